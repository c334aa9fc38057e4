"""One priority level of a dynamic batcher: who waits in it, and for how long. Used by `broker.worker.batcher`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from broker.repository.scheduling import QueuePolicy
from broker.worker.deadlines import Deadlines
from shm.admission import EXPIRED, Request, Verdict
from shm.errors import Code
from shm.fair_line import FairLine

FULL: Verdict = (Code.UNAVAILABLE, "Exceeds maximum queue size")
MEASURED = 4  # requests at least before the pace says anything
_MS = 1_000_000


def told_more(request: Request) -> bool:
    """Does its client read more than Triton's text? Those of Triton's do not."""
    return request.plan is not None and bool(request.plan.owner)


@final
class Level:
    """A level and its policy. `late_at`: when its first request has waited too long; 0 = never.

    `size`: those that count for `max_queue_size`, which are all in `line` and `delayed`. The latter have waited too
    long (timeout_action DELAY): they go when nothing else of their level waits.
    """

    __slots__ = (
        "_admitted",
        "_full_at",
        "_late",
        "_pace",
        "_seen",
        "_timeout",
        "delayed",
        "late_at",
        "line",
        "policy",
        "size",
    )

    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy
        self.line = FairLine[Request]()
        self.delayed = FairLine[Request]()
        self.size = 0
        self.late_at = 0
        self._timeout = policy.default_timeout_microseconds * 1000
        self._full_at = 0  # when one was refused, while something has waited ever since
        self._admitted = 0  # since then: as many as have been taken
        self._pace = 0.0  # ns until a place is free
        self._seen = 0  # requests that say so
        self._late = Deadlines()  # only with a time-out; a request's own may only be shorter

    def add(self, request: Request, now: int) -> None:
        """Queue behind the others of its client."""
        self._admitted += 1
        if not self.size:
            self._full_at = 0
        self.line.add(request)
        self.size += 1
        if self._timeout:
            until, own = now + self._timeout, request.queue_timeout
            self._late.add(request, min(until, own) if own and self.policy.allow_timeout_override else until)
            self.late_at = self._late.earliest()

    def full(self, request: Request, now: int) -> Verdict:
        """For one that is refused because `max_queue_size` wait. Native clients are told when a place is free, as far
        as what has come in between the latest refusals says so.
        """
        if self._full_at and self._admitted > 0:
            pace = (now - self._full_at) / self._admitted
            self._pace += (pace - self._pace) / (8 if self._seen else 1)
            self._seen += self._admitted
        if self._admitted > 0 or not self._full_at:
            self._full_at, self._admitted = now, 0
        if not told_more(request):
            return FULL
        code, text = FULL
        text += f": {self.size} requests wait, max_queue_size is {self.policy.max_queue_size}"
        if self._seen >= MEASURED:
            text += f"; try again in {max(1, round(self._pace / _MS))} ms"
        return code, text

    def expired(self, request: Request) -> Verdict:
        """For one that has waited too long; native clients are told what says so."""
        if not told_more(request):
            return EXPIRED
        code, text = EXPIRED
        allowed = self.policy.default_timeout_microseconds
        return code, f"{text}: it waited longer than default_timeout_microseconds ({allowed}) of its model allows"

    def remove(self, request: Request) -> bool:
        """Drop one request; False when it is not here."""
        if not (self.line.remove(request) or self.delayed.remove(request)):
            return False
        self.size -= 1
        self._admitted -= 1  # whoever takes its place says nothing about the pace
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
