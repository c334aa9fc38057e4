"""A model that two workers serve, one of which fails or hangs from its first request on; a real broker."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import clientlib
from shm.errors import InferError
from tests.fakes import models, spread
from tests.fakes.broker import Broker

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


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Each byte written there ends a run that hangs. Beside it lies the repository."""
    directory = tmp_path_factory.mktemp("bad")
    gate = directory / "gate"
    os.mkfifo(gate)
    fp32 = spread.tensors("input", "x FP32 4") + spread.tensors("output", "y FP32 4")
    for name, fails in (("fails", "yes"), ("hangs", "no")):
        config = f"""max_batch_size: 4 backend: "{name}" {fp32}
instance_group [ {{ count: 1 kind: KIND_CPU }}, {{ count: 1 kind: KIND_CPU }} ]
parameters {{ key: "worker_group" value {{ string_value: "left,right" }} }}
parameters {{ key: "gate" value {{ string_value: "{gate}" }} }}
parameters {{ key: "fails" value {{ string_value: "{fails}" }} }}
"""
        models.write_model(directory / "repository", name, config=config)
        (directory / "repository" / name / "backend.py").write_text(BACKEND)
    kept = os.open(gate, os.O_RDWR | os.O_CLOEXEC)
    yield gate
    os.close(kept)


@pytest.fixture(scope="module")
def client(gate: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[clientlib.Client]:
    with (
        Broker(gate.parent / "repository", tmp_path_factory.mktemp("run")) as broker,
        clientlib.connect(f"ipc://{broker.ready().directory}") as client,
    ):
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
