"""Answers in the order in which requests were taken from the queue (`preserve_ordering`), over several instances.

One per model version that asks for it; `broker.worker.scheduler` numbers batches, `broker.worker.loop` publishes. A
client's requests leave the queue as they came, so its answers do, too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import final

from shm.admission import Publishes, Request

Endings = Iterable[tuple[Publishes, list[Request]]]


@final
class InOrder:
    """What has run early waits here until everything before it is published."""

    __slots__ = ("_begun", "_lock", "_next", "_waiting")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = 0
        self._next = 0
        self._waiting: dict[int, Endings] = {}

    def begin(self) -> int:
        """The number of a batch that was just taken. Its caller holds the scheduler's lock."""
        number = self._begun
        self._begun += 1
        return number

    def end(self, number: int, endings: Endings) -> None:
        """The batch has run: publish it, and those that waited for it, or leave that to who runs an earlier one."""
        with self._lock:  # also while publishing: two threads must not swap places
            self._waiting[number] = endings
            while (ready := self._waiting.pop(self._next, None)) is not None:
                self._next += 1
                for channel, requests in ready:
                    channel.complete(requests)
