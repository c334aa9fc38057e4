"""While every instance of a worker is at work nobody leads: nothing that comes could begin before one of them is free.

Part of `broker.worker.loop`. With an instance per core, each ring would cost a running batch its core and its caches.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import final

from broker.worker.hot_set import HotSet
from broker.worker.scheduler import Scheduler

PARK_S = 0.025  # longest time that nobody looks at the channels
_now = time.monotonic_ns


@final
class Parking:
    """`parked`: who finishes first looks at the channels before anything else."""

    __slots__ = ("_hot_set", "_room", "_scheduler", "parked")

    def __init__(self, scheduler: Scheduler, hot_set: HotSet) -> None:
        self._scheduler, self._hot_set = scheduler, hot_set
        self._room = threading.Event()  # ends it
        self.parked = False

    def begin(self, bookkeeping: Callable[[], None]) -> bool:
        """Leave the channels alone until an instance is free: clients need not ring, and no thread wakes for what they
        publish. False: one is free. Called by the leader, who steps down after it.
        """
        if self._scheduler.saturated():
            bookkeeping()
            self._hot_set.park()
            self._room.clear()
            self.parked = True
            if self._scheduler.saturated():  # who has finished meanwhile did not see that nobody leads
                return True
        if self.parked:
            self.end()
            self._hot_set.stir()
        return False

    def wait(self, until: int) -> None:
        """For room, or until CLOCK_MONOTONIC ns `until` (0: nothing is due)."""
        self._room.wait(min(max(0.0, (until - _now()) / 1e9), PARK_S) if until else PARK_S)

    def end(self) -> None:
        """Somebody looks again."""
        if self.parked:
            self.parked = False
            self._room.set()
