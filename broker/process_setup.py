"""What the broker asks of the kernel for its own process, once, before it starts anything.

Called by `broker.server`. And the duty that comes with being a subreaper: ending zombies that nobody else waits for.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import final

from shm.prctl import PR_SET_CHILD_SUBREAPER, prctl, undumpable

log = logging.getLogger(__name__)

FD_TABLE = 8000  # descriptors that the table has room for from the start


def prepare() -> None:
    """Limits, descriptor table, subreaper, and no access for other processes of the same uid."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # Growing the table later, with threads around, stalls the loop for milliseconds.
    with contextlib.suppress(OSError):
        os.close(os.dup2(0, min(FD_TABLE, hard - 1), inheritable=False))
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    undumpable()


def complain_about_runtimes() -> None:
    """Two distributions of one runtime overwrite each other's files; which one runs is chance."""
    found = []
    for name in ("onnxruntime", "onnxruntime-gpu"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {distribution(name).version}")
    if len(found) > 1:
        log.error(
            "both %s are installed: they overwrite each other's files, so GPU support or the CPU build may be broken. "
            "Uninstall both, then install the one you need",
            " and ".join(found),
        )


@final
class Orphans:
    """Zombies that the broker has adopted and nobody waits for: processes left behind by dead workers.

    Its own children are reaped by whoever started them as soon as their pidfds are readable, and a zombie's owner may
    need ten seconds for that: so only one that is seen by two calls, half a minute apart, is nobody's.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def reap(self) -> list[int]:
        """Reap what the call before has seen already. Returns the pids."""
        zombies = {pid for pid in _children() if _is_zombie(pid)}
        reaped = sorted(zombies & self._seen)
        for pid in reaped:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        self._seen = zombies - set(reaped)
        return reaped


def _children() -> list[int]:
    children = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            children += [int(pid) for pid in (task / "children").read_text().split()]
    return children


def _is_zombie(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] == "Z"
