"""What an admitted request meets before it is queued: models, or queues, that may answer it without an instance, and
what it has to wait for.

Called by the loop's leader with what it took from one channel, and by runs of ensembles with their steps.
"""

from __future__ import annotations

from broker.worker.ensembles.run import Withdrawable
from broker.worker.held import Held
from broker.worker.plans import Plan
from shm.admission import Request


def take_in(requests: list[Request], held: Held | None = None) -> list[Request]:
    """End those whose answer is known; returns the others, which are to be queued. `held` keeps what has to wait."""
    rest: list[Request] = []
    answered: list[Request] = []
    for request in requests:
        plan = request.plan
        assert isinstance(plan, Plan)
        model = plan.model
        if model is not None and model.cached is not None and not plan.windows and model.cached.answer(request):
            answered.append(request)
        elif model is not None and model.ensemble is not None:
            model.ensemble.begin(request)
        elif held is not None and model is not None and request.wait_event and held.hold(request, plan, model):
            continue  # it comes later
        else:
            rest.append(request)
    if answered:
        answered[0].channel.complete(answered)
    return rest


def withdraw(request: Request) -> None:
    """Nobody waits for a request that is not queued any more: of an ensemble's, the steps still to run do not."""
    under_way = request.sequence
    if isinstance(under_way, Withdrawable):
        under_way.withdraw()
