"""Where the sequences of members in other workers are: by their number, but for those that began when that was down.

One per session of steps (`broker.worker.ensembles.remote.session`); asked by `broker.worker.ensembles.remote.plans`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import final

MAX_STRAYS = 4_096  # those that began first are forgotten first: their next step must specify START


@final
class StepHomes:
    """By its number a sequence is found again after a death of this worker, too; strays are lost with it."""

    __slots__ = ("_lock", "_strays")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._strays: OrderedDict[tuple[str, int], str] = OrderedDict()  # by member

    def find(self, member: str, number: int, workers: Sequence[str]) -> str:
        """The worker that has a sequence, and where one that begins anew stays: its START ends what it had before."""
        stray = self._strays.get((member, number), "")
        return stray if stray in workers else workers[number % len(workers)]

    def stray(self, member: str, number: int, worker: str) -> None:
        """This one begins elsewhere."""
        with self._lock:
            self._strays[member, number] = worker
            self._strays.move_to_end((member, number))
            if len(self._strays) > MAX_STRAYS:
                self._strays.popitem(last=False)
