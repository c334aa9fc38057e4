"""Where the requests of a plan go whose model several workers serve: the choice, without I/O.

Held by plans of both kinds of client, one `Spread` per thread or loop, and only where there is a choice: everybody else
has one `Bound`. A worker's load is what this process sees of it: how many requests it has there, how long the last one
took, waiting included, which tells of other processes' requests, and for how long none has ended.
"""

from __future__ import annotations

import time
from typing import Generic, final

from clientlib.link import Bound, L, Lanes, Link, Prepared
from clientlib.submission import Route

HALF_NS = 1_000_000_000  # what was measured counts half after so long: a worker that was slow once is tried again
LEAST_NS = 1_000  # that a request is taken to last, so that many do not go at once to a worker that nothing is known of
AGAIN_NS = 1_000_000_000  # between two tries to reach a worker that was not up

_now_ns = time.monotonic_ns


@final
class Spread(Generic[L]):
    """A plan's bindings, by worker. Used by the thread or loop that it was made for."""

    __slots__ = (
        "_homes",
        "_lanes",
        "_model",
        "_moves",
        "_tried_ns",
        "_turn",
        "_used",
        "bounds",
        "link",
        "prepared",
        "workers",
    )

    def __init__(self, model: str, link: Link[L], prepared: Prepared[L]) -> None:
        self._model = model
        self._homes = link.homes
        self._lanes: Lanes[L] = link.lanes
        self._used: dict[str, int] = {}  # when a request was last sent there
        self._moves: dict[str, tuple[int, int]] = {}  # completions so far, and when they were found to have changed
        self._turn = 0
        self._tried_ns = _now_ns()
        self.link = link
        self.prepared = prepared
        self.workers = prepared.workers
        self.bounds: dict[str, Bound[L]] = {}

    def pick(self, route: Route) -> str:
        """The worker for a request. It may have no binding yet if the request is a step of a sequence."""
        sequence_id, start, end = route
        if not sequence_id:
            home = self._freest()[0]
            self._used[home] = _now_ns()
            return home
        homes, workers = self._homes, self.workers
        if start:
            home = homes.begin(self._model, sequence_id, workers, self._freest())
        else:
            home = homes.find(self._model, sequence_id, workers)
        if end:
            homes.end(self._model, sequence_id)
        return home

    def missing(self) -> list[str]:
        """Workers without a binding."""
        return [worker for worker in self.workers if worker not in self.bounds]

    def is_due(self) -> bool:
        """Is it time to try those without a binding again? True is taken as said: they are tried now."""
        if len(self.bounds) == len(self.workers) or _now_ns() - self._tried_ns < AGAIN_NS:
            return False
        self._tried_ns = _now_ns()
        return True

    def _freest(self) -> list[str]:
        """The workers that are up, the one with the least to do first; where none is, all: any is waited for."""
        up = [worker for worker, bound in self.bounds.items() if not bound.channel.away] or list(self.bounds)
        self._turn += 1  # of workers that are equal now this one, now that
        at, now = self._turn % len(up), _now_ns()
        return sorted((*up[at:], *up[:at]), key=lambda worker: self._cost(worker, now))

    def _cost(self, worker: str, now: int) -> int:
        """How long (ns) a request would be there, roughly."""
        idle_ns = now - self._used.get(worker, now)
        outstanding, stuck_ns = self._look(worker, now)
        took_ns = self.bounds[worker].channel.took >> min(idle_ns // HALF_NS, 62)
        return (outstanding + 1) * max(took_ns, stuck_ns, LEAST_NS)

    def _look(self, worker: str, now: int) -> tuple[int, int]:
        """Requests of this process there, whatever thread sent them, and for how long (ns) none of them has ended."""
        channels = [lane.channel for lane in self._lanes.all() if lane.worker == worker]
        outstanding = sum(channel.outstanding for channel in channels)
        completed = sum(channel.completed for channel in channels)
        before, since = self._moves.get(worker, (-1, now))
        if not outstanding or completed != before:
            self._moves[worker] = completed, now
            return outstanding, 0
        return outstanding, now - since
