"""What a stranger's descriptor is, found out without asking the file system that it is of.

A file of a FUSE mount answers `fstat`, `read`, and even `close` when its owner's process likes: a stopped one never
does, and who waits for it cannot be killed. So the kernel is asked what only the kernel can answer. A name proves
nothing: a mount of the peer's own can have a file of any name. Used by `broker.porter`, `shm.cuda` and `shm.regions`.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import stat
import struct
from typing import Final, NamedTuple, final

_AT_EMPTY_PATH: Final = 0x1000
_AT_STATX_DONT_SYNC: Final = 0x4000
_STATX_TYPE: Final = 1
_STATX: Final = struct.Struct("28xH98x4I112x")  # stx_mode, and the numbers of stx_rdev and stx_dev
_NVIDIA_MAJOR: Final = 195  # of nvidiactl and of each GPU's device, since ever (Documentation/admin-guide/devices.txt)
_INFORMATION: Final = 4096  # bytes of /proc/self/fdinfo that are looked at


@final
class Kind(NamedTuple):
    """`mode`: the type bits of st_mode. `device`: what a device node names. `filesystem`: st_dev."""

    mode: int
    device: tuple[int, int]
    filesystem: int


def is_harmless(fd: int) -> bool:
    """Is it of the kernel itself, so that nothing that is done with it, its close included, waits for anybody?

    Memory with seals, a dma-buf, a device of NVIDIA's: all that the broker takes. Others that are harmless, too, are
    not worth a rule; a TCP socket is none of them: closing it may wait as long as its SO_LINGER says.
    """
    if has_seals(fd) or is_dma_buf(fd):
        return True
    kind = kind_of(fd)
    return kind is not None and stat.S_ISCHR(kind.mode) and kind.device[0] == _NVIDIA_MAJOR


def has_seals(fd: int) -> bool:
    """Memory of the kernel's, as only a memfd or a file of tmpfs has it."""
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return True


def is_dma_buf(fd: int) -> bool:
    """By what /proc says of it: only dma-bufs have an exporter. False where there is no /proc."""
    try:
        information = os.open(f"/proc/self/fdinfo/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return _says_dma_buf(os.read(information, _INFORMATION))
    except OSError:
        return False
    finally:
        os.close(information)


def _says_dma_buf(information: bytes) -> bool:
    return b"\nexp_name:" in information


def kind_of(fd: int) -> Kind | None:
    """What the kernel remembers of it (statx, AT_STATX_DONT_SYNC). None: it does not tell."""
    statx = _statx()
    found = ctypes.create_string_buffer(_STATX.size)
    if statx is None or statx(fd, b"", _AT_EMPTY_PATH | _AT_STATX_DONT_SYNC, _STATX_TYPE, found):
        return None
    mode, major, minor, of_major, of_minor = _STATX.unpack(found.raw)
    return Kind(stat.S_IFMT(mode), (major, minor), os.makedev(of_major, of_minor))


@functools.cache
def _statx() -> ctypes._NamedFuncPointer | None:
    statx = getattr(ctypes.CDLL(None), "statx", None)
    if statx is not None:
        statx.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_char_p)
    return statx
