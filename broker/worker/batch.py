"""What one thread runs at a time. Made by `broker.worker.scheduler`, run by `broker.worker.loop`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

from broker.worker.model import Instance
from broker.worker.plans import Plan
from broker.worker.queues import Row
from broker.worker.sequence_endings import Ending, tell
from broker.worker.undelivered import Kept
from shm.admission import Publishes, Request
from shm.worker_channel import WorkerChannel

TAKE_LIMIT = 64
LIGHT = 1 << 18  # bytes of tensors that are copied in less time than that
SHORT_NS = 200_000  # longer batches run without the lead: a hand-off between threads costs 10-20 µs


@final
class Batch:
    """What one thread runs: requests of one model on one of its instances. `alone`: nothing else may run.

    `rows` is what its queue gave: the requests, with None for empty slots of a sequence batch. `number`: its place
    among the model's batches where answers keep their order (`broker.worker.in_order`).

    `endings`: sequences that the model is told of first. There may be nothing else to do: no requests.
    """

    __slots__ = ("alone", "endings", "instance", "number", "requests", "rows")

    def __init__(
        self, instance: Instance, requests: list[Request], rows: Sequence[Row] = (), *, alone: bool = False
    ) -> None:
        self.instance = instance
        self.requests = requests
        self.rows = rows
        self.alone = alone
        self.endings: Sequence[Ending] = ()
        order = instance.model.in_order
        self.number = 0 if order is None or alone else order.begin()

    def begin(self) -> bool:
        """Tell the model what it is to know first. Is there something to run?"""
        if self.endings:
            tell(self.instance, self.endings)
        return bool(self.requests)

    def short(self) -> bool:
        """Is this known to be over sooner than a hand-off is worth? Unmeasured is long."""
        request = self.requests[0] if self.requests else None
        if request is None or self.alone or self.endings or isinstance(request.sequence, Kept):
            return False
        plan = request.plan
        if len(self.requests) == 1 and isinstance(plan, Plan):
            if self.instance.model.assembly is None:
                key = (self.instance.number, request.input_position, request.output_position, request.rows)
                execution = plan.bindings.get(key)
                return execution is not None and 0 < execution.typical_ns < SHORT_NS
            if sum(tensor.place.byte_size for tensor in (*plan.inputs, *plan.outputs)) > LIGHT:
                return False
        rows = sum(request.rows for request in self.requests)
        return 0 < self.instance.typical.get(rows, 0) < SHORT_NS


def by_channel(requests: list[Request]) -> Iterable[tuple[Publishes, list[Request]]]:
    """The requests of each channel, in their order."""
    first = requests[0].channel
    for request in requests:
        if request.channel is not first:
            break
    else:
        return ((first, requests),)
    groups: dict[Publishes, list[Request]] = {}
    for request in requests:
        groups.setdefault(request.channel, []).append(request)
    return tuple(groups.items())


def worth_taking(channel: WorkerChannel, now: int) -> int:
    """How many entries of a channel to queue at once.

    All, where requests may run together. One of a model that runs each alone: queued, it costs twice what it costs
    inline, and what is queued keeps all others from running inline. With many of each client in the queue it would
    never be empty again while the clients send a new request for every answer.
    """
    request = channel.peek(now)
    model = None if request is None else request.plan.model  # type: ignore[union-attr]
    return 1 if model is not None and model.alone else TAKE_LIMIT
