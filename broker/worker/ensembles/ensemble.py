"""A loaded ensemble: its requests are runs, whose steps are internal requests in the members' queues.

`Ensemble.begin` is called by whoever takes requests in (`broker.worker.intake`): the loop's leader, or the run of an
outer ensemble. What happens to a request is in `broker.worker.ensembles.run`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from broker.repository.scheduling import Step
from broker.worker.decoupled import taker_of
from broker.worker.ensembles.flow import Branch, Flow
from broker.worker.ensembles.graph import Gates, Graph
from broker.worker.ensembles.inline import chain_of
from broker.worker.ensembles.memory import Outputs, Prepared, Value
from broker.worker.ensembles.run import Run, Submit
from broker.worker.execute import run_batch
from broker.worker.model import LoadedModel
from broker.worker.plans import Plan
from broker.worker.undelivered import Undelivered, lost
from shm import statistics
from shm.admission import EXPIRED, Request
from shm.errors import Code, InferError
from shm.layout import SEQUENCE_AGAIN, SEQUENCE_START

if TYPE_CHECKING:
    from broker.worker.cuda.events import Waiters

MAX_PREPARED = 16  # per plan of a client, which chooses positions and rows: each holds the run's intermediate tensors
MAX_FLOWS = 256  # requests of a decoupled ensemble at a time: each has a thread
PREPARED_BYTES = 64 << 20  # of such tensors, also per plan; a run that needs more gets its memory anew


class Members(Protocol):
    """The models of this worker (`broker.worker.models`). From any thread."""

    def pin(self, steps: Iterable[Step]) -> list[LoadedModel]:
        """The model of each step; none of them is closed before `unpin`. Raises InferError UNAVAILABLE."""

    def unpin(self, models: Iterable[LoadedModel]) -> None:
        """They may go when they are replaced or unloaded."""

    def adopt(self, plan: Plan, model: LoadedModel) -> None:
        """Bind a step's plan."""

    def look_later(self) -> None:
        """Have `Ensemble.expire` called until it says that nothing is left."""


class Ensemble:
    """One loaded version. `submit` queues steps, `take_back` ends those that still wait."""

    def __init__(self, model: LoadedModel, members: Members, submit: Submit, take_back: Submit) -> None:
        assert model.config.ensemble is not None
        self.model = model
        self.graph = Graph(model.config.ensemble)
        self.adopt = members.adopt
        self._members = members
        self._submit, self._take_back = submit, take_back
        self._lock = threading.Lock()
        limit = model.config.ensemble.max_inflight_requests
        self._gates = Gates(limit) if limit else None
        self._undelivered: Undelivered[Outputs] = Undelivered()
        self._following: deque[Request] = deque()  # they are in, and not queued yet
        self._passing = False
        self._epoch = 0
        self._waiters: Waiters | None = None
        self._block = model.instances[0].block

    def begin(self, request: Request) -> None:
        """Start a client's (or an outer ensemble's) request; its ending is published when the run is over."""
        request.channel.start((request,))
        plan, streams = request.plan, self.model.streams
        assert isinstance(plan, Plan)
        if streams is not None:
            taker = taker_of(self.model.instances[0], streams, request, time.monotonic_ns())
            if taker is not None:
                self.started()
                Flow(self, request, taker).begin()
            return
        run = self.run(request, self.queue, lambda: request.channel.complete((request,)))
        if request.wait_event and plan.windows:
            self._begin_after_event(run, request, plan)
        else:
            run.begin()

    def _begin_after_event(self, run: Run, request: Request, plan: Plan) -> None:
        """Its client is not done with what it reads, or wants to have written."""
        from broker.worker.cuda.events import Waiters, events_of

        try:
            if self._waiters is None:
                self._waiters = Waiters()
            then = lambda error: run.begin() if error is None else run.refuse(error)  # noqa: E731
            self._waiters.add(request, events_of(request, plan), then)
        except (InferError, RuntimeError) as error:  # RuntimeError: there is no thread to be had
            run.refuse(error)

    def run_alone(self, request: Request) -> None:
        """Run all steps here and now, on members that nobody else uses; publishing the ending is the caller's."""
        waiting: list[Request] = []
        self.run(request, waiting.extend, lambda: None).begin()
        while waiting:
            step = waiting.pop(0)
            plan = step.plan
            assert isinstance(plan, Plan)
            assert plan.model is not None
            run_batch(plan.model.instances[0], [step], [step])
            step.channel.complete((step,))

    def run(self, request: Request, submit: Submit, publish: Callable[[], None]) -> Run:
        """What becomes of a request; it has not begun."""
        return Run(self, request, submit, publish)

    def branch(self, flow: Flow, request: Request, parent: Branch | None, written: Mapping[str, Value]) -> Branch:
        """What follows from one response of a member, or from the client's request; it has not begun."""
        return Branch(flow, self, request, parent, written)

    def close(self) -> None:
        """Its model is closed; runs may still be under way."""

    # --- of runs ------------------------------------------------------------------------------------------------

    def pin(self, steps: Sequence[int]) -> dict[int, LoadedModel]:
        """The members that these steps run on, until `unpin`. Raises InferError UNAVAILABLE."""
        return dict(zip(steps, self._members.pin([self.graph.steps[at] for at in steps]), strict=True))

    def unpin(self, members: dict[int, LoadedModel]) -> None:
        """They have done their work."""
        self._members.unpin(members.values())

    def take_back(self, steps: list[Request]) -> None:
        """End those that wait, for a queue or a gate, with CANCELLED."""
        if self._gates is not None:
            with self._lock:
                outside = [step for step in steps if self._gates.remove(step)]
            for step in outside:
                step.fail(Code.CANCELLED, "the request was cancelled")
                step.channel.complete((step,))
            steps = [step for step in steps if step not in outside]
        if steps:
            self._take_back(steps)

    def left(self, steps: Sequence[Request]) -> None:
        """They have ended: others may go to their members."""
        if self._gates is None:
            return
        with self._lock:
            self._following.extend(step for step in map(self._gates.leave, steps) if step is not None)
            if self._passing:
                return  # by a step that ended at once
            self._passing = True
        while True:
            with self._lock:
                if not self._following:
                    self._passing = False
                    return
                step = self._following.popleft()
            self._submit([step])
            assert isinstance(step.channel, Run)
            step.channel.look()

    def queue(self, steps: list[Request]) -> None:
        """Let steps go to their members, as far as `max_inflight_requests` lets them."""
        if self._gates is not None:
            with self._lock:
                steps = [step for step in steps if self._gates.enter(step)]
        if steps:
            self._submit(steps)

    def prepared(self, plan: Plan, request: Request, behind: frozenset[str]) -> Prepared:
        """What an earlier run on the same position left, or nothing of the sort. The caller's alone until `keep`.

        `behind`: of a branch, the tensors that it begins with.
        """
        with self._lock:
            found = plan.bindings.pop(self._key(request), None) if plan.model is self.model else None
            if isinstance(found, Prepared) and found.epoch == self._epoch:
                return found
            return Prepared(self.graph.needed(tensor.name for tensor in plan.outputs), self._epoch)

    def keep(self, plan: Plan, request: Request, prepared: Prepared) -> None:
        """For the next run on that position, in place of the oldest when there is too much."""
        if prepared.chain is None:
            inline = self._gates is None and self.model.cached is None and self.model.streams is None
            prepared.chain = chain_of(self.graph, prepared, plan, request.output_position) if inline else ()
            prepared.note = request.note
        prepared.kept = prepared.byte_size
        room = PREPARED_BYTES - prepared.kept
        with self._lock:
            bindings = plan.bindings
            if plan.model is not self.model or plan.closed is not None or prepared.epoch != self._epoch or room < 0:
                return
            while bindings and (len(bindings) >= MAX_PREPARED or sum(each.kept for each in bindings.values()) > room):
                del bindings[next(iter(bindings))]
            bindings[self._key(request)] = prepared

    def keep_undelivered(self, request: Request, outputs: Outputs, now: int) -> None:
        """A sequence's step has run, and its client had too little room for what it gave."""
        assert isinstance(request.plan, Plan)
        with self._lock:
            self._undelivered.keep((request.plan.owner, request.sequence_id), outputs, now)
        self._members.look_later()

    def expire(self, now: int) -> bool:
        """What nobody has asked for in time goes. Is anything left?"""
        with self._lock:
            self._undelivered.expire(now)
            return len(self._undelivered) > 0

    def undelivered(self, request: Request) -> Outputs | None:
        """What `request`, a step of a sequence, asks for once more: that has run. None: it is to run.

        Raises InferError if it has run and is not kept any more.
        """
        assert isinstance(request.plan, Plan)
        key = (request.plan.owner, request.sequence_id)
        with self._lock:
            self._undelivered.expire(request.arrival)
            kept = self._undelivered.take(key)
            why = "" if kept is not None else self._undelivered.why(key)
        if not request.flags & SEQUENCE_AGAIN:
            return None  # something newer came
        if kept is None and not request.flags & SEQUENCE_START:
            raise InferError(*lost(self.model.name, request.sequence_id, why))
        return kept

    def gone(self, owner: int) -> None:
        """The client is gone: nobody asks for what is kept for it."""
        with self._lock:
            self._undelivered.drop(owner)

    def at_once(self, plan: Plan, request: Request) -> Prepared | None:
        """What an earlier run on the same position left, for a run during which nobody else can want it."""
        found = plan.bindings.get(self._key(request))
        return found if isinstance(found, Prepared) and found.epoch == self._epoch else None

    def forget(self, plans: Iterable[Plan]) -> None:
        """A model has come or gone: what was prepared holds on to it. `plans`: of clients, whoever they are for."""
        with self._lock:
            self._epoch += 1
            for plan in plans:
                if plan.model is self.model:
                    plan.forget_bindings()

    def _key(self, request: Request) -> tuple[int, int, int, int]:
        number = self.model.instances[0].number
        return number, request.input_position, request.output_position, request.rows

    # --- statistics ---------------------------------------------------------------------------------------------

    def started(self) -> None:
        """A run has begun."""
        with self._lock:
            self._block[statistics.PENDING] += 1

    def crowded(self) -> bool:
        """Are more requests of a decoupled ensemble under way than it has threads for?"""
        return self._block[statistics.PENDING] > MAX_FLOWS

    def flow_ended(self) -> None:
        """The last of a decoupled ensemble's steps is over; its streams count the rest."""
        with self._lock:
            self._block[statistics.PENDING] -= 1

    def count_inline(self, rows: int, infer_ns: int) -> None:
        """A request has run at once. Members count for themselves."""
        with self._lock:
            self.model.instances[0].count_inline(rows, infer_ns)

    def flush(self) -> None:
        """Write what `count_inline` remembered."""
        with self._lock:
            self.model.instances[0].flush()

    def count_copy(self, reason: str, byte_size: int) -> None:
        """A run has copied."""
        with self._lock:
            self.model.instances[0].count_copy(reason, byte_size)

    def ended(self, request: Request, took: int) -> None:
        """A run is over: `request` has its ending."""
        block = self._block
        with self._lock:
            block[statistics.PENDING] -= 1
            if request.code == Code.OK:
                self.model.instances[0].count_batch(
                    1, request.rows, request.queue_ns, request.input_ns, request.infer_ns, request.output_ns
                )
            elif request.code == Code.CANCELLED:
                block[statistics.CANCELLED] += 1
            elif EXPIRED[1].encode() in request.note:
                block[statistics.EXPIRED] += 1
            else:
                block[statistics.FAIL] += 1
                block[statistics.FAIL_NS] += took
