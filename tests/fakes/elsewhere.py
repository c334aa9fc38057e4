"""An ensemble with members in other workers, in this process: the session, the lanes and the other workers are the
test's. What runs elsewhere waits in the workbench's queue like everything else.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec.structs import replace

from broker.repository.config import ModelConfig, RemoteMember
from broker.worker.ensembles.remote.channel import Sends
from broker.worker.ensembles.remote.elsewhere import Elsewhere, SpreadEnsemble
from broker.worker.ensembles.remote.homes import StepHomes
from broker.worker.ensembles.remote.memory import SharedMemory
from broker.worker.model import LoadedModel
from broker.worker.plans import Plan, adopt
from shm import messages
from shm.admission import Request
from shm.costs import Seen
from shm.errors import Code, InferError
from shm.layout import FINAL, NOTE_BYTES
from shm.sockets import close_all
from tests.fakes.ensembles import Workbench, added


class Session:
    """Stands in for `broker.worker.ensembles.remote.session.StepSession` and the broker behind it."""

    def __init__(self, bench: SpreadBench) -> None:
        self._bench = bench
        self.homes = StepHomes()
        self._words = itertools.count(1)
        self.plans: dict[int, messages.PrepareStep] = {}
        self.regions: set[str] = set()
        self.full = ""  # why no region is registered any more
        self.refuse = ""  # why no plan is prepared any more
        self.later: list[Any] = []  # answers that are held back, and what was postponed
        self.holds = False

    def need(self) -> None: ...

    def postpone(self, then: Callable[[], None]) -> None:
        if self.holds:
            self.later.append(then)
        else:
            then()

    def lane(self, worker: str, streams: bool = False) -> Session:
        return self

    worker, replaced = "cpu/other", False

    def seen(self, now: int) -> Seen:
        return Seen(0, 0, False, 0, 0, 0)

    def call(self, message: messages.Message, then: Any = lambda reply, fds: None, fds: Any = ()) -> None:
        close_all(fds)
        reply: Any = messages.Done()
        if isinstance(message, messages.RegisterPool):
            if self.full:
                reply = InferError(Code.UNAVAILABLE, self.full)
            else:
                self.regions.add(message.name)
        elif isinstance(message, messages.Unregister):
            self.regions.remove(message.name)
        elif isinstance(message, messages.Release):
            del self.plans[message.index]
        elif isinstance(message, messages.PrepareStep):
            known = {spec.region for spec in (*message.plan.inputs, *message.plan.outputs)} <= self.regions
            assert known or self.full
            if not known:
                reply = InferError(Code.NOT_FOUND, "Unable to find shared memory region: 'steps.1'")
            elif self.refuse:
                reply = InferError(Code.UNAVAILABLE, self.refuse)
            else:
                index = next(self._words)
                self.plans[index] = message
                reply = messages.Prepared(index=index, generation=1, worker="", model_version="1", rows=0)
        if self.holds:
            self.later.append(lambda: then(reply, []))
        else:
            then(reply, [])

    # --- as a lane ------------------------------------------------------------------------------------------------

    def submit(self, sends: Sends) -> None:
        try:
            word = sends.word()
        except InferError as error:
            sends.fail((Code[error.code], error.message))
            return
        assert word & 0xFFFF_FFFF in self.plans, "its plan is there"
        self._bench.sends[sends.step] = sends
        if self._bench.answers_at_once:
            self._bench.finish(self._bench.sends.pop(sends.step), run(sends.step))
        else:
            self._bench.queue.append(sends.step)

    def ended(self, sends: Sends) -> None: ...

    def cancel(self, step: Request) -> None:
        if step in self._bench.queue:
            self._bench.queue.remove(step)
            self._bench.sends.pop(step).fail((Code.CANCELLED, "the request was cancelled"))


class SpreadBench(Workbench):
    """A workbench whose ensembles have members elsewhere, which `spread` chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.sends: dict[Request, Sends] = {}
        self.session = Session(self)
        self.answers_at_once = False  # elsewhere
        self.blamed: list[tuple[int, str]] = []
        self._elsewhere = Elsewhere(lambda: None, lambda session, model: self.blamed.append((session, model)))
        self._elsewhere.session = self.session  # type: ignore[assignment]
        self._elsewhere.memory = SharedMemory(self.session)  # type: ignore[arg-type]

    def spread(self, config: ModelConfig, at: set[int], **more: Any) -> ModelConfig:
        """With those steps elsewhere."""
        assert config.ensemble is not None
        steps = config.ensemble.step
        members = {n: self.models[steps[n].model_name].config.as_remote for n in at}
        return replace(
            config, remote={n: RemoteMember(workers=("cpu/other",), config=c, **more) for n, c in members.items()}
        )

    def load(self, config: ModelConfig) -> LoadedModel:
        model = super().load(config)
        if config.remote:
            model.ensemble = SpreadEnsemble(model, self, self.submit, self.take_back, self._elsewhere)
        return model

    def adopt(self, plan: Plan, model: LoadedModel) -> None:
        if model.pins or model in self.models.values() or model in self.replaced:
            super().adopt(plan, model)
        else:
            adopt(plan, model, {})  # it stands for one elsewhere

    def end(self, at: int, failure: str = "") -> None:
        step = self.running[at]
        sends = self.sends.pop(step, None)
        if sends is None:
            super().end(at, failure)
            return
        del self.running[at]
        self.finish(sends, (Code.INTERNAL, failure) if failure else run(step))

    def finish(self, sends: Sends, outcome: tuple[Code, str] | bytes) -> None:
        """A step elsewhere has its completion."""
        code, note = (Code.OK, outcome) if isinstance(outcome, bytes) else (outcome[0], outcome[1].encode())
        sends.settle((0, 0, code | FINAL, 1, 1, 1, 1, 0), note.ljust(NOTE_BYTES, b"\0"))

    def leftovers(self) -> tuple[int, int]:
        """Plans elsewhere and regions after everything was let go."""
        for model in (*self.models.values(), *self.replaced):
            if model.ensemble is not None:
                model.ensemble.close()
        return len(self.session.plans), len(self.session.regions)


def run(step: Request) -> tuple[Code, str] | bytes:
    """As `tests.fakes.ensembles.add`, in a worker where outputs have the room that they have."""
    plan = step.plan
    assert isinstance(plan, Plan)
    inputs = sorted(plan.inputs, key=lambda each: each.name)
    arrays = []
    for tensor in inputs:
        data = tensor.memory(0)[: 4 * int(np.prod(tensor.shape))].tobytes()
        arrays.append(np.frombuffer(data, np.float32).reshape(tensor.shape))
    note: list[int] = []
    for tensor in plan.outputs:
        result = added(arrays, step.slot, tensor.name == "y1")
        data = np.frombuffer(result.tobytes(), np.uint8)
        if data.size > tensor.place.byte_size:
            room = tensor.place.byte_size
            text = f"shared memory size specified with the request for output '{tensor.name}' ({room} bytes) should be"
            return Code.INVALID_ARG, f"{text} at least {data.size} bytes to hold the results"
        if tensor.open:
            note += [result.ndim, *result.shape]
        tensor.memory(0)[: data.size] = data
    return struct.pack(f"<{len(note)}Q", *note)
