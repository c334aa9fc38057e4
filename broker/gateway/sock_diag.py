"""Whose is the socket at the other end of a TCP connection of this host? Asked of the kernel, exactly, each time.

Used by `broker.gateway.peers`. NETLINK_SOCK_DIAG (sock_diag(7), linux/inet_diag.h) looks one socket up by its four
numbers, seen from the peer's side, in about 6 µs; reading /proc/net/tcp takes milliseconds.

    request   nlmsghdr 16 | family protocol ext pad u8 · states u32 | inet_diag_sockid 48
    reply     nlmsghdr 16 | family state timer retrans u8 | inet_diag_sockid 48 | expires rqueue wqueue uid inode u32
    sockid    source port, destination port (big-endian) · source, destination address (16 bytes each) · interface ·
              cookie

Three answers are not the peer's. A closing socket (FIN_WAIT, TIME_WAIT) has no owner any more and is shown with uid
0; without an established connection the kernel answers with whatever *listens* on the port; and an error means that
there is none in this network namespace. Only an established socket with an inode and exactly these numbers counts.
"""

from __future__ import annotations

import socket
import struct
from ipaddress import IPv4Address, IPv6Address
from typing import final

Address = IPv4Address | IPv6Address
Endpoint = tuple[Address, int]

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20  # message type
NLM_F_REQUEST = 1
NO_COOKIE = b"\xff" * 8  # INET_DIAG_NOCOOKIE twice: any socket
TCP_ESTABLISHED = 1
STATES = 0xFFF  # all; the kernel looks at them in dumps only
REPLY_BYTES = 4096

_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence number, port
_REQUEST = struct.Struct("=BBBBI")
_SOCKID = struct.Struct("!HH16s16s")
_STATE = struct.Struct("=xB")
_OWNER = struct.Struct("=12xII")  # after the sockid: uid, inode
_SOCKID_BYTES = 48
_SOCKID_AT = _HEADER.size + 4
_OWNER_AT = _SOCKID_AT + _SOCKID_BYTES
_REPLY = _OWNER_AT + _OWNER.size


@final
class SocketOwners:
    """One netlink socket, kept open and used by one thread. Without sock_diag in the kernel nobody owns anything."""

    def __init__(self) -> None:
        self._netlink: socket.socket | None = None
        self._sequence = 0

    def uid(self, peer: Endpoint, local: Endpoint) -> int | None:
        """The uid that owns the socket connected from `peer` to `local`; None: no process of this host, or unknown.

        A uid that is not mapped in this user namespace comes as the overflow uid.
        """
        peer, local = (_plain(peer[0]), peer[1]), (_plain(local[0]), local[1])
        self._sequence = (self._sequence + 1) & 0xFFFFFFFF
        try:
            if self._netlink is None:
                self._netlink = _open()
            self._netlink.send(encode(peer, local, self._sequence))
            while True:  # the kernel has answered before `send` returns; what came late for an earlier question goes
                reply = self._netlink.recv(REPLY_BYTES, socket.MSG_DONTWAIT)
                if len(reply) >= _HEADER.size and _HEADER.unpack_from(reply)[3] == self._sequence:
                    return decode(reply, peer, local)
        except OSError:
            self.close()
            return None

    def close(self) -> None:
        """It opens again by itself when it is asked."""
        if self._netlink is not None:
            self._netlink.close()
            self._netlink = None


def encode(peer: Endpoint, local: Endpoint, sequence: int) -> bytes:
    """The request for the socket whose own end is `peer`."""
    family = socket.AF_INET if peer[0].version == 4 else socket.AF_INET6
    sockid = _SOCKID.pack(peer[1], local[1], peer[0].packed, local[0].packed) + bytes(4) + NO_COOKIE
    body = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, STATES) + sockid
    return _HEADER.pack(_HEADER.size + len(body), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, sequence, 0) + body


def decode(reply: bytes, peer: Endpoint, local: Endpoint) -> int | None:
    """The owner that `reply` names, None unless it is that of the established socket between these two."""
    if len(reply) < _REPLY or _HEADER.unpack_from(reply)[1] != SOCK_DIAG_BY_FAMILY:
        return None
    source_port, destination_port, source, destination = _SOCKID.unpack_from(reply, _SOCKID_AT)
    (state,) = _STATE.unpack_from(reply, _HEADER.size)
    (family,) = struct.unpack_from("=B", reply, _HEADER.size)
    found = ((_address(family, source), source_port), (_address(family, destination), destination_port))
    uid, inode = _OWNER.unpack_from(reply, _OWNER_AT)
    return int(uid) if state == TCP_ESTABLISHED and inode and found == (peer, local) else None


def _address(family: int, packed: bytes) -> Address:
    # An IPv6 socket may be the end of an IPv4 connection: it is shown with mapped addresses.
    return IPv4Address(packed[:4]) if family == socket.AF_INET else _plain(IPv6Address(packed))


def _plain(address: Address) -> Address:
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def _open() -> socket.socket:
    netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, NETLINK_SOCK_DIAG)
    try:
        netlink.connect((0, 0))  # the kernel: nobody else's datagrams are delivered
    except BaseException:
        netlink.close()
        raise
    return netlink
