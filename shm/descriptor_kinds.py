"""What a stranger's descriptor is, found out without asking the file system that it is of.

A file of a FUSE mount answers `fstat` and `read` when its owner's process likes: a stopped one never does, and who
waits for it cannot be killed. So the kernel is asked what only the kernel can answer. A name proves nothing: a mount of
the peer's own can have a file of any name. Used by `shm.cuda` and `shm.regions`.

`close` of such a file waits, too. That is left: a session is of the broker's own user, who can stop the broker anyway.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import struct
from typing import Final

_AT_EMPTY_PATH: Final = 0x1000
_AT_STATX_DONT_SYNC: Final = 0x4000
_STATX: Final = struct.Struct("136x2I112x")  # the numbers of stx_dev
_INFORMATION: Final = 4096  # bytes of /proc/self/fdinfo that are looked at


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


def filesystem_of(fd: int) -> int | None:
    """st_dev, as the kernel remembers it (statx, AT_STATX_DONT_SYNC). None: it does not tell."""
    statx = _statx()
    found = ctypes.create_string_buffer(_STATX.size)
    if statx is None or statx(fd, b"", _AT_EMPTY_PATH | _AT_STATX_DONT_SYNC, 0, found):
        return None
    return os.makedev(*_STATX.unpack(found.raw))


@functools.cache
def _statx() -> ctypes._NamedFuncPointer | None:
    statx = getattr(ctypes.CDLL(None), "statx", None)
    if statx is not None:
        statx.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_char_p)
    return statx
