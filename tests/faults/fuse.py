"""A file of a FUSE mount whose process is stopped: whoever closes it waits, and cannot be killed meanwhile.

Speaks the kernel's protocol over /dev/fuse by hand, in namespaces of the caller's own or its lab's. Used by
offenders.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
from collections.abc import Iterator
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUSER, MS_REC, MS_PRIVATE, MNT_DETACH = 0x20000, 0x1000_0000, 0x4000, 1 << 18, 2
LOOKUP, GETATTR, OPEN, INIT = 1, 3, 14, 26
ENOSYS = 38
_libc = ctypes.CDLL(None, use_errno=True)


class CannotMount(Exception):
    """This machine allows no such mount; the text says why."""


class StoppedFile:
    """`open` works until `stop`; after that nothing that the kernel asks of the file is answered."""

    def __init__(self, directory: Path) -> None:
        """Puts the calling process, which must have one thread, into namespaces of its own."""
        at = directory / "stopped"
        at.mkdir(mode=0o700)
        uid, gid = os.geteuid(), os.getegid()
        _call(_libc.unshare(CLONE_NEWNS | (CLONE_NEWUSER if uid else 0)), "unshare")
        try:
            for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
                if uid:
                    Path("/proc/self", name).write_text(text)
        except OSError as error:
            raise CannotMount(f"{name} of a user namespace: {error.strerror}") from None
        _call(_libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "mount private")
        self._at = at / "file"
        self._server = _mount(at, 0o40777)

    def open(self) -> int:
        return os.open(self._at, os.O_RDONLY | os.O_CLOEXEC)

    def stop(self) -> None:
        _stop(self._server)

    def end(self) -> None:
        _end(self._server)


@contextlib.contextmanager
def covered_by_stopped(at: Path) -> Iterator[None]:
    """A file, already stopped, is mounted over the file `at` of this mount namespace."""
    server = _mount(at, 0o100666)
    try:
        _stop(server)
        yield
    finally:
        _end(server)
        _call(_libc.umount2(bytes(at), MNT_DETACH), "umount")


def _mount(at: Path, mode: int) -> int:
    """Mount there a file or directory of that mode. Returns the pid of its server."""
    try:
        device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise CannotMount(f"/dev/fuse cannot be opened: {error.strerror}") from None
    options = f"fd={device},rootmode={mode:o},user_id={os.geteuid()},group_id={os.getegid()}"
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
        elif operation == LOOKUP:
            answer = struct.pack("<4Q2I", 2, 1, 0, 0, 0, 0) + _attributes(2, 0o100666)
        elif operation == GETATTR:
            answer = struct.pack("<QII", 0, 0, 0) + _attributes(node, 0o40777 if node == 1 else 0o100666)
        elif operation == OPEN:
            answer = struct.pack("<QII", 1, 0, 0)
        else:
            os.write(device, struct.pack("<IiQ", 16, -ENOSYS, unique))
            continue
        os.write(device, struct.pack("<IiQ", 16 + len(answer), 0, unique) + answer)


def _attributes(node: int, mode: int) -> bytes:
    owner = (os.geteuid(), os.getegid())
    return struct.pack("<6Q10I", node, 4096, 8, 0, 0, 0, 0, 0, 0, mode, 1, *owner, 0, 4096, 0)


def _call(result: int, what: str) -> None:
    if result:
        raise CannotMount(f"{what}: {os.strerror(ctypes.get_errno())}")
