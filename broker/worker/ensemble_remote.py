"""An ensemble with members in other workers: their steps are requests of this worker's own session with the broker.

Made by `broker.worker.models` for configurations that name such members (`ModelConfig.remote`). It differs from other
ensembles in where tensors lie: a client's are copied, inputs when its request begins and outputs when it ends, and what
a step elsewhere reads or writes lies in shared memory of this worker (`ensemble_remote_memory`). So what a run has
prepared serves the next one of any client, and no other worker ever sees a client's memory. The plan of a step
elsewhere keeps its model there, as a run here pins its members.
"""

from __future__ import annotations

import queue
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import final

from broker.repository.config import RemoteMember
from broker.worker.ensemble import PREPARED_BYTES, Ensemble, Members
from broker.worker.ensemble_memory import Prepared
from broker.worker.ensemble_remote_memory import SharedMemory
from broker.worker.ensemble_remote_plans import Key, SharedPrepared
from broker.worker.ensemble_remote_run import RemoteStep, SpreadRun
from broker.worker.ensemble_remote_session import StepSession
from broker.worker.ensemble_run import Submit
from broker.worker.execute import run_batch
from broker.worker.model import LoadedModel
from broker.worker.plans import Plan
from shm import statistics
from shm.admission import Request
from shm.errors import Code, InferError
from shm.parameters import key_of

MAX_POOLED = 256  # of what runs have prepared, for the next ones
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


@final
class SpreadEnsemble(Ensemble):
    """One loaded version."""

    def __init__(
        self, model: LoadedModel, members: Members, submit: Submit, take_back: Submit, elsewhere: Elsewhere
    ) -> None:
        super().__init__(model, members, self._pass_on, self._back)
        self.remote: dict[int, RemoteMember] = model.config.remote
        self.session, self.memory, self.blame = elsewhere.session, elsewhere.memory, elsewhere.blame
        self.rooms: dict[str, int] = {}  # ensemble tensor of unknown size → bytes that the largest so far took
        self._stand_ins = {at: LoadedModel(each.config, 0, 0) for at, each in self.remote.items()}
        steps = self.graph.steps
        self.shared = frozenset(
            tensor for at in self.remote for tensor in (*steps[at].input_map.values(), *steps[at].output_map.values())
        )
        self.written = {tensor: at for at in self.remote for tensor in steps[at].output_map.values()}
        self._sequences = any(each.sequences for each in self.remote.values())
        self._submit_here, self._take_back_here = submit, take_back
        self._pool: OrderedDict[SharedPrepared, None] = OrderedDict()  # the one used last at the end
        self._by_key: dict[Key, list[SharedPrepared]] = {}
        self.session.need()

    def run(self, request: Request, submit: Submit, publish: Callable[[], None]) -> SpreadRun:
        """See `Ensemble.run`."""
        return SpreadRun(self, request, submit, publish)

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
        with self._lock:
            self._epoch += 1
            pooled = self._take_all()
        for prepared in pooled:
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
                lane = self.session.lane(self.remote[step.slot].worker)
                lane.submit(RemoteStep(run, step, lane, run.bound(step)))
        return [step for step in steps if step.slot not in self.remote]

    def _back(self, steps: list[Request]) -> None:
        if here := [step for step in steps if step.slot not in self.remote]:
            self._take_back_here(here)
        for step in steps:
            if step.slot in self.remote:
                self.session.lane(self.remote[step.slot].worker).cancel(step)

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

    def prepared(self, plan: Plan, request: Request) -> SharedPrepared:
        """What an earlier run of the same kind left, whoever's it was, or nothing of the sort."""
        key = self._kind(plan, request)
        with self._lock:
            if found := self._by_key.get(key):
                prepared = found.pop()
                del self._pool[prepared]
                return prepared
            needed = self.graph.needed(tensor.name for tensor in plan.outputs)
            return SharedPrepared(needed, self._epoch, key, self)

    def keep(self, plan: Plan, request: Request, prepared: Prepared) -> None:
        """For the next run of the kind, in place of those that were not used for the longest time."""
        assert isinstance(prepared, SharedPrepared)
        prepared.kept = prepared.byte_size
        gone: list[SharedPrepared] = []
        with self._lock:
            if prepared.epoch != self._epoch:
                gone.append(prepared)
            else:
                self._by_key.setdefault(prepared.key, []).append(prepared)
                self._pool[prepared] = None
                total = sum(each.kept for each in self._pool)
                while len(self._pool) > MAX_POOLED or (total > PREPARED_BYTES and self._pool):
                    oldest = next(iter(self._pool))
                    total -= oldest.kept
                    self._remove(oldest)
                    gone.append(oldest)
        for each in gone:
            each.dispose()

    def forget(self, plans: Iterable[Plan]) -> None:
        """See `Ensemble.forget`."""
        super().forget(plans)
        self.close()

    def _kind(self, plan: Plan, request: Request) -> Key:
        """Equal for requests whose steps have the same shapes, and which may share a plan elsewhere."""
        rows = request.rows
        inputs = tuple((t.name, t.shape_of(rows), t.memory(request.input_position, rows).size) for t in plan.inputs)
        owner = plan.owner if self._sequences else 0
        return inputs, rows, frozenset(t.name for t in plan.outputs), owner, key_of(plan.parameters)

    def _remove(self, prepared: SharedPrepared) -> None:
        del self._pool[prepared]
        same = self._by_key[prepared.key]
        same.remove(prepared)
        if not same:
            del self._by_key[prepared.key]

    def _take_all(self) -> list[SharedPrepared]:
        pooled = list(self._pool)
        self._pool.clear()
        self._by_key.clear()
        return pooled
