"""A gRPC client by hand that begins many large messages and finishes none, as fast as the server lets it."""

from __future__ import annotations

import socket
import threading
import time
from typing import Final

METHOD: Final = "/inference.GRPCInferenceService/ModelInfer"
DATA: Final = b"\1" * 16384
_FIRST_WINDOW: Final = 65535
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
LIMIT_S: Final = 60.0


class HalfSent:
    """`streams` messages of `size` bytes each on one connection, all but the last 100 bytes. Until it is closed.

    `sent`: bytes; `closed`: by the server. Use as a context manager.
    """

    def __init__(self, port: int, streams: int, size: int) -> None:
        self.sent = 0
        self.closed = False
        self._left = {2 * number + 1: size - 100 for number in range(streams)}
        self._windows = dict.fromkeys(self._left, _FIRST_WINDOW)
        self._window = self._initial = _FIRST_WINDOW
        self._came = b""
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": METHOD,
            ":authority": "x",
            "content-type": "application/grpc",
            "te": "trailers",
        }
        headers = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields.items())
        begin = b"\0" + size.to_bytes(4, "big")
        self._socket.sendall(_PREFACE + _frame(4, 0, 0, b""))
        for stream in self._left:
            self._socket.sendall(_frame(1, 4, stream, headers) + _frame(0, 0, stream, begin))
            self._windows[stream] -= len(begin)
            self._window -= len(begin)

    def __enter__(self) -> HalfSent:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        until = time.monotonic() + LIMIT_S
        try:
            while not self._stop.is_set() and time.monotonic() < until:
                self._read()
                for stream in self._left:
                    for _ in range(64):
                        if not self._send(stream):
                            break
        except OSError:
            self.closed = True

    def _send(self, stream: int) -> int:
        size = min(len(DATA), self._left[stream], self._windows[stream], self._window)
        if size > 0:
            self._socket.settimeout(5)
            self._socket.sendall(_frame(0, 0, stream, DATA[:size]))
            self.sent += size
            self._left[stream] -= size
            self._windows[stream] -= size
            self._window -= size
        return max(0, size)

    def _read(self) -> None:
        """What has come of frames. Raises OSError at the end."""
        self._socket.settimeout(0.002)
        try:
            came = self._socket.recv(1 << 16)
        except TimeoutError:
            return
        if not came:
            raise ConnectionResetError
        self._came += came
        while len(self._came) >= 9 and len(self._came) >= 9 + (length := int.from_bytes(self._came[:3], "big")):
            kind, flags = self._came[3:5]
            stream = int.from_bytes(self._came[5:9], "big")
            payload, self._came = self._came[9 : 9 + length], self._came[9 + length :]
            self._understand(kind, flags, stream, payload)

    def _understand(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == 8:  # WINDOW_UPDATE
            if stream:
                self._windows[stream] += int.from_bytes(payload, "big")
            else:
                self._window += int.from_bytes(payload, "big")
        elif kind == 4 and not flags & 1:  # SETTINGS
            for at in range(0, len(payload), 6):
                if int.from_bytes(payload[at : at + 2], "big") == 4:
                    initial = int.from_bytes(payload[at + 2 : at + 6], "big")
                    for each in self._windows:
                        self._windows[each] += initial - self._initial
                    self._initial = initial
            self._answer(_frame(4, 1, 0, b""))
        elif kind == 6 and not flags & 1:  # PING
            self._answer(_frame(6, 1, 0, payload))

    def _answer(self, frame: bytes) -> None:
        self._socket.settimeout(5)
        self._socket.sendall(frame)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _text(value: str) -> bytes:
    return bytes((len(value),)) + value.encode()
