"""Where the requests of a plan go whose model several workers serve: the choice, without I/O.

Held by plans of both kinds of client, one `Spread` per thread or loop, and only where there is a choice: everybody else
has one `Bound`. A worker's load is what it says itself (`ClientChannel.ahead`, at most 10 ms old) and what this process
sees of it: how many requests it has there, how long the last one ran, and for how long none has ended.
Of which nothing is known, or nothing good, that is not taken for a quick one (`shm.costs`).
"""

from __future__ import annotations

import time
from operator import itemgetter
from typing import Generic, final

from clientlib.link import Bound, L, Link, Prepared
from clientlib.load import AtWorker
from clientlib.submission import Route
from shm.client_channel import ClientChannel
from shm.costs import assumed_ns, cost_ns

AGAIN_NS = 1_000_000_000  # between two tries to reach a worker that was not up

_COST = itemgetter(0)
_now_ns = time.monotonic_ns


@final
class Spread(Generic[L]):
    """A plan's bindings, by worker. Used by the thread or loop that it was made for."""

    __slots__ = ("_homes", "_load", "_model", "_tried_ns", "_turn", "_used", "bounds", "link", "prepared", "workers")

    def __init__(self, model: str, link: Link[L], prepared: Prepared[L]) -> None:
        self._model = model
        self._homes = link.homes
        self._load = link.load
        self._used: dict[str, int] = {}  # when a request was last sent there, or first might have been
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
            return self._freest()
        homes, workers = self._homes, self.workers
        if start:
            home = homes.begin(self._model, sequence_id, workers, self._by_cost(), self._may_live_on())
        else:
            home = homes.find(self._model, sequence_id, workers)
        if end:
            homes.end(self._model, sequence_id)
        return home

    def missing(self) -> list[str]:
        """Workers without a binding."""
        return [worker for worker in self.workers if worker not in self.bounds]

    def _may_live_on(self) -> list[str]:
        """Workers that this plan has not reached, or that do not respond: not known to have lost their sequences."""
        bounds = self.bounds.items()
        silent = [worker for worker, bound in bounds if bound.channel.away and not bound.channel.replaced]
        return [*self.missing(), *silent]

    def is_due(self) -> bool:
        """Is it time to try those without a binding again? True is taken as said: they are tried now."""
        if len(self.bounds) == len(self.workers) or _now_ns() - self._tried_ns < AGAIN_NS:
            return False
        self._tried_ns = _now_ns()
        return True

    def _freest(self) -> str:
        """The worker with the least to do, of those that are up and respond; where none does, of all."""
        now = _now_ns()
        load = self._load.look(now)
        _, home = min(self._costs(load, now), key=_COST)
        self._used[home] = now
        if home in load:
            load[home].outstanding += 1  # this one, for whoever is next to look at the same count
        return home

    def _by_cost(self) -> list[str]:
        """The workers that are up, the one with the least to do first; where none is, all."""
        now = _now_ns()
        return [worker for _, worker in sorted(self._costs(self._load.look(now), now), key=_COST)]

    def _costs(self, load: dict[str, AtWorker], now: int) -> list[tuple[int, str]]:
        """How long (ns) a request would be, roughly, at each worker that is up; where none is, at each. Of equal ones
        now this, now that comes first.
        """
        costs = []
        for worker, bound in self.bounds.items():
            if not bound.channel.away:
                costs.append((self._cost(worker, bound.channel, load, now), worker))
        if not costs:
            costs = [(self._cost(worker, bound.channel, load, now), worker) for worker, bound in self.bounds.items()]
        self._turn += 1
        first = self._turn % len(costs)
        return costs[first:] + costs[:first]

    def _cost(self, worker: str, channel: ClientChannel, load: dict[str, AtWorker], now: int) -> int:
        there, idle_ns = load.get(worker), now - self._used.setdefault(worker, now)
        ran_ns = channel.ran or self._assumed(channel.failed, load, now)
        if there is None or not there.outstanding:
            return cost_ns(0, ran_ns, idle_ns, 0, channel.ahead())
        return cost_ns(there.outstanding, ran_ns, idle_ns, now - there.since, channel.ahead())

    def _assumed(self, failed: bool, load: dict[str, AtWorker], now: int) -> int:
        there = [load[worker] for worker in self.bounds if worker in load]
        stuck = [now - at.since for at in there if at.outstanding]
        return assumed_ns(failed, [bound.channel.ran for bound in self.bounds.values()], stuck)
