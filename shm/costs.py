"""How long a request would take at one of several workers that serve its model, as far as its sender can tell.

Used by clients (`clientlib.spread`), and by workers for steps of ensembles elsewhere
(`broker.worker.ensembles.remote.plans`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

HALF_NS = 1_000_000_000  # what was measured counts half after so long: a worker that was slow once is tried again
LEAST_NS = 1_000  # that a request is taken to last, so that many do not go at once to a worker that nothing is known of
FAILED_TIMES = 32  # of the longest run: where all requests fail. If idle, it is tried again after log2(32) s


class Seen(NamedTuple):
    """What the sender of a request sees of a worker."""

    outstanding: int  # requests that it has there
    ran_ns: int  # of the one that ended well last, without what it waited; 0: none has
    failed: bool  # have some failed, and none ended well?
    idle_ns: int  # since it sent one, or first could have
    stuck_ns: int  # for how long none of those there has ended
    ahead_ns: int  # of everybody's requests, the sender's among them, as the worker said last (`ClientChannel.ahead`)


def costs_ns(workers: Sequence[Seen]) -> list[int]:
    """How long a request would be at each, roughly.

    Where none has ended well, it is taken to run as long as at the others on average: else a worker that has hung from
    its first request, and is told of only so far, would look like the quickest. Where requests fail, FAILED_TIMES as
    long as it runs, or makes its sender wait, at the slowest: else the one that is always free would get all of them.
    """
    if all(seen.ran_ns for seen in workers):
        return [_cost_ns(seen, seen.ran_ns) for seen in workers]
    known = [seen.ran_ns for seen in workers if seen.ran_ns]
    mean = sum(known) // len(known) if known else 0
    dear = FAILED_TIMES * max(max(seen.ran_ns, seen.stuck_ns) for seen in workers)
    return [_cost_ns(seen, seen.ran_ns or (dear if seen.failed else mean)) for seen in workers]


def _cost_ns(seen: Seen, ran_ns: int) -> int:
    if seen.idle_ns >= HALF_NS:
        ran_ns >>= min(seen.idle_ns // HALF_NS, 62)
    each = max(ran_ns, seen.stuck_ns, LEAST_NS)
    return max(seen.outstanding * each, seen.ahead_ns) + each
