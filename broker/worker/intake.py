"""What an admitted request meets before it is queued: models, or queues, that may answer it without an instance.

Called by the loop's leader with what it took from one channel, and by runs of ensembles with their steps.
"""

from __future__ import annotations

from broker.worker.binding import deliver
from broker.worker.ensemble_run import Withdrawable
from broker.worker.plans import Plan
from broker.worker.undelivered import Kept
from shm import statistics
from shm.admission import Request
from shm.errors import Code, as_infer_error


def take_in(requests: list[Request]) -> list[Request]:
    """End those whose answer is known; returns the others, which are to be queued."""
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
        else:
            rest.append(request)
    if answered:
        answered[0].channel.complete(answered)
    return rest


def hand_over(request: Request) -> bool:
    """Answer a request that its queue refused with HAND_OVER: its step has run, and there is room for the result now.

    What does not fit now either is an error, and gone.
    """
    plan, kept = request.plan, request.sequence
    assert isinstance(plan, Plan)
    assert plan.model is not None
    assert isinstance(kept, Kept)
    missing = [tensor.name for tensor in plan.outputs if tensor.name not in kept.outputs]
    try:
        if missing:
            request.fail(Code.INVALID_ARG, f"output '{missing[0]}' was not asked for when this step was run")
        else:
            arrays = [kept.outputs[tensor.name] for tensor in plan.outputs]
            request.copied = deliver(plan.model, request, plan.outputs, arrays)
            request.give(kept.given)
            kept.record.states.update(kept.states)
    except Exception as error:
        failure = as_infer_error(error)
        request.fail(Code[failure.code], failure.message)
    plan.model.instances[0].block[statistics.FAIL if request.code else statistics.SUCCESS] += 1
    request.channel.complete((request,))
    return True


def withdraw(request: Request) -> None:
    """Nobody waits for a request that is not queued any more: of an ensemble's, the steps still to run do not."""
    under_way = request.sequence
    if isinstance(under_way, Withdrawable):
        under_way.withdraw()
