"""How much memory can still be allocated: what the host has, and what the cgroups of this process allow.

Asked before pools are made and before pages of system regions are reserved, and by the broker when it sets its quota:
memory that is allocated beyond this is paid for by whichever process the OOM killer chooses.
"""

from __future__ import annotations

import errno
import re
from pathlib import Path

from shm.errors import Code, InferError


def memory_room(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can be allocated without waking the OOM killer, on this host and in this process's cgroups."""
    host = _meminfo(proc, "MemAvailable")
    return max(0, min([host, *(limit - used for limit, used in _cgroup_memory(proc, cgroups))]))


def memory_limit(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes this process could have at most: the host's memory or the tightest limit of its cgroups."""
    return min([_meminfo(proc, "MemTotal"), *(limit for limit, _ in _cgroup_memory(proc, cgroups))])


def check_room(byte_size: int) -> None:
    """Raises InferError unless `byte_size` bytes can be allocated and a twentieth of what is available stays free."""
    room = memory_room()
    if byte_size > room - room // 20:
        raise no_space(byte_size, byte_size, room)


def no_space(asked: int, missing: int, room: int, error: OSError | None = None) -> InferError:
    """The error that says how much was asked, how much of it must still be allocated, and what there is."""
    cause = f" ({errno.errorcode.get(error.errno or 0, error.errno)})" if error else ""
    return InferError(
        Code.UNAVAILABLE,
        f"no space left for shared memory{cause}: {asked} bytes asked, {missing} of them not allocated yet, "
        f"{room} bytes available",
    )


def _meminfo(proc: Path, field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB$", (proc / "meminfo").read_text(), re.MULTILINE)
    if match is None:
        raise InferError(Code.INTERNAL, f"{proc}/meminfo has no {field}")
    return int(match[1]) * 1024


def _cgroup_memory(proc: Path, cgroups: Path) -> list[tuple[int, int]]:
    """(limit, bytes in use that cannot be reclaimed) of every memory cgroup of this process, version 1 or 2."""
    found: list[tuple[int, int]] = []
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, limit, usage, prefix = cgroups, "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            root, limit, usage, prefix = cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
        else:
            continue
        leaf = root / path.lstrip("/")
        # A container without a cgroup namespace is told the host's path, and finds its own limits at the root.
        for directory in (leaf, *leaf.parents):
            if directory.is_relative_to(root):
                found += _limit_and_usage(directory, limit, usage, prefix)
    return found


def _limit_and_usage(directory: Path, limit: str, usage: str, prefix: str) -> list[tuple[int, int]]:
    try:
        most = (directory / limit).read_text().strip()
        used = int((directory / usage).read_text())
        fields = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    except OSError:
        return []
    if most == "max":
        return []
    # Cached files give way to an allocation; shared memory is not among them.
    cached = sum(int(fields.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
    return [(int(most), used - cached)]
