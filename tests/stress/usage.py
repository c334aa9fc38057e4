"""What a process holds, from /proc, and what /dev/shm holds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class Usage(NamedTuple):
    """`shared`: mappings of shared memory, a part of `maps` (the rest are the allocator's and libraries')."""

    descriptors: int
    shared: int
    maps: int
    rss_kib: int


def usage(pid: int) -> Usage:
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    status = Path(f"/proc/{pid}/status").read_text()
    rss = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    shared = sum("/memfd:" in line or "/dev/shm/" in line for line in maps)
    return Usage(len(os.listdir(f"/proc/{pid}/fd")), shared, len(maps), int(rss.split()[1]))


def shm_bytes() -> int:
    """All of /dev/shm, other programs' files included."""
    facts = os.statvfs("/dev/shm")
    return (facts.f_blocks - facts.f_bfree) * facts.f_frsize
