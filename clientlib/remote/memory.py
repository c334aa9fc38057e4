"""Where the regions of remote clients lie: memory of this host, whether or not the server can see it.

    local    a sealed memfd of this process; its bytes travel in messages
    system   a POSIX object; made here for transports that share memory, or by anybody for `register_system_shm`

A token names the object, so that another process of the same uid on this host can open it: no server is asked.
Called by `clientlib.remote.core`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
from dataclasses import dataclass
from typing import NoReturn, final

import posix_ipc

from clientlib.region import MappedRegion
from shm.errors import Code, InferError
from shm.regions import check_pool, open_system, reserve

_LOCAL = re.compile(r"local\.(\d{1,10})\.(\d{1,10})\.(\d{1,20})\.(\d{1,19})", re.ASCII)
_OURS = re.compile(r"tensorbroker\.\d{1,10}\.[0-9a-f]{16}", re.ASCII)  # what `create_system` makes
_OBJECTS = "/dev/shm"
_SYSTEM = re.compile(r"system\.(\d{1,19})\.(\d{1,19})\.(/?[A-Za-z0-9_.-]{1,254})", re.ASCII)


@final
@dataclass(frozen=True, slots=True)
class Opened:
    """A descriptor, which is the caller's, and the window of it that a region is."""

    fd: int
    byte_size: int
    offset: int = 0
    writable: bool = True
    kind: str = "local"
    key: str = ""


def create_system(name: str, byte_size: int) -> Opened:
    """A new POSIX object with all its pages, for a transport that shares memory. `remove` its key after use."""
    _remove_orphans()
    key = f"/tensorbroker.{os.getpid()}.{secrets.token_hex(8)}"
    try:
        fd = posix_ipc.SharedMemory(key, posix_ipc.O_CREX, mode=0o600).fd
    except OSError as error:
        raise InferError(Code.UNAVAILABLE, f"cannot make shared memory for region '{name}': {error}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)  # as long as it is mapped here, with or without a descriptor
        os.ftruncate(fd, byte_size)
        reserve(fd, 0, byte_size)
    except BaseException as error:
        os.close(fd)
        remove(key, os.getpid())
        if isinstance(error, OSError):
            raise InferError(Code.UNAVAILABLE, f"cannot make {byte_size} bytes of shared memory: {error}") from None
        raise
    return Opened(fd, byte_size, kind="system", key=key)


def _remove_orphans() -> None:
    """Objects of clients that were killed: nobody holds their lock. (A pid says nothing across containers.)"""
    with contextlib.suppress(OSError), os.scandir(_OBJECTS) as entries:
        for name in [entry.name for entry in entries if _OURS.fullmatch(entry.name)]:
            with contextlib.suppress(OSError):
                _remove_orphan(os.path.join(_OBJECTS, name))


def _remove_orphan(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_size:  # else it is being made, and not locked yet
                os.unlink(path)
    finally:
        os.close(fd)


def remove(key: str, made_by: int) -> None:
    """Take the name of an object away, in the process that made it. The memory stays as long as it is mapped."""
    if os.getpid() == made_by:
        with contextlib.suppress(posix_ipc.Error, OSError):
            posix_ipc.unlink_shared_memory(key)


def open_key(name: str, key: str, byte_size: int, offset: int) -> Opened:
    """A POSIX object that exists. Raises InferError with Triton's texts."""
    try:
        fd, found = open_system(name, key, byte_size, offset, os.getuid())
    except InferError as error:
        # What follows compares the broker's /dev/shm with the client's: here there is one only.
        raise InferError(error.code, error.message.partition(". The broker runs as")[0]) from None
    try:
        reserve(fd, offset, byte_size)
    except BaseException:
        os.close(fd)
        raise
    return Opened(fd, byte_size, offset, found.writable, "system", key)


def token_of(region: MappedRegion) -> str:
    """What `open_token` opens in any process of this uid on this host, as long as the region lives."""
    if region.kind == "system":
        return f"system.{region.offset}.{region.byte_size}.{region.key}"
    return f"local.{os.getpid()}.{region.memory.fd}.{region.identity[1]}.{region.byte_size}"


def open_token(name: str, token: str) -> Opened:
    """The memory that a token names. Raises InferError NOT_FOUND when its owner has let it go."""
    if match := _SYSTEM.fullmatch(token):
        offset, byte_size = int(match[1]), int(match[2])
        try:
            return open_key(name, match[3], byte_size, offset)
        except InferError as error:
            if error.code != Code.INTERNAL.name:
                raise
            _not_shared(f"its owner has unregistered it ({error.message})")
    match = _LOCAL.fullmatch(token)
    if match is None:
        _not_shared("this is no token of a remote client's region")
    pid, number, inode, byte_size = (int(digits) for digits in match.groups())
    try:
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        _not_shared("its owner, a process of this uid on this host, may have unregistered it or ended")
    try:
        # The owner may have closed that descriptor and opened another file under its number.
        status = os.fstat(fd)
        if status.st_ino != inode or not stat.S_ISREG(status.st_mode):
            _not_shared("its owner has unregistered it")
        check_pool(fd, byte_size)
    except BaseException:
        os.close(fd)
        raise
    return Opened(fd, byte_size)


def _not_shared(why: str) -> NoReturn:
    raise InferError(
        Code.NOT_FOUND, f"Unable to find shared memory region: no region is shared under this token: {why}"
    )
