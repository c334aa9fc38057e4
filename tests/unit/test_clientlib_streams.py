"""Streams against a small broker: what is garbled, what is asked again, who waits, who leaves, and who is gone."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import clientlib
from shm.admission import Request
from shm.errors import Code, InferError
from tests.fakes.broker import eventually
from tests.fakes.small_broker import SmallBroker, connect, doubling

X = {"x": np.arange(3, dtype=np.float32)}
Completion = tuple[int, bytes]
BRIEF = (0.05, 0.5, 5.0)  # deadlines, each of which a busy machine may reach before anything has come


def note(*words: int) -> bytes:
    return struct.pack(f"<{len(words)}Q", *words)


def numbers(count: int) -> list[Completion]:
    """Responses 0, 1, …, each one number, whose bytes nobody has written."""
    return [(0, note(1, 1, 4))] * count


class Sender:
    """Answers `several`: `completions` at once; then `end`, or, without one, nothing until `finish`."""

    def __init__(self, broker: SmallBroker, completions: list[Completion], end: Completion | None) -> None:
        self.completions, self.end = completions, end
        self.requests: list[Request] = []
        broker.several = self.run

    def run(self, request: Request) -> bool:
        self.requests.append(request)
        for completion in self.completions:
            self.send(request, completion)
        if self.end is not None:
            request.code, request.note = self.end
        return self.end is not None

    def send(self, request: Request, completion: Completion) -> None:
        request.code, request.note = completion
        assert request.channel.respond(request)

    def finish(self, end: Completion = (0, b"")) -> None:
        (request,) = self.requests
        request.code, request.note = end
        request.channel.complete([request])


@pytest.fixture
def answering(small_broker: SmallBroker) -> Iterator[Callable[[list[Completion], Completion | None], Sender]]:
    """Makes senders; afterwards they let go of requests, which keep the client's memory mapped."""
    made: list[Sender] = []

    def make(completions: list[Completion], end: Completion | None) -> Sender:
        made.append(Sender(small_broker, completions, end))
        return made[-1]

    yield make
    for sender in made:
        sender.requests.clear()


def outcome(stream: Iterator[clientlib.InferResult]) -> list[object]:
    """Shapes of `y`, and the codes of errors, in their order."""
    found: list[object] = []
    while True:
        try:
            found.append(next(stream)["y"].shape)
        except StopIteration:
            return found
        except InferError as error:
            found.append(error.code)


async def outcome_of(stream: clientlib.AsyncStream) -> list[object]:
    found: list[object] = []
    while True:
        try:
            found.append((await anext(stream))["y"].shape)
        except StopAsyncIteration:
            return found
        except InferError as error:
            found.append(error.code)


CASES = {
    "plain": (numbers(3), (0, b""), [(1,)] * 3),
    "nothing": ([], (0, b""), []),
    "the last with the end": (numbers(1), (0, note(2, 0, 5, 0)), [(1,), (0, 5)]),
    "an error in the middle": ([*numbers(1), (Code.INTERNAL, b"no"), *numbers(1)], (0, b""), [(1,), "INTERNAL", (1,)]),
    "an error at the end": (numbers(1), (Code.UNAVAILABLE, b"gone"), [(1,), "UNAVAILABLE"]),
    "a code that nobody knows": ([], (77, b"\xff"), ["UNKNOWN"]),
    "garbage": ([*numbers(1), (0, b"\x11" * 500), *numbers(2)], (0, b""), [(1,), "INTERNAL"]),
    "garbage at the end": (numbers(1), (0, note(1, 9)), [(1,), "INTERNAL"]),
    "sizes that do not fit": ([(0, note(1, 7, 4))], (0, b""), ["INTERNAL"]),
    "more than there is": ([(0, note(1, 2**40, 2**42))], (0, b""), ["UNSUPPORTED"]),
    "parts that do not come": ([(0, note(1, 5000, 20_000))], (0, b""), ["INTERNAL"]),
}


@pytest.mark.parametrize("case", CASES)
def test_what_comes_of_it(small_broker, client, case, answering):
    completions, end, expected = CASES[case]
    answering(completions, end)
    for _ in range(3):
        assert outcome(client.stream("several", X)) == expected
    assert client.infer("echo", {"x": np.array(["a"], object)})["y"].tolist() == [b"a"]


@pytest.mark.parametrize("case", CASES)
def test_what_comes_of_it_on_a_loop(small_broker, case, answering):
    completions, end, expected = CASES[case]
    answering(completions, end)

    async def test() -> None:
        async with await clientlib.connect_async(f"ipc://{small_broker.directory}") as client:
            for _ in range(3):
                assert await outcome_of(client.stream("several", X)) == expected
            assert (await client.infer("echo", {"x": np.array(["a"], object)}))["y"].tolist() == [b"a"]

    asyncio.run(test())


def test_garbage_cancels_the_request(small_broker, client, answering):
    sender = answering([(0, note(1, 7, 4))], None)
    stream = client.stream("several", X)
    assert outcome(stream) == ["INTERNAL"]
    eventually(lambda: sender.requests[0].ended, "the request is cancelled")
    client.infer("double", {"x": np.ones((1, 1), np.float32)})  # which takes in the end
    assert outcome(client.stream("double", {"x": np.ones((1, 1), np.float32)})) == [(1, 1)]


class TestAskedAgain:
    def test_a_reload_costs_the_stream_of_a_client_nothing(self, small_broker, client, answering):
        answering(numbers(2), (0, b""))
        for model, x in (("several", X), ("double", {"x": np.ones((1, 1), np.float32)})):
            first = outcome(client.stream(model, x))
            small_broker.reload()
            assert outcome(client.stream(model, x)) == first

    def test_a_plan_says_that_it_is_outdated(self, small_broker, client):
        _, plan = doubling(client)
        small_broker.reload()
        with pytest.raises(InferError, match="prepare the plan again"):
            next(plan.stream())

    def test_a_result_larger_than_its_room(self, client):
        for _ in range(2):
            (result,) = client.stream("spread", X)
            assert result["y"].shape == (120_000,)

    def test_on_a_loop(self, small_broker, answering):
        answering(numbers(2), (0, b""))

        async def test() -> None:
            async with await clientlib.connect_async(f"ipc://{small_broker.directory}") as client:
                assert await outcome_of(client.stream("spread", X)) == [(120_000,)]
                for _ in range(2):
                    assert await outcome_of(client.stream("several", X)) == [(1,), (1,)]
                    small_broker.reload()

        asyncio.run(test())


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    return thread, found


class TestWhoWaits:
    def test_is_woken_by_what_comes(self, small_broker, client, answering):
        sender = answering([], None)
        stream = client.stream("several", X)
        thread, found = in_thread(lambda: outcome(stream))
        eventually(lambda: sender.requests)
        for completion in numbers(3):
            sender.send(sender.requests[0], completion)
        sender.finish()
        thread.join(60)
        assert found == [[(1,)] * 3]

    @pytest.mark.parametrize("readers", [1, 3])
    def test_is_woken_when_the_stream_is_closed(self, small_broker, client, readers, answering):
        answering(numbers(1), None)
        stream = client.stream("several", X)
        next(stream)
        threads = [in_thread(lambda: outcome(stream)) for _ in range(readers)]
        stream.close()
        for thread, found in threads:
            thread.join(60)
            assert found == [[]]

    def test_is_told_that_the_client_was_closed(self, small_broker, answering):
        client = connect(small_broker)
        answering(numbers(1), None)
        stream = client.stream("several", X)
        next(stream)
        thread, found = in_thread(lambda: outcome(stream))
        client.close()
        thread.join(60)
        assert found == [["UNAVAILABLE"]]

    def test_is_told_that_the_broker_is_gone(self, small_broker, client, answering):
        sender = answering(numbers(2), None)
        stream = client.stream("several", X)
        thread, found = in_thread(lambda: outcome(stream))
        eventually(lambda: sender.requests)
        small_broker.stop()
        thread.join(60)
        assert found == [[(1,), (1,), "UNAVAILABLE"]]
        small_broker.start()
        sender.end = (0, b"")
        assert outcome(client.stream("several", X)) == [(1,), (1,)]

    def test_waits_until_the_deadline(self, small_broker, client, answering):
        sender = answering(numbers(1), None)
        found: list[object] = []
        for timeout in BRIEF:
            with contextlib.suppress(InferError):  # it did not even begin in time
                found = outcome(client.stream("several", X, timeout=timeout))
            if (1,) in found:
                break
        assert found == [(1,), "UNAVAILABLE"]
        eventually(lambda: sender.requests[-1].ended, "the request is cancelled")

    def test_waits_on_a_loop_until_the_deadline(self, small_broker, answering):
        sender = answering(numbers(1), None)

        async def test() -> None:
            async with await clientlib.connect_async(f"ipc://{small_broker.directory}") as client:
                for timeout in BRIEF:
                    if (found := await outcome_of(client.stream("several", X, timeout=timeout))) != ["UNAVAILABLE"]:
                        break
                assert found == [(1,), "UNAVAILABLE"]
                await asyncio.to_thread(eventually, lambda: sender.requests[-1].ended, "the request is cancelled")
                before = len(sender.requests)
                waiting = asyncio.create_task(outcome_of(client.stream("several", X)))
                while len(sender.requests) == before:  # noqa: ASYNC110 (another thread appends)
                    await asyncio.sleep(0)
                small_broker.stop()
                assert await waiting == [(1,), "UNAVAILABLE"]

        asyncio.run(test())
        small_broker.start()


class TestWhoLeaves:
    def test_may_be_collected_while_this_thread_submits(self, small_broker, client, answering):
        """The garbage collector runs anywhere: also where the channel is locked."""
        sender = answering(numbers(1), None)
        stream = client.stream("several", X)
        next(stream)
        channel = stream._source.lane.channel
        with channel._lock:
            del stream
        sender.send(sender.requests[0], numbers(1)[0])
        client.infer("double", {"x": np.ones((1, 1), np.float32)})  # which takes it in, and cancels
        eventually(lambda: sender.requests[0].ended, "the request is cancelled")

    def test_cancels_before_anything_came(self, small_broker, client):
        small_broker.hold = True
        stream = client.stream("several", X)
        assert stream.cancel()
        assert outcome(stream) == ["CANCELLED"]

    def test_cancels_what_is_queued_on_a_loop(self, small_broker):
        async def test() -> None:
            small_broker.hold = True
            async with await clientlib.connect_async(f"ipc://{small_broker.directory}", slots=1) as client:
                first, queued = client.stream("several", X), client.stream("several", X)
                for stream in (first, queued):
                    assert await stream is stream
                late = client.stream("several", X, timeout=0.5)  # the channel is open by now
                left = client.stream("several", X)
                for stream in (late, left):
                    assert await stream is stream
                assert queued.cancel()
                assert await outcome_of(queued) == ["CANCELLED"]
                assert await outcome_of(late) == ["UNAVAILABLE"]
                left.close()
                small_broker.release()
                assert await outcome_of(first) == []
                assert await outcome_of(left) == []
                assert await outcome_of(client.stream("several", X)) == []

        asyncio.run(test())

    def test_never_started_on_a_loop(self, small_broker):
        async def test() -> None:
            async with await clientlib.connect_async(f"ipc://{small_broker.directory}") as client:
                stream = client.stream("several", X)
                assert not stream.cancel()
                stream.close()
                assert await outcome_of(stream) == []
                assert "Prepare" not in small_broker.calls
                failing = client.stream("nobody", X)
                with pytest.raises(InferError, match="unknown model"):
                    await failing
                assert await outcome_of(failing) == []

        asyncio.run(test())


def test_arguments(client):
    with pytest.raises(InferError, match="priority"):
        client.stream("several", X, priority=-1)
    with pytest.raises(InferError, match="parameters"):
        client.stream("several", X, parameters=["a"])
    with pytest.raises(InferError, match="timeout"):
        client.stream("several", X, timeout="soon")
    _, plan = doubling(client)
    with pytest.raises(InferError, match="input_slot"):
        plan.stream(input_slot="first")
    with pytest.raises(InferError, match="sequence_id"):
        plan.stream(sequence_start=True)
    plan.release()
    with pytest.raises(InferError, match="released"):
        plan.stream()
    with pytest.raises(TypeError, match="cannot be copied"):
        client.stream("double", {"x": np.ones((1, 1), np.float32)}).__reduce__()


def test_without_memory_for_larger_rooms_responses_come_in_parts(small_broker, client, answering, monkeypatch):
    def no_memory(*_: object) -> None:
        raise InferError(Code.UNAVAILABLE, "no memory is left")

    answering([(0, note(1, 50_000, 200_000))], (0, b""))
    assert outcome(client.stream("several", X)) == ["INTERNAL"], "the other parts do not come"
    monkeypatch.setattr(clientlib.Client, "grow", no_memory)
    answering(numbers(2), (0, b""))
    for _ in range(2):
        assert outcome(client.stream("several", X)) == [(1,), (1,)]


def test_without_memory_for_larger_rooms_responses_come_in_parts_on_a_loop(small_broker, answering, monkeypatch):
    async def no_memory(*_: object) -> None:
        raise InferError(Code.UNAVAILABLE, "no memory is left")

    async def ask() -> None:
        async with await clientlib.connect_async(small_broker.directory) as client:
            assert await outcome_of(client.stream("several", X)) == ["INTERNAL"], "the other parts do not come"
            monkeypatch.setattr(clientlib.AsyncClient, "grow", no_memory)
            answering(numbers(2), (0, b""))
            for _ in range(2):
                assert await outcome_of(client.stream("several", X)) == [(1,), (1,)]

    answering([(0, note(1, 50_000, 200_000))], (0, b""))
    asyncio.run(ask())
