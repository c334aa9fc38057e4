"""An `HttpServer` on a `FakeService`, in a thread of this process, for tests that speak to it over sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from broker.gateway.http.limits import Patience
from broker.gateway.http.server import HttpServer
from broker.gateway.kserve import Caller
from broker.gateway.options import GatewayOptions
from broker.gateway.peers import Peers
from tests.fakes.broker import eventually
from tests.fakes.gateways import free_ports
from tests.fakes.kserve import FakeService

T = TypeVar("T")
WAIT_S = 60.0
# Nobody is closed because the machine was busy with something else. Who tests that looks moves the clock (`advance`).
PATIENT = Patience(first_byte=60, head=60, body=60, send=60, idle=60, discard=60)


def identify(_: Any, headers: Mapping[str, str]) -> Caller:
    return Caller("http", headers=headers)


class Running:
    """`service` and `server` belong to the thread: `call` runs something there."""

    def __init__(self, options: GatewayOptions, loop: asyncio.AbstractEventLoop) -> None:
        self.service = FakeService()
        self.options = options
        self.port = options.http_port
        self.url = f"127.0.0.1:{self.port}"
        self.lines: list[str] = []
        self.server: HttpServer
        self._loop = loop
        self._ahead_s = 0.0

    def call(self, function: Callable[[], Awaitable[T] | T]) -> T:
        async def run() -> T:
            result = function()
            return await result if isinstance(result, Awaitable) else result

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(WAIT_S)

    def advance(self, seconds: float) -> None:
        """What waits for the server's clock finds it so much later, and has been run when this returns."""
        self._ahead_s += seconds
        self._loop.time = lambda: time.monotonic() + self._ahead_s  # type: ignore[method-assign]
        for _ in range(2):  # what was due has been run before the second
            self.call(lambda: None)

    def states(self) -> set[str]:
        """Of its connections."""
        return self.call(lambda: {each._state for each in self.server._connections})

    def connections(self) -> int:
        return self.call(lambda: len(self.server._connections))

    def connect(self, receive_buffer: int = 0) -> Peer:
        """`receive_buffer`: bytes that the kernel keeps for the peer; 0: as many as it likes."""
        sock = socket.socket()
        try:
            if receive_buffer:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            sock.settimeout(WAIT_S)
            sock.connect(("127.0.0.1", self.port))
        except OSError:
            sock.close()
            raise
        return Peer(sock)


class Peer:
    """A socket that speaks HTTP by hand."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = b""

    def send(self, data: bytes) -> Peer:
        self.sock.sendall(data)
        return self

    def request(self, method: str, path: str, body: bytes = b"", *headers: str) -> Peer:
        lines = [f"{method} {path} HTTP/1.1", "Host: h", f"Content-Length: {len(body)}", *headers]
        return self.send("\r\n".join([*lines, "", ""]).encode() + body)

    def reply(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers in lower case, body. ConnectionError when there is none."""
        status, headers = self.head()
        return status, headers, self.take(int(headers.get("content-length", 0)))

    def head(self) -> tuple[int, dict[str, str]]:
        """Status, and headers in lower case."""
        while b"\r\n\r\n" not in self._buffer:
            self._more()
        start, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        first, *lines = start.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        return int(first.split()[1]), headers

    def take(self, length: int) -> bytes:
        """The next `length` bytes."""
        while len(self._buffer) < length:
            self._more()
        taken, self._buffer = self._buffer[:length], self._buffer[length:]
        return taken

    def chunk(self) -> bytes:
        """The next chunk of a body; b"" is its end."""
        while b"\r\n" not in self._buffer:
            self._more()
        size, _, self._buffer = self._buffer.partition(b"\r\n")
        data = self.take(int(size, 16))
        assert self.take(2) == b"\r\n"
        return data

    def error(self) -> tuple[int, str]:
        status, headers, body = self.reply()
        assert headers["content-type"] == "application/json"
        return status, json.loads(body)["error"]

    def _more(self) -> None:
        data = self.sock.recv(1 << 20)
        if not data:
            raise ConnectionError("closed")
        self._buffer += data

    def closed(self) -> bool:
        """Does the peer say no more? Waits for it."""
        try:
            return self._buffer == b"" and self.sock.recv(1) == b""
        except ConnectionError:
            return True

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()


@contextmanager
def running(*, max_connections: int = 0, peers: bool = False, **options: Any) -> Iterator[Running]:
    """A server that listens. `peers`: with the real `Peers` instead of a caller without principal."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="http server")
    thread.start()
    try:
        # Not pytest's directory: the name of a Unix socket has to be short.
        with tempfile.TemporaryDirectory(prefix="tb-http-") as directory:
            given = {"directory": directory, "broker_uid": 0, "http_port": free_ports(1)[0]} | options
            it = Running(GatewayOptions(**given), loop)

            known = Peers(it.options.broker_uid) if peers else None

            async def start() -> None:
                who = known.http_caller if known is not None else identify
                it.server = HttpServer(it.service, it.options, who, patience=PATIENT, max_connections=max_connections)
                it.lines = await it.server.start()

            it.call(start)
            try:
                yield it
            finally:
                it.call(lambda: it.server.stop(0))
                if known is not None:
                    known.close()
                eventually(lambda: it.call(lambda: len(asyncio.all_tasks())) == 1, "no request outlives the server")
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(WAIT_S)
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
