"""Who is a principal: addresses, owners of sockets and headers, without a connection."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest
from multidict import CIMultiDict

from broker.gateway import peers
from broker.gateway.kserve import Caller
from broker.gateway.peers import Peers
from broker.gateway.sock_diag import Endpoint
from shm.message_values import Principal

UID = 1234
SELF = Principal(uid=UID, scope="kserve")


class Connection:
    """As much of a socket as is looked at."""

    def __init__(self, peer: Any, local: Any, family: int = socket.AF_INET, uid: int = UID) -> None:
        self.family, self.peer, self.local, self.uid = family, peer, local, uid

    def getpeername(self) -> Any:
        if self.peer is None:
            raise OSError("Transport endpoint is not connected")
        return self.peer

    def getsockname(self) -> Any:
        return self.local

    def getsockopt(self, *arguments: Any) -> bytes:
        return (1).to_bytes(4, "little") + self.uid.to_bytes(4, "little") + bytes(4)


def text(address: bytes) -> str:
    return socket.inet_ntop(socket.AF_INET if len(address) == 4 else socket.AF_INET6, address)


class Kernel:
    """Answers with `uid`, and remembers what it was asked."""

    def __init__(self, uid: int | None = UID) -> None:
        self.uid = uid
        self.asked: list[tuple[str, int, str, int]] = []

    def __call__(self, peer: Endpoint, local: Endpoint) -> int | None:
        self.asked.append((text(peer[0]), peer[1], text(local[0]), local[1]))
        return self.uid


LOOPBACK = Connection(("127.0.0.1", 40000), ("127.0.0.1", 8000))


def http(kernel: Kernel, connection: Connection | None = LOOPBACK, **headers: str) -> Caller:
    return Peers(UID, owner=kernel).http_caller(connection, CIMultiDict(headers))


def on_loopback(asked: Peers) -> Callable[[str, Any], Caller]:
    return asked.grpc_callers("127.0.0.1", 8001)


# --- HTTP ---------------------------------------------------------------------------------------------------------


def test_a_loopback_peer_of_the_brokers_uid_is_its_principal() -> None:
    kernel = Kernel()
    caller = http(kernel)
    assert kernel.asked == [], "who names no region is not looked up"
    assert caller.principal == SELF
    assert caller.principal == SELF
    assert kernel.asked == [("127.0.0.1", 40000, "127.0.0.1", 8000)], "once per request"
    assert caller.refusal == ""


@pytest.mark.parametrize(
    ("peer", "local", "asked"),
    [
        (("::1", 7, 0, 0), ("::1", 8, 0, 0), ("::1", 7, "::1", 8)),
        (("::ffff:127.0.0.1", 7, 0, 0), ("::ffff:127.0.0.1", 8, 0, 0), ("127.0.0.1", 7, "127.0.0.1", 8)),
        (("127.0.0.1", 7), ("127.9.9.9", 8), ("127.0.0.1", 7, "127.9.9.9", 8)),
    ],
)
def test_every_loopback_address_is_asked_as_it_is(peer: Any, local: Any, asked: Any) -> None:
    kernel = Kernel()
    assert http(kernel, Connection(peer, local)).principal == SELF
    assert kernel.asked == [asked]


@pytest.mark.parametrize(
    ("peer", "local"),
    [
        (("10.0.0.5", 7), ("10.0.0.1", 8)),
        (("10.0.0.1", 7), ("10.0.0.1", 8)),
        (("127.0.0.1", 7), ("10.0.0.1", 8)),
        (("10.0.0.1", 7), ("127.0.0.1", 8)),
        (("fd00::2", 7, 0, 0), ("::1", 8, 0, 0)),
        (("fe80::1%eth0", 7, 0, 4), ("fe80::2%eth0", 8, 0, 4)),
        (("::ffff:10.0.0.5", 7, 0, 0), ("::ffff:127.0.0.1", 8, 0, 0)),
    ],
)
def test_other_addresses_are_remote_and_not_even_asked_for(peer: Any, local: Any) -> None:
    kernel = Kernel()
    caller = http(kernel, Connection(peer, local))
    assert caller.principal is None
    assert "loopback" in caller.refusal
    assert kernel.asked == []


@pytest.mark.parametrize(
    ("uid", "why"), [(UID + 1, f"uid {UID + 1}"), (0, "uid 0"), (None, "kernel does not know")], ids=str
)
def test_other_uids_and_unknown_sockets_have_no_principal(uid: int | None, why: str) -> None:
    caller = http(Kernel(uid))
    assert caller.principal is None
    assert why in caller.refusal


def test_the_overflow_uid_is_nobodys_even_for_a_broker_that_has_it() -> None:
    uid = peers.overflow_uid()
    caller = Peers(uid, owner=Kernel(uid)).http_caller(LOOPBACK, {})
    assert caller.principal is None
    assert "user namespace" in caller.refusal


@pytest.mark.parametrize("connection", [None, Connection(None, None), Connection(("nowhere", 1), ("127.0.0.1", 2))])
def test_a_connection_that_is_gone_is_nobodys(connection: Connection | None) -> None:
    assert http(Kernel(), connection).principal is None


def test_a_unix_sockets_peer_is_the_uid_that_connected() -> None:
    assert http(Kernel(None), Connection("", "/run/http.sock", socket.AF_UNIX)).principal == SELF
    assert http(Kernel(), Connection("", "/run/http.sock", socket.AF_UNIX, uid=UID + 1)).principal is None


def test_the_log_says_why_but_not_for_every_request(caplog: pytest.LogCaptureFixture) -> None:
    now = [10.0]
    asked = Peers(UID, owner=Kernel(UID + 1), clock=lambda: now[0])
    for _ in range(3):
        assert asked.http_caller(LOOPBACK, {}).principal is None
    now[0] = 11.0
    assert asked.http_caller(LOOPBACK, {"via": "x"}).principal is None
    assert [record.getMessage() for record in caplog.records] == [
        f"a request may not use shared memory: the peer is uid {UID + 1}, this broker serves uid {UID}",
        "a request may not use shared memory: a proxy forwarded the request: it has a header 'via'",
    ]


# --- forwarded ----------------------------------------------------------------------------------------------------

FORWARDERS = [
    "X-Forwarded-For",
    "x-forwarded-host",
    "X-FORWARDED-PROTO",
    "x-forwarded-client-cert",
    "Forwarded",
    "Via",
    "X-Real-IP",
    "True-Client-IP",
    "CF-Connecting-IP",
    "Origin",
    "Sec-Fetch-Site",
]


def callers(kernel: Kernel) -> dict[str, Callable[[str], Caller]]:
    asked = Peers(UID, owner=kernel)
    unix = Connection("", "/run/http.sock", socket.AF_UNIX)
    return {
        "http": lambda name: asked.http_caller(LOOPBACK, CIMultiDict({name: "1.2.3.4"})),
        "http unix": lambda name: asked.http_caller(unix, CIMultiDict({name: ""})),
        "grpc": lambda name: on_loopback(asked)("ipv4:127.0.0.1:40000", {name: "1.2.3.4"}),
        "grpc unix": lambda name: on_loopback(asked)("unix:", {name: "1.2.3.4"}),
    }


@pytest.mark.parametrize("front_end", callers(Kernel()))
@pytest.mark.parametrize("name", FORWARDERS)
def test_what_a_proxy_forwards_or_a_web_page_sends_has_no_principal(front_end: str, name: str) -> None:
    make = callers(Kernel())[front_end]
    assert make(name).principal is None
    assert name.lower() in make(name).refusal
    assert make("X-Request-Id").principal == SELF


# --- gRPC ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peer", "address", "asked"),
    [
        ("ipv4:127.0.0.1:40000", "127.0.0.1", ("127.0.0.1", 40000, "127.0.0.1", 8001)),
        ("ipv6:%5B::1%5D:40000", "::1", ("::1", 40000, "::1", 8001)),
        ("ipv6:[::1]:40000", "[::1]", ("::1", 40000, "::1", 8001)),
    ],
)
def test_a_grpc_peer_is_asked_for_by_the_address_that_grpc_listens_on(peer: str, address: str, asked: Any) -> None:
    kernel = Kernel()
    assert Peers(UID, owner=kernel).grpc_callers(address, 8001)(peer, {}).principal
    assert kernel.asked == [asked]


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "[::]", "no such host .", "10.0.0.1"])
def test_tcp_peers_of_a_server_on_more_than_loopback_are_nobodys(address: str) -> None:
    # Another uid's connection from the same port to another loopback address would be taken for the owner's.
    kernel = Kernel()
    caller = Peers(UID, owner=kernel).grpc_callers(address, 8001)
    assert caller("ipv4:127.0.0.1:40000", {}).principal is None
    assert "loopback" in caller("ipv4:127.0.0.1:40000", {}).refusal
    assert kernel.asked == []
    assert caller("unix:", {}).principal == SELF


def test_all_addresses_means_servers_of_their_own_on_loopback() -> None:
    for host in ("0.0.0.0", "::", "[::]"):
        assert peers.grpc_listeners(host)[:2] == [host, "127.0.0.1"]
    assert peers.grpc_listeners("127.0.0.1") == ["127.0.0.1"]
    assert peers.grpc_listeners("10.0.0.1") == ["10.0.0.1"]


@pytest.mark.parametrize(
    "peer",
    [
        "",
        "ipv4:127.0.0.1",
        "ipv4:127.0.0.1:x",
        "ipv4:127.0.0.1:65536",
        "ipv4:127.1:1",
        "ipv4:x:1",
        "ipv6:::1",
        "vsock:1:2",
    ],
)
def test_a_grpc_peer_without_an_address_is_nobodys(peer: str) -> None:
    kernel = Kernel()
    assert on_loopback(Peers(UID, owner=kernel))(peer, {}).principal is None
    assert kernel.asked == []


def test_a_remote_grpc_peer_is_nobodys() -> None:
    caller = on_loopback(Peers(UID, owner=Kernel()))("ipv4:10.1.2.3:40000", {})
    assert "10.1.2.3" in caller.refusal


# --- ZeroMQ -------------------------------------------------------------------------------------------------------


def test_a_zeromq_client_has_a_scope_of_its_own() -> None:
    asked = Peers(UID, owner=Kernel(None))
    assert asked.zmq_caller(f"localhost:{UID}:5:77", "c1").principal == Principal(uid=UID, scope="zmq:c1")
    assert asked.zmq_caller("localhost:0:0:77", "c1").principal is None
    assert peers.zmq_peer("localhost:0:1:77") == (0, 77)


@pytest.mark.parametrize("peer", ["", "127.0.0.1", "localhost:1:2", "localhost:-1:2:3", "remote:1:2:3"])
def test_a_zeromq_peer_over_anything_but_ipc_is_nobodys(peer: str) -> None:
    assert peers.zmq_peer(peer) is None
    assert Peers(UID).zmq_caller(peer, "c").principal is None


def test_the_callers_given_answer_needs_no_question() -> None:
    assert Caller("http", SELF).principal == SELF
    assert Caller("grpc", None, "remote").refusal == "remote"
