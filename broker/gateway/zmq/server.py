"""The ZeroMQ front end: sessions of local clients on `ipc://<run directory>/zmq.sock` (docs/wire-protocol.md).

    Port (the socket) ── ZmqServer (sessions, liveness, replies) ── Verbs ── Service

Started by gateway 0 alone. Everything happens on the event loop's thread; only verbs are tasks. A client is gone when
its process ends or it misses three heartbeats, whichever is first: its requests are cancelled and its regions go.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, final

from broker.gateway.kserve import Caller, Service
from broker.gateway.options import GatewayOptions
from broker.gateway.zmq.clients import LIMITS, Client, Clients, watch
from broker.gateway.zmq.codec import Refused, decode, encode, failure, inline_size
from broker.gateway.zmq.journal import Journal, Session, started
from broker.gateway.zmq.port import MIN_DESCRIPTORS, Port, Sent, enough_descriptors
from broker.gateway.zmq.verbs import Verbs
from shm import zmq_messages as words
from shm.errors import Code, InferError, ProtocolError, forget_frames

log = logging.getLogger(__name__)

TICK_S: Final = 0.25  # how often clients are looked at
BURST: Final = 64  # messages read before the loop has its turn
LET_GO_S: Final = 1.0  # for requests that were cancelled, when the server stops
NO_SESSION: Final = "this connection has no session: say hello first (again, if the gateway was restarted)"
WHILE_EXITING: Final = (words.Heartbeat, words.Goodbye, words.Cancel, words.Release)

Identify = Callable[[str, str, Mapping[str, str]], Caller]


@final
class ZmqServer:
    """`identify(peer address, token, headers)` makes the caller of a session (`peers.Peers.zmq_caller`)."""

    def __init__(self, service: Service, options: GatewayOptions, identify: Identify) -> None:
        self._service = service
        self._options = options
        self._identify = identify
        self._verbs = Verbs(service)
        self._clients = Clients()
        self._tasks: set[asyncio.Task[None]] = set()
        self._full: set[Client] = set()  # those with an outbox
        self._port: Port | None = None
        self._journal = Journal(options.directory)
        self._tick: asyncio.TimerHandle | None = None
        self.refused = 0  # messages that were none
        self.dropped = 0  # clients that did not read

    async def start(self) -> list[str]:
        """Listen. Returns what to log. Raises OSError when the socket cannot be made."""
        if not self._options.zmq or self._options.index:
            return []
        if not enough_descriptors():
            log.warning("ZeroMQ is off: it needs a limit of %d open files or more (`ulimit -Hn`)", MIN_DESCRIPTORS)
            return []
        self._loop = asyncio.get_running_loop()
        self._port = port = Port(self._options.directory, self._options.broker_uid)
        self._loop.add_reader(port.fd, self._readable)
        self._loop.add_reader(port.monitor_fd, port.count)
        port.count()
        self._adopt()
        self._readable()
        self._look()
        return [f"Started ZMQService at ipc://{port.path}"]

    async def stop(self, grace_s: float) -> None:
        """Accept no more connections, let requests end for `grace_s`, cancel the rest, close. May be called again."""
        if (port := self._port) is None:
            return
        port.pause()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LET_GO_S)
        self._port = None
        if self._tick is not None:
            self._tick.cancel()
        self._loop.remove_reader(port.fd)
        self._loop.remove_reader(port.monitor_fd)
        for client in self._clients.sessions():
            self._unwatch(client)  # its regions stay: the next gateway may be told its token
        port.close()

    # --- messages in -----------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        if (port := self._port) is None:
            return
        if self._full:
            port.readable()  # lets libzmq see who has room again
            self._flush()
        left = BURST
        while port.readable():
            routing, data, peer = port.receive(self._clients.known)
            self._handle(routing, data, peer)
            if not (left := left - 1):
                self._loop.call_soon(self._readable)
                break

    def _handle(self, routing: bytes, data: bytes | None, peer: str | None) -> None:
        client = self._clients.known.get(routing)
        if client is None and self._clients.ignored(routing):
            return
        try:
            if data is None:
                raise ProtocolError("a message is one frame, and ZMQ_ROUTING_ID must not be set")
            message = decode(data)
        except Refused as error:
            self.refused += 1
            self._reply(client or routing, failure(error.request, error))
            return
        except ProtocolError as error:
            self._bad(routing, error)
            return
        if client is None:
            self._greet(routing, message, peer)
            return
        client.bad = 0
        client.heard = self._loop.time()
        try:
            self._dispatch(client, message)
        except InferError as error:
            self._reply(client, failure(message.id, error))

    def _bad(self, routing: bytes, error: ProtocolError) -> None:
        self.refused += 1
        client = self._clients.known.get(routing)
        self._reply(client or routing, failure(0, error))
        if self._clients.count_bad(routing):
            log.warning("ZeroMQ: a connection sent messages that are none and is ignored from now on")
            if client is not None:
                self._end(client, "it sent messages that are none")

    def _dispatch(self, client: Client, message: words.ClientMessage) -> None:
        if self._service.exiting and not isinstance(message, WHILE_EXITING):
            raise InferError(Code.UNAVAILABLE, "Server exiting")
        match message:
            case words.Heartbeat():
                pass
            case words.Goodbye():
                self._reply(client, words.Done(id=message.id))
                self._end(client, "")
                return
            case words.Cancel():
                if (cancel := client.requests.get(message.target)) is not None:
                    cancel()
            case words.Hello():
                raise InferError(Code.INVALID_ARG, "this connection has a session already: say goodbye first")
            case _:
                inline = inline_size(message) if isinstance(message, words.Infer) else 0
                client.admit(message.id, inline)
                task = self._loop.create_task(self._work(client, message, inline))
                self._tasks.add(task)
                task.add_done_callback(partial(self._worked, client, message.id, inline))
                client.begin(message.id, inline, task.cancel)
                return
        self._reply(client, words.Done(id=message.id))

    async def _work(self, client: Client, message: words.Request, inline: int) -> None:
        try:
            reply = await self._verbs.answer(client, message)
        except InferError as error:
            reply = failure(message.id, error)
            forget_frames(error)  # what failed may be held
        except asyncio.CancelledError:
            reply = failure(message.id, cancelled())
        except Exception as error:
            log.exception("ZeroMQ: a request failed")
            reply = failure(message.id, InferError(Code.INTERNAL, "internal error of the gateway"))
            forget_frames(error)
        client.end(message.id, inline)
        self._reply(client, reply)
        if self._port is not None and self._port.readable():  # sending may have used up the event
            self._readable()

    def _worked(self, client: Client, request: int, inline: int, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():  # before it began
            client.end(request, inline)
            self._reply(client, failure(request, cancelled()))

    # --- sessions --------------------------------------------------------------------------------------------------

    def _greet(self, routing: bytes, message: words.ClientMessage, peer: str | None) -> None:
        try:
            if self._service.exiting:
                raise InferError(Code.UNAVAILABLE, "Server exiting")
            if not isinstance(message, words.Hello):
                self._reply(routing, words.Error(id=message.id, code="UNAVAILABLE", message=NO_SESSION, hello=True))
                return
            client, resumed = self._welcome(routing, message, peer)
        except InferError as error:
            self._reply(routing, failure(message.id, error))
            return
        self._reply(
            client,
            words.Welcome(
                id=message.id,
                protocol=words.PROTOCOL,
                token=client.token,
                resumed=resumed,
                server=self._service.server_name,
                version=self._service.server_version,
                limits=LIMITS,
            ),
        )

    def _welcome(self, routing: bytes, hello: words.Hello, peer: str | None) -> tuple[Client, bool]:
        if peer is None:
            raise InferError(
                Code.INVALID_ARG, "this connection chose its own ZMQ_ROUTING_ID: leave that to the gateway"
            )
        uid = self._options.broker_uid
        told = peer.rpartition(":")[2] if peer else ""
        pid = int(told) if told.isdecimal() and int(told) else hello.pid
        # Without the peer's address it is one whom the socket's mode and ZMQ_IPC_FILTER_UID let in.
        address = peer or f"localhost:{uid}:0:{pid}"
        try:
            pidfd = watch(pid, uid)
        except ProcessLookupError:
            raise InferError(
                Code.INVALID_ARG, f"pid {pid} is no process of this user: send your own, or none"
            ) from None
        try:
            client, resumed, previous = self._clients.welcome(
                routing, hello, lambda token: self._identify(address, token, hello.headers), pid, self._loop.time()
            )
        except BaseException:
            if pidfd >= 0:
                os.close(pidfd)
            raise
        if previous is not None:
            self._let_go(previous)
        self._watch(client, pidfd)
        self._write()
        return client, resumed

    def _adopt(self) -> None:
        """Take over the sessions of the last gateway: their clients come back, or they end."""
        for session in self._journal.read():
            caller = self._identify(f"localhost:{self._options.broker_uid}:0:{session.pid}", session.token, {})
            client = self._clients.adopt(session.token, caller, session.pid, session.patience_s, self._loop.time())
            try:
                self._watch(client, watch(session.pid, self._options.broker_uid))
                if not session.alive():  # looked at now, when nobody else can come to have its number unnoticed
                    raise ProcessLookupError
            except ProcessLookupError:
                self._end(client, "its process has ended")

    def _write(self) -> None:
        self._journal.write(Session(c.token, c.pid, c.started, c.patience_s) for c in self._clients.sessions())

    def _watch(self, client: Client, pidfd: int) -> None:
        if pidfd >= 0:
            client.pidfd, client.started = pidfd, started(client.pid)
            self._loop.add_reader(pidfd, self._end, client, "its process has ended")

    def _end(self, client: Client, why: str) -> None:
        """The session is over. `why` "": it said so."""
        if not self._clients.remove(client):
            return
        self._write()
        if why:
            log.info("ZeroMQ: a client (pid %d) is gone: %s", client.pid, why)
        self._let_go(client)
        task = self._loop.create_task(self._forget(client))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _let_go(self, client: Client) -> None:
        self._unwatch(client)
        self._full.discard(client)
        for cancel in list(client.requests.values()):
            cancel()

    async def _forget(self, client: Client) -> None:
        try:
            await self._verbs.forget(client)
        except InferError as error:
            log.warning("ZeroMQ: the regions of a client that is gone could not be let go: %s", error)

    def _unwatch(self, client: Client) -> None:
        if client.pidfd >= 0:
            self._loop.remove_reader(client.pidfd)
            os.close(client.pidfd)
            client.pidfd = -1

    def _look(self) -> None:
        for client, why in self._clients.gone(self._loop.time()):
            self._end(client, why)
        self._readable()
        self._tick = self._loop.call_later(TICK_S, self._look)

    # --- messages out ----------------------------------------------------------------------------------------------

    def _reply(self, to: Client | bytes, reply: words.Reply) -> None:
        if (port := self._port) is None:
            return
        data = encode(reply)
        if isinstance(to, bytes):
            port.send(to, data)  # a stranger that does not read misses it
            return
        if self._clients.known.get(to.routing) is not to:
            return
        # A connection that is gone may come back with the token: the process and the heartbeats tell, not this.
        if (to.outbox or port.send(to.routing, data) is Sent.FULL) and not self._put(to, data):
            self.dropped += 1
            self._end(to, "it does not read its replies")

    def _put(self, client: Client, data: bytes) -> bool:
        self._full.add(client)
        return client.put(data, self._loop.time())

    def _flush(self) -> None:
        assert self._port is not None
        for client in list(self._full):
            while client.outbox and self._port.send(client.routing, client.outbox[0]) is not Sent.FULL:
                client.outbox_bytes -= len(client.outbox.popleft())
                client.stuck = self._loop.time()
            if not client.outbox:
                self._full.discard(client)


def cancelled() -> InferError:
    """The end of a request whose client asked for it."""
    return InferError(Code.CANCELLED, "the request was cancelled")
