"""A session on an event loop: the loop watches the socket, every call is a future.

Made by `clientlib.async_client`; used on its loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Callable
from typing import TypeVar, final

from clientlib.session import Answer, Call, Procedure, Session
from shm import sockets
from shm.errors import InferError, ProtocolError, fresh
from shm.messages import Message
from shm.sockets import close_all

T = TypeVar("T")
BURST = 64  # datagrams read before the loop gets its turn
CALLS = 64  # unanswered ones at a time, given up or not: the broker hangs up on a session that has 256


@final
class _Reply:
    __slots__ = ("_session", "future")

    def __init__(self, future: asyncio.Future[Answer], session: Session) -> None:
        self.future = future
        self._session = session

    def answered(self, answer: Answer) -> None:
        if self.future.done():  # given up in this turn of the loop, and not forgotten yet
            reply, fds = answer
            close_all(fds)
            self._session.decline(reply)
        else:
            self.future.set_result(answer)

    def failed(self, error: InferError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


@final
class AsyncSession:
    """Owns `sock`, a connected, non-blocking SEQPACKET socket."""

    __slots__ = ("_calls", "_loop", "_on_end", "_sending", "_session", "_sock")

    def __init__(
        self,
        sock: socket.socket,
        path: str,
        loop: asyncio.AbstractEventLoop,
        on_notice: Callable[[Message], None] | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        """`on_notice` is given what the broker says unasked, `on_end` called once, when the connection has ended."""
        self._sock = sock
        self._session = Session(path, on_notice)
        self._loop = loop
        self._on_end = on_end
        self._sending = asyncio.Lock()
        self._calls = asyncio.Semaphore(CALLS)
        loop.add_reader(sock, self._read)

    @property
    def lost(self) -> bool:
        """Has the connection ended?"""
        return self._session.lost is not None

    async def drive(self, procedure: Procedure[T], deadline: float) -> T:
        """Run `procedure` to its end; every one of its calls must be answered by `deadline` (loop.time)."""
        try:
            call = next(procedure)
            while True:
                try:
                    answer = await self.call(call, deadline)
                except BaseException as error:
                    call = procedure.throw(error)
                else:
                    call = procedure.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result

    async def call(self, call: Call, deadline: float) -> Answer:
        """Send `call` and await its reply. Raises InferError; ConnectionLost when the session has ended."""
        began = self._loop.time()
        future: asyncio.Future[Answer] = self._loop.create_future()
        number, data = self._session.request(call, _Reply(future, self._session))
        counted = sent = False
        try:
            async with asyncio.timeout_at(deadline):
                await self._calls.acquire()
                counted = True
                await self._send(data, call)
                sent = True
                return await future
        except BaseException as error:
            self._session.forget(number, sent=sent)
            if future.done() and not future.cancelled() and future.exception() is None:
                late, fds = future.result()  # it came in the same turn of the loop as the end of our patience
                close_all(fds)
                self._session.decline(late)
            future.cancel()
            if isinstance(error, TimeoutError):
                raise self._session.late(call, deadline - began) from None
            raise
        finally:
            if counted and number not in self._session.unanswered:  # else until the answer comes
                self._calls.release()
            del future  # which holds the error that it raised, and that this frame

    def close(self) -> None:
        """End the session; whoever waits is told that it was closed."""
        self._end("was left: the client was closed")

    def leave_to_parent(self) -> None:
        """In a forked child: close the copy of the socket without a word to the broker or the loop."""
        self._sock.close()

    async def _send(self, data: bytes, call: Call) -> None:
        async with self._sending:
            while self._session.lost is None:
                try:
                    return sockets.send(self._sock, data, call.fds)
                except BlockingIOError:
                    await self._writable()
                except OSError:
                    self._end("went away")
        raise fresh(self._session.lost)

    async def _writable(self) -> None:
        ready = asyncio.Event()
        self._loop.add_writer(self._sock, ready.set)
        try:
            await ready.wait()
        finally:
            self._loop.remove_writer(self._sock)

    def _read(self) -> None:
        try:
            for _ in range(BURST):
                received = sockets.receive(self._sock)
                if received is None:
                    return self._end("went away")
                self._receive(*received)
                with contextlib.suppress(OSError):
                    self._session.give_back(functools.partial(sockets.send, self._sock))
        except BlockingIOError:
            pass
        except (OSError, ProtocolError) as error:
            self._end(f"was left: {error}")

    def _receive(self, data: bytes, fds: list[int]) -> None:
        unanswered = len(self._session.unanswered)
        self._session.receive(data, fds)
        if len(self._session.unanswered) < unanswered:
            self._calls.release()

    def _end(self, why: str) -> None:
        if self._session.lost is None:
            self._loop.remove_reader(self._sock)
            self._sock.close()
            self._session.end(why)
            while self._session.unanswered:
                self._session.unanswered.popitem()
                self._calls.release()
            if self._on_end is not None:
                self._on_end()
