"""One client's connection: datagrams in, requests through one at a time, replies out, and the end of it.

`broker.listener` makes sessions; what requests mean is `Service`'s business (`broker.control`). Requests of a session
run one after another in the order they came, so a client can send register, prepare and submit back to back. Loads and
unloads, which may take minutes, and those of a gateway or worker begin in the order they came, and up to 64 run at
once: those are of many clients, who must not wait for each other. Nothing here waits for a client: what it does not
read is queued up to a bound, then it is hung up.

    Hello within 5 s → [Starting …] → Welcome → requests … → hang-up, its process's end, or a broken rule
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, final

import msgspec

from broker.records import OURS, Peer
from shm import sockets
from shm.errors import Code, InferError, ProtocolError, forget_frames
from shm.lease_messages import KeepLoaded
from shm.memory import written_memfd
from shm.messages import (
    MAX_DATAGRAM,
    PROTOCOL,
    WITH_DESCRIPTORS,
    Failure,
    Goodbye,
    Hello,
    Id,
    Large,
    LoadModel,
    Message,
    Request,
    UnloadModel,
    decode_request,
    encode,
)

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0
STALL_TIMEOUT_S = 5.0  # a client that reads nothing for so long while replies wait is gone for our purposes
BURST = 16  # datagrams of one session per turn of the loop
MAX_WAITING = 256  # requests
AT_ONCE = 64  # requests that run: a gateway's, a worker's, or those of a client that may take as long as a load
MAY_LOAD = (LoadModel, UnloadModel, KeepLoaded)
MAX_WAITING_BYTES = 4 << 20
MAX_OUTBOX_BYTES = 256 << 10  # of replies that a client has not read
# A gateway's event loop may be busy while all its calls are answered: reading none for a moment must not be its end.
GATEWAY_OUTBOX_BYTES = MAX_OUTBOX_BYTES + AT_ONCE * MAX_DATAGRAM
MAX_ERRORS = 100  # undecodable datagrams in a row


class Answer(NamedTuple):
    """A reply and the descriptors that go with it. Those in `owned` are closed once they are sent."""

    reply: Message
    fds: Sequence[int] = ()
    owned: Sequence[int] = ()


class Service(Protocol):
    """What a session asks of the rest of the broker."""

    async def welcome(self, session: Session) -> Message:
        """The reply to Hello; sends Starting notices until there is one."""

    async def answer(self, peer: Peer, request: Request, fds: list[int]) -> Answer:
        """The reply to `request`. Takes `fds` over. Raises InferError, OSError."""

    async def end(self, peer: Peer) -> None:
        """Give back everything the session holds. Raises nothing."""


class _Envelope(msgspec.Struct):
    """What can be read of a request that is otherwise wrong."""

    id: Id = 0


@final
class Session:
    """Owns the socket and the pidfd of one client. `closed` is done when everything it held has been given back."""

    def __init__(
        self,
        connection: socket.socket,
        pidfd: int,
        peer: Peer,
        service: Service,
        *,
        on_end: Callable[[Session], None],
        hello_s: float | None = HELLO_TIMEOUT_S,
    ) -> None:
        """`hello_s`: within which Hello must come; None: whenever."""
        self.peer = peer
        self._on_end = on_end
        self.library = ""
        self.protocol_errors = 0
        self.fault = ""  # of the client, for which it was hung up
        self._socket = connection
        self._pidfd = pidfd
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[Request, list[int], int]] = deque()
        self._waiting_bytes = 0
        self._arrived = asyncio.Event()
        self._outbox: deque[tuple[bytes, list[int]]] = deque()
        self._outbox_bytes = 0
        self._drained = asyncio.Event()
        self._drained.set()
        self._stalled: asyncio.TimerHandle | None = None
        self._errors_in_a_row = 0
        self._greeted = False
        self._ended = False
        self._running: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(AT_ONCE)
        self._hello: asyncio.TimerHandle | None = None
        if hello_s is not None:
            self._hello = self._loop.call_later(hello_s, self.hang_up, f"no Hello within {hello_s:g} s")
        self._loop.add_reader(pidfd, self.end, "its process ended")
        self._loop.add_reader(connection, self._read)
        self.closed = self._loop.create_task(self._live(), name=f"session {peer.session}")

    # --- ending ----------------------------------------------------------------------------------------------------

    def hang_up(self, reason: str, *, orderly: bool = False) -> None:
        """Say Goodbye and end. `orderly`: by no fault of the client."""
        self.send(Goodbye(reason=reason))
        if orderly:
            self.end(reason)
        else:
            self._drop(reason)

    def _drop(self, fault: str) -> None:
        self.fault = self.fault or fault
        self.end(fault)

    def end(self, reason: str) -> None:
        """Close the connection now; what the session held is given back by and by (`closed`)."""
        if self._ended:
            return
        self._ended = True
        level = logging.DEBUG if self.peer.role == "client" else logging.INFO
        log.log(level, "session %d (pid %d) ends: %s", self.peer.session, self.peer.pid, reason)
        for timer in (self._hello, self._stalled):
            if timer:
                timer.cancel()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        close_politely(self._socket)
        for _, fds, _ in self._waiting:
            sockets.close_all(fds)
        self._waiting.clear()
        for _, fds in self._outbox:
            sockets.close_all(fds)
        self._outbox.clear()
        self.closed.cancel()
        self._on_end(self)

    async def _live(self) -> None:
        try:
            while True:
                await self._arrived.wait()
                while self._waiting:
                    await self._drained.wait()
                    request, fds, byte_size = self._waiting.popleft()
                    self._waiting_bytes -= byte_size
                    if self._greeted and (self.peer.role in OURS or isinstance(request, MAY_LOAD)):
                        await self._begin(request, fds)
                    else:
                        await self._serve(request, fds)
                    await asyncio.sleep(0)  # many requests can be answered without waiting: the others' turn first
                self._arrived.clear()
        except asyncio.CancelledError:
            pass  # by end(): the loop above never ends otherwise
        finally:
            for task in self._running:
                task.cancel()
            if self._running:
                await asyncio.wait(self._running)
            await self._service.end(self.peer)

    # --- requests --------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        for _ in range(BURST):
            if self._ended:
                return
            try:
                datagram = sockets.receive(self._socket)
            except BlockingIOError:
                return
            except ProtocolError as error:  # cut short: what was in it, and whether a reply is awaited, is lost
                self._refuse(error, 0)
                self.hang_up(error.message)
                return
            except OSError as error:
                self.end(f"cannot be read: {error.strerror}")
                return
            if datagram is None:
                self.end("hung up")
                return
            self._take(*datagram)

    def _take(self, data: bytes, fds: list[int]) -> None:
        try:
            request = decode_request(data)
        except ProtocolError as error:
            sockets.close_all(fds)
            self._refuse(error, _id_of(data))
            if not self._greeted or self._errors_in_a_row >= MAX_ERRORS:
                self.hang_up(error.message)
            return
        self._errors_in_a_row = 0
        if not isinstance(request, WITH_DESCRIPTORS):
            sockets.close_all(fds)
            fds = []
        self._waiting.append((request, fds, len(data)))
        self._waiting_bytes += len(data)
        self._arrived.set()
        if len(self._waiting) > MAX_WAITING or self._waiting_bytes > MAX_WAITING_BYTES:
            self.hang_up(
                f"more than {MAX_WAITING} requests or {MAX_WAITING_BYTES} bytes of requests are waiting: read replies "
                "before sending more"
            )

    def _refuse(self, error: ProtocolError, request_id: int) -> None:
        self.protocol_errors += 1
        self._errors_in_a_row += 1
        self.send(Failure(id=request_id, code=error.code, message=error.message))

    async def _begin(self, request: Request, fds: list[int]) -> None:
        try:
            await self._room.acquire()
        except asyncio.CancelledError:
            sockets.close_all(fds)
            raise
        task = self._loop.create_task(self._serve(request, fds))
        self._running.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._room.release()

    async def _serve(self, request: Request, fds: list[int]) -> None:
        try:
            if not self._greeted:
                sockets.close_all(fds)
                await self._greet(request)
                return
            if isinstance(request, Hello):
                raise InferError(Code.INVALID_ARG, "Hello is sent once, as the first message of a session")
            answer = await self._service.answer(self.peer, request, fds)
            self.send(msgspec.structs.replace(answer.reply, id=request.id), answer.fds)
            sockets.close_all(answer.owned)
        except Exception as error:
            self.send(failure(request.id, error))
            forget_frames(error)  # a future or a record may hold it

    async def _greet(self, request: Request) -> None:
        if not isinstance(request, Hello):
            self.send(Failure(id=request.id, code=Code.INVALID_ARG.name, message="the first message must be Hello"))
            self.hang_up("the first message was not Hello")
            return
        if request.protocol != PROTOCOL:
            message = (
                f"this broker speaks protocol {PROTOCOL}, the client speaks protocol {request.protocol}: install the "
                "same version of tensorbroker on both sides"
            )
            self.send(Failure(id=request.id, code=Code.UNSUPPORTED.name, message=message))
            self.hang_up(message)
            return
        if self._hello:
            self._hello.cancel()
        self._greeted = True
        self.library = request.library
        self.send(msgspec.structs.replace(await self._service.welcome(self), id=request.id))

    # --- replies ---------------------------------------------------------------------------------------------------

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send without waiting; `fds` stay the caller's. A client that does not read is hung up."""
        if self._ended:
            return
        data = encode(message)
        try:
            if len(data) > MAX_DATAGRAM:
                memory = written_memfd("tensorbroker-reply", data)
                try:
                    self._transmit(encode(Large(id=message.id, byte_size=len(data))), [memory])
                finally:
                    os.close(memory)
            else:
                self._transmit(data, fds)
        except OSError as error:
            self.end(f"cannot be written: {error.strerror}")

    def _transmit(self, data: bytes, fds: Sequence[int]) -> None:
        if not self._outbox:
            try:
                sockets.send(self._socket, data, fds)
                return
            except BlockingIOError:
                self._loop.add_writer(self._socket, self._flush)
                self._watch_progress()
                # No more work for a client that is behind with reading; one that never reads ends by `_stalled`.
                if self.peer.role not in OURS:
                    self._drained.clear()
                    self._loop.remove_reader(self._socket)
        limit = GATEWAY_OUTBOX_BYTES if self.peer.role in OURS else MAX_OUTBOX_BYTES
        if self._outbox_bytes + len(data) > limit:
            self._drop(f"does not read: {self._outbox_bytes} bytes of replies are waiting")
            return
        # Duplicates, because the caller's may be closed, and their numbers used again, before these are sent.
        self._outbox.append((data, [os.dup(fd) for fd in fds]))
        self._outbox_bytes += len(data)

    def _flush(self) -> None:
        try:
            while self._outbox:
                data, fds = self._outbox[0]
                sockets.send(self._socket, data, fds)
                self._outbox.popleft()
                self._outbox_bytes -= len(data)
                sockets.close_all(fds)
                self._watch_progress()
        except BlockingIOError:
            return
        except OSError as error:
            self.end(f"cannot be written: {error.strerror}")
            return
        self._loop.remove_writer(self._socket)
        if self._stalled:
            self._stalled.cancel()
        if not self._drained.is_set():
            self._drained.set()
            self._loop.add_reader(self._socket, self._read)

    def _watch_progress(self) -> None:
        if self._stalled:
            self._stalled.cancel()
        self._stalled = self._loop.call_later(STALL_TIMEOUT_S, self._drop, "has not read its replies for 5 s")


def failure(request_id: int, error: Exception) -> Failure:
    """What a client is told of `error`: never a traceback, never a path or a name it did not send."""
    if isinstance(error, InferError):
        return Failure(id=request_id, code=error.code, message=error.message)
    if isinstance(error, OSError):
        log.warning("a request failed: %s", error)
        return Failure(
            id=request_id, code=Code.UNAVAILABLE.name, message=f"the broker is short of resources: {error.strerror}"
        )
    log.error("a request failed by a defect of the broker", exc_info=error)
    return Failure(
        id=request_id, code=Code.INTERNAL.name, message="internal error of the broker; its log has the details"
    )


def close_politely(connection: socket.socket) -> None:
    """Close so that the peer can still read what was sent: closing with unread input would reset it instead."""
    try:
        connection.shutdown(socket.SHUT_RD)  # from here on the peer can send nothing more, so this ends
        while (datagram := _receive_anything(connection)) is not None:
            sockets.close_all(datagram)
    except OSError:
        pass
    connection.close()


def _receive_anything(connection: socket.socket) -> list[int] | None:
    try:
        datagram = sockets.receive(connection)
    except ProtocolError:
        return []
    return None if datagram is None else datagram[1]


def _id_of(data: bytes) -> int:
    try:
        return msgspec.msgpack.decode(data, type=_Envelope).id
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return 0
