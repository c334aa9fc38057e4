"""What `infer` and streams of both kinds of plans do behind a first try that failed for want of room, or at the wrong
worker.

A worker names one output at a time that lacks room, so each may take a try of its own; one that lacks it again after
that is an error.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import final

from clientlib.failures import NotServed, RoomNeeded
from clientlib.results import InferResult
from shm.errors import InferError, fresh

RETRIED = (RoomNeeded, NotServed)  # kept without a traceback: it would hold on to the first try, and that to it


@final
class Tries:
    """Which failures of one request are worth another try, for streams, which ask as each comes."""

    __slots__ = ("_grown", "_over")

    def __init__(self) -> None:
        self._grown: set[str] = set()
        self._over = False

    def allow(self, failure: InferError) -> bool:
        """Each output that lacks room is worth one; anything else is if it came first, and nothing after it."""
        if not isinstance(failure, RoomNeeded):
            first = not (self._over or self._grown)
            self._over = True
            return first
        if self._over or failure.output in self._grown:
            return False
        self._grown.add(failure.output)
        return True


def infer_again(
    failure: RoomNeeded | NotServed, grow: Callable[[RoomNeeded], None], infer: Callable[[], InferResult]
) -> InferResult:
    """The result of `infer`, once `grow` has made room for it; the worker of a NotServed is not asked again."""
    grown: set[str] = set()
    while isinstance(failure, RoomNeeded) and failure.output not in grown:
        grown.add(failure.output)
        grow(failure)
        try:
            return infer()
        except RoomNeeded as error:
            failure = error.with_traceback(None)
    if grown:
        raise fresh(failure)
    return infer()


async def infer_again_async(
    failure: RoomNeeded | NotServed,
    grow: Callable[[RoomNeeded], Awaitable[None]],
    infer: Callable[[], Awaitable[InferResult]],
) -> InferResult:
    """The same on an event loop."""
    grown: set[str] = set()
    while isinstance(failure, RoomNeeded) and failure.output not in grown:
        grown.add(failure.output)
        await grow(failure)
        try:
            return await infer()
        except RoomNeeded as error:
            failure = error.with_traceback(None)
    if grown:
        raise fresh(failure)
    return await infer()
