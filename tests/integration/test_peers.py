"""Who asks, told by the kernel of this host: real TCP and Unix connections, of this uid and of another."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from pathlib import Path

import grpc
import pytest

from broker.gateway.kserve import Caller
from broker.gateway.peers import Peers
from broker.gateway.sock_diag import SocketOwners
from shm.message_values import Principal

UID = os.getuid()
SELF = Principal(uid=UID, scope="kserve")
OTHER = 4321
_DISABLED = Path("/proc/sys/net/ipv6/conf/lo/disable_ipv6")
needs_ipv6 = pytest.mark.skipif(not _DISABLED.exists() or _DISABLED.read_text() != "0\n", reason="no IPv6")
needs_root = pytest.mark.skipif(UID != 0, reason="only root can become another uid")
CONNECT = """
import os, socket, sys
os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
address = sys.argv[2] if sys.argv[3] == "unix" else (sys.argv[2], int(sys.argv[3]))
family = socket.AF_UNIX if sys.argv[3] == "unix" else socket.AF_INET6 if ":" in sys.argv[2] else socket.AF_INET
with socket.socket(family) as connection:
    if len(sys.argv) > 4:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        connection.bind(("127.0.0.1", int(sys.argv[4])))
    connection.connect(address)
    sys.stdin.read()
"""


@pytest.fixture
def peers() -> Iterator[Peers]:
    made = Peers(UID)
    yield made
    made.close()


@contextlib.contextmanager
def listening(address: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
        if listener.family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((address, 0))
        listener.listen()
        listener.settimeout(20)
        yield listener


@contextlib.contextmanager
def connected(address: str, target: str = "") -> Iterator[tuple[socket.socket, socket.socket]]:
    """(the server's end, the client's end)."""
    target = target or address
    with listening(address) as listener, socket.socket(socket.AF_INET6 if ":" in target else socket.AF_INET) as client:
        client.connect((target, listener.getsockname()[1]))
        with listener.accept()[0] as server:
            yield server, client


@contextlib.contextmanager
def stranger(*address: str) -> Iterator[None]:
    """A process of another uid that connects and waits."""
    with subprocess.Popen([sys.executable, "-c", CONNECT, str(OTHER), *address], stdin=subprocess.PIPE) as process:
        try:
            yield
        finally:
            process.send_signal(signal.SIGKILL)


@pytest.mark.parametrize(
    ("address", "target"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1"),
        ("0.0.0.0", "127.1.2.3"),
        pytest.param("::1", "::1", marks=needs_ipv6),
        pytest.param("::", "::1", marks=needs_ipv6),
        pytest.param("::", "127.0.0.1", marks=needs_ipv6),
        pytest.param("::", "::ffff:127.0.0.1", marks=needs_ipv6),
        pytest.param("127.0.0.1", "::ffff:127.0.0.1", marks=needs_ipv6),
    ],
)
def test_a_loopback_peer_of_this_uid(peers: Peers, address: str, target: str) -> None:
    with connected(address, target) as (server, _):
        caller = peers.http_caller(server, {})
        assert (caller.principal, caller.refusal) == (SELF, "")


def test_a_forwarded_request_has_none_though_its_proxy_would(peers: Peers) -> None:
    with connected("127.0.0.1") as (server, _):
        assert peers.http_caller(server, {"x-forwarded-for": "10.0.0.9"}).principal is None
        assert peers.http_caller(server, {}).principal == SELF


def test_an_address_of_this_host_that_is_not_loopback_is_remote(peers: Peers) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: only picks a source address
        except OSError:
            pytest.skip("no route but loopback")
        address = probe.getsockname()[0]
    if ip_address(address).is_loopback:
        pytest.skip("no address but loopback")
    with connected("0.0.0.0", address) as (server, _):
        caller = peers.http_caller(server, {})
        assert caller.principal is None
        assert address in caller.refusal


@needs_root
def test_another_uid_over_tcp(peers: Peers) -> None:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listening("127.0.0.1"))
        stack.enter_context(stranger("127.0.0.1", str(listener.getsockname()[1])))
        server = stack.enter_context(listener.accept()[0])
        caller = peers.http_caller(server, {})
        assert caller.principal is None
        assert f"uid {OTHER}" in caller.refusal
        theirs = Peers(OTHER)
        stack.callback(theirs.close)
        assert theirs.http_caller(server, {}).principal == Principal(uid=OTHER, scope="kserve")


@needs_root
def test_two_peers_may_have_one_port(peers: Peers) -> None:
    """On the same port as ours, to another loopback address: whoever asks by the peer's address alone is fooled."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listening("0.0.0.0"))
        port = listener.getsockname()[1]
        ours = stack.enter_context(socket.socket())
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        ours.bind(("127.0.0.1", 0))
        ours.connect(("127.0.0.1", port))
        at_ours = stack.enter_context(listener.accept()[0])
        stack.enter_context(stranger("127.0.0.2", str(port), str(ours.getsockname()[1])))
        at_theirs = stack.enter_context(listener.accept()[0])
        assert at_theirs.getpeername() == at_ours.getpeername()
        assert peers.http_caller(at_ours, {}).principal == SELF
        assert f"uid {OTHER}" in peers.http_caller(at_theirs, {}).refusal


@needs_root
def test_another_uid_over_a_unix_socket(peers: Peers, tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    for directory in (tmp_path, *tmp_path.parents[:-2]):
        directory.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        os.chmod(path, 0o666)
        listener.listen()
        listener.settimeout(20)
        with stranger(path, "unix"), listener.accept()[0] as server:
            assert f"uid {OTHER}" in peers.http_caller(server, {}).refusal
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
            with listener.accept()[0] as server:
                assert peers.http_caller(server, {}).principal == SELF


@pytest.mark.parametrize("linger", [False, True], ids=["fin", "reset"])
def test_a_peer_that_has_gone_is_nobodys(peers: Peers, linger: bool) -> None:
    # The kernel shows closing sockets with uid 0, which may be the broker's.
    with connected("127.0.0.1") as (server, client):
        assert peers.http_caller(server, {}).principal == SELF
        if linger:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        assert peers.http_caller(server, {}).principal is None


def test_whoever_listens_on_the_peers_port_is_not_the_peer() -> None:
    owners = SocketOwners()
    with listening("127.0.0.1") as listener:
        loopback, port = socket.inet_aton("127.0.0.1"), listener.getsockname()[1]
        assert owners.uid((loopback, port), (loopback, 1)) is None
    owners.close()


def test_without_sock_diag_every_tcp_peer_is_remote(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> socket.socket:
        raise OSError(93, "Protocol not supported")

    asked = Peers(UID)
    with connected("127.0.0.1") as (server, _):
        with monkeypatch.context() as patch:
            patch.setattr("broker.gateway.sock_diag._open", refused)
            assert "kernel does not know" in asked.http_caller(server, {}).refusal
        assert asked.http_caller(server, {}).principal == SELF
    asked.close()


def test_grpc_says_its_peers_in_the_form_that_is_read(tmp_path: Path) -> None:
    asked = Peers(UID)
    callers: list[Callable[[str, Mapping[str, str]], Caller]] = []
    principals: list[Principal | None] = []

    def handle(request: bytes, context: grpc.ServicerContext) -> bytes:
        principals.append(callers[0](context.peer(), dict(context.invocation_metadata())).principal)
        return b""

    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        method = grpc.unary_unary_rpc_method_handler(handle)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", {"m": method}),))
        path = f"unix:{tmp_path}/g"
        port = server.add_insecure_port("127.0.0.1:0")
        server.add_insecure_port(path)
        callers.append(asked.grpc_callers("127.0.0.1", port))
        server.start()
        for target in (f"127.0.0.1:{port}", path):
            with grpc.insecure_channel(target) as channel:
                call = channel.unary_unary("/t/m")
                call(b"", timeout=20)
                call(b"", timeout=20, metadata=[("x-forwarded-for", "10.0.0.9")])
        server.stop(None).wait()
    asked.close()
    assert principals == [SELF, None, SELF, None]
