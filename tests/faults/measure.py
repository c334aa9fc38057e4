"""What a process holds, read from /proc: descriptors, memory files, threads and mappings."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

POOLS = 2  # threads that the broker's pools, and a worker's for loads and ends of models, may make after the first look
NO_MORE_THAN = 30.0  # seconds in which everything that a row cost must be given back; 5 on a machine that is not busy


class Holdings(NamedTuple):
    """Counts of one process. `shared` are the mappings of memory that somebody else could see."""

    fds: int
    memfds: int
    threads: int
    maps: int
    shared: int


def holdings(pid: int) -> Holdings:
    links = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return Holdings(
        len(links),
        sum("memfd:" in link for link in links),
        len(os.listdir(f"/proc/{pid}/task")),
        len(maps),
        sum("memfd:" in line or "/dev/shm" in line for line in maps),
    )


def resident_bytes(pid: int) -> int:
    """RssAnon and RssShmem together: what the process itself touched."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024


def alive(pid: int) -> bool:
    """Zombies are not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def excess(now: dict[str, Holdings], before: dict[str, Holdings], slack: int) -> list[str]:
    """What of `now` is more than `before`. `slack`: mappings that an allocator may add without anything being lost."""
    found = []
    for process, held in now.items():
        for name, count, limit in zip(Holdings._fields, held, before.get(process, held), strict=True):
            pools = POOLS if name == "threads" else 0
            if count > limit + pools + (slack if name == "maps" else 0):
                found.append(f"{process}: {name} {limit} → {count}")
    return found
