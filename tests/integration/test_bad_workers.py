"""Models that two workers serve, one of which fails, hangs, or is being replaced; a real broker."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import clientlib
from clientlib.homes import Homes
from shm.errors import InferError
from tests.fakes import models, spread
from tests.fakes.broker import eventually
from tests.fakes.gateways import Gateway
from tests.fakes.processes import kill_new

pytestmark = pytest.mark.timeout(120)
ASKED = 60
ONE = np.ones((1, 4), np.float32)
BACKEND = """
import os

def load(context):
    return Model(context.config.parameters)

class Model:
    def __init__(self, parameters):
        self.gate = os.open(parameters["gate"], os.O_RDWR)
        self.fails = parameters["fails"] == "yes"
        self.mark = parameters["gate"] + "." + parameters["fails"]

    def bind(self, inputs, outputs):
        return Binding(self, inputs[0].memory.view("<f4"), outputs[0].memory.view("<f4"))

    def close(self):
        os.close(self.gate)

    def bad(self):
        '''The worker that runs first is.'''
        try:
            os.symlink(str(os.getpid()), self.mark)
        except FileExistsError:
            pass
        return os.readlink(self.mark) == str(os.getpid())

class Binding:
    def __init__(self, model, x, y):
        self.model, self.x, self.y = model, x, y

    def run(self):
        if self.model.bad():
            if self.model.fails:
                raise RuntimeError("not here")
            os.read(self.model.gate, 1)
        self.y[:] = self.x + 1

    def results(self):
        return []
"""
LATE = """
import os

def load(context):
    gate = context.config.parameters["gate"]
    if os.path.exists(gate + ".closed"):
        with open(gate, "rb", 0) as waits:
            waits.read(1)
    return Model()

class Model:
    def bind(self, inputs, outputs):
        raise RuntimeError("it is only loaded")

    def close(self):
        pass
"""
LEFT, RIGHT = "cpu/left", "cpu/right"
TWO = """instance_group [ { count: 1 kind: KIND_CPU }, { count: 1 kind: KIND_CPU } ]
parameters { key: "worker_group" value { string_value: "left,right" } }
"""


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Each byte written there ends a run that hangs. Beside it lies the repository, and "late", which is the same for
    loads of the model "late", which wait while there is a file "late.closed".
    """
    directory = tmp_path_factory.mktemp("bad")
    gate, late = directory / "gate", directory / "late"
    os.mkfifo(gate)
    os.mkfifo(late)
    repository = directory / "repository"
    fp32 = spread.tensors("input", "x FP32 4") + spread.tensors("output", "y FP32 4")
    for name, fails in (("fails", "yes"), ("hangs", "no")):
        config = f"""max_batch_size: 4 backend: "{name}" {fp32} {TWO}
parameters {{ key: "gate" value {{ string_value: "{gate}" }} }}
parameters {{ key: "fails" value {{ string_value: "{fails}" }} }}
"""
        models.write_model(repository, name, config=config)
        (repository / name / "backend.py").write_text(BACKEND)
    int32 = spread.tensors("input", "INPUT INT32 1") + spread.tensors("output", "OUTPUT INT32 1")
    models.write_model(repository, "sums", config=f"max_batch_size: 8 {int32} {spread.SEQUENCE} {TWO}")
    config = f"""max_batch_size: 4 backend: "late" {fp32}
parameters {{ key: "worker_group" value {{ string_value: "left" }} }}
parameters {{ key: "gate" value {{ string_value: "{late}" }} }}
"""
    models.write_model(repository, "late", config=config)
    (repository / "late" / "backend.py").write_text(LATE)
    kept = [os.open(each, os.O_RDWR | os.O_CLOEXEC) for each in (gate, late)]
    yield gate
    for fd in kept:
        os.close(fd)


@pytest.fixture(scope="module")
def broker(gate: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with Gateway(gate.parent / "repository", tmp_path_factory.mktemp("run"), gateways=1) as broker:
        broker.ready()
        yield broker


@pytest.fixture
def client(broker: Gateway) -> Iterator[clientlib.Client]:
    with clientlib.connect(f"ipc://{broker.directory}") as client:
        yield client


def answers(client: clientlib.Client, model: str, timeout: float) -> Counter[str]:
    """How many of so many requests, one after the other, ended with which message; "" is well."""
    found: Counter[str] = Counter()
    for _ in range(ASKED):
        try:
            well = client.infer(model, {"x": ONE}, timeout=timeout)["y"].tolist() == [[2, 2, 2, 2]]
            found["" if well else "wrong"] += 1
        except InferError as error:
            found[error.message] += 1
    return found


def test_where_one_fails_all_of_its_requests_the_other_gets_most(client: clientlib.Client) -> None:
    """It has nothing to do, and never said how long it takes."""
    found = answers(client, "fails", 60)
    failed = ASKED - found[""]
    assert failed == sum(count for text, count in found.items() if "not here" in text) > 0, found
    assert failed <= ASKED // 3, "it is tried now and then"


def test_where_one_hangs_from_its_first_request_the_other_gets_most(client: clientlib.Client, gate: Path) -> None:
    """Its requests end by their deadlines, so that it has nothing outstanding."""
    try:
        with pytest.raises(InferError, match="timeout expired"):
            client.infer("hangs", {"x": ONE}, timeout=1)
        found = answers(client, "hangs", 1)
        late = ASKED - found[""]
        assert late == sum(count for text, count in found.items() if "timeout expired" in text), found
        assert late <= ASKED // 3
    finally:
        gate.write_bytes(bytes(ASKED + 1))


class Sums:
    """Sequences of the model "sums" over HTTP, with a connection for each step."""

    def __init__(self, broker: Gateway) -> None:
        self._broker = broker

    def step(self, number: int, value: int, *, start: bool = False, end: bool = False) -> int | str:
        """The sum so far, or the error."""
        given = {"name": "INPUT", "datatype": "INT32", "shape": [1, 1], "data": [value]}
        parameters = {"sequence_id": number, "sequence_start": start, "sequence_end": end}
        status, answer = self._broker.post("/v2/models/sums/infer", {"inputs": [given], "parameters": parameters})
        if status != 200:
            return f"{status}: {answer}"
        (total,) = answer["outputs"][0]["data"]
        return int(total)


def test_no_step_goes_on_where_its_sequence_is_not_when_the_only_gateway_has_ended(broker: Gateway, gate: Path) -> None:
    """One begins where it would not be looked for, since that worker is being replaced. The next gateway does not know
    of it, looks there, and hands out the refusal. All others go on.
    """
    sums, late = Sums(broker), gate.with_name("late")
    closed = gate.with_name("late.closed")
    homes = {number: Homes(shared=True).find("sums", number, (LEFT, RIGHT)) for number in range(1, 30)}
    stays, moves = (next(number for number, home in homes.items() if home == key) for key in (RIGHT, LEFT))

    def left() -> tuple[int, str]:
        row = next(row for row in broker.status()["workers"] if row["key"] == LEFT)
        return int(row["pid"] or 0), str(row["state"])

    def gateway() -> int:
        (row,) = broker.gateways()
        return int(str(row["pid"] or 0))

    assert sums.step(stays, 1, start=True) == 1
    assert sums.step(moves, 1, start=True) == 1
    assert sums.step(moves, 1) == 2
    closed.touch()
    gone: set[int] = set()
    kill_new(lambda: left()[0] if left()[1] == "ready" else 0, gone)
    eventually(lambda: left()[0] not in {0, *gone} and left()[1] == "starting", "its replacement loads")
    assert sums.step(moves, 10, start=True) == 10, "it begins elsewhere"
    assert sums.step(moves, 10) == 20, "where this gateway finds it"
    kill_new(gateway, gone)
    eventually(lambda: gateway() not in {0, *gone} and broker.get("/v2/health/live")[0] == 200, "there is another one")
    assert sums.step(stays, 1) == 2, "it is where every gateway looks"
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(sums.step, moves, 10)
        closed.unlink()
        late.write_bytes(b"1")
        refused = str(asked.result(60))
    assert f"inference request for sequence {moves} to model 'sums' must specify the START flag" in refused
    assert "if it had begun, it must begin again" in refused
    assert sums.step(moves, 5, start=True) == 5
    assert sums.step(moves, 5, end=True) == 10
    assert sums.step(stays, 1, end=True) == 3
