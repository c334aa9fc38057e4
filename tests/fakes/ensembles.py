"""An ensemble in this process, without threads: the test decides which queued step runs next and how it ends.

`Workbench` stands in for the worker's loop and model table. Members add: every output is the sum of the inputs, plus
the number of the step, plus 100 for the second output; `reference` computes the same without any of the worker's code.
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from broker.repository.config import InstanceGroup, ModelConfig, TensorConfig
from broker.repository.scheduling import Ensemble as Scheduling
from broker.repository.scheduling import Step
from broker.worker.backends import NoRuntime
from broker.worker.binding import Execution
from broker.worker.cache import ResponseCache
from broker.worker.cached import Cached
from broker.worker.ensembles.ensemble import Ensemble
from broker.worker.ensembles.inline import lone_run
from broker.worker.intake import take_in, withdraw
from broker.worker.messages import BindPlan
from broker.worker.model import Instance, LoadedModel
from broker.worker.overlap import Crowds
from broker.worker.plans import Plan, adopt
from broker.worker.regions import RegionTable
from shm import statistics
from shm.admission import Request
from shm.errors import Code, InferError
from shm.layout import NOTE_BYTES
from tests.fakes.loaded import Memory, spec

WIDTH = 3
ROW = 4 * WIDTH
ROOM = 256  # of one position of a tensor
POSITIONS = 32


def model_config(name: str, inputs: Iterable[str], outputs: Iterable[str], batch: int, dims: Sequence[int], **more):
    """All tensors FP32, with the same dims."""

    def tensors(names: Iterable[str]) -> tuple[TensorConfig, ...]:
        return tuple(TensorConfig(name=each, datatype="FP32", dims=tuple(dims)) for each in names)

    fields = {
        "platform": "",
        "backend": "adds",
        "directory": "/models",
        "versions": {1: "/models/1"},
        "default_model_filename": "",
        "input": tensors(inputs),
        "output": tensors(outputs),
        "instance_group": (InstanceGroup(name=name),),
    }
    return ModelConfig(name=name, max_batch_size=batch, **(fields | more))


def ensemble_config(name: str, steps: Sequence[Step], inputs, outputs, batch: int, dims, limit: int = 0) -> ModelConfig:
    scheduling = Scheduling(step=tuple(steps), max_inflight_requests=limit)
    more = {"platform": "ensemble", "backend": "ensemble", "instance_group": (), "ensemble": scheduling}
    return model_config(name, inputs, outputs, batch, dims, **more)


def added(arrays: Sequence[np.ndarray], at: int, second: bool) -> np.ndarray:
    return sum(arrays[1:], arrays[0]) + np.float32(at + 100 * second)


def reference(steps: Sequence[Step], given: Mapping[str, np.ndarray], wanted: Iterable[str], inner: Mapping[str, int]):
    """The wanted tensors, and which steps they need. `inner`: member → how many plain steps it has itself (0: none)."""
    writer = {tensor: at for at, step in enumerate(steps) for tensor in step.output_map.values()}
    needed: set[int] = set()

    def value(tensor: str) -> np.ndarray:
        if tensor not in writer:
            return given[tensor]
        at = writer[tensor]
        needed.add(at)
        step = steps[at]
        arrays = [value(step.input_map[name]) for name in sorted(step.input_map)]
        second = next(name for name, each in step.output_map.items() if each == tensor) == "y1"
        if inner.get(step.model_name):
            result = arrays[0]
            for number in range(inner[step.model_name]):
                result = added([result], number, False)
            return result
        return added(arrays, at, second)

    return {tensor: value(tensor) for tensor in wanted}, needed


class Client:
    """Where requests come from and answers go. Implements `shm.admission.Publishes`."""

    def __init__(self) -> None:
        self.ended: list[Request] = []
        self.found: dict[Request, dict[str, np.ndarray]] = {}  # as it was at once: positions are used again

    def start(self, requests: Sequence[Request]) -> None: ...

    def finish(self, request: Request) -> None:
        self.complete((request,))

    def complete(self, requests: Sequence[Request]) -> None:
        self.ended.extend(requests)
        self.found.update((request, dict(answers(request))) for request in requests if not request.code)


class Runs:
    """The binding of a step's plan: the sums of `add`."""

    def __init__(self, plan: Plan, at: int, broken: bool) -> None:
        self.plan, self.at, self.broken = plan, at, broken

    def run(self) -> None:
        if self.broken:
            raise RuntimeError("broken")
        add(Request(Client(), self.at, (0,) * 13, self.plan, 1))


class Workbench:
    """The models of a worker and the steps that wait for them: `broker.worker.ensembles.ensemble.Members`."""

    def __init__(self) -> None:
        self.models: dict[str, LoadedModel] = {}
        self.replaced: list[LoadedModel] = []
        self.plans: list[Plan] = []
        self.queue: list[Request] = []
        self.running: list[Request] = []
        self.client = Client()
        self.memory = Memory(1 << 22)
        self.regions = RegionTable()
        self.regions.add(self.memory.info, self.memory.fd)
        self.takes_ns = 1000  # each step, as far as is known before
        self.looks = 0  # that were asked for
        self.refuse = ""  # why no step is queued any more
        self.meanwhile: Callable[[], None] = lambda: None  # what another thread does while steps are being queued
        self._used = 0
        self._numbers = itertools.count(1)

    # --- models -------------------------------------------------------------------------------------------------

    def load(self, config: ModelConfig) -> LoadedModel:
        """Also again: what runs goes on with the model that was there."""
        model = LoadedModel(config, 1, 1)
        if config.ensemble is not None:
            model.load_ensemble(memoryview(bytearray(8 * statistics.BLOCK)).cast("Q"))
            model.ensemble = Ensemble(model, self, self.submit, self.take_back)
        if config.name in self.models:
            self.replaced.append(self.models[config.name])
        self.models[config.name] = model
        self.forget()
        return model

    def unload(self, name: str) -> None:
        self.replaced.append(self.models.pop(name))
        self.forget()

    def forget(self) -> None:
        for model in self.models.values():
            if model.ensemble is not None:
                model.ensemble.forget(self.plans)

    def pin(self, steps: Iterable[Step]) -> list[LoadedModel]:
        steps = list(steps)
        for step in steps:
            if step.model_name not in self.models:
                raise InferError(Code.UNAVAILABLE, f"model '{step.model_name}' is not loaded")
        found = [self.models[step.model_name] for step in steps]
        for model in found:
            model.pins += 1
        return found

    def unpin(self, models: Iterable[LoadedModel]) -> None:
        for model in models:
            model.pins -= 1

    def look_later(self) -> None:
        self.looks += 1

    def adopt(self, plan: Plan, model: LoadedModel) -> None:
        assert model.pins > 0
        adopt(plan, model, {})

    # --- clients ------------------------------------------------------------------------------------------------

    def keep_answers(self, model: LoadedModel) -> None:
        """With a cache of its own."""
        block = model.instances[0].block
        cache = ResponseCache(1 << 20, memoryview(bytearray(8 * statistics.BLOCK)).cast("Q"))
        model.keep_answers(Cached(cache, model.name, 1, 1, block))

    def plan(
        self,
        model: LoadedModel,
        shape: Sequence[int],
        outputs: Sequence[str],
        *,
        is_open: bool = False,
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> Plan:
        """All tensors but `shapes` have this shape (rows in front if the model batches), in POSITIONS positions."""
        batched = model.config.max_batch_size > 0

        def place(name: str, wanted: Sequence[int]):
            self._used += POSITIONS * ROOM
            size = {"byte_size": ROOM} if -1 in wanted else {}
            return self.memory.tensor(spec(name, wanted, offset=self._used - POSITIONS * ROOM, stride=ROOM, **size))

        answer = (*shape[:-1], -1) if is_open else shape
        message = BindPlan(
            session=len(self.plans) + 1,
            index=0,
            generation=1,
            model=model.name,
            version=1,
            inputs=tuple(place(each.name, (shapes or {}).get(each.name, shape)) for each in model.config.input),
            outputs=tuple(place(name, answer) for name in outputs),
            input_positions=POSITIONS,
            output_positions=POSITIONS,
            rows=shape[0] if batched else 0,
        )
        plan = Plan(message, self.regions, Crowds(lambda: ()))
        adopt(plan, model, {})
        self.plans.append(plan)
        return plan

    def ask(
        self,
        plan: Plan,
        position: int,
        given: Mapping[str, np.ndarray],
        rows: int = 0,
        deadline: int = 0,
        sequence: tuple[int, int] = (0, 0),
    ):
        """A request on one position, begun. `sequence`: id and flags."""
        self._give(plan, position, given)
        entry = self._entry(plan, position, rows, deadline)
        request = Request(self.client, 0, (*entry[:7], *sequence, *entry[9:]), plan, 1)
        assert take_in([request]) == []
        return request

    def _give(self, plan: Plan, position: int, given: Mapping[str, np.ndarray]) -> None:
        for tensor in plan.inputs:
            data = given[tensor.name]
            tensor.memory(position)[: data.nbytes] = np.frombuffer(data.tobytes(), np.uint8)

    def _entry(self, plan: Plan, position: int, rows: int, deadline: int) -> tuple[int, ...]:
        return (next(self._numbers), plan.key, 0, deadline, position, position, rows, 0, 0, 0, 0, 0, 0)

    def ask_alone(self, plan: Plan, position: int, given: Mapping[str, np.ndarray], rows: int = 0, broken: int = -1):
        """A request that may run at once, as the loop's leader tries it first; and whether it did.

        `broken`: the step that raises, if it runs at once.
        """
        assert not self.queue
        self._give(plan, position, given)
        request = Request(self.client, 0, self._entry(plan, position, rows, 0), plan, 1)
        assert plan.model is not None
        self._bind_steps(plan.model, request, broken)
        lone = lone_run(request, plan.model)
        if lone is None or not lone.claim():
            if lone is not None:
                lone.give_back()
            assert take_in([request]) == []
            return request, False
        lone.run(self.client)  # type: ignore[arg-type]
        assert not self.queue
        lone.give_back()
        return request, True

    def _bind_steps(self, model: LoadedModel, request: Request, broken: int) -> None:
        """As the worker's own runs do it: an instance that is free, and a binding of each step's plan."""
        assert model.ensemble is not None
        prepared = model.ensemble.at_once(request.plan, request)
        for at, plan in prepared.plans.items() if prepared is not None else ():
            member = plan.model
            if member.ensemble is not None:
                continue
            if not member.instances:
                block = memoryview(bytearray(8 * statistics.BLOCK)).cast("Q")
                member.instances = [Instance(member, member.name, NoRuntime(), block)]
                member.free = list(member.instances)
            execution = Execution(member.instances[0], Runs(plan, at, at == broken), [], [])  # type: ignore[arg-type]
            execution.measured(self.takes_ns)
            plan.bindings[member.instances[0].number, 0, 0, plan.rows] = execution

    def cancel(self, request: Request) -> None:
        if request not in self.client.ended and not request.ended:
            request.ended = Code.CANCELLED
            withdraw(request)

    # --- what the loop does -------------------------------------------------------------------------------------

    def submit(self, steps: list[Request]) -> None:
        self.meanwhile()
        steps = take_in(steps)
        if not self.refuse:
            self.queue.extend(steps)
            return
        for step in steps:
            step.fail(Code.UNAVAILABLE, self.refuse)
            step.channel.complete((step,))

    def take_back(self, steps: list[Request]) -> None:
        for step in steps:
            if step in self.queue:
                self.queue.remove(step)
                step.fail(Code.CANCELLED, "the request was cancelled")
                step.channel.complete((step,))

    def begin(self, at: int) -> None:
        """Take one from the queue: it cannot be taken back any more."""
        self.running.append(self.queue.pop(at))

    def end(self, at: int, failure: str = "") -> None:
        """A step that runs ends."""
        step = self.running.pop(at)
        if failure:
            step.fail(Code.INTERNAL, failure)
        else:
            add(step)
        step.channel.complete((step,))

    def drain(self) -> None:
        """Run all that waits, in order."""
        while self.queue or self.running:
            if not self.running:
                self.begin(0)
            self.end(0)

    def close(self) -> None:
        os.close(self.memory.fd)


def add(step: Request) -> None:
    """The member's run: sums, into places that are as large as the plan says or that grow.

    Where inputs lie is looked up once per plan, as a runtime's binding does. Backend "counts": x0, about x0 times.
    """
    plan = step.plan
    assert isinstance(plan, Plan)
    inputs = sorted(plan.inputs, key=lambda each: each.name)
    bound = plan.bindings.setdefault((0, 0, 0, 0), [tensor.memory(0) for tensor in inputs])
    arrays = []
    for tensor, memory in zip(inputs, bound, strict=True):
        data = memory[: int(np.prod(tensor.shape)) * 4].tobytes()
        arrays.append(np.frombuffer(data, np.float32).reshape(tensor.shape))
    note: list[int] = []
    for tensor in plan.outputs:
        result = added(arrays, step.slot, tensor.name == "y1")
        if plan.model is not None and plan.model.config.backend == "counts":
            result = np.full(int(arrays[0].flat[0]), arrays[0].flat[0], np.float32)
        data = np.frombuffer(result.tobytes(), np.uint8)
        if tensor.open:
            assert tensor.make_room(data.size)
            note += [result.ndim, *result.shape]
        else:
            assert tensor.shape == result.shape
        tensor.memory(0)[: data.size] = data
    step.note = struct.pack(f"<{len(note)}Q", *note)
    assert len(step.note) <= NOTE_BYTES


def answers(request: Request) -> Iterator[tuple[str, np.ndarray]]:
    """What the client finds: its outputs in the shapes that it was told."""
    plan = request.plan
    assert isinstance(plan, Plan)
    note = list(struct.unpack(f"<{len(request.note) // 8}Q", request.note))
    for tensor in plan.outputs:
        shape = tensor.shape_of(request.rows)
        if tensor.open:
            rank = note.pop(0)
            shape, note = tuple(note[:rank]), note[rank:]
        data = tensor.memory(request.output_position)[: 4 * int(np.prod(shape))]
        yield tensor.name, np.frombuffer(data.tobytes(), np.float32).reshape(shape)
