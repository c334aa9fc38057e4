"""gRPC messages that are still arriving: when memory gets short, the connection that holds most of it is closed.

grpc shows a message when it is whole, and says nothing of what it keeps until then: each stream gets as much window as
its message needs, so 10 half messages of 200 MiB on one connection took 1.9 GiB. The kernel knows what a connection has
received (TCP_INFO), and the front end what of that came out as messages; the rest is arriving, or was given up on the
way. Compressed messages come out larger than they came in, which could hide others: when memory gets shorter still, it
is the connection that has sent most. Nothing is counted while this process is small. Unix sockets, which are the
broker's own user's, are not counted.

Used by `broker.gateway.grpc.server`, on its event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Final, final

from broker.gateway.memory import private_bytes, trim
from shm.capacity import memory_limit

MEMORY_SHARE: Final = 2  # of the memory there is this process may have half; from half of that on it is watched
LOOK_S: Final = 0.25
REST: Final = 4  # looks after a connection was closed: what it held is given back meanwhile
WORTH: Final = 16 << 20  # bytes that arrive: no connection with less is closed
AROUND: Final = 256  # bytes that come with a message at most: headers and frames
_RECEIVED: Final = struct.Struct("128xQ")  # tcpi_bytes_received of Linux's struct tcp_info
_V4_IN_V6: Final = "::ffff:"
_log = logging.getLogger(__name__)

Connections = Callable[[int], Iterator[tuple[str, socket.socket]]]


@final
class Arrivals:
    """Those at one port. `look` is called by itself between `start` and `stop`."""

    def __init__(self, port: int, limit: int = 0, private: Callable[[], int] = private_bytes) -> None:
        """`limit`: bytes that this process may have, 0 for half the memory there is; `private`: what it has."""
        self._port = port
        self._limit = limit or memory_limit() // MEMORY_SHARE
        self._private = private
        self._whole: Counter[str] | None = None  # bytes of whole messages by connection, while it is watched
        self._before: dict[str, int] = {}  # bytes that each had received when that began
        self._rest = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Look from now on."""
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look_again)

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def whole(self, connection: str, size: int) -> None:
        """A message of `size` bytes is here. `connection` as grpc writes it: "ipv4:127.0.0.1:4711"."""
        if self._whole is not None:
            self._whole[connection] += size + AROUND

    def look(self) -> str:
        """Close a connection if one must be; returns which."""
        private = self._private()
        if private < self._limit // 2:
            self._whole = None
            return ""
        with contextlib.ExitStack() as stack:
            found = {name: stack.enter_context(sock) for name, sock in connections(self._port)}
            received = {name: _received(sock) for name, sock in found.items()}
            if self._whole is None:
                self._whole, self._before, self._rest = Counter(), received, 0
            self._rest -= self._rest > 0
            if private < self._limit or self._rest:
                return ""
            worst, size = self._worst(received, hidden=private > self._limit + self._limit // 4)
            if size < WORTH:
                return ""
            _log.warning(
                "memory gets short, %d bytes: the gRPC connection of %s is closed, of which %d bytes were arriving",
                private,
                worst,
                size,
            )
            with contextlib.suppress(OSError):  # it is closed
                found[worst].shutdown(socket.SHUT_RDWR)
            self._rest = REST
            return worst

    def _worst(self, received: Mapping[str, int], *, hidden: bool) -> tuple[str, int]:
        """The connection that has most bytes arriving, and how many. `hidden`: if that is nothing, has sent most."""
        assert self._whole is not None
        sent = {name: size - self._before.get(name, 0) for name, size in received.items()}
        arriving = {name: size - self._whole[name] for name, size in sent.items()}
        worst = max(arriving, key=arriving.__getitem__, default="")
        if hidden and arriving.get(worst, 0) < WORTH:
            worst, arriving = max(sent, key=sent.__getitem__, default=""), sent
        return worst, arriving.get(worst, 0)

    def _look_again(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(LOOK_S, self._look_again)
        if self.look():
            loop.call_later(LOOK_S, loop.run_in_executor, None, trim)


def connections(port: int) -> Iterator[tuple[str, socket.socket]]:
    """This process's TCP connections at a local port, each by its peer and as a socket of one's own."""
    ours = set()  # one of them may have the number that the listing itself had
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was closed meanwhile, or is no connection
            if int(name) in ours or not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            found = socket.socket(fileno=os.dup(int(name)))
            try:
                tcp = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
                peer = _peer(found) if tcp and found.getsockname()[1] == port else ""
            except OSError:
                peer = ""
            if peer:
                ours.add(found.fileno())
                yield peer, found
            else:
                found.close()


def _peer(connection: socket.socket) -> str:
    """As grpc writes it. Raises OSError for a socket that listens."""
    host, port, *_ = connection.getpeername()
    if host.startswith(_V4_IN_V6):
        host = host.removeprefix(_V4_IN_V6)
    return f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"


def _received(connection: socket.socket) -> int:
    try:
        information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.size)
        return int(_RECEIVED.unpack(information)[0])
    except (OSError, struct.error):  # it is closed
        return 0
