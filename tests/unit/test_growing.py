"""What a client does when results were larger than the room for them: each output gets room once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from clientlib.async_streams import AsyncStream
from clientlib.failures import NotServed, RoomNeeded
from clientlib.growing import RETRIED, infer_again, infer_again_async
from clientlib.streams import Stream
from shm.errors import Code, InferError

ELSEWHERE = NotServed(Code.UNAVAILABLE, "model 'm' is not loaded")
REFUSED = InferError(Code.INVALID_ARG, "no")


def lacks(output: str) -> RoomNeeded:
    return RoomNeeded(Code.INVALID_ARG, f"{output} lacks room", output, 8)


class Try:
    """What the tries after the first one come to, in their order: errors, or a result."""

    def __init__(self, *tries: object) -> None:
        self.tries = list(tries)
        self.grown: list[str] = []

    def grow(self, needed: RoomNeeded) -> None:
        self.grown.append(needed.output)

    def infer(self) -> object:
        found = self.tries.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


def at_once(failure: InferError, tries: Try) -> object:
    return infer_again(failure, tries.grow, tries.infer)


def on_a_loop(failure: InferError, tries: Try) -> object:
    def later(does: Callable[..., object]) -> Callable[..., Awaitable[object]]:
        async def do(*given: object) -> object:
            return does(*given)

        return do

    return asyncio.run(infer_again_async(failure, later(tries.grow), later(tries.infer)))


class Source:
    """Of one try of a stream: its only response, or an error in its place."""

    def __init__(self, next_one: Callable[[], object]) -> None:
        self.next: Any = next_one

    def cancel(self) -> bool:
        return False

    def close(self) -> None:
        pass

    let_go = close


def in_a_stream(failure: InferError, tries: Try) -> object:
    def again(error: InferError) -> Source | None:
        if isinstance(error, RoomNeeded):
            tries.grow(error)
        return Source(tries.infer) if isinstance(error, RETRIED) else None

    first = Try(failure)
    return next(Stream(Source(first.infer), again))


def in_a_stream_on_a_loop(failure: InferError, tries: Try) -> object:
    def source(of: Try) -> Any:
        async def next_one() -> object:
            return of.infer()

        return Source(next_one)

    async def begin() -> Any:
        return source(Try(failure))

    async def again(error: InferError) -> Any:
        if isinstance(error, RoomNeeded):
            tries.grow(error)
        return source(tries) if isinstance(error, RETRIED) else None

    async def first() -> object:
        return await anext(AsyncStream(begin, again))

    return asyncio.run(first())


@pytest.mark.parametrize("again", [at_once, on_a_loop, in_a_stream, in_a_stream_on_a_loop])
@pytest.mark.parametrize(
    ("failure", "tries", "grown", "ends"),
    [
        (ELSEWHERE, ["result"], [], "result"),
        (ELSEWHERE, [ELSEWHERE], [], ELSEWHERE),
        (ELSEWHERE, [lacks("y")], [], "y lacks room"),
        (lacks("y"), ["result"], ["y"], "result"),
        (lacks("y"), [lacks("z"), lacks("a"), "result"], ["y", "z", "a"], "result"),
        (lacks("y"), [lacks("z"), lacks("y")], ["y", "z"], "y lacks room"),
        (lacks("y"), [REFUSED], ["y"], REFUSED),
        (lacks("y"), [ELSEWHERE], ["y"], ELSEWHERE),
    ],
)
def test_each_output_gets_room_once(again, failure, tries, grown, ends):
    made = Try(*tries)
    if ends == "result":
        assert again(failure, made) == "result"
    else:
        with pytest.raises(InferError) as raised:
            again(failure, made)
        assert raised.value.message == getattr(ends, "message", ends)
    assert (made.grown, made.tries) == (grown, [])
