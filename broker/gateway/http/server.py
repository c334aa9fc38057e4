"""The HTTP/REST front end: listens, counts connections, and answers requests from the table of endpoints.

Made by `broker.gateway.process`. Order of checks for a request: path (404), restriction (403), method (405), size of
the body before it is read (400), then the endpoint's own.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, final

from broker.gateway.http.connection import Connection
from broker.gateway.http.errors import EXITING, METHOD_NOT_ALLOWED
from broker.gateway.http.incoming import Incoming
from broker.gateway.http.limits import BODIES, Patience, connections_allowed
from broker.gateway.http.message import Reply, Request, error_reply, text_reply
from broker.gateway.http.routes import Routes, unknown
from broker.gateway.kserve import Caller, Service
from broker.gateway.options import GatewayOptions
from shm.errors import Code, InferError

_log = logging.getLogger(__name__)

Identify = Callable[[Any, Mapping[str, str]], Caller]  # the connection's socket (None: closed), headers in any case

SOCKET_NAME: Final = "http.sock"
SWEEP_S: Final = 0.25


@final
class HttpServer:
    """One gateway's. `identify`: who sends a request (`broker.gateway.peers`)."""

    def __init__(
        self,
        service: Service,
        options: GatewayOptions,
        identify: Identify,
        *,
        patience: Patience | None = None,
        max_connections: int = 0,
    ) -> None:
        self._service = service
        self._options = options
        self._identify = identify
        self._routes = Routes(service, options)
        self._listeners: list[asyncio.Server] = []
        self._connections: set[Connection] = set()
        self._max_connections = max_connections or connections_allowed()
        self._body_bytes = 0
        self._stopping = False
        self._idle = asyncio.Event()  # set when stopping and no connection is left
        self._sweeper: asyncio.TimerHandle | None = None
        self._path: tuple[Path, int] | None = None  # of the Unix socket, with its inode
        self.limit = options.http_max_input_size
        self.patience = patience or Patience()

    async def start(self) -> list[str]:
        """Listen. Returns a line for the log per address; raises InferError when one cannot be had."""
        self._loop = asyncio.get_running_loop()
        lines = []
        try:
            if self._options.http_port:
                lines.append(f"Started HTTPService at {await self._listen_tcp()}")
                if self._options.index == 0:
                    lines.append(f"Started HTTPService at unix:{await self._listen_unix()}")
        except BaseException:
            await self.stop(0)
            raise
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)
        return lines

    async def stop(self, grace_s: float) -> None:
        """Listen no more; requests that run have `grace_s` seconds to end, then they are cancelled."""
        self._stopping = True
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        self._remove_path()
        for connection in list(self._connections):
            connection.finish()
        if self._connections and grace_s > 0:
            try:
                async with asyncio.timeout(grace_s):
                    await self._idle.wait()
            except TimeoutError:
                pass
        for connection in list(self._connections):
            connection.abort()
        while self._connections:  # transports say so on the next turn of the loop
            self._idle.clear()
            await self._idle.wait()
        if self._sweeper is not None:
            self._sweeper.cancel()

    # --- for connections -------------------------------------------------------------------------------------------

    def admit(self, connection: Connection) -> Reply | None:
        """See `http.connection.Owner`."""
        if self._stopping:
            return text_reply(503, EXITING)
        if len(self._connections) >= self._max_connections:
            return text_reply(503, f"too many connections: this server takes {self._max_connections} at a time")
        self._connections.add(connection)
        return None

    def forget(self, connection: Connection) -> None:
        """See `http.connection.Owner`."""
        self._connections.discard(connection)
        if self._stopping and not self._connections:
            self._idle.set()

    def reserve(self, size: int) -> None:
        """See `http.connection.Owner`."""
        if self._body_bytes + size > BODIES * self.limit:
            raise InferError(Code.UNAVAILABLE, "too many large requests at a time: try again later")
        self._body_bytes += size

    def release(self, size: int) -> None:
        """See `http.connection.Owner`."""
        self._body_bytes -= size

    async def answer(self, incoming: Incoming) -> Reply:
        """See `http.connection.Owner`."""
        _log.debug("HTTP request: %s %s", incoming.message.method, incoming.path)
        found = self._routes.find(incoming.path)
        if found is None:
            return error_reply(unknown(incoming.path))
        if self._service.exiting:
            raise InferError(Code.UNAVAILABLE, EXITING)
        endpoint, names = found
        message, transport = incoming.message, incoming.transport
        caller = self._identify(transport.get_extra_info("socket") if transport else None, message.headers)
        self._service.check(endpoint.category, caller)
        handler = endpoint.methods.get(message.method)
        if handler is None:
            reply = text_reply(405, METHOD_NOT_ALLOWED)
            reply.headers = (("Allow", ", ".join(endpoint.methods)),)
            return reply
        began = time.monotonic_ns() if self._service.traces.on else 0
        body = await incoming.body(self.limit)
        request = Request(message.headers, message.raw_headers, body, caller, incoming.connection.reserve)
        if began:
            request.received = began, time.monotonic_ns()
        return await handler(request, *names)

    def _sweep(self) -> None:
        now = self._loop.time()
        self._sweeper = self._loop.call_at(now + SWEEP_S, self._sweep)
        for connection in [each for each in self._connections if each.deadline <= now]:
            connection.expire()

    # --- listening -------------------------------------------------------------------------------------------------

    def _connection(self) -> Connection:
        return Connection(self, self._loop)

    async def _listen_tcp(self) -> str:
        host, port = self._options.http_address, self._options.http_port
        address = f"{host}:{port}"
        try:
            listener = await self._loop.create_server(
                self._connection,
                host,
                port,
                backlog=self._backlog(),
                reuse_port=(self._options.http_reuse_port or self._options.gateways > 1) or None,
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise InferError(Code.UNAVAILABLE, f"Socket '{address}' already in use ") from None
            raise InferError(Code.UNAVAILABLE, f"cannot listen on '{address}': {error}") from None
        self._listeners.append(listener)
        return address

    async def _listen_unix(self) -> Path:
        path = Path(self._options.directory) / SOCKET_NAME
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            if path.exists() and stat.S_ISSOCK(path.lstat().st_mode):
                path.unlink()  # of a gateway that died; the broker sees to it that none of this index lives
            sock.bind(os.fspath(path))
            path.chmod(0o600)  # nobody can connect before listen()
            self._path = path, path.stat().st_ino
            listener = await self._loop.create_unix_server(self._connection, sock=sock, backlog=self._backlog())
        except OSError as error:
            sock.close()
            raise InferError(Code.UNAVAILABLE, f"cannot listen on '{path}': {error}") from None
        self._listeners.append(listener)
        return path

    def _backlog(self) -> int:
        # asyncio accepts as many at a time before it tells us of the first: they must not be all descriptors there are.
        return max(16, min(1024, self._max_connections // 2))

    def _remove_path(self) -> None:
        if self._path is not None:
            path, inode = self._path
            try:
                if path.stat().st_ino == inode:
                    path.unlink()
            except OSError:
                pass
            self._path = None
