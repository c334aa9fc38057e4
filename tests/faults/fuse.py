"""A file of a FUSE mount whose process is stopped: whoever opens it waits, and cannot be killed meanwhile.

Speaks the kernel's protocol over /dev/fuse by hand, in the mount namespace of its lab. Used by offenders.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
from collections.abc import Iterator
from pathlib import Path

MNT_DETACH = 2
GETATTR, INIT = 3, 26
ENOSYS = 38
MODE = 0o100666
_libc = ctypes.CDLL(None, use_errno=True)


class CannotMount(Exception):
    """This machine allows no such mount; the text says why."""


@contextlib.contextmanager
def covered_by_stopped(at: Path) -> Iterator[None]:
    """A file, already stopped, is mounted over the file `at` of this mount namespace."""
    server = _mount(at)
    try:
        _stop(server)
        yield
    finally:
        _end(server)
        _call(_libc.umount2(bytes(at), MNT_DETACH), "umount")


def _mount(at: Path) -> int:
    """Mount a file there. Returns the pid of its server."""
    try:
        device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise CannotMount(f"/dev/fuse cannot be opened: {error.strerror}") from None
    options = f"fd={device},rootmode={MODE:o},user_id={os.geteuid()},group_id={os.getegid()}"
    _call(_libc.mount(b"stopped", bytes(at), b"fuse", 0, options.encode()), "mount fuse")
    server = os.fork()
    if not server:
        try:
            _serve(device)
        finally:
            os._exit(0)
    os.close(device)  # with the server ends the last one, and then the kernel answers in its place
    return server


def _stop(server: int) -> None:
    os.kill(server, signal.SIGSTOP)
    os.waitid(os.P_PID, server, os.WSTOPPED | os.WNOWAIT)


def _end(server: int) -> None:
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)


def _serve(device: int) -> None:
    while True:
        asked = os.read(device, 1 << 20)
        _, operation, unique, node = struct.unpack_from("<IIQQ", asked)
        if operation == INIT:
            answer = struct.pack("<IIIIHHII", 7, 31, 0, 0, 12, 9, 4096, 1) + bytes(36)
        elif operation == GETATTR:
            answer = struct.pack("<QII", 0, 0, 0) + _attributes(node)
        else:
            os.write(device, struct.pack("<IiQ", 16, -ENOSYS, unique))
            continue
        os.write(device, struct.pack("<IiQ", 16 + len(answer), 0, unique) + answer)


def _attributes(node: int) -> bytes:
    owner = (os.geteuid(), os.getegid())
    return struct.pack("<6Q10I", node, 4096, 8, 0, 0, 0, 0, 0, 0, MODE, 1, *owner, 0, 4096, 0)


def _call(result: int, what: str) -> None:
    if result:
        raise CannotMount(f"{what}: {os.strerror(ctypes.get_errno())}")
