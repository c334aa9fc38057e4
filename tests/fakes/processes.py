"""Guards for tests that start processes: what they left behind, and waiting for things without a fixed sleep."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from shm.prctl import PR_SET_CHILD_SUBREAPER, prctl


def children(pid: int | str = "self") -> list[int]:
    """All but the one that Python starts with the first shared memory of a process (Triton's client uses that)."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has ended since, or ends while it is read
            found += map(int, (task / "children").read_text().split())
    return [child for child in found if not _is_resource_tracker(child)]


def _is_resource_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def name_of(pid: int) -> str:
    """Its name; "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def descriptors() -> set[str]:
    """What the open descriptors of this process are, by number."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
    return found


@contextlib.contextmanager
def subreaper() -> Iterator[None]:
    """This process adopts what its children leave, as the broker does; nothing may be left at the end."""
    before = children()  # a broker that other tests share, or the resource tracker of a client
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        left = {pid: name_of(pid) for pid in children() if pid not in before}
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        prctl(PR_SET_CHILD_SUBREAPER, 0)
    assert not left, f"processes were left behind: {left}"


def kill_new(named: Callable[[], int], gone: set[int], limit_s: float = 60.0) -> None:
    """SIGKILL the process that `named` tells, once it tells one that is not in `gone` and lives; it joins `gone`.

    What a broker's status says may be a moment old: just after a death it still names the dead process.
    """
    until_s = time.monotonic() + limit_s
    while True:
        pid = named()
        if pid and pid not in gone:
            gone.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                return
        assert time.monotonic() < until_s, f"no process but {sorted(gone)} was named within {limit_s:g} s"
        time.sleep(0.005)


async def until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    """Wait until `condition` holds; TimeoutError after `limit_s`."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110  what is waited for happens in other processes, too
            await asyncio.sleep(0.005)


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an `async def` test in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: object, **fixtures: object) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **fixtures), 90))

    return run
