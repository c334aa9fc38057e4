"""When queued requests have waited too long. Used by `broker.worker.scheduler` and `batcher`, under the one lock."""

from __future__ import annotations

import heapq
import itertools
from typing import Any, final

from shm.admission import Request


@final
class Deadlines:
    """Those of the queued requests, the earliest first."""

    __slots__ = ("_entries", "_heap", "_order")

    def __init__(self) -> None:
        self._entries: dict[Request, list[Any]] = {}
        self._heap: list[list[Any]] = []  # deadline, number, request; None = it is not queued any more
        self._order = itertools.count()

    def earliest(self) -> int:
        """0 = none."""
        while self._heap and self._heap[0][2] is None:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: Request, at: int) -> None:
        """It is queued, and waits until `at`."""
        entry = self._entries[request] = [at, next(self._order), request]
        heapq.heappush(self._heap, entry)

    def remove(self, request: Request) -> None:
        """It is queued no more. Most never get near their deadline: what they leave behind goes in one sweep."""
        entry = self._entries.pop(request, None)
        if entry is not None:
            entry[2] = None  # the request keeps its channel's memory mapped
            if len(self._heap) > 2 * len(self._entries) + 64:
                self._heap = [entry for entry in self._heap if entry[2] is not None]
                heapq.heapify(self._heap)

    def passed(self, now: int) -> list[Request]:
        """Take out those whose deadline has passed."""
        late: list[Request] = []
        while 0 < self.earliest() <= now:
            request = heapq.heappop(self._heap)[2]
            del self._entries[request]
            late.append(request)
        return late
