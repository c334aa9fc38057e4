"""AF_UNIX SOCK_SEQPACKET with descriptors: the transport of sessions and worker links.

Used on both sides; knows nothing of what the datagrams mean. Three facts shape it: `socket.recv_fds` of 3.11 ignores
its flags (descriptors would be inheritable), an empty datagram looks like end of file, and a path longer than 107
bytes does not fit `sun_path`.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import final

from shm.errors import ProtocolError
from shm.messages import MAX_DATAGRAM

MAX_FDS = 16  # per datagram, as received; more are closed by the kernel and reported by MSG_CTRUNC
MAX_PATH = 107  # sun_path is 108 bytes with its terminating zero
SO_PEERPIDFD = 77  # asm-generic/socket.h, since Linux 6.5
_RECEIVE = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
_ANCILLARY = socket.CMSG_SPACE(MAX_FDS * 4)


@final
class DescriptorsLost(ProtocolError):
    """The descriptors of a datagram did not all arrive, and those that did are closed. Its `data` is whole."""

    def __init__(self, message: str, data: bytes = b"") -> None:
        super().__init__(message)
        self.data = data

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.message, self.data))


def seqpacket() -> socket.socket:
    """An unconnected, non-blocking SEQPACKET socket."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)


@contextlib.contextmanager
def address(path: str) -> Iterator[str]:
    """An address for `path` that fits `sun_path` however deep its directory lies: through /proc/self/fd.

    Raises OSError when the directory cannot be opened or the file's own name does not fit.
    """
    if len(os.fsencode(path)) <= MAX_PATH:
        yield path
        return
    directory, name = os.path.split(path)
    fd = os.open(directory or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        short = f"/proc/self/fd/{fd}/{name}"
        if len(os.fsencode(short)) > MAX_PATH:
            raise OSError(errno.ENAMETOOLONG, "the name of a socket file must be shorter", path)
        yield short
    finally:
        os.close(fd)


def send(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """Send one datagram. Raises BlockingIOError when the peer's buffer is full (the socket is non-blocking)."""
    if fds:
        sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))], socket.MSG_NOSIGNAL)
    else:
        sock.send(data, socket.MSG_NOSIGNAL)


def receive(sock: socket.socket) -> tuple[bytes, list[int]] | None:
    """One datagram and its descriptors (close-on-exec, owned by the caller), or None at end of file.

    Raises BlockingIOError when nothing is there, ProtocolError when the datagram was cut short, DescriptorsLost when
    only its descriptors were (whatever arrived of them is closed).
    """
    try:
        data, ancillary, flags, _ = sock.recvmsg(MAX_DATAGRAM, _ANCILLARY, _RECEIVE)
    except ConnectionResetError:
        return None
    fds: list[int] = []
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received = array.array("i")
            received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
            fds.extend(received)
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        close_all(fds)
        if flags & socket.MSG_TRUNC:
            raise ProtocolError(f"a datagram is longer than {MAX_DATAGRAM} bytes")
        raise DescriptorsLost(
            f"the descriptors of a datagram were cut short: at most {MAX_FDS} travel with one, and this process must"
            " have as many free (RLIMIT_NOFILE)",
            data,
        )
    if not data:  # indistinguishable from end of file; nobody who follows the protocol sends it
        close_all(fds)
        return None
    return data, fds


def close_all(fds: Sequence[int]) -> None:
    """Close every descriptor of `fds`."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def peer_credentials(sock: socket.socket) -> tuple[int, int, int]:
    """(pid, uid, gid) of the process that connected. Meaningless for a socketpair, which names its maker."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", raw)
    return pid, uid, gid


def peer_pidfd(sock: socket.socket) -> int:
    """A pidfd of the connecting process: readable when it has ended, whoever else still holds the socket.

    SO_PEERPIDFD cannot name a recycled pid; the fallback, right after accept, can only in the moment between.
    Raises ProcessLookupError when the process is gone already (some kernels give a readable pidfd then).
    """
    try:
        fd = struct.unpack("i", sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, 4))[0]
    except OSError as error:
        if error.errno == errno.ENOPROTOOPT:
            return os.pidfd_open(peer_credentials(sock)[0])
        # Up to 6.15 this is how a process that was reaped is reported; its pid may be another's by now.
        if error.errno in (errno.EINVAL, errno.ESRCH):
            raise ProcessLookupError(errno.ESRCH, "the process that connected has ended") from error
        raise
    os.set_inheritable(fd, False)
    return int(fd)
