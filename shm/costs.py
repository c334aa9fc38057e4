"""How long a request would take at one of several workers that serve its model, as far as its sender can tell.

Used by clients (`clientlib.spread`), and by workers for steps of ensembles elsewhere
(`broker.worker.ensembles.remote.channel`).
"""

from __future__ import annotations

HALF_NS = 1_000_000_000  # what was measured counts half after so long: a worker that was slow once is tried again
LEAST_NS = 1_000  # that a request is taken to last, so that many do not go at once to a worker that nothing is known of


def cost_ns(outstanding: int, ran_ns: int, idle_ns: int, stuck_ns: int, ahead_ns: int) -> int:
    """`outstanding`: requests that the sender has there. `ran_ns`: of the one that ended last, without what it waited.
    `idle_ns`: since it sent one. `stuck_ns`: for how long none of those has ended. `ahead_ns`: of everybody's requests,
    the sender's among them, as the worker said last (`ClientChannel.ahead`).
    """
    if idle_ns >= HALF_NS:
        ran_ns >>= min(idle_ns // HALF_NS, 62)
    each = max(ran_ns, stuck_ns, LEAST_NS)
    return max(outstanding * each, ahead_ns) + each
