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
from typing import final

Address = bytes  # as on the wire: 4 bytes, or 16; IPv4 addresses mapped into IPv6 are 4 (see `plain`)
Endpoint = tuple[Address, int]

MAPPED = bytes(10) + b"\xff\xff"  # ::ffff:0:0/96

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20  # message type
NLM_F_REQUEST = 1
NO_COOKIE = b"\xff" * 8  # INET_DIAG_NOCOOKIE twice: any socket
TCP_ESTABLISHED = 1
STATES = 0xFFF  # all; the kernel looks at them in dumps only
REPLY_BYTES = 4096

_INET, _INET6 = int(socket.AF_INET), int(socket.AF_INET6)
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence number, port
_REQUEST = struct.Struct("=IHHII BBBBI 2s2s16s16sI8s")
_REPLY = struct.Struct("=IHHII BBxx 4s16s16s12x 12xII")


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
        owner = self.owner(peer, local)
        return None if owner is None else owner[0]

    def owner(self, peer: Endpoint, local: Endpoint) -> tuple[int, int] | None:
        """As `uid`, with the inode of the socket."""
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
    return _REQUEST.pack(
        *(_REQUEST.size, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, sequence, 0),
        *(_INET if len(peer[0]) == 4 else _INET6, socket.IPPROTO_TCP, 0, 0, STATES),
        *(peer[1].to_bytes(2, "big"), local[1].to_bytes(2, "big"), peer[0], local[0], 0, NO_COOKIE),
    )


def decode(reply: bytes, peer: Endpoint, local: Endpoint) -> tuple[int, int] | None:
    """The uid and inode that `reply` names, None unless they are those of the established socket between these two."""
    if len(reply) < _REPLY.size:
        return None
    _, kind, _, _, _, family, state, ports, source, destination, uid, inode = _REPLY.unpack_from(reply)
    if kind != SOCK_DIAG_BY_FAMILY or state != TCP_ESTABLISHED or not inode:
        return None
    if family == _INET:
        source, destination = source[:4], destination[:4]
    # An IPv6 socket may be the end of an IPv4 connection: it is shown with mapped addresses.
    same = (plain(source), plain(destination)) == (peer[0], local[0])
    if not same or ports != peer[1].to_bytes(2, "big") + local[1].to_bytes(2, "big"):
        return None
    return int(uid), int(inode)


def plain(address: bytes) -> Address:
    """IPv4 for an IPv4 address that is mapped into IPv6."""
    return address[12:] if len(address) == 16 and address.startswith(MAPPED) else address


def _open() -> socket.socket:
    netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, NETLINK_SOCK_DIAG)
    try:
        netlink.connect((0, 0))  # the kernel: nobody else's datagrams are delivered
    except BaseException:
        netlink.close()
        raise
    return netlink
