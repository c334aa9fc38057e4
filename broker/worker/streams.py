"""The requests of a decoupled model that have begun and not ended, and those that its `execute` is at.

One `Streams` per loaded model (`LoadedModel.streams`): `broker.worker.decoupled` runs with it, `broker.worker.answers`
and `ensembles.flow` tell it what has ended, the loop has it look after what nobody ends.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, final

from broker.repository.config import ModelConfig
from broker.worker.assembly import Assembly
from broker.worker.model import Instance
from shm import statistics
from shm.admission import Request, Verdict
from shm.errors import Code

if TYPE_CHECKING:
    from broker.worker.answers import Answers

CANCELLED: Verdict = (Code.CANCELLED, "the request was cancelled")
DROPPED: Verdict = (Code.INTERNAL, "the model let go of the request without a final response")
_now = time.monotonic_ns


class Endable(Protocol):
    """Where the responses of one request went that nobody can answer any more."""

    def end_if_idle(self, verdict: Verdict) -> None:
        """End it, unless it has ended or a response is on its way."""


@final
class Streams:
    """The requests of one model that have begun and not ended."""

    __slots__ = ("_dropped", "_inside", "_live", "again", "assembly", "lock")

    def __init__(self, config: ModelConfig) -> None:
        self.assembly = Assembly(config) if config.sequence_batching is not None else None  # for controls and states
        self.lock = threading.Lock()  # for an instant: statistics, which any thread may add to; what is to run again
        self._live: dict[Request, Answers] = {}
        self._inside: dict[Request, Instance] = {}
        self._dropped: deque[Endable] = deque()
        self.again: dict[Request, Answers] = {}  # of requests that are to run once more; that runs even if they ended

    def __len__(self) -> int:
        return len(self._live)

    def begin(self, answers: Answers, block: memoryview) -> None:
        """A request has been given to the instance that `block` is of."""
        self._live[answers.request] = answers
        with self.lock:
            block[statistics.LASTING] += 1

    def end(self, request: Request, block: memoryview) -> None:
        """It has ended."""
        with self.lock:
            block[statistics.LASTING] -= 1
        self._live.pop(request, None)

    def run(self, instance: Instance, requests: Sequence[Request], execute: Callable[[], None]) -> None:
        """Call the model with the hang watch on: without a sign of life (`goes_on`) for as long as a run of another
        model may take, it hangs. What it takes in all says nothing about its health, so that is not measured.
        """
        rows = sum(request.rows or 1 for request in requests)
        self._inside.update(dict.fromkeys(requests, instance))
        instance.begin(rows, _now())
        try:
            execute()
        finally:
            instance.end(rows, 0)
            for request in requests:
                self._inside.pop(request, None)

    def goes_on(self, request: Request) -> None:
        """The model has sent a response to `request`, or asked whether one is wanted, or waits for the client: if it is
        in `execute` with it, it does not hang.
        """
        instance = self._inside.get(request)
        if instance is not None:
            instance.block[statistics.STARTED] = _now()

    def drop(self, answers: Endable) -> None:
        """Nobody can answer it any more. Called while memory is collected: takes no lock and ends nothing itself."""
        self._dropped.append(answers)

    def look(self) -> None:
        """End what nobody can answer any more, and what its client does not want any more. From time to time."""
        while self._dropped:
            self._dropped.popleft().end_if_idle(DROPPED)
        # The values alone: while pairs were made, memory might be collected, and others begin and end in between.
        for answers in list(self._live.values()):
            if answers.request.ended:
                answers.end_if_idle(CANCELLED)
