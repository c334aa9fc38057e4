"""One HTTP connection: requests in, one after the other, replies out, and the limits that keep it from harm.

    new ──first byte──▶ head ──complete──▶ running ◀──▶ body
                         ▲                    │
                        idle ◀─── sending ◀───┴──refused──▶ sending ──▶ discarding ──▶ closed

Parsing is aiohttp's (llhttp in C). Its server is not used: here one task is made when a request's head is complete,
which answers two turns of the event loop earlier than a task per connection that makes one per request.

Every state but `running` has a deadline. `broker.gateway.http.server` looks at them four times a second; a peer that
did something meanwhile (sent enough of a body, took some of a reply) is given more time.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import math
import struct
import termios
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, Protocol, final

from aiohttp.base_protocol import BaseProtocol
from aiohttp.http import HttpRequestParser, RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.streams import StreamReader

from broker.gateway.http.errors import internal, invalid
from broker.gateway.http.incoming import BodyError, Incoming
from broker.gateway.http.limits import (
    MAX_FIELD,
    MAX_HEADERS,
    MAX_LINE,
    ONE_WRITE,
    PIPELINE,
    READ_SIZE,
    SEND_SIZE,
    Patience,
)
from broker.gateway.http.message import CHUNKED, UNTIL_CLOSED, Reply, Rest, error_reply, head
from broker.gateway.kserve import Buffer
from shm.errors import InferError, forget_frames

_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_log = logging.getLogger(__name__)


class Owner(Protocol):
    """Whom connections belong to: `broker.gateway.http.server.HttpServer`."""

    @property
    def patience(self) -> Patience:
        """For all of its connections."""

    @property
    def limit(self) -> int:
        """Bytes that a body may have."""

    def admit(self, connection: Connection) -> Reply | None:
        """Count it, or say why not."""

    def forget(self, connection: Connection) -> None:
        """It is closed."""

    def reserve(self, size: int) -> None:
        """Room for `size` more bytes of bodies. Raises InferError."""

    def release(self, size: int) -> None:
        """Give back what was reserved."""

    async def answer(self, incoming: Incoming) -> Reply:
        """To one request. Raises InferError."""


@final
class Connection(BaseProtocol):
    """See the module. `deadline`: when to call `expire`."""

    __slots__ = ("_closing", "_current", "_discarding", "_handed", "_last", "_mark", "_owner", "_queue", "_reserved",
                 "_state", "_task", "deadline")  # fmt: skip

    def __init__(self, owner: Owner, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._owner = owner
        self._queue: deque[tuple[RawRequestMessage, StreamReader] | HttpProcessingError] = deque()
        self._task: asyncio.Task[None] | None = None
        self._current: StreamReader | None = None  # the body of the request that is being answered
        self._state = "new"
        self._discarding = False
        self._last = False  # nothing can follow what is in the queue
        self._closing = False  # nothing shall
        self._reserved = 0  # bytes
        self._handed = 0  # bytes given to the transport, of all replies
        self._mark = 0  # how far the peer was when the deadline was set
        self.deadline = loop.time() + owner.patience.first_byte

    @property
    def busy(self) -> bool:
        """Is a request being answered?"""
        return self._task is not None

    # --- what the transport says -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Serve it, or refuse it at once."""
        super().connection_made(transport)
        assert self.transport is not None
        self.transport.set_write_buffer_limits(high=SEND_SIZE)
        if (refusal := self._owner.admit(self)) is not None:
            self._discarding = True
            self.transport.write(b"".join((head(refusal, sum(map(len, refusal.parts)), "close"), *refusal.parts)))
            self.transport.close()
            return
        self._parser = HttpRequestParser(
            self,
            self._loop,
            READ_SIZE,
            max_line_size=MAX_LINE,
            max_field_size=MAX_FIELD,
            max_headers=MAX_HEADERS,
            payload_exception=BodyError,
            auto_decompress=False,
            max_msg_queue_size=PIPELINE,
        )

    def connection_lost(self, exc: BaseException | None) -> None:
        """Nobody waits for the answer any more: cancel the request."""
        super().connection_lost(exc)
        self._queue.clear()
        self._discarding = True
        if self._task is not None:
            self._task.cancel()
        self._parser = None
        self._owner.forget(self)

    def data_received(self, data: bytes) -> None:
        """Also called with b"", to go on with what a pause left."""
        if self._discarding or self._last or self._parser is None:
            return
        try:
            messages, upgraded, _ = self._parser.feed_data(data)
        except HttpProcessingError as error:
            self._malformed(error)
        else:
            if not self._closing:
                self._queue.extend(messages)
            self._last = upgraded  # to another protocol, which we do not speak: the request is answered as any other
        if self._last or len(self._queue) >= PIPELINE:
            self._pause_reading_for_buffer()
        if self._task is None:
            if self._queue:
                self._next()
            elif data and self._state in ("new", "idle"):
                self._enter("head", self._owner.patience.head)

    def _malformed(self, error: HttpProcessingError) -> None:
        self._last = True
        if self._task is not None and self._current is not None and not self._current.is_eof():
            self._current.set_exception(BodyError(_first_line(error)))
        else:
            self._queue.append(error)

    # --- one request -----------------------------------------------------------------------------------------------

    def _next(self) -> None:
        item = self._queue.popleft()
        self._state, self.deadline = "running", math.inf
        if isinstance(item, HttpProcessingError):
            refusal = error_reply(invalid(f"malformed HTTP request: {_first_line(item)}"))
            self._task = self._loop.create_task(self._finish(refusal, "", keep=False, old=False))
            return
        message, payload = item
        self._current = payload
        self._task = self._loop.create_task(self._serve(message, payload))
        assert self._parser is not None
        self._parser.message_consumed()
        if self._buffer_paused and not self._last and len(self._queue) <= PIPELINE // 2:
            self._resume_reading_for_buffer()
            self.data_received(b"")

    async def _serve(self, message: RawRequestMessage, payload: StreamReader) -> None:
        try:
            reply = await self._owner.answer(Incoming(message, payload, self))
        except InferError as error:
            _log.debug("HTTP request failed: %s", error.message)
            reply = error_reply(error)
            forget_frames(error)  # what failed may be held, by the stream of the body for one
        except asyncio.CancelledError:
            self.abort()
            return
        except Exception as error:
            _log.exception("HTTP: %s %.200r failed", message.method, message.path)
            reply = error_reply(internal("internal error"))
            forget_frames(error)
        finally:
            if self._reserved:
                self._owner.release(self._reserved)
                self._reserved = 0
        follows = bool(self._queue) or not (self._last or self._closing)
        keep = follows and payload.is_eof() and not message.should_close
        await self._finish(reply, message.method, keep=keep, old=message.version.minor == 0)

    async def _finish(self, reply: Reply, method: str, *, keep: bool, old: bool) -> None:
        """Send the reply, then go on or close. `old`: the request is HTTP/1.0."""
        if reply.trace is not None:
            reply.trace.mark("HTTP_SEND_START")
        try:
            if reply.rest is not None:
                keep = await self._send_on(reply, reply.rest, keep=keep, chunked=not old)
            else:
                await self._send(reply, method, "close" if not keep else "keep-alive" if old else "")
        except (ConnectionError, asyncio.CancelledError):
            self.abort()
            return
        except Exception:  # what was begun cannot be made an error any more
            _log.exception("HTTP: a reply could not be sent to its end")
            self.abort()
            return
        finally:
            if reply.trace is not None:
                reply.trace.mark("HTTP_SEND_END")
                reply.trace.write()
        self._task = self._current = None
        if not keep:
            self._shut()
        elif self._queue:
            self._next()
        else:
            self._enter("idle", self._owner.patience.idle)

    @contextlib.contextmanager
    def waiting_for(self, payload: StreamReader, *, expected: bool) -> Iterator[None]:
        """Meanwhile a body is read, at no less than its pace. `expected`: the peer waits to be told to go on."""
        if expected:
            self._transport().write(_CONTINUE)
        self._mark = payload.total_bytes
        self._enter("body", self._owner.patience.body)
        try:
            yield
        finally:
            self._state, self.deadline = "running", math.inf

    def listen_no_more(self) -> None:
        """Who sends such a body is not listened to any longer."""
        self._last = True
        self._queue.clear()

    @property
    def limit(self) -> int:
        """Bytes that a body may have."""
        return self._owner.limit

    def reserve(self, size: int) -> None:
        """Count bytes for the request that is being answered. Raises InferError."""
        self._owner.reserve(size)
        self._reserved += size

    # --- the reply -------------------------------------------------------------------------------------------------

    async def _send(self, reply: Reply, method: str, connection: str) -> None:
        """Hand all of `reply` to the transport. Raises ConnectionError."""
        length = sum(map(len, reply.parts))
        start = head(reply, length, connection)
        await self._hand(start, reply.parts if method != "HEAD" else ())

    async def _send_on(self, reply: Reply, rest: Rest, *, keep: bool, chunked: bool) -> bool:
        """Send a reply that is still being made, each piece as it comes. May the connection be kept?"""
        keep = keep and chunked
        start = head(reply, CHUNKED if chunked else UNTIL_CLOSED, "" if keep else "close")
        try:
            await self._hand(start, _chunk(*reply.parts) if chunked else reply.parts)
            async for piece in rest:
                await self._hand(b"", _chunk(piece) if chunked else (piece,))
            if chunked:
                await self._hand(b"0\r\n\r\n", ())
        finally:
            await rest.aclose()
        return keep and not self._closing

    async def _hand(self, start: bytes, parts: Sequence[Buffer]) -> None:
        if sum(map(len, parts)) <= ONE_WRITE:
            self._write(b"".join((start, *parts)))
        else:
            self._write(start)
            for part in parts:
                # In pieces: the transport copies what the socket does not take at once.
                for position in range(0, len(part), SEND_SIZE):
                    self._write(memoryview(part)[position : position + SEND_SIZE])
                    if self.writing_paused:
                        await self._drain()
        if self.writing_paused:
            await self._drain()

    def _write(self, data: Buffer) -> None:
        self._transport().write(data)
        self._handed += len(data)

    async def _drain(self) -> None:
        self._mark = self._taken()
        self._enter("sending", self._owner.patience.send)
        await self._drain_helper()
        self._state, self.deadline = "running", math.inf

    def _transport(self) -> asyncio.Transport:
        if self.transport is None or self.transport.is_closing():
            raise ConnectionResetError("the peer is gone")
        return self.transport

    def _taken(self) -> int:
        """Bytes of replies that the peer's kernel has. Ours takes more only when a third of its buffer is free."""
        if self.transport is None:
            return self._handed
        waiting = struct.pack("i", 0)
        try:
            fd = self.transport.get_extra_info("socket").fileno()
            waiting = fcntl.ioctl(fd, termios.TIOCOUTQ, waiting)
        except (OSError, ValueError):  # it is closed
            pass
        return self._handed - self.transport.get_write_buffer_size() - int(struct.unpack("i", waiting)[0])

    # --- the end ---------------------------------------------------------------------------------------------------

    def expire(self) -> None:
        """The deadline has passed: give the peer more time if it did something, else end the connection."""
        patience = self._owner.patience
        if self._state == "body" and self._current is not None:
            mark, need, more = self._current.total_bytes, patience.body_progress, patience.body
        elif self._handed > self._taken():
            mark, need, more = self._taken(), 1, patience.send
        else:
            mark, need, more = 0, 1, 0.0
        if mark - self._mark >= need:
            self._mark = mark
            self.deadline += more
        else:
            self.abort()

    def abort(self) -> None:
        """End it now; what was not sent is dropped."""
        self._discarding = True
        self.deadline = math.inf
        if self.transport is not None:
            self.transport.abort()

    def finish(self) -> None:
        """No further request: close after the one that is being answered, if any."""
        self._closing = True
        self._queue.clear()
        if self._task is None:
            self._shut()

    def _shut(self) -> None:
        """Say no more, and let the peer read what was said.

        A socket that is closed with bytes unread resets the connection, and the peer may never see the reply.
        """
        if self.transport is None or self._discarding:
            return
        self._discarding = True
        self._mark = self._taken()
        self._enter("discarding", self._owner.patience.discard)
        self.transport.write_eof()
        self._resume_transport_reading()

    def _enter(self, state: str, patience: float) -> None:
        self._state = state
        self.deadline = self._loop.time() + patience


def _chunk(*parts: Buffer) -> tuple[Buffer, ...]:
    """One chunk of a body in chunks; of no bytes, which would be its end: nothing."""
    length = sum(map(len, parts))
    return (b"%x\r\n" % length, *parts, b"\r\n") if length else ()


def _first_line(error: HttpProcessingError) -> str:
    return error.message.partition("\n")[0][:200].rstrip(":")
