"""Which connection is closed when memory gets short: the one with most bytes that have not become messages."""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
from collections.abc import Iterator

import pytest

from broker.gateway.grpc import arrivals
from broker.gateway.grpc.arrivals import AROUND, Arrivals, connections
from tests.fakes.broker import eventually

LIMIT = 1 << 30


class Lab:
    """A port with connections, and a process whose memory the test says."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.private = LIMIT // 4
        self.arrivals = Arrivals(self.port, LIMIT, lambda: self.private)
        self._sockets: list[socket.socket] = [self._listener]
        self._accepted: dict[socket.socket, socket.socket] = {}

    def connect(self) -> tuple[str, socket.socket]:
        """What the connection is called, and the client's end of it."""
        client = socket.create_connection(("127.0.0.1", self.port))
        accepted, (host, port) = self._listener.accept()
        self._sockets += (client, accepted)
        self._accepted[client] = accepted
        return f"ipv4:{host}:{port}", client

    def send(self, client: socket.socket, count: int) -> None:
        """Bytes that have arrived when this returns: the kernel may take its time."""
        before = self._waiting(client)
        client.sendall(b"x" * count)
        eventually(lambda: self._waiting(client) == before + count, "they have arrived")

    def _waiting(self, client: socket.socket) -> int:
        found: int = struct.unpack("i", fcntl.ioctl(self._accepted[client], termios.FIONREAD, bytes(4)))[0]
        return found

    def close(self) -> None:
        for each in self._sockets:
            each.close()


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.setattr(arrivals, "WORTH", 10_000)
    lab = Lab()
    yield lab
    lab.close()


def is_closed(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False


def test_connections_are_known_by_their_peers(lab: Lab) -> None:
    names = {lab.connect()[0] for _ in range(3)}
    found = dict(connections(lab.port))
    assert set(found) == names
    for each in found.values():
        each.close()


def test_nothing_is_closed_while_there_is_memory(lab: Lab) -> None:
    _, client = lab.connect()
    for lab.private in (LIMIT // 4, LIMIT * 3 // 4, LIMIT - 1):
        lab.send(client, 20_000)
        assert lab.arrivals.look() == ""


def test_the_one_with_most_that_is_no_message_is_closed(lab: Lab) -> None:
    (busy, working), (idle, _), (bad, attacker) = (lab.connect() for _ in range(3))
    lab.send(attacker, 15_000)
    lab.private = LIMIT * 3 // 4
    assert lab.arrivals.look() == "", "from here on it is watched; what came before counts for nothing"
    lab.send(working, 60_000)
    for _ in range(3):
        lab.arrivals.whole(busy, 20_000 - AROUND)
    lab.send(attacker, 9_000)
    lab.private = LIMIT
    assert lab.arrivals.look() == "", "it is not worth it"
    lab.send(attacker, 2_000)
    assert lab.arrivals.look() == bad
    eventually(lambda: is_closed(attacker), "it is closed")
    assert not is_closed(working)
    new, late = lab.connect()
    lab.send(late, 30_000)
    assert [lab.arrivals.look() for _ in range(4)] == ["", "", "", new], "what was closed is given back meanwhile"
    assert idle not in (bad, new)


def test_compressed_messages_hide_nothing_for_long(lab: Lab) -> None:
    bad, attacker = lab.connect()
    lab.private = LIMIT
    lab.arrivals.look()
    lab.send(attacker, 40_000)
    lab.arrivals.whole(bad, 1 << 30)
    assert lab.arrivals.look() == ""
    lab.private = LIMIT * 3 // 2
    assert lab.arrivals.look() == bad


def test_what_has_become_small_begins_anew(lab: Lab) -> None:
    _, client = lab.connect()
    lab.private = LIMIT * 3 // 4
    lab.arrivals.look()
    lab.send(client, 20_000)
    lab.private = LIMIT // 4
    lab.arrivals.look()
    lab.private = LIMIT
    assert [lab.arrivals.look() for _ in range(3)] == ["", "", ""]
