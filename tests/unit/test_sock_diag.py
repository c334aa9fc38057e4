"""The netlink messages that ask whose a socket is, built and read without asking."""

from __future__ import annotations

import socket
import struct

import pytest

from broker.gateway import sock_diag
from broker.gateway.sock_diag import Endpoint


def inet(text: str) -> bytes:
    return socket.inet_pton(socket.AF_INET6 if ":" in text else socket.AF_INET, text)


PEER: Endpoint = (inet("127.0.0.1"), 40000)
LOCAL: Endpoint = (inet("127.0.0.1"), 8000)
PEER6: Endpoint = (inet("::1"), 40000)
LOCAL6: Endpoint = (inet("::1"), 8000)


def reply(
    source: Endpoint = PEER,
    destination: Endpoint = LOCAL,
    *,
    kind: int = 20,
    family: int = socket.AF_INET,
    state: int = 1,
    uid: int = 1000,
    inode: int = 77,
) -> bytes:
    """As linux/inet_diag.h lays it out."""
    body = struct.pack("=BBBB", family, state, 0, 0)
    body += struct.pack("!HH16s16s", source[1], destination[1], source[0], destination[0])
    body += struct.pack("=III", 0, 5, 6)  # interface, cookie
    body += struct.pack("=IIIII", 0, 0, 0, uid, inode)
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 1, 0) + body


def test_the_request_names_exactly_one_socket() -> None:
    message = sock_diag.encode(PEER, LOCAL, 9)
    assert struct.unpack_from("=IHHII", message) == (72, 20, 1, 9, 0)
    assert len(message) == 72
    assert message[16:18] == bytes([socket.AF_INET, socket.IPPROTO_TCP])
    assert message[24:28] == struct.pack("!HH", 40000, 8000)
    assert message[28:32] == bytes([127, 0, 0, 1])
    assert message[44:48] == bytes([127, 0, 0, 1])
    assert message[64:72] == b"\xff" * 8  # whatever its cookie


def test_ipv6_is_asked_as_ipv6() -> None:
    message = sock_diag.encode(PEER6, LOCAL6, 1)
    assert message[16] == socket.AF_INET6
    assert message[28:44] == bytes(15) + b"\x01"


def test_the_owner_of_an_established_socket_is_the_answer() -> None:
    assert sock_diag.decode(reply(uid=1234), PEER, LOCAL) == (1234, 77)
    assert sock_diag.decode(reply(PEER6, LOCAL6, family=socket.AF_INET6), PEER6, LOCAL6) == (1000, 77)


def test_an_ipv6_socket_may_be_the_end_of_an_ipv4_connection() -> None:
    mapped = [(inet(f"::ffff:{socket.inet_ntoa(address)}"), port) for address, port in (PEER, LOCAL)]
    assert sock_diag.decode(reply(*mapped, family=socket.AF_INET6), PEER, LOCAL) == (1000, 77)


@pytest.mark.parametrize("state", [2, 4, 5, 6, 8, 10, 12])
def test_closing_and_listening_sockets_are_nobodys(state: int) -> None:
    # The kernel shows TIME_WAIT with uid 0, and whoever listens on the port where there is no connection.
    assert sock_diag.decode(reply(state=state, uid=0), PEER, LOCAL) is None


@pytest.mark.parametrize(
    "answer",
    [
        reply(inode=0),
        reply((PEER[0], 40001)),
        reply((inet("127.0.0.2"), 40000)),
        reply(PEER, (inet("127.0.0.2"), 8000)),
        reply(kind=2),
        reply()[:-1],
        reply()[:20],
        b"",
        struct.pack("=IHHIIi", 36, 2, 0, 1, 0, -2),  # ENOENT
    ],
)
def test_any_other_answer_is_none(answer: bytes) -> None:
    assert sock_diag.decode(answer, PEER, LOCAL) is None
