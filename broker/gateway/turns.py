"""One at a time, in the order in which they came: who writes an output's range of a region, and steps of a sequence.

Used by `broker.gateway.inference` for requests that have the same range, or the same sequence. On one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from typing import Final, TypeVar, final

from broker.gateway.timeouts import until
from clientlib.failures import RangeInUse

FIRST_WAIT_S: Final = 0.0005  # before one looks again whether a range is free, and the longest such wait
LAST_WAIT_S: Final = 0.016
IN_USE_S: Final = 60.0  # and how long that is tried
T = TypeVar("T")


@final
class Turn:
    """One range. Unlike `asyncio.Lock` it is not free while somebody waits for it, so that `free` can be relied on."""

    __slots__ = ("__weakref__", "_taken", "_waiting")

    def __init__(self) -> None:
        self._taken = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def free(self) -> bool:
        """Does nobody have it or wait for it?"""
        return not self._taken

    async def take(self) -> None:
        """Wait until it is ours."""
        if not self._taken:
            self._taken = True
            return
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        try:
            await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():
                self.give_back()  # it became ours in the same moment
            raise

    def give_back(self) -> None:
        """To the one who has waited longest."""
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(None)
                return
        self._taken = False


@final
class Queues:
    """A turn for each of any number of keys. There is nothing of a key that nobody is in: it needs no bound."""

    def __init__(self) -> None:
        self._turns: dict[Hashable, Turn] = {}

    def __len__(self) -> int:
        return len(self._turns)

    @contextlib.asynccontextmanager
    async def turn(self, key: Hashable) -> AsyncIterator[None]:
        """Inside, nobody else of `key` is; other keys wait for nothing."""
        turn = self._turns.get(key)
        if turn is None:
            turn = self._turns[key] = Turn()
        try:
            await turn.take()
            try:
                yield
            finally:
                turn.give_back()
        finally:
            if turn.free and self._turns.get(key) is turn:
                del self._turns[key]


async def take_all(turns: Sequence[Turn]) -> None:
    """Take `turns` one after another; everybody does so in the same order, so that nobody waits for each other."""
    taken = 0
    try:
        for turn in turns:
            await turn.take()
            taken += 1
    except BaseException:
        give_back_all(turns[:taken])
        raise


def give_back_all(turns: Sequence[Turn]) -> None:
    """The end of `take_all`."""
    for turn in turns:
        turn.give_back()


async def in_turn(turns: Sequence[Turn], run: Callable[[], Awaitable[T]], deadline_ns: int) -> T:
    """What `run` gives, called once nobody else writes the ranges of `turns`.

    `run` raises RangeInUse, and has done nothing, while somebody does who has no turn here: another gateway's request,
    or one whose caller has left. It is called again then, for `IN_USE_S` at most.
    """
    wait_s, ends = FIRST_WAIT_S, time.monotonic() + IN_USE_S
    while True:
        async with until(deadline_ns):
            await take_all(turns)
        try:
            return await run()
        except RangeInUse:
            if time.monotonic() > ends:
                raise
        finally:
            give_back_all(turns)
        async with until(deadline_ns):
            await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, LAST_WAIT_S)
