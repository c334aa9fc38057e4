"""How long a request would take at one of several workers that serve its model, as far as its sender can tell.

Used by clients (`clientlib.spread`), and by workers for steps of ensembles elsewhere
(`broker.worker.ensembles.remote.plans`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

HALF_NS = 1_000_000_000  # what was measured counts half after so long: a worker that was slow once is tried again
LEAST_NS = 1_000  # that a request is taken to last, so that many do not go at once to a worker that nothing is known of
FAILED_TIMES = 32  # what the longest run counts where all have failed; it halves, so an idle worker is tried after 5 s


class Seen(NamedTuple):
    """What the sender of a request sees of a worker."""

    outstanding: int  # requests that it has there
    ran_ns: int  # of the one that ended well last, without what it waited; 0: none has
    failed: bool  # have some failed, and none ended well?
    idle_ns: int  # since it sent one, or first could have
    stuck_ns: int  # for how long none of those there has ended
    ahead_ns: int  # of everybody's requests, the sender's among them, as the worker said last (`ClientChannel.ahead`)


def costs_ns(workers: Sequence[Seen]) -> list[int]:
    """How long a request would be at each, roughly."""
    ran, stuck = [seen.ran_ns for seen in workers], [seen.stuck_ns for seen in workers]
    costs = []
    for seen in workers:
        ran_ns = seen.ran_ns or assumed_ns(seen.failed, ran, stuck)
        costs.append(cost_ns(seen.outstanding, ran_ns, seen.idle_ns, seen.stuck_ns, seen.ahead_ns))
    return costs


def cost_ns(outstanding: int, ran_ns: int, idle_ns: int, stuck_ns: int, ahead_ns: int) -> int:
    """How long a request would be at one worker; arguments as in `Seen`. `ran_ns`: if none has, `assumed_ns`."""
    if idle_ns >= HALF_NS:
        ran_ns >>= min(idle_ns // HALF_NS, 62)
    each = max(ran_ns, stuck_ns, LEAST_NS)
    return max(outstanding * each, ahead_ns) + each


def assumed_ns(failed: bool, ran_ns: Sequence[int], stuck_ns: Sequence[int]) -> int:
    """How long a request is taken to run at a worker where none has ended well. The rest is of all there are.

    As long as at the others on average: else one that has hung from its first request would look like the quickest, as
    soon as that is given up. Where requests fail, FAILED_TIMES as long as they run, or keep their sender waiting, at
    the slowest: else the one that is always free would get all of them.
    """
    if failed:
        return FAILED_TIMES * max((*ran_ns, *stuck_ns))
    known = [ns for ns in ran_ns if ns]
    return sum(known) // len(known) if known else 0
