"""An HTTP server that does what a test's script says, byte by byte: one step per request, on any connection."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

# What a step does with a request it has read; True keeps the connection.
Step = Callable[[socket.socket, bytes], bool]


def reply(body: bytes = b"{}", *, status: str = "200 OK", head: str = "", keep: bool = True) -> Step:
    text = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{head}\r\n".encode() + body

    def step(sock: socket.socket, request: bytes) -> bool:
        sock.sendall(text)
        return keep

    return step


def raw(data: bytes) -> Step:
    def step(sock: socket.socket, request: bytes) -> bool:
        sock.sendall(data)
        return False

    return step


def hang(sock: socket.socket, request: bytes) -> bool:
    """Say nothing until the client goes away."""
    while sock.recv(65536):
        pass
    return False


def hang_up(sock: socket.socket, request: bytes) -> bool:
    return False


class RawHttp:
    """`requests`: what came, whole; `closed`: set when a connection was closed by the server after its step."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = list(steps)
        self.requests: list[bytes] = []
        self.arrived: queue.SimpleQueue[bytes] = queue.SimpleQueue()  # the same, to wait for
        self.closed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> RawHttp:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._listener.fileno() < 0:
            return
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(30)
        self._listener.close()
        for sock in self._sockets:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(sock)
            self._threads.append(threading.Thread(target=self._serve, args=(sock,)))
            self._threads[-1].start()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            try:
                while self._steps and (request := self._read(sock)):
                    self.requests.append(request)
                    self.arrived.put(request)
                    if not self._steps.pop(0)(sock, request):
                        break
            except OSError:
                pass
        self.closed.set()

    def _read(self, sock: socket.socket) -> bytes:
        data = b""
        while b"\r\n\r\n" not in data:
            if not (more := sock.recv(65536)):
                return b""
            data += more
        head, _, body = data.partition(b"\r\n\r\n")
        lengths = [
            line.partition(b":")[2] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")
        ]
        while lengths and len(body) < int(lengths[0]):
            if not (more := sock.recv(65536)):
                return b""
            body += more
        return head + b"\r\n\r\n" + body
