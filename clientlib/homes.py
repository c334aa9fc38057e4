"""Which worker has a sequence, of models that several workers serve.

One per session with the broker (`clientlib.link.Link`); asked by `clientlib.spread`. Any thread.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import final

MAX_HOMES = 65_536  # sequences whose worker is remembered; those that began first are forgotten first


@final
class Homes:
    """Which worker has a sequence: the one that its START went to.

    `shared`: its steps may come through other processes, as those of gateways do. Then its id alone decides.
    """

    __slots__ = ("_counts", "_homes", "_lock", "_shared")

    def __init__(self, *, shared: bool = False) -> None:
        self._shared = shared
        self._lock = threading.Lock()
        self._homes: dict[tuple[str, int], str] = {}
        self._counts: Counter[tuple[str, str]] = Counter()  # by model and worker

    def find(self, model: str, sequence_id: int, workers: tuple[str, ...]) -> str:
        """The worker of a sequence that has begun."""
        if self._shared:
            return workers[sequence_id % len(workers)]
        home = self._homes.get((model, sequence_id), "")
        return home if home in workers else workers[0]

    def begin(self, model: str, sequence_id: int, workers: tuple[str, ...], up: list[str]) -> str:
        """The worker of one that begins: of those that are `up`, the freest first, the one with the fewest sequences.

        A sequence keeps a slot of its worker's instances, whether steps of it run just now or not. One that begins anew
        stays where it was, if that is up: there its START ends what it had before, which would keep its slot elsewhere.
        """
        if self._shared:
            return self.find(model, sequence_id, workers)
        with self._lock:
            before = self._homes.get((model, sequence_id))
            self._forget(model, sequence_id)
            if len(self._homes) >= MAX_HOMES:
                self._forget(*next(iter(self._homes)))
            home = before if before in up else min(up, key=lambda worker: self._counts[model, worker])
            self._homes[model, sequence_id] = home
            self._counts[model, home] += 1
        return home

    def end(self, model: str, sequence_id: int) -> None:
        """Its last step has been sent."""
        with self._lock:
            self._forget(model, sequence_id)

    def _forget(self, model: str, sequence_id: int) -> None:
        home = self._homes.pop((model, sequence_id), None)
        if home is not None:
            self._counts[model, home] -= 1
