"""Reaching the broker from an event loop: the session of an `AsyncClient`, made again when it was lost.

Made by `clientlib.async_client`, whose verbs are procedures that run here.
"""
# ruff: noqa: ASYNC109 (the arguments are those of the client's verbs)

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import TypeVar, final

from clientlib.address import Absent, dial
from clientlib.arguments import seconds
from clientlib.async_claims import check_loop, turn
from clientlib.async_lane import AsyncLane, LoopLanes
from clientlib.async_session import AsyncSession
from clientlib.client import CALL_S, RECONNECT_S, RETRY_S
from clientlib.link import Link
from clientlib.native import Native
from clientlib.patience import Patience
from clientlib.session import Procedure
from clientlib.submission import remaining_s
from shm.errors import Code, ConnectionLost, InferError, fresh

T = TypeVar("T")


@final
class AsyncReach:
    """Runs procedures on the link of `native`. A call finds the session lost at worst once."""

    __slots__ = ("_connecting", "_loop", "_native", "_patience")

    def __init__(self, native: Native[AsyncLane], loop: asyncio.AbstractEventLoop) -> None:
        self._native = native
        self._loop = loop
        self._connecting = asyncio.Lock()
        self._patience = Patience()

    async def run(self, make: Callable[[Link[AsyncLane]], Procedure[T]], timeout: float = CALL_S) -> T:
        """Run a procedure to its end within `timeout` seconds. Raises InferError."""
        return await self.run_until(self._loop.time() + seconds(timeout), make)

    async def run_until(self, deadline: float, make: Callable[[Link[AsyncLane]], Procedure[T]]) -> T:
        """The same until `deadline` (loop time)."""
        while True:
            self.check()
            link = self._native.link
            fresh = link is None
            if link is None:
                link = await self.connect(deadline, wait=True)
            session = link.session
            assert isinstance(session, AsyncSession)
            try:
                return await session.drive(make(link), deadline)
            except ConnectionLost:
                self._native.lose(link)
                if fresh or self._native.closed:
                    raise

    def check(self) -> None:
        """Raises InferError where the client does not work: closed, another process, another loop."""
        self._native.check()
        check_loop(self._loop)

    async def connect(self, deadline: float, *, wait: bool) -> Link[AsyncLane]:
        """The session, made anew unless another task was faster. `wait`: for a broker that was there before."""
        what = f"connects to the broker in {self._native.directory}"
        async with turn(self._connecting, deadline - self._loop.time(), what):
            until = min(deadline, self._loop.time() + RECONNECT_S) if wait else deadline
            while self._native.link is None:
                self._native.check()
                session = AsyncSession(await self._dial(until, wait=wait), self._native.directory, self._loop)
                try:
                    welcome = await session.drive(self._native.greet(), deadline)
                    # Of all regions: that it takes longer than whoever comes first has must not be their end.
                    await session.drive(self._native.attach(), max(deadline, self._loop.time() + RECONNECT_S))
                    await session.drive(self._native.leases.attach(), deadline)
                except BaseException as error:
                    session.close()
                    # One that is just going down answers no more; its successor will.
                    if not (wait and isinstance(error, ConnectionLost) and self._loop.time() < until):
                        raise
                else:
                    self._native.link = Link(self._native.lose, session, LoopLanes(welcome.max_channels))
            return self._native.link

    async def _dial(self, until: float, *, wait: bool) -> socket.socket:
        while True:
            try:
                if (sock := dial(self._native.directory)) is not None:
                    return sock
                problem = InferError(Code.UNAVAILABLE, f"the broker in {self._native.directory} is too busy to answer")
            except Absent as absent:
                if not wait:
                    raise fresh(absent.error) from None
                problem = absent.error
            remaining = until - self._loop.time()
            if remaining <= 0:
                raise fresh(problem)
            await asyncio.sleep(min(remaining, RETRY_S))
            self._native.check()

    async def run_for(self, deadline_ns: int, patience_s: float, make: Callable[[Link[AsyncLane]], Procedure[T]]) -> T:
        """Run what a request needs, `patiently`."""
        with self.patiently(deadline_ns, patience_s) as ends:
            return await self.run_until(ends, make)

    @contextlib.contextmanager
    def patiently(self, deadline_ns: int, patience_s: float) -> Iterator[float]:
        """Until when (loop time) what a request needs may take: its deadline or a little beyond (`Patience`), without
        one `patience_s`. Reaching a broker that is gone, and waiting for others that do, counts as that.
        """
        remaining = remaining_s(deadline_ns)
        deadline = self._loop.time() + (patience_s if remaining is None else remaining)
        until = self._patience.until(deadline, self._loop.time())
        try:
            yield until
        except InferError:
            self._patience.given_up(deadline, until, self._loop.time())
            raise
