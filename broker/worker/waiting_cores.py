"""Is some thread of this host ready to run and waiting for a core?

Asked by a worker that looks for its next request (`broker.worker.hot_set`): looking must not cost a host with more
runnable threads than cores what somebody else could do. With four clients of a gateway on two cores it took a quarter
of the host, and a third of the requests per second; and a thread that yields all the time comes last: beside two busy
processes a native client got half of the requests per second that it gets from a worker that sleeps.
"""

from __future__ import annotations

import os
import time
from typing import final

SLOW_NS = 20_000  # a file system in user space instead of the kernel's: worth less than it costs
_TRIES = 3


@final
class WaitingCores:
    """The kernel's own count of runnable threads (proc(5), loadavg: fourth field), read in about 1 µs."""

    def __init__(self, path: str = "/proc/loadavg", cores: int | None = None) -> None:
        self._cores = cores or os.cpu_count() or 1  # of the host, as the count is
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = -1
        took = min(self._read_ns() for _ in range(_TRIES))
        if self._fd >= 0 and took > SLOW_NS:
            self.close()

    def close(self) -> None:
        """Nobody waits from now on."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def wanted(self) -> bool:
        """Are more threads runnable, the caller among them, than there are cores? False where that cannot be known."""
        if self._fd < 0:
            return False
        try:
            return int(os.pread(self._fd, 128, 0).split(None, 4)[3].split(b"/")[0]) > self._cores
        except (OSError, ValueError, IndexError):
            return False

    def _read_ns(self) -> int:
        began = time.monotonic_ns()
        self.wanted()
        return time.monotonic_ns() - began
