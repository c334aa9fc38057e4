"""What every way of running a batch shares: the hang watch around a run, a request's failure, the check of its memory.

Used by `execute` (ordinary models) and `assembled` (sequences, state, ragged batches).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from broker.worker.backends import OWN_CODE
from broker.worker.model import Instance
from broker.worker.plans import Plan
from broker.worker.tracebacks import complain
from shm import statistics
from shm.admission import Request
from shm.errors import Code, InferError, can_be_told, described, forget_frames, fresh

_now = time.monotonic_ns


def run_watched(instance: Instance, run: Callable[[], None], rows: int, began: int) -> int:
    """Run with the hang watch on; returns when it ended."""
    instance.begin(rows, began)
    try:
        with OWN_CODE:
            run()
    finally:
        ended = _now()
        instance.end(rows, ended - began)
    return ended


def fail(instance: Instance, request: Request, error: Exception, began: int) -> None:
    """Give the request its bad ending, in one line, and count it."""
    # One that a backend raised from another exception is its answer. What `OWN_CODE` raises is none: it comes from what
    # is no Exception.
    if not (isinstance(error, InferError) and isinstance(error.__cause__, Exception)):
        complain(instance.model.config, error)
    told = answer(instance, error)
    request.fail(Code[told.code], told.message)
    forget_frames(error)  # the backend may hold it
    instance.block[statistics.FAIL] += 1
    instance.block[statistics.FAIL_NS] += _now() - began


def answer(instance: Instance, error: Exception) -> InferError:
    """What a request of its model is told, in one line."""
    if not can_be_told(error):
        return InferError(Code.INTERNAL, described(error).splitlines()[0])
    if error.__cause__ is not None and not isinstance(error.__cause__, Exception):  # what `OWN_CODE` has caught
        return InferError(error.code, f"model '{instance.model.name}', instance '{instance.name}': {error.message}")
    return fresh(error)


def neighbours(requests: Sequence[Request]) -> tuple[int, int] | None:
    """First input and output position, when the requests are neighbours of one plan, in whatever order they came."""
    plan = requests[0].plan
    rows, shift = plan.rows, requests[0].output_position - requests[0].input_position  # type: ignore[union-attr]
    positions = set()
    for request in requests:
        position = request.input_position
        if request.plan is not plan or request.rows != rows or request.output_position - position != shift:
            return None
        positions.add(position)
    first, count = min(positions), len(requests)
    if len(positions) != count or max(positions) - first >= count:
        return None
    return first, first + shift


def check_sizes(plan: Plan) -> None:
    """Raises InferError when a shared file of the plan is shorter than it was: touching it would end this process."""
    truncated = plan.shared and plan.changed_size()
    if truncated:
        raise InferError(Code.INTERNAL, f"shared memory region '{truncated}' changed size: register it again")
