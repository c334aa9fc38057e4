"""Statistics of requests that ended without an instance: refused, cancelled, or past their deadline."""

from __future__ import annotations

from collections.abc import Iterable

from broker.worker.plans import Plan
from shm import statistics
from shm.admission import EXPIRED, Request
from shm.errors import Code


def count_endings(requests: Iterable[Request]) -> None:
    """Count each with its model. Those that have none are the channel's to count."""
    for request in requests:
        if isinstance(request.plan, Plan) and request.plan.model is not None:
            word = statistics.CANCELLED if request.code == Code.CANCELLED else statistics.FAIL
            if request.note.startswith(EXPIRED[1].encode()):
                word = statistics.EXPIRED
            block = request.plan.model.instances[0].block
            block[word] += 1
            if word == statistics.FAIL:
                block[statistics.REFUSED_EARLY] += 1
