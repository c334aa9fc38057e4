"""Memory that regions are made of: pools (sealed memfds), system shared memory (POSIX names), local memory.

Clients make pools with `create_pool`. The broker admits descriptors and names with `check_pool`, `open_system` and
`reserve`; these never map anything, never read content, and never act with a right that the peer itself lacks.
Workers and clients map what was admitted (`MappedMemory`). Nothing here knows names, leases or plans.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import mmap
import os
import re
import stat
from pathlib import Path
from typing import Final, Protocol, final

import msgspec
import numpy as np
import numpy.typing as npt

from shm.capacity import check_room, memory_room, no_space
from shm.descriptor_kinds import filesystem_of
from shm.errors import Code, InferError
from shm.memory import pages, sealed_memfd

_SHM_DIRECTORY: Final = "/dev/shm"
_KEY: Final = re.compile(r"/?([A-Za-z0-9_.-]{1,254})", re.ASCII)
_RESERVED_PREFIX: Final = "triton_python_backend_shm_region_"
_WRITE_SEALS: Final = fcntl.F_SEAL_WRITE | 0x0010  # F_SEAL_FUTURE_WRITE, which Python 3.11 has no name for
_SEAL_NAMES: Final = {
    fcntl.F_SEAL_SHRINK: "F_SEAL_SHRINK",
    fcntl.F_SEAL_GROW: "F_SEAL_GROW",
    fcntl.F_SEAL_SEAL: "F_SEAL_SEAL",
}


class FileIdentity(msgspec.Struct, frozen=True):
    """Which object a descriptor refers to. Equal (device, inode) is the same memory, whatever its names are."""

    device: int
    inode: int
    file_size: int
    writable: bool


class Memory(Protocol):
    """The bytes of one region in this process. `bytes` is 1-D; views of it stay valid after `close`."""

    kind: str
    byte_size: int
    writable: bool
    fd: int | None

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        """The whole region. Raises InferError after `close`."""

    def close(self) -> None:
        """Drop this object's hold on the memory, which goes when the last view of it has gone."""


@final
class MappedMemory:
    """A region of an open file: [offset, offset + byte_size) of `fd`, at any offset.

    `fd` remains the caller's, and `self.fd` is None, unless `keep_fd`: then it belongs to this object and is closed
    with it. Raises InferError when the file is smaller than it was said to be, or when there is no room for a mapping.
    """

    __slots__ = ("_bytes", "byte_size", "fd", "kind", "writable")

    def __init__(
        self, fd: int, offset: int, byte_size: int, writable: bool, *, kind: str = "pool", keep_fd: bool = False
    ) -> None:
        # From 0, because mmap wants multiples of a page. A private mapping that is never written shows the file like
        # a shared one; shared read-only mappings of write-sealed memfds are refused by kernels before 6.7.
        flags, prot = (
            (mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE) if writable else (mmap.MAP_PRIVATE, mmap.PROT_READ)
        )
        end = _end(offset, byte_size)
        try:
            if (left := os.fstat(fd).st_size) < end:
                raise InferError(
                    Code.INTERNAL, f"shared memory changed size: {end} bytes were registered, {left} are left"
                )
            mapping = mmap.mmap(fd, end, flags=flags, prot=prot)
        except (OSError, ValueError) as error:
            raise InferError(Code.UNAVAILABLE, f"cannot map {end} bytes of shared memory: {error}") from None
        # The array holds the mapping, and every view of the array holds the array.
        self._bytes: npt.NDArray[np.uint8] | None = np.frombuffer(mapping, np.uint8, byte_size, offset)
        self.kind = kind
        self.byte_size = byte_size
        self.writable = writable
        self.fd = fd if keep_fd else None

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        """The whole region, 1-D, as writable as the mapping. Raises InferError after `close`."""
        return _still_open(self._bytes)

    def close(self) -> None:
        """Drop the mapping, which goes with the last view of it, and close a kept descriptor. May be repeated."""
        self._bytes = None
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


@final
class LocalMemory:
    """A region of this process alone, zeroed and page-aligned like the shared kinds."""

    __slots__ = ("_bytes", "byte_size", "fd", "kind", "writable")

    def __init__(self, byte_size: int) -> None:
        end = _end(0, byte_size)
        try:
            mapping = mmap.mmap(-1, end, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise InferError(Code.UNAVAILABLE, f"cannot allocate {byte_size} bytes: {error}") from None
        self._bytes: npt.NDArray[np.uint8] | None = np.frombuffer(mapping, np.uint8)
        self.kind = "local"
        self.byte_size = byte_size
        self.writable = True
        self.fd: int | None = None

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        """The whole region, 1-D. Raises InferError after `close`."""
        return _still_open(self._bytes)

    def close(self) -> None:
        """Drop the memory, which goes with the last view of it. May be repeated."""
        self._bytes = None


def create_pool(byte_size: int) -> int:
    """A descriptor of a new pool: a zeroed memfd whose pages are allocated and whose size nobody can change.

    Raises InferError, with the numbers, when the host or the container has not that much memory left.
    """
    _end(0, byte_size)
    # A memfd is not limited by the size of /dev/shm: without this look, the limit would be the OOM killer.
    check_room(byte_size)
    try:
        return sealed_memfd("tensorbroker-pool", byte_size)
    except OSError as error:
        raise no_space(byte_size, byte_size, memory_room(), error) from None


def check_pool(fd: int, byte_size: int) -> FileIdentity:
    """Admit a descriptor that a peer sent as a pool of `byte_size` bytes. Raises InferError saying what is wrong.

    Never blocks and leaves `fd` open. `writable` is False for a write-sealed memfd: inputs only.
    """
    _end(0, byte_size)
    try:
        # Before fstat, which on a file of a FUSE mount waits for the peer's own process.
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        access = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    except OSError:
        raise InferError(
            Code.INVALID_ARG,
            "a pool must be a memfd, and this descriptor has no seals (a file, a directory, a pipe, a socket or a "
            "device): make pools with create_region",
        ) from None
    missing = [seal for flag, seal in _SEAL_NAMES.items() if not seals & flag]
    if missing:
        raise InferError(
            Code.INVALID_ARG,
            f"a pool must be a memfd sealed with {', '.join(_SEAL_NAMES.values())}, and {', '.join(missing)} is "
            "missing (files of /dev/shm cannot be sealed: use register_system_shm)",
        )
    if access != os.O_RDWR:
        raise InferError(Code.INVALID_ARG, "a pool must be open for reading and writing: seal it to make it read-only")
    status = os.fstat(fd)
    if status.st_dev != _memfd_device():
        raise InferError(Code.INVALID_ARG, "a pool must be a memfd of ordinary pages: huge pages are not supported")
    if status.st_size < byte_size:
        raise InferError(
            Code.INVALID_ARG, f"a pool of {byte_size} bytes must be that long: the memfd has {status.st_size} bytes"
        )
    if (allocated := status.st_blocks * 512) < status.st_size:
        raise InferError(
            Code.INVALID_ARG,
            f"a pool's pages must be allocated before it is registered (posix_fallocate): the memfd has {allocated} "
            f"of {status.st_size} bytes",
        )
    return FileIdentity(status.st_dev, status.st_ino, status.st_size, not seals & _WRITE_SEALS)


def open_system(name: str, key: str, byte_size: int, offset: int, peer_uid: int) -> tuple[int, FileIdentity]:
    """Open the POSIX shared memory object `key` for region `name` of a peer; the caller owns the descriptor.

    Refused, with Triton's texts where it has one: anything but a regular, linked, single-named file of `peer_uid`
    itself that its owner can read and that holds offset + byte_size. Read-only when its owner cannot write it.
    """
    bare = _bare_key(name, key)
    fd = _open_key(key, bare)
    try:
        status = os.fstat(fd)
        _check_object(key, status, peer_uid)
        if byte_size <= 0 or offset < 0 or offset + byte_size > status.st_size:
            raise InferError(
                Code.INVALID_ARG,
                f"failed to register shared memory region {name!r}: invalid args: {byte_size} bytes at offset {offset} "
                f"of {key!r}, which has {status.st_size}",
            )
        if _is_writable(fd) and not status.st_mode & stat.S_IWUSR:
            # A broker of root may open everything for writing: what the peer gets is what the peer may have.
            read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            os.close(fd)
            fd = read_only
        return fd, FileIdentity(status.st_dev, status.st_ino, status.st_size, _is_writable(fd))
    except BaseException:
        os.close(fd)
        raise


def reserve(fd: int, offset: int, byte_size: int) -> None:
    """Allocate the pages of a system region now, because a missing page at first touch kills the process (SIGBUS).

    Takes up to half a millisecond a MiB: call it in a thread. Raises InferError with the numbers when /dev/shm or the
    memory is full, or when pages are missing from an object that is read-only.
    """
    end = _end(offset, byte_size)
    status = os.fstat(fd)
    if status.st_size < end:
        raise InferError(
            Code.INVALID_ARG, f"shared memory changed size: {end} bytes are needed, {status.st_size} are left"
        )
    missing = min(byte_size, max(0, pages(status.st_size) - status.st_blocks * 512))
    if not _is_writable(fd):
        if missing:
            raise InferError(
                Code.INVALID_ARG,
                f"a read-only shared memory object must have all its pages, and {missing} bytes were never written: "
                "write all of it, or make it writable",
            )
        return
    check_room(missing)
    try:
        os.posix_fallocate(fd, offset, byte_size)
    except OSError as error:
        filesystem = os.fstatvfs(fd)
        raise no_space(byte_size, missing, filesystem.f_bavail * filesystem.f_frsize, error) from None


def shrunk(fd: int, file_size: int) -> bool:
    """Whether the file behind a mapping is shorter than when it was admitted: touching the rest would be fatal."""
    return os.fstat(fd).st_size < file_size


def _end(offset: int, byte_size: int) -> int:
    if offset < 0 or byte_size < 1:
        raise InferError(
            Code.INVALID_ARG, f"a region has at least one byte at an offset of 0 or more, got {byte_size} at {offset}"
        )
    return offset + byte_size


def _still_open(memory: npt.NDArray[np.uint8] | None) -> npt.NDArray[np.uint8]:
    if memory is None:
        raise InferError(Code.NOT_FOUND, "this region's memory is closed")
    return memory


def _is_writable(fd: int) -> bool:
    return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR


@functools.cache
def _memfd_device() -> int:
    """The device of every memfd of ordinary pages, by which those of huge pages are told apart."""
    fd = os.memfd_create("tensorbroker-probe", os.MFD_CLOEXEC)
    try:
        return os.fstat(fd).st_dev
    finally:
        os.close(fd)


@functools.cache
def _overflow_uid() -> int:
    """The uid that the kernel shows for every uid outside this user namespace."""
    return int(Path("/proc/sys/kernel/overflowuid").read_text())


def _bare_key(name: str, key: str) -> str:
    if key.lstrip("/").startswith(_RESERVED_PREFIX):
        raise InferError(
            Code.INVALID_ARG,
            f"cannot register shared memory region {name!r} with key {key!r} as the key contains the reserved prefix "
            f"'{_RESERVED_PREFIX}'",
        )
    match = _KEY.fullmatch(key)
    if match is None or match[1] in (".", ".."):
        raise InferError(
            Code.INVALID_ARG,
            f"cannot register shared memory region {name!r} - invalid shm key {key!r}: a key is an optional slash and "
            "1 to 254 letters, digits, dots, dashes and underscores",
        )
    return match[1]


def _open_key(key: str, bare: str) -> int:
    """As `shm_open`: follows no symbolic link, does not wait for the other end of a FIFO, never creates.

    Does not open what is on another file system than shared memory: where a FUSE mount covers the object, `shm_open`
    itself would wait for the mount's owner.
    """
    at, number = -1, errno.EACCES
    try:
        at = os.open(f"{_SHM_DIRECTORY}/{bare}", os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        if filesystem_of(at) not in (None, os.stat(_SHM_DIRECTORY).st_dev):
            raise _cannot_open(key, "it is not a shared memory object (another file system is mounted there)")
        for access in (os.O_RDWR, os.O_RDONLY):
            with contextlib.suppress(PermissionError):
                return os.open(f"/proc/self/fd/{at}", access | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        number = errno.EINVAL if error.errno == errno.EISDIR else error.errno or 0  # as shm_open says it
    finally:
        if at >= 0:
            os.close(at)  # which asks nobody, as it was never opened
    wrong_type = number in (errno.EINVAL, errno.ELOOP, errno.ENXIO)
    reason = f"{errno.errorcode.get(number, number)} ({os.strerror(number)})"
    raise _cannot_open(key, reason, Code.INVALID_ARG if wrong_type else Code.INTERNAL)


def _check_object(key: str, status: os.stat_result, peer_uid: int) -> None:
    if not stat.S_ISREG(status.st_mode) or status.st_dev != os.stat(_SHM_DIRECTORY).st_dev:
        raise _cannot_open(key, f"it is not a shared memory object ({stat.filemode(status.st_mode)})")
    if peer_uid == _overflow_uid():
        raise _cannot_open(key, f"this connection's uid is not known here and shows as {peer_uid} (user namespaces)")
    if status.st_uid != peer_uid:
        raise _cannot_open(key, f"it belongs to uid {status.st_uid}, and this connection to uid {peer_uid}")
    if not status.st_mode & stat.S_IRUSR:
        raise _cannot_open(key, f"EACCES: its mode {stat.filemode(status.st_mode)} does not let its owner read it")
    if status.st_nlink != 1:
        raise _cannot_open(key, f"it must have one name, and has {status.st_nlink}")


def _cannot_open(key: str, reason: str, code: Code = Code.INVALID_ARG) -> InferError:
    try:
        directory = os.stat(_SHM_DIRECTORY)
        here = f"its {_SHM_DIRECTORY} is {directory.st_dev}:{directory.st_ino}"
    except OSError as error:
        here = f"has no {_SHM_DIRECTORY} ({error.strerror})"
    return InferError(
        code,
        f"Unable to open shared memory region: {key!r}: {reason}. The broker runs as uid {os.geteuid()} and {here}: "
        f"unless `stat -c %d:%i {_SHM_DIRECTORY}` prints the same where the region was made, the two do not share it "
        "(containers need one ipc namespace; create_region works without)",
    )
