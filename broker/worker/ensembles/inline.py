"""A lone request for an ensemble of short steps: they run one after the other, at once, on the leader's thread.

What `Loop._run_inline` is for ordinary models. It needs what an earlier run on the same position has prepared: the
steps' plans and the memory between them. Anything unusual (a member at work, a size that only a run tells, an output
that must be copied, a step that fails) is left to `broker.worker.ensembles.run`, which tells the cases apart.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple, final

from broker.worker.batch import SHORT_NS
from broker.worker.binding import Execution
from broker.worker.ensembles.graph import Graph, Progress
from broker.worker.ensembles.memory import Prepared
from broker.worker.model import Instance, LoadedModel
from broker.worker.plans import Plan
from shm.admission import Request
from shm.errors import forget_frames
from shm.worker_channel import WorkerChannel

if TYPE_CHECKING:
    from broker.worker.ensembles.ensemble import Ensemble

_now = time.monotonic_ns


class Link(NamedTuple):
    """One step on its way: which binding runs on which instance."""

    execution: Execution
    instance: Instance
    rows: int


def chain_of(graph: Graph, prepared: Prepared, client: Plan, output_position: int) -> tuple[Plan, ...]:
    """The steps' plans in an order in which they can run, () if such a request is not to run inline.

    Every output must be written where the client wants it, and every shape must be known before it runs.
    """
    for tensor in client.outputs:
        place = prepared.places.get(tensor.name)
        start = tensor.place.offset + output_position * tensor.place.stride
        if place is None or place.region is not tensor.region or place.offset != start:
            return ()
    chain: list[Plan] = []
    progress = Progress(prepared.needed)
    ready = progress.begin()
    while ready:
        at = ready.pop(0)
        plan = prepared.plans.get(at)
        if plan is None or plan.model is None or not (plan.model.alone or plan.model.immediate):
            return ()
        if any(tensor.open for tensor in plan.outputs):
            return ()
        chain.append(plan)
        names = graph.steps[at].output_map
        ready += progress.wrote(names[tensor.name] for tensor in plan.outputs)
    return tuple(chain)


def lone_run(request: Request, model: LoadedModel) -> Lone | None:
    """The run of `request`, which `peek` returned, if all of its steps may run at once as things stand."""
    plan, ensemble = request.plan, model.ensemble
    assert isinstance(plan, Plan)
    assert ensemble is not None
    links: list[Link] = []
    typical = 0
    prepared = ensemble.at_once(plan, request)
    if prepared is None or not prepared.chain or (plan.shared and plan.changed_size()):
        return None
    for step in prepared.chain:
        member = step.model
        if member is None or not member.free:
            return None
        instance = member.free[-1]
        execution: Execution | None = step.bindings.get((instance.number, 0, 0, step.rows))
        if execution is None or not execution.typical_ns or execution.copies or execution.opens:
            return None
        typical += execution.typical_ns
        links.append(Link(execution, instance, step.rows))
    return Lone(ensemble, request, links, prepared.note) if typical < SHORT_NS else None


@final
class Lone:
    """Such a run: `claim`, `run` if that was possible, `give_back`."""

    __slots__ = ("_claimed", "_ensemble", "_failed", "_links", "_note", "_request")

    def __init__(self, ensemble: Ensemble, request: Request, links: list[Link], note: bytes) -> None:
        self._ensemble, self._request, self._links, self._note = ensemble, request, links, note
        self._claimed: list[Instance] = []
        self._failed = False

    @property
    def models(self) -> set[LoadedModel]:
        """Those that have something to count."""
        return {instance.model for instance in self._claimed}

    def claim(self) -> bool:
        """Take the ensemble and each instance once, so that none is closed or runs elsewhere."""
        for instance in (self._ensemble.model.instances[0], *(link.instance for link in self._links)):
            if instance in self._claimed:
                continue
            free = instance.model.free
            try:
                taken = free.pop()
            except IndexError:  # by a thread that finished meanwhile, or the model is closed
                return False
            if taken is not instance:
                free.append(taken)
                return False
            self._claimed.append(instance)
        return True

    def run(self, channel: WorkerChannel) -> None:
        """Run the steps and publish; if one raises, nothing is published before `give_back`."""
        began = start = _now()
        for execution, instance, rows in self._links:
            instance.begin(rows, began)
            try:
                execution.run()
            except BaseException as error:
                forget_frames(error)  # the backend may hold it
                instance.end(rows, 0)  # the attempt counts for nothing
                self._failed = True
                return
            ended = _now()
            took = ended - began
            execution.measured(took)
            instance.count_inline(rows, took)
            instance.end(rows, took)
            began = ended
        request = self._request
        request.infer_ns = began - start
        self._ensemble.count_inline(request.rows, request.infer_ns)
        request.note = self._note
        if request.note:
            channel.complete((request,))
        else:
            channel.finish(request)

    def give_back(self) -> None:
        """The instances are free. What failed is run again from its beginning: that tells the ways of failing apart."""
        for instance in self._claimed:
            instance.model.free.append(instance)
        if self._failed:
            self._ensemble.begin(self._request)
