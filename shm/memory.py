"""Anonymous sealed memory that two processes map: channels, ledgers, the statistics page, large replies.

Made by the broker and by tests. Regions of users are `shm.regions`.
"""

from __future__ import annotations

import fcntl
import mmap
import os

PAGE = 4096
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def sealed_memfd(name: str, byte_size: int) -> int:
    """A zeroed memfd of `byte_size` bytes whose size nobody can change: a peer cannot make our accesses fault.

    Pages are allocated now (an OSError here) rather than at first touch (a SIGBUS there).
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, byte_size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def written_memfd(name: str, data: bytes) -> int:
    """A memfd that holds `data`, which nobody can change, to be read from its start."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
        os.lseek(fd, 0, os.SEEK_SET)
    except BaseException:
        os.close(fd)
        raise
    return fd


def map_words(fd: int, byte_size: int) -> tuple[mmap.mmap, memoryview]:
    """The shared mapping of `fd` and its view as 64-bit words.

    One element store is one aligned 8-byte store: neither side can see half of a word (x86-64 and aarch64).
    """
    memory = mmap.mmap(fd, byte_size)
    return memory, memoryview(memory).cast("Q")


def pages(byte_size: int) -> int:
    """`byte_size` rounded up to whole pages."""
    return -(-byte_size // PAGE) * PAGE
