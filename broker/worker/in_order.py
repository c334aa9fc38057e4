"""Answers in the order in which requests were taken from the queue (`preserve_ordering`), over several instances.

One per model version that asks for it; `broker.worker.scheduler` numbers batches, `broker.worker.loop` publishes. A
client's requests leave the queue as they came, so its answers do, too. As in Triton, what ends without having run
(refused, expired, cancelled) is answered at once. Sequences need none of this: an instance runs one batch at a time,
and the order that `oldest` can be told to keep is that of an instance.
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

    __slots__ = ("_begun", "_lock", "_next", "_publishing", "_waiting")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = 0
        self._next = 0
        self._publishing = False  # by one thread at a time: two must not swap places
        self._waiting: dict[int, Endings] = {}

    def begin(self) -> int:
        """The number of a batch that was just taken. Its caller holds the scheduler's lock."""
        number = self._begun
        self._begun += 1
        return number

    def end(self, number: int, endings: Endings) -> None:
        """The batch has run: publish it, and those that waited for it, or leave that to who runs an earlier one."""
        with self._lock:
            self._waiting[number] = endings
            if self._publishing:
                return
            self._publishing = True
        while (ready := self._take_next()) is not None:
            for channel, requests in ready:  # without the lock: whoever ends a batch meanwhile goes on
                channel.complete(requests)

    def _take_next(self) -> Endings | None:
        with self._lock:
            ready = self._waiting.pop(self._next, None)
            if ready is None:
                self._publishing = False
            else:
                self._next += 1
            return ready
