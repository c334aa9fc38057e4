"""What an admitted request meets before it is queued: models that may answer it without an instance.

Called by the loop's leader with what it took from one channel.
"""

from __future__ import annotations

from broker.worker.plans import Plan
from shm.admission import Request


def take_in(requests: list[Request]) -> list[Request]:
    """End those whose answer is known; returns the others, which are to be queued."""
    rest: list[Request] = []
    answered: list[Request] = []
    for request in requests:
        plan = request.plan
        assert isinstance(plan, Plan)
        ensemble = plan.model.ensemble if plan.model is not None else None
        if ensemble is not None:
            ensemble.begin(request)
            continue
        cached = plan.model.cached if plan.model is not None else None
        (answered if cached is not None and cached.answer(request) else rest).append(request)
    if answered:
        answered[0].channel.complete(answered)
    return rest
