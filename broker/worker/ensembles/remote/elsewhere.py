"""An ensemble with members in other workers: their steps are requests of this worker's own session with the broker.

Made by `broker.worker.models` for configurations that name such members (`ModelConfig.remote`). It differs from other
ensembles in where tensors lie: a client's are copied, inputs when its request begins and outputs when it ends, and what
a step elsewhere reads or writes lies in shared memory of this worker (`ensembles.remote.memory`). So what a run has
prepared serves the next one of any client, and no other worker ever sees a client's memory. The plan of a step
elsewhere keeps its model there, as a run here pins its members.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import final

from broker.repository.config import RemoteMember
from broker.worker.ensembles.ensemble import Ensemble, Members
from broker.worker.ensembles.flow import Branch, Flow
from broker.worker.ensembles.memory import Prepared, Value
from broker.worker.ensembles.remote.flow import SpreadBranch
from broker.worker.ensembles.remote.memory import SharedMemory
from broker.worker.ensembles.remote.plans import Bound
from broker.worker.ensembles.remote.pool import Budget, Pool
from broker.worker.ensembles.remote.prepared import Key, SharedPrepared
from broker.worker.ensembles.remote.run import RemoteStep, SpreadRun
from broker.worker.ensembles.remote.session import StepSession
from broker.worker.ensembles.remote.stream import RemoteStream
from broker.worker.ensembles.run import Submit
from broker.worker.execute import run_batch
from broker.worker.model import LoadedModel
from broker.worker.plans import Plan
from shm import statistics
from shm.admission import Request
from shm.errors import Code, InferError
from shm.layout import SEQUENCE_START
from shm.parameters import key_of

MAX_RUNS = 1024  # requests under way at a time: each has plans in the other workers
ALONE_S = 60.0  # for a step elsewhere while nothing else may run here


@final
class Elsewhere:
    """What this worker's ensembles need of others: one per process."""

    def __init__(self, ask: Callable[[], None], blame: Callable[[int, str], None]) -> None:
        """`blame`: the session and the model of a request that ended another worker for the second time."""
        self.blame = blame
        self.session = StepSession(ask)
        self.memory = SharedMemory(self.session)
        self.plans = Budget()


@final
class SpreadEnsemble(Ensemble):
    """One loaded version."""

    def __init__(
        self, model: LoadedModel, members: Members, submit: Submit, take_back: Submit, elsewhere: Elsewhere
    ) -> None:
        super().__init__(model, members, self._pass_on, self._back)
        self.remote: dict[int, RemoteMember] = model.config.remote
        self.session, self.memory, self.blame = elsewhere.session, elsewhere.memory, elsewhere.blame
        self.plans = elsewhere.plans
        self.rooms: dict[str, int] = {}  # ensemble tensor of unknown size → bytes that the largest so far took
        self._stand_ins = {at: LoadedModel(each.config, 0, 0) for at, each in self.remote.items()}
        steps = self.graph.steps
        plain = [at for at, each in self.remote.items() if not each.config.decoupled]
        self.written = frozenset(tensor for at in plain for tensor in steps[at].output_map.values())
        self.shared = self.written.union(*(steps[at].input_map.values() for at in self.remote))
        self._sequences = any(each.sequences for each in self.remote.values())
        self._submit_here, self._take_back_here = submit, take_back
        self._pool = Pool()
        self._turn = itertools.count()
        self.plans.add(self._pool)
        self.session.need()

    def run(self, request: Request, submit: Submit, publish: Callable[[], None]) -> SpreadRun:
        """See `Ensemble.run`."""
        return SpreadRun(self, request, submit, publish)

    def branch(self, flow: Flow, request: Request, parent: Branch | None, written: Mapping[str, Value]) -> SpreadBranch:
        """See `Ensemble.branch`."""
        return SpreadBranch(flow, self, request, parent, written)

    def run_alone(self, request: Request) -> None:
        """See `Ensemble.run_alone`. Steps elsewhere are waited for."""
        waiting: queue.SimpleQueue[Request | None] = queue.SimpleQueue()

        def submit(steps: list[Request]) -> None:
            for step in self._sent(steps):
                waiting.put(step)

        run = self.run(request, submit, lambda: waiting.put(None))
        run.begin()
        while True:
            try:
                step = waiting.get(timeout=ALONE_S)
            except queue.Empty:
                run.give_up()
                continue
            if step is None:
                return
            plan = step.plan
            assert isinstance(plan, Plan)
            assert plan.model is not None
            run_batch(plan.model.instances[0], [step], [step])
            step.channel.complete((step,))

    def close(self) -> None:
        """It serves nobody any more; runs may still be under way."""
        self.plans.remove(self._pool)
        self._drop()

    def _drop(self) -> None:
        with self._lock:
            self._epoch += 1
        for prepared in self._pool.take_all():
            prepared.dispose()

    # --- steps ----------------------------------------------------------------------------------------------------

    def _pass_on(self, steps: list[Request]) -> None:
        if here := self._sent(steps):
            self._submit_here(here)

    def _sent(self, steps: list[Request]) -> list[Request]:
        """Send those that run elsewhere; returns the others."""
        for step in steps:
            if step.slot in self.remote:
                run = step.channel
                assert isinstance(run, SpreadRun)
                self.send(run, step, run.bound(step))
        return [step for step in steps if step.slot not in self.remote]

    def send(self, run: SpreadRun, step: Request, bound: Bound) -> None:
        """Let a step go to a worker that serves its member."""
        number = step.sequence_id and step.sequence_id + run.owner
        at = self.now_and_turn()
        lane = bound.home(number, bool(step.flags & SEQUENCE_START), *at) if number else bound.choose(*at)
        if bound.places is None:
            lane.submit(RemoteStep(run, step, lane, bound))
        else:
            assert isinstance(run, SpreadBranch)
            lane.submit(RemoteStream(run, step, lane, bound))

    def now_and_turn(self) -> tuple[int, int]:
        """For a choice of a worker."""
        return time.monotonic_ns(), next(self._turn)

    def _back(self, steps: list[Request]) -> None:
        if here := [step for step in steps if step.slot not in self.remote]:
            self._take_back_here(here)
        for step in steps:
            if (member := self.remote.get(step.slot)) is not None:
                for worker in member.workers:  # the lane that does not have it does nothing
                    self.session.lane(worker, streams=member.config.decoupled).cancel(step)

    # --- of runs --------------------------------------------------------------------------------------------------

    def pin(self, steps: Sequence[int]) -> dict[int, LoadedModel]:
        """As `Ensemble.pin`; the plans of steps elsewhere keep their models."""
        if self._block[statistics.PENDING] > MAX_RUNS:
            raise InferError(
                Code.UNAVAILABLE, f"{MAX_RUNS} requests for it are under way, which is as many as it takes"
            )
        found = super().pin([at for at in steps if at not in self.remote])
        return {at: self._stand_ins[at] if at in self.remote else found[at] for at in steps}

    def unpin(self, members: dict[int, LoadedModel]) -> None:
        """See `Ensemble.unpin`."""
        super().unpin({at: model for at, model in members.items() if at not in self.remote})

    def prepared(self, plan: Plan, request: Request, behind: frozenset[str]) -> SharedPrepared:
        """What an earlier run of the same kind left, whoever's it was, or nothing of the sort."""
        key = self._kind(plan, request, behind)
        found = self._pool.take(key)
        if found is not None:
            return found
        needed = self.graph.needed(tensor.name for tensor in plan.outputs)
        return SharedPrepared(needed, self._epoch, key, self)

    def keep(self, plan: Plan, request: Request, prepared: Prepared) -> None:
        """For the next run of the kind, in place of those that were not used for the longest time."""
        assert isinstance(prepared, SharedPrepared)
        prepared.kept = prepared.byte_size
        with self._lock:  # so that what is put back when others go does not stay
            gone = self._pool.put(prepared) if prepared.epoch == self._epoch else [prepared]
        for each in gone:
            each.dispose()

    def forget(self, plans: Iterable[Plan]) -> None:
        """See `Ensemble.forget`."""
        super().forget(plans)
        self._drop()

    def _kind(self, plan: Plan, request: Request, behind: frozenset[str]) -> Key:
        """Equal for requests whose steps have the same shapes, and which may share a plan elsewhere."""
        rows = request.rows
        inputs = tuple((t.name, t.shape_of(rows), t.memory(request.input_position, rows).size) for t in plan.inputs)
        # Whose sequence a step is of, its plan says, here as elsewhere.
        owner = plan.owner if self._sequences or request.sequence_id else 0
        return inputs, rows, frozenset(t.name for t in plan.outputs), owner, key_of(plan.parameters), behind
