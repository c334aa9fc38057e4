"""Responses as the gateway's core gives them: ends, errors among others, beginning anew, what may be kept unread."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from broker.gateway import lasting as lasting_module
from broker.gateway.kserve import InferRequest, InferResponse, InputTensor
from broker.gateway.lasting import Holder, Lasting
from broker.gateway.streaming import AnyResponses, OneResponse, Run
from clientlib.results import InferResult
from shm.errors import Code, InferError
from tests.fakes.processes import in_loop

GONE = InferError(Code.NOT_FOUND, "model 'm' is not loaded")
WORD = InferError(Code.INTERNAL, "An Error Occurred")
EXPIRED = InferError(Code.UNAVAILABLE, "Request timeout expired: it was queued for 3 ms")
END, HANG = "end", "hang"
ME = Holder("connection", "owner")


class Results:
    """What comes, in order: a number is a result, an error is one; "end" after either: it said so itself."""

    def __init__(self, items: Sequence[Any]) -> None:
        self._items = list(items)
        self.final = False
        self.unread_bytes = 0
        self.closed = False

    async def __anext__(self) -> InferResult:
        if self.closed or not self._items:
            raise StopAsyncIteration
        item = self._items.pop(0)
        if item == HANG:
            await asyncio.Event().wait()
        self.final = self._items == [END]
        if self.final:
            self._items.clear()
        if isinstance(item, InferError):
            raise item
        return InferResult({}, (item,))

    def close(self) -> None:
        self.closed = True
        self.unread_bytes = 0


class Source:
    """Gives `Results` one after another, or raises; keeps them in `given`."""

    def __init__(self, *attempts: Sequence[Any] | InferError) -> None:
        self._attempts = list(attempts)
        self.given: list[Results] = []
        self.errors: list[InferError] = []
        self.anew: list[bool] = []

    async def __call__(self, *, anew: bool) -> Run:
        self.anew.append(anew)
        attempt = self._attempts.pop(0)
        if isinstance(attempt, InferError):
            raise attempt
        self.given.append(Results(attempt))

        async def deliver(result: InferResult) -> InferResponse:
            number = result._entry[0]
            if number < 0:
                raise InferError(Code.INTERNAL, "does not fit")
            return InferResponse("m", "1", str(number), [])

        return Run(self.given[-1], (), deliver, self.errors.append)


def request() -> InferRequest:
    return InferRequest("m", id="7", inputs=[InputTensor("x", "FP32", (1,), b"1234")])


async def taken(responses: AnyResponses | OneResponse) -> list[tuple[str, bool]]:
    """Number or error of each, and whether it was final."""
    return [(r.error.message if r.error else r.id, r.final) async for r in responses]


def told(*attempts: Sequence[Any] | InferError) -> tuple[list[tuple[str, bool]], Source, list[bool]]:
    """What came of `AnyResponses`, and what its `on_end` was told."""
    source, ends = Source(*attempts), []

    async def run() -> list[tuple[str, bool]]:
        responses = AnyResponses(request(), source, Lasting(2), ME)
        responses.on_end = ends.append
        return await taken(responses)

    return asyncio.run(run()), source, ends


@pytest.mark.parametrize(
    ("items", "expected", "failed"),
    [
        ([], [], False),
        ([1, 2], [("1", False), ("2", False)], False),
        ([1, 2, END], [("1", False), ("2", True)], False),
        ([1, WORD, 2], [("1", False), ("An Error Occurred", False), ("2", False)], True),
        ([WORD, END], [("An Error Occurred", True)], True),
        ([EXPIRED, END], [("Request timeout expired", True)], True),
        ([1, GONE, 2], [("1", False), ("model 'm' is not loaded", False), ("2", False)], True),
        ([-1, 2], [("does not fit", False), ("2", False)], True),
    ],
)
def test_any_number_of_responses(items: list[Any], expected: list[tuple[str, bool]], failed: bool) -> None:
    came, source, ends = told(items)
    assert came == expected
    assert (source.anew, ends) == ([False], [failed])


def test_a_request_that_has_not_run_begins_anew_once() -> None:
    came, source, ends = told([GONE, END], [1, END])
    assert (came, source.anew, ends) == ([("1", True)], [False, True], [False])
    assert source.given[0].closed
    came, source, _ = told([GONE, END], [GONE, END])
    assert (came, source.anew) == ([("model 'm' is not loaded", True)], [False, True])
    came, _, _ = told([GONE, END], WORD)
    assert came == [("An Error Occurred", True)]


def test_what_cannot_begin_is_one_error() -> None:
    came, _, ends = told(WORD)
    assert (came, ends) == ([("An Error Occurred", True)], [True])


def test_the_inputs_are_let_go_once_it_runs() -> None:
    asked = request()

    @in_loop
    async def run() -> None:
        responses = AnyResponses(asked, Source([1, 2]), Lasting(2), ME)
        assert asked.inputs
        await anext(responses)
        assert not asked.inputs

    run()


def test_closing_cancels_and_ends_once() -> None:
    @in_loop
    async def run() -> None:
        source, ends, lasting = Source([1, 2]), [], Lasting(1)
        responses = AnyResponses(request(), source, lasting, ME)
        responses.on_end = ends.append
        await anext(responses)
        await responses.aclose()
        await responses.aclose()
        assert (source.given[0].closed, ends) == (True, [True])
        assert await taken(responses) == []
        assert await taken(AnyResponses(request(), Source([3]), lasting, ME)) == [("3", False)], (
            "its turn was given back"
        )
        never = AnyResponses(request(), Source([3]), lasting, ME)
        never.on_end = ends.append
        await never.aclose()
        assert ends == [True, True]

    run()


def test_cancelled_while_it_waits_for_its_turn() -> None:
    @in_loop
    async def run() -> None:
        lasting = Lasting(1)
        first = AnyResponses(request(), Source([1, HANG]), lasting, ME)
        await anext(first)
        waiting = AnyResponses(request(), Source([2]), lasting, ME)
        task = asyncio.create_task(taken(waiting))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await waiting.aclose()
        await first.aclose()
        assert await taken(AnyResponses(request(), Source([3]), lasting, ME)) == [("3", False)]

    run()


def test_the_one_that_is_furthest_behind_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lasting_module, "LOOK_S", 0.005)

    @in_loop
    async def run() -> None:
        lasting = Lasting(16, unread=1000)
        sources = [Source([1, 2]) for _ in range(3)]
        streams = [AnyResponses(request(), source, lasting, ME) for source in sources]
        for stream in streams:
            await anext(stream)
        for source, size in zip(sources, (400, 500, 300), strict=True):
            source.given[0].unread_bytes = size
        while not any(source.given[0].closed for source in sources):  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        assert [source.given[0].closed for source in sources] == [False, True, False]
        (message, final), *rest = await taken(streams[1])
        assert message.startswith("responses that wait for their readers took more than 1000 bytes, 500 of them this")
        assert (final, rest) == (True, [])
        assert await taken(streams[0]) == [("2", False)]
        await streams[2].aclose()

    run()


def test_one_response() -> None:
    async def fine() -> InferResponse:
        return InferResponse("m", "1", "1", [])

    async def fails() -> InferResponse:
        raise WORD

    @in_loop
    async def run() -> None:
        ends: list[bool] = []
        for work, expected in ((fine, ("1", True)), (fails, ("An Error Occurred", True))):
            responses = OneResponse(request(), work)
            responses.on_end = ends.append
            assert await taken(responses) == [expected]
            await responses.aclose()
        assert ends == [False, True]

    run()
