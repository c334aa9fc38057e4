"""The truth about plans: what each session has prepared, at which worker it is bound, and what is refused.

Called by `broker.control` for Prepare and Release, by `broker.sessions` at a session's end, and by the coroner, which
asks what a dead worker's requests were. A submission names a plan by one word: `index | generation << 32`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, final

from msgspec.structs import replace

from broker.cuda_regions import nearest, ring_of
from broker.ensemble_members import retryable
from broker.plan_check import check
from broker.records import RegionEntry
from broker.registry import RegionWorker, Registry
from broker.repository.config import ModelConfig
from broker.silence import first_to_respond
from broker.worker.messages import BindPlan
from shm.errors import Code, InferError
from shm.messages import ModelMetadata, Prepare, PrepareAt, Prepared, PrepareStep

MAX_PLANS = 4096  # per session
_GENERATIONS = 2**32 - 1  # the word has 32 bits for it; 0 is never used


class PlanWorker(RegionWorker, Protocol):
    """What plans need of a worker."""

    device: str  # the UUID of its GPU, "" on the CPU
    state: str

    async def responds(self) -> bool:
        """Is it up, and does it give a sign of life soon?"""

    async def bind_plan(self, message: BindPlan) -> None:
        """Returns when the worker's process can take submissions of the plan."""

    def drop_plan(self, session: int, index: int, generation: int) -> None:
        """Forget a plan; its requests in flight end as usual."""


class ModelLookup(Protocol):
    """What plans need of the models."""

    def metadata(self, model: str, version: str = "") -> ModelMetadata:
        """Raises InferError with Triton's lookup texts."""

    def config(self, model: str, version: str = "") -> tuple[ModelConfig, int]:
        """The final configuration and the version it resolves to."""

    def serving(self, model: str) -> ModelConfig | None:
        """The configuration of the latest version that is ready."""

    def workers_for(self, model: str, version: str) -> Sequence[PlanWorker]:
        """The workers that serve it, the best one first."""


@final
@dataclass(slots=True)
class _Plan:
    message: BindPlan
    regions: tuple[RegionEntry, ...]
    streams: bool = False  # of a decoupled model
    workers: dict[str, PlanWorker] = field(default_factory=dict)  # at which it is bound, or about to be


@final
@dataclass(slots=True)
class _Table:
    """Plans of one session. An index is reused with the next generation, so a late submission names nothing."""

    plans: dict[int, _Plan] = field(default_factory=dict)
    generations: list[int] = field(default_factory=list)  # last one given out, by index
    free: list[int] = field(default_factory=list)

    def take(self) -> tuple[int, int]:
        if self.free:
            index = self.free.pop()
        elif len(self.generations) < MAX_PLANS:
            index = len(self.generations)
            self.generations.append(0)
        else:
            raise InferError(
                Code.UNAVAILABLE, f"too many plans: a session has at most {MAX_PLANS}; release some, or use slots=N"
            )
        self.generations[index] = self.generations[index] % _GENERATIONS + 1
        return index, self.generations[index]


@final
class Plans:
    """All plans of all sessions."""

    def __init__(self, models: ModelLookup, registry: Registry) -> None:
        self._models = models
        self._registry = registry
        self._tables: dict[int, _Table] = {}
        self._refused: dict[tuple[int, str], int] = {}  # (session, model) → until when, CLOCK_MONOTONIC ns

    async def prepare(
        self, session: int, request: Prepare, owner: int = 0, step: PrepareStep | None = None
    ) -> Prepared:
        """Check the plan, have its worker map what it names, bind it there; returns when the worker knows it.

        Of several workers that serve the model it is the best one that responds; `prepare_at` binds the plan to others.
        `owner`: as `shm.admission.BoundPlan` has it. `step`: what `request` came with.
        """
        metadata = self._models.metadata(request.model, request.version)
        serving = self._models.workers_for(request.model, request.version)
        credit = None if step is None else step.credit
        checked = check(metadata, request, lambda name: self._registry.find(session, name), credit)
        ring = ring_of(self._registry.find(session, request.events), checked.regions) if request.events else None
        workers = nearest(_wanted(serving, request), checked.regions)
        config, version = self._models.config(request.model, request.version)
        table = self._tables.setdefault(session, _Table())
        index, generation = table.take()
        message = BindPlan(
            session=session,
            index=index,
            generation=generation,
            model=request.model,
            version=version,
            inputs=checked.inputs,
            outputs=checked.outputs,
            input_positions=request.input_positions,
            output_positions=request.output_positions,
            rows=checked.rows,
            interface=config.interface,
            follow_latest=not request.version,
            retryable=(step is None or step.retry) and retryable(self._models, config),
            owner=owner,
            step=step is not None,
            credit=checked.credit,
            responses=request.responses,
            parameters=request.parameters,
            events=ring.identity if ring is not None else None,
        )
        regions = checked.regions if ring is None else (*checked.regions, ring)
        table.plans[index] = plan = _Plan(message, regions, config.decoupled)
        try:
            worker = await first_to_respond(workers)
            await self._bind(plan, worker)
        except BaseException:
            self._drop(session, plan)
            raise
        # A sequence stays where it began, whatever plan a step comes by: the client must be able to choose.
        choice = len(workers) > 1 or (config.sequence_batching is not None and len(serving) > 1 and not request.worker)
        return Prepared(
            index=index,
            generation=generation,
            worker=worker.key,
            workers=tuple(sorted(worker.key for worker in workers)) if choice else (),
            model_version=str(version),
            rows=checked.rows,
        )

    async def prepare_at(self, session: int, request: PrepareAt) -> None:
        """Bind a plan to one more worker that serves its model; returns when that worker knows it.

        It may be one that is not near the plan's regions, for steps of a sequence that it has. Raises NOT_FOUND, and
        UNAVAILABLE for a worker that is not up, or does not respond, and is not to be waited for.
        """
        plan = self._find(session, request.index, request.generation)
        if plan is None:
            raise _no_plan(request.index, request.generation)
        message = plan.message
        serving = self._models.workers_for(message.model, "" if message.follow_latest else str(message.version))
        for worker in serving:
            if worker.key == request.worker:
                if not request.wait and not await worker.responds():
                    how = "does not respond" if worker.state == "ready" else f"is {worker.state}"
                    raise InferError(Code.UNAVAILABLE, f"worker '{worker.key}' {how}")
                await self._bind(plan, worker)
                if self._find(session, request.index, request.generation) is not plan:  # it has ended meanwhile
                    worker.drop_plan(session, request.index, request.generation)
                return
        raise InferError(Code.NOT_FOUND, f"worker '{request.worker}' does not serve model '{message.model}'")

    async def _bind(self, plan: _Plan, worker: PlanWorker) -> None:
        plan.workers[worker.key] = worker  # before it is asked: what ends the plan meanwhile must end it there, too
        await self._registry.map_at(worker, plan.regions)
        refused = self.refused_until_ns(plan.message.session, plan.message.model)
        await worker.bind_plan(replace(plan.message, refused_until_ns=refused))

    def release(self, session: int, index: int, generation: int) -> None:
        """Forget a plan. Raises NOT_FOUND for one that this session does not have."""
        plan = self._find(session, index, generation)
        if plan is None:
            raise _no_plan(index, generation)
        self._drop(session, plan)

    def end(self, session: int) -> None:
        """Forget everything about a session."""
        table = self._tables.get(session, _Table())
        for plan in list(table.plans.values()):
            self._drop(session, plan)
        self._tables.pop(session, None)
        self._refused = {key: until for key, until in self._refused.items() if key[0] != session}

    def count(self, session: int) -> int:
        """Number of plans of a session."""
        return len(self._tables[session].plans) if session in self._tables else 0

    # --- what the coroner asks -------------------------------------------------------------------------------------

    def retryable(self, session: int, plan_word: int) -> bool:
        """May a request of this plan that was running when its worker died be run once more?"""
        plan = self._named_by(session, plan_word)
        return plan is not None and plan.message.retryable

    def streams(self, session: int, plan_word: int) -> bool:
        """Is it of a decoupled model?"""
        plan = self._named_by(session, plan_word)
        return plan is not None and plan.streams

    def model_of(self, session: int, plan_word: int) -> tuple[str, int] | None:
        """(model, version) of a plan, None when it is gone or a step's."""
        plan = self._named_by(session, plan_word)
        # For what a step of an ensemble does, its ensemble's worker names whom to blame.
        return None if plan is None or plan.message.step else (plan.message.model, plan.message.version)

    def counted_for(self, session: int, plan_word: int) -> tuple[str, int] | None:
        """(model, version) that count a request of this plan, a step's too; None when it is gone."""
        plan = self._named_by(session, plan_word)
        return None if plan is None else (plan.message.model, plan.message.version)

    def is_one_client(self, session: int) -> bool:
        """Is whatever it asks one client's? The plans of gateways are nobody's."""
        table = self._tables.get(session)
        return table is not None and all(plan.message.owner for plan in table.plans.values())

    def refuse(self, session: int, model: str, until_ns: int) -> None:
        """Requests of `session` for `model` killed workers: plans made until then carry that. CLOCK_MONOTONIC ns."""
        if session in self._tables:
            self._refused[session, model] = until_ns

    def refused_until_ns(self, session: int, model: str) -> int:
        """0, or until when requests of `session` for `model` are refused."""
        until = self._refused.get((session, model), 0)
        if until <= time.monotonic_ns():
            self._refused.pop((session, model), None)
            return 0
        return until

    def _find(self, session: int, index: int, generation: int) -> _Plan | None:
        plan = self._tables[session].plans.get(index) if session in self._tables else None
        return plan if plan is not None and plan.message.generation == generation else None

    def _named_by(self, session: int, word: int) -> _Plan | None:
        return self._find(session, word & 0xFFFF_FFFF, word >> 32)

    def _drop(self, session: int, plan: _Plan) -> None:
        table = self._tables[session]
        del table.plans[plan.message.index]
        table.free.append(plan.message.index)
        for worker in plan.workers.values():
            worker.drop_plan(session, plan.message.index, plan.message.generation)


def _wanted(serving: Sequence[PlanWorker], request: Prepare) -> Sequence[PlanWorker]:
    """The worker that `request` names, or all that serve its model."""
    if not request.worker:
        return serving
    named = [worker for worker in serving if worker.key == request.worker]
    if not named:
        keys = ", ".join(f"'{worker.key}'" for worker in serving)
        raise InferError(
            Code.INVALID_ARG, f"model '{request.model}' is served by worker {keys}, not '{request.worker}'"
        )
    return named


def _no_plan(index: int, generation: int) -> InferError:
    return InferError(Code.NOT_FOUND, f"no plan {index} of generation {generation} in this session")
