"""Errors of models' own code keep neither clients' memory mapped nor a model's own, in a worker that never looks for
cycles. (tests/unit has the same of the client.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from broker.repository.config import ModelConfig
from broker.repository.scheduling import SequenceBatching, Step
from broker.worker import messages
from shm.errors import InferError
from shm.layout import SEQUENCE_END, SEQUENCE_START
from tests.fakes.broker import eventually
from tests.fakes.channel import Pending
from tests.fakes.ensembles import ensemble_config
from tests.fakes.lone_worker import SIZE, Gate, LoneWorker, PlanOn, Sent, Session

# What own code may do with what it raises: let go of it, keep it in a module, in an object, in a local name.
RAISES = """
import gc, os, sys
import numpy as np
from shm.errors import Code, InferError

gc.disable()

KEPT = [OSError(f"kept {n}") for n in range(10)]
KINDS = [ValueError, KeyError, RuntimeError, MemoryError, lambda text: InferError(Code.NOT_FOUND, text)]
latest = None

def fail(n, holder):
    global latest
    way, error = n % 10, KINDS[n // 10](f"error {n}")
    if way == 0:
        raise error
    if way == 1:
        raise KEPT[n // 10]
    if way == 2:
        latest = error
        raise latest
    if way == 3:
        holder.error = error
        raise holder.error
    if way == 4:
        try:
            raise error
        except Exception as cause:
            holder.cause = cause
            raise TypeError(n) from cause
    if way == 5:
        try:
            raise error
        except Exception as context:
            latest = context
            raise OSError(n)
    if way == 6:
        try:
            raise error
        except Exception as part:
            latest = part
        raise ExceptionGroup("several", [latest])
    if way == 7:
        latest = SystemExit(n)
        raise latest
    if way == 8:
        raise KEPT[0] from KEPT[1]
    np.zeros(3).reshape(n)

class Model:
    def __init__(self, weights):
        self.weights = weights

    def bind(self, inputs, outputs):
        x, y = inputs[0].memory.view("<f4"), outputs[0].memory
        y = None if y is None else y.view("<f4")
        if x[0] >= 100:
            fail(int(x[0]) - 100, self)
        return Binding(x, y)

    def execute(self, streams):
        for stream in streams:
            fail(int(stream.inputs["x"].flat[0]), self)

    def close(self):
        pass

class Binding:
    def __init__(self, x, y):
        self.x, self.y = x, y

    def run(self):
        if self.x[0] >= 0:
            fail(int(self.x[0]), self)
        if self.y is not None:
            self.y[:] = self.x + 1

    def results(self):
        return [self.x + 1] if self.y is None else []

def load(context):
    model = Model(np.memmap(os.path.join(context.directory, "weights"), np.uint8, "r"))
    if context.config.name.startswith("unable"):
        fail(int(context.config.name[6:]), model)
    return model
"""
WAYS = 50


class Raiser(Gate):
    """What raises error number x[0], in `bind` if 100 more; below 0 it runs."""

    BACKEND = RAISES

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        (directory / "1" / "weights").write_bytes(bytes(1 << 22))

    def is_mapped(self, worker: LoneWorker) -> bool:
        inode = str((self.directory / "1" / "weights").stat().st_ino)
        return any(line.split()[4] == inode for line in Path(f"/proc/{worker.pid}/maps").read_text().splitlines())


@pytest.fixture(scope="module")
def worker() -> Iterator[LoneWorker]:
    with LoneWorker() as worker:
        yield worker


@pytest.fixture
def raiser(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[[str], Raiser]]:
    made: list[Raiser] = []

    def make(name: str) -> Raiser:
        made.append(Raiser(tmp_path / name))
        return made[-1]

    yield make
    for each in made:
        each.close()


def alone(plan: PlanOn) -> None:
    for way in range(WAYS):
        assert plan.submit(100 + way).wait().code
    for _ in range(30):  # what has been measured runs on the leader's own thread, right from the channel
        plan.infer(-1)
    for way in range(WAYS):
        assert plan.submit(way).wait().code


def together(plan: PlanOn) -> None:
    for way in range(0, WAYS, 5):
        sent = [plan.submit(way + at, at) for at in range(5)]
        assert all(each.wait().code for each in sent)


def in_sequences(plan: PlanOn) -> None:
    """Controls and states make a batch of the instance's own memory."""
    for way in range(WAYS):
        pending, word = Pending(), plan.message.index | plan.message.generation << 32
        plan.session.memory.bytes[plan.at : plan.at + 4].view("<f4")[:] = way
        flags = SEQUENCE_START | SEQUENCE_END
        ident = plan.session.client.submit(pending, word, 0, 0, 0, 0, flags=flags, sequence_id=1 + way)
        assert Sent(plan, pending, ident, 0).wait().code


KINDS: dict[str, tuple[dict[str, object], dict[str, object], Callable[[PlanOn], None]]] = {
    "alone": ({}, {}, alone),
    "together": ({"batch": 5, "delay": 20_000}, {}, together),
    "in_sequences": ({"sequence_batching": SequenceBatching()}, {}, in_sequences),
    "decoupled": ({"decoupled": True}, {"responses": 1}, together),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_region_goes_with_its_registration(worker: LoneWorker, raiser: Callable[[str], Raiser], kind: str) -> None:
    config_fields, plan_fields, ask = KINDS[kind]
    model = raiser(kind)
    config: ModelConfig = model.config(**config_fields)  # type: ignore[arg-type]
    worker.load(config)
    with Session(worker).attach() as session:
        ask(session.bind(config, **plan_fields))
        assert worker.maps(session.memory)
        worker.retire_region(session.memory)
        eventually(lambda: not worker.maps(session.memory), "the region is not mapped")
        worker.ask(messages.DetachChannel(channel=session.channel))
    assert model.is_mapped(worker)
    worker.ask(messages.UnloadModel(model=config.name, version=1))
    eventually(lambda: not model.is_mapped(worker), "what the model had is not mapped")


@pytest.mark.parametrize("decoupled", [False, True])
def test_the_same_of_an_ensemble(worker: LoneWorker, raiser: Callable[[str], Raiser], decoupled: bool) -> None:
    model = raiser("member")
    member: ModelConfig = model.config(decoupled=decoupled)
    step = Step(model_name="member", input_map={"x": "x"}, output_map={"y": "y"})
    ensemble = ensemble_config("around", [step], "x", "y", 0, (1, SIZE))
    if decoupled:
        ensemble = replace(ensemble, decoupled=True)
    worker.load(member)
    worker.load(ensemble, [next(worker._blocks)])
    with Session(worker).attach() as session:
        ask = together if decoupled else alone
        ask(session.bind(ensemble, responses=int(decoupled)))
        worker.retire_region(session.memory)
        eventually(lambda: not worker.maps(session.memory), "the region is not mapped")
        worker.ask(messages.DetachChannel(channel=session.channel))
    for name in ("around", "member"):
        worker.ask(messages.UnloadModel(model=name, version=1))
    eventually(lambda: not model.is_mapped(worker), "what the model had is not mapped")


def test_a_load_that_fails_leaves_nothing(worker: LoneWorker, raiser: Callable[[str], Raiser]) -> None:
    for way in range(10):
        model = raiser(f"unable{way}")
        with pytest.raises(InferError):
            worker.load(model.config())
        eventually(lambda model=model: not model.is_mapped(worker), f"what load {way} had is not mapped")
