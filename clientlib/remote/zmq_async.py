"""The ZeroMQ transport for one event loop, which reads the socket whenever libzmq says so. As `zmq_transport`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar, final

from clientlib.address import Address
from clientlib.pending import expired
from clientlib.remote import zmq_codec
from clientlib.remote.transport import InferAnswer, InferRequest, Word, lost, unreachable
from clientlib.remote.zmq_line import HEARTBEAT_S, RECONNECT_S, RETRY_S, Line, call_back, repeat
from shm import zmq_messages as words
from shm.errors import InferError, fresh

CANCEL_S = 5.0  # how long the end of a cancelled request is waited for
_in_parent: list[object] = []
Reply = words.GatewayMessage | InferError
T = TypeVar("T")


def connect_async(address: Address) -> AsyncZmqTransport:
    """For the running event loop. Connects when it is first used."""
    return AsyncZmqTransport(address)


@final
class AsyncZmqTransport:
    """A gateway over ZeroMQ, for one event loop."""

    wire = "ZeroMQ"
    shares_memory = True

    def __init__(self, address: Address) -> None:
        self._address = address
        self._line = Line(address)
        self._loop = asyncio.get_running_loop()
        self._greeting = asyncio.Lock()
        self._closed = False
        self._loop.add_reader(self._line.fd, self._read)
        self._beat = self._loop.call_later(HEARTBEAT_S, self._heartbeat)

    # --- what is asked ---------------------------------------------------------------------------------------------

    async def call(self, word: Word, deadline: float) -> Any:
        """As `AsyncTransport.call`."""
        reply = await self._ask(partial(zmq_codec.word_message, word), deadline)
        answer = zmq_codec.answer(reply, word)
        self._line.remember(word)
        return answer

    async def infer(self, request: InferRequest, deadline: float) -> InferAnswer:
        """As `AsyncTransport.infer`."""
        end = zmq_codec.infer_answer(await self._ask(partial(zmq_codec.infer_message, request), deadline))
        if isinstance(end, InferError):
            raise fresh(end)
        return end

    # --- life ------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """As `AsyncTransport.close`."""
        self._end()

    def drop(self) -> None:
        """As `AsyncTransport.drop`."""
        if self._closed or self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._end)

    def leave_to_parent(self) -> None:
        """As `AsyncTransport.leave_to_parent`."""
        _in_parent.append(self)

    def _end(self) -> None:
        if not self._closed:
            self._closed = True
            self._beat.cancel()
            self._loop.remove_reader(self._line.fd)
            call_back(self._line.close())

    # --- inside ----------------------------------------------------------------------------------------------------

    async def _ask(self, make: Callable[[int], words.Request], deadline: float) -> words.GatewayMessage:
        for last in (False, True):
            await self._session(deadline)
            reply = await self._wait(make, deadline)
            if isinstance(reply, InferError):
                raise fresh(reply)
            if last or not repeat(reply):
                return reply
        raise AssertionError

    async def _wait(self, make: Callable[[int], words.Request], deadline: float) -> Reply:
        if self._closed:
            raise lost(self._address, "the client was closed")
        number = self._line.number()
        reply: asyncio.Future[Reply] = self._loop.create_future()
        self._line.ask(make(number), partial(_settle, reply))
        self._read()  # sending may have used up the event
        try:
            return await _until(reply, deadline)
        except TimeoutError:
            self._tell(words.Cancel(id=self._line.number(), target=number))
            raise expired() from None
        except asyncio.CancelledError:
            # The memory of a request is in use until the gateway says that it has ended.
            self._tell(words.Cancel(id=self._line.number(), target=number))
            await asyncio.wait([reply], timeout=CANCEL_S)
            raise

    async def _session(self, deadline: float) -> None:
        if self._line.welcomed:
            return
        try:
            await _until(self._greeting.acquire(), deadline)
        except TimeoutError:
            raise expired() from None
        try:
            while not self._line.welcomed:
                await self._connect(min(deadline, self._loop.time() + RECONNECT_S))
                reply = await self._wait(self._line.hello, deadline)
                if isinstance(reply, InferError):
                    raise fresh(reply)
                if self._line.greeted(reply) and self._line.regions:
                    listed = await self._wait(_list_regions, deadline)
                    if not isinstance(listed, InferError):
                        for word in self._line.missing(listed):
                            await self._wait(partial(zmq_codec.word_message, word), deadline)
        finally:
            self._greeting.release()

    async def _connect(self, until: float) -> None:
        while True:
            if self._closed:
                raise lost(self._address, "the client was closed")
            self._line.probe()
            self._read()
            if self._line.connected():
                return
            if self._loop.time() >= until:
                raise unreachable(self._address, "the gateway is not there")
            await asyncio.sleep(RETRY_S)

    def _read(self) -> None:
        if not self._closed:
            call_back(self._line.receive())

    def _tell(self, message: words.Request) -> None:
        if not self._closed and self._line.welcomed:
            self._line.tell(message)
            self._loop.call_soon(self._read)

    def _heartbeat(self) -> None:
        self._tell(words.Heartbeat(id=self._line.number()))
        self._beat = self._loop.call_later(HEARTBEAT_S, self._heartbeat)


def _settle(future: asyncio.Future[Reply], reply: Reply) -> None:
    if not future.done():
        future.set_result(reply)


def _list_regions(number: int) -> words.Request:
    return words.Regions(id=number)


async def _until(what: Awaitable[T], deadline: float) -> T:
    """Raises TimeoutError at the deadline (loop time). What is awaited is not cancelled when it is a future."""
    if deadline == math.inf:
        return await (asyncio.shield(what) if isinstance(what, asyncio.Future) else what)
    async with asyncio.timeout_at(deadline):
        return await (asyncio.shield(what) if isinstance(what, asyncio.Future) else what)
