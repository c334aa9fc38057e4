"""One priority level of a dynamic batcher: who waits in it, and for how long. Used by `broker.worker.batcher`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from broker.repository.scheduling import QueuePolicy
from broker.worker.deadlines import Deadlines
from broker.worker.fair_line import FairLine
from shm.admission import Request


@final
class Level:
    """A level and its policy. `late_at`: when its first request has waited too long; 0 = never.

    `size`: those that count for `max_queue_size`, which are all in `line` and `delayed`. The latter have waited too
    long (timeout_action DELAY): they go when nothing else of their level waits.
    """

    __slots__ = ("_late", "_timeout", "delayed", "late_at", "line", "policy", "size")

    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy
        self.line = FairLine()
        self.delayed = FairLine()
        self.size = 0
        self.late_at = 0
        self._timeout = policy.default_timeout_microseconds * 1000
        self._late = Deadlines()  # only with a time-out; a request's own may only be shorter

    def add(self, request: Request, now: int) -> None:
        """Queue behind the others of its client."""
        self.line.add(request)
        self.size += 1
        if self._timeout:
            until, own = now + self._timeout, request.queue_timeout
            self._late.add(request, min(until, own) if own and self.policy.allow_timeout_override else until)
            self.late_at = self._late.earliest()

    def remove(self, request: Request) -> bool:
        """Drop one request; False when it is not here."""
        if not (self.line.remove(request) or self.delayed.remove(request)):
            return False
        self.size -= 1
        self.forget((request,))
        return True

    def take(self, batch: Sequence[Request]) -> None:
        """Take out what of `batch` is of this level, first in line. It may still be late until it is forgotten."""
        for line in (self.line, self.delayed):
            own = [request for request in batch if line.has(request)]
            line.serve(own)
            self.size -= len(own)

    def forget(self, requests: Sequence[Request]) -> None:
        """They wait no more, so they cannot be late."""
        if len(self._late):
            for request in requests:
                self._late.remove(request)
            self.late_at = self._late.earliest()

    def late(self, now: int) -> list[Request]:
        """Take out those that have waited too long; with DELAY they stay, behind the others."""
        late: list[Request] = []
        for request in self._late.passed(now):
            waits = self.line.remove(request)  # else it was taken already, and waits for its batch to begin
            if self.policy.timeout_action != "DELAY":
                late.append(request)
                self.size -= waits
            elif waits:
                self.delayed.add(request)
        self.late_at = self._late.earliest()
        return late
