"""Who asks: from a connection and its headers to a `Caller`, for every front end.

Shared memory is the broker's own uid's: a TCP peer on the loopback interface whose socket belongs to that uid
(`broker.gateway.sock_diag`), a Unix socket's peer of that uid (SO_PEERCRED), and whoever could open gRPC's Unix socket,
which is that uid's alone. A request that a proxy forwarded is the proxy's user's, and one that a browser sends for a
page is the page's author's; both may be anybody: such requests have no principal wherever they come from. Everybody
without one may still send tensors inline.

Nothing is remembered by address: each request that names a region asks anew, since another process may have the port
by then. What cannot be found out counts as remote.
"""

from __future__ import annotations

import logging
import re
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol, final
from urllib.parse import unquote

from broker.gateway.kserve import Caller, Identity
from broker.gateway.parties import Parties
from broker.gateway.sock_diag import Address, Endpoint, SocketOwners, plain
from shm.message_values import Principal
from shm.sockets import peer_credentials

COMPLAIN_S = 1.0
KSERVE = "kserve"  # the scope of HTTP and gRPC
FORWARDED = frozenset({"forwarded", "via", "x-real-ip", "x-client-ip", "x-cluster-client-ip", "true-client-ip"})
FORWARDED_PREFIXES = ("x-forwarded-", "x-original-forwarded-", "x-envoy-external-", "cf-connecting-")
# What a browser says of every POST of a page, and no page can leave out: any page on the web may send one to 127.0.0.1.
OF_A_PAGE = frozenset({"origin", "sec-fetch-site", "sec-fetch-mode", "sec-fetch-dest"})
_log = logging.getLogger(__name__)
_LOOPBACK6 = socket.inet_pton(socket.AF_INET6, "::1")
_GRPC_TCP = re.compile(r"ipv[46]:(?P<address>.+):(?P<port>\d{1,5})")
_ZMQ_PEER = re.compile(r"localhost:(?P<uid>\d{1,10}):\d{1,10}:(?P<pid>\d{1,10})")


class Connection(Protocol):
    """A connected socket, or what asyncio lends of it: `transport.get_extra_info("socket")`."""

    @property
    def family(self) -> int:
        """AF_INET, AF_INET6 or AF_UNIX."""

    def getpeername(self) -> Any:
        """Raises OSError when the peer is gone."""

    def getsockname(self) -> Any:
        """Raises OSError."""

    def getsockopt(self, *arguments: Any) -> Any:
        """Raises OSError."""


@final
class Peers:
    """Makes callers for one gateway, on its event loop's thread."""

    def __init__(
        self,
        broker_uid: int,
        *,
        owner: Callable[[Endpoint, Endpoint], int | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`owner` is asked for the uid of a socket, by default the kernel."""
        self._uid = broker_uid
        self._clock = clock
        self._complained = float("-inf")
        self._owners = SocketOwners()
        self._owner = owner or self._owners.uid
        self._parties = Parties(self._owners)
        self._overflow = overflow_uid()

    def close(self) -> None:
        """Close the netlink socket."""
        self._owners.close()

    def http_caller(self, connection: Connection | None, headers: Mapping[str, str]) -> Caller:
        """Of one HTTP request. `connection` None: it is closed by now. `headers`: any case, aiohttp's mapping too."""
        ask = partial(self._ask, self._http, connection, headers)
        party = partial(self._http_party, connection)
        return Caller("http", headers=headers, ask=ask, connection=connection, party=party)

    def grpc_callers(self, address: str, port: int) -> Callable[[str, Mapping[str, str]], Caller]:
        """What makes the caller of a call, or of one request of a stream, to a server on `address` alone.

        It takes the peer as grpc writes it, and what of the metadata is text. gRPC tells a handler where its peer is,
        but not which address the peer connected to, and an exact question needs both: on any other address than one of
        loopback, TCP peers are remote (see `grpc_listeners`).
        """
        local = loopback_addresses(address)

        def caller(peer: str, metadata: Mapping[str, str]) -> Caller:
            ask = partial(self._ask, self._grpc, local, port, peer, metadata)
            party = partial(self._grpc_party, local, port, peer)
            return Caller("grpc", headers=metadata, ask=ask, connection=peer, party=party)

        return caller

    def zmq_caller(self, peer_address: str, client: str, headers: Mapping[str, str] | None = None) -> Caller:
        """Of one message. `peer_address`: its frame's metadata; `client` names the client within its uid."""
        ask, party = partial(self._ask, self._zmq, peer_address, client), partial(self._zmq_party, peer_address, client)
        return Caller("zmq", headers=headers or {}, ask=ask, party=party)

    def _ask(self, rule: Callable[..., Identity], *arguments: object) -> Identity:
        """Apply `rule`; the log says why somebody was refused, once a second at most."""
        identity = rule(*arguments)
        if identity[0] is None and (now := self._clock()) - self._complained >= COMPLAIN_S:
            self._complained = now
            _log.warning("a request may not use shared memory: %s", identity[1])
        return identity

    # --- the rules, one per kind of connection ---------------------------------------------------------------------

    def _http(self, connection: Connection | None, headers: Mapping[str, str]) -> Identity:
        if by := forwarded_by(headers):
            return None, by
        if connection is None:
            return None, "the connection is closed"
        try:
            if connection.family == socket.AF_UNIX:
                return self._of_uid(peer_credentials(connection)[1], KSERVE)  # type: ignore[arg-type]
            return self._tcp(_endpoint(connection.getpeername()), _endpoint(connection.getsockname()))
        except (OSError, ValueError) as error:
            return None, f"the peer's address is not known: {error}"

    def _grpc(self, listening: Mapping[int, Address], port: int, peer: str, headers: Mapping[str, str]) -> Identity:
        if by := forwarded_by(headers):
            return None, by
        if peer.startswith("unix:"):
            return self._of_uid(self._uid, KSERVE)
        remote = _grpc_endpoint(peer)
        if remote is None:
            return None, "the peer's address is not known"
        if not _is_loopback(remote[0]):
            return None, _not_loopback(remote[0])
        local = listening.get(len(remote[0]))
        if local is None:
            return None, "it did not connect to the loopback address that it has itself"
        return self._tcp(remote, (local, port))

    def _zmq(self, peer_address: str, client: str) -> Identity:
        found = zmq_peer(peer_address)
        if found is None:
            return None, "the peer of the ZeroMQ socket is not known"
        return self._of_uid(found[0], f"zmq:{client}")

    def _tcp(self, peer: Endpoint, local: Endpoint) -> Identity:
        if not (_is_loopback(peer[0]) and _is_loopback(local[0])):
            return None, _not_loopback(peer[0])
        uid = self._owner(peer, local)
        if uid is None:
            return None, "the kernel does not know the peer's socket"
        return self._of_uid(uid, KSERVE)

    def _of_uid(self, uid: int, scope: str) -> Identity:
        if uid == self._overflow:
            return None, f"uid {uid} stands for every uid that is not known in this user namespace"
        if uid != self._uid:
            return None, f"the peer is uid {uid}, this broker serves uid {self._uid}"
        return Principal(uid=uid, scope=scope), ""

    # --- whose turn a request takes --------------------------------------------------------------------------------

    def _http_party(self, connection: Connection | None) -> int:
        if connection is None:
            return 0
        try:
            if connection.family == socket.AF_UNIX:
                return self._parties.of_pid(peer_credentials(connection)[0])  # type: ignore[arg-type]
            return self._parties.of_tcp(_endpoint(connection.getpeername()), _endpoint(connection.getsockname()))
        except (OSError, ValueError):
            return 0  # it is closed: nobody waits for the answer

    def _grpc_party(self, listening: Mapping[int, Address], port: int, peer: str) -> int:
        """All of the Unix socket are one: grpc says no more of them."""
        remote = _grpc_endpoint(peer)
        if remote is None:
            return self._parties.number(peer)
        local = listening.get(len(remote[0]))
        if local is None:
            return self._parties.number(("host", remote[0]))
        return self._parties.of_tcp(remote, (local, port))

    def _zmq_party(self, peer_address: str, client: str) -> int:
        found = zmq_peer(peer_address)
        return self._parties.number(client) if found is None else self._parties.of_pid(found[1])


def forwarded_by(headers: Mapping[str, str]) -> str:
    """Why a request with these headers is not its peer's own; "" if nothing says so."""
    for name in headers:
        lower = name.lower()
        if lower in FORWARDED or lower.startswith(FORWARDED_PREFIXES):
            return f"a proxy forwarded the request: it has a header {lower[:64]!r}"
        if lower in OF_A_PAGE:
            return f"a browser sent the request for a web page: it has a header {lower!r}"
    return ""


def zmq_peer(peer_address: str) -> tuple[int, int] | None:
    """(uid, pid) from the Peer-Address of a frame that came over ipc://, None for any other."""
    found = _ZMQ_PEER.fullmatch(peer_address)
    return (int(found["uid"]), int(found["pid"])) if found else None


def _grpc_endpoint(peer: str) -> Endpoint | None:
    """Of a TCP peer as grpc writes it."""
    found = _GRPC_TCP.fullmatch(peer)
    try:
        return _endpoint((unquote(found["address"]).strip("[]"), found["port"])) if found else None
    except (OSError, ValueError):
        return None


def grpc_listeners(host: str) -> list[str]:
    """The addresses that gRPC servers of their own listen on, so that --grpc-address is served and peers are known.

    One, unless that means all addresses: then loopback's get servers of their own, which win over the one on all
    (SO_REUSEPORT lets them share the port). Were there only one, another uid's connection from the same port to another
    loopback address would be taken for its owner's.
    """
    if host.strip("[]") not in ("0.0.0.0", "::"):
        return [host]
    return [host, "127.0.0.1", *(["::1"] if _has_ipv6() else ())]


def loopback_addresses(host: str) -> dict[int, Address]:
    """The one loopback address per length that a server on `host` listens on; {} if it may be another one."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
        addresses = {_parse(str(address[0])) for *_, address in found}
    except (OSError, ValueError, UnicodeError):
        return {}
    by_length = {len(address): address for address in addresses}
    return by_length if len(by_length) == len(addresses) and all(map(_is_loopback, addresses)) else {}


def overflow_uid() -> int:
    """What the kernel shows for every uid outside this user namespace: it could be anybody's."""
    return int(Path("/proc/sys/kernel/overflowuid").read_text())


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def _endpoint(name: Any) -> Endpoint:
    """Raises OSError, ValueError."""
    port = int(name[1])
    if not 0 <= port < 65536:
        raise ValueError(f"no such port: {port}")
    return _parse(name[0]), port


def _parse(text: str) -> Address:
    """Raises OSError, ValueError. A link's name behind an address of IPv6 counts for nothing: it is not loopback's."""
    if ":" not in text:
        return socket.inet_pton(socket.AF_INET, text)
    return plain(socket.inet_pton(socket.AF_INET6, text.partition("%")[0]))


def _is_loopback(address: Address) -> bool:
    return address[0] == 127 if len(address) == 4 else address == _LOOPBACK6


def _not_loopback(address: Address) -> str:
    text = socket.inet_ntop(socket.AF_INET if len(address) == 4 else socket.AF_INET6, address)
    return f"the peer {text} did not come over the loopback interface"
