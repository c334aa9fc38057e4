"""Implicit state of decoupled models: what one step sends as a state, the next step of its sequence reads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import clientlib
from shm.errors import InferError
from tests.fakes.broker import Broker

CONFIG = """
backend: "own"
max_batch_size: %d
model_transaction_policy { decoupled: true }
input { name: "X" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] }
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  oldest { max_candidate_sequences: 8 }
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
  state {
    input_name: "SUM_IN" output_name: "SUM_OUT" data_type: TYPE_INT32 dims: [ 1 ]
    initial_state { name: "begin" data_type: TYPE_INT32 dims: [ 1 ] data_file: "ten" }
  }
}
"""
STREAMS = """
import numpy as np

class Model:
    def execute(self, streams):
        for stream in streams:
            x, total = stream.inputs["X"], stream.inputs["SUM_IN"]
            if x.flat[0] == 99:
                stream.send({"SUM_OUT": np.zeros(1, np.int64)}, final=True)  # of another datatype
                continue
            for part in range(int(x.flat[0])):
                total = total + 1
                stream.send({"Y": total, "SUM_OUT": total})
            stream.send({"SUM_OUT": total}, final=True)

    bind = close = lambda self, *_: None

def load(context):
    return Model()
"""
ONCE = """
import numpy as np

class Model:
    def bind(self, inputs, outputs):
        return Run({each.name: each.memory.view(np.int32).reshape(each.shape) for each in inputs}, outputs)

    def close(self): pass

class Run:
    def __init__(self, inputs, outputs):
        self.inputs, self.outputs = inputs, outputs

    def run(self):
        total = self.inputs["SUM_IN"] + self.inputs["X"]
        made = {"Y": total, "SUM_OUT": total}
        self.made = [made[each.name] for each in self.outputs]

    def results(self):
        return self.made

def load(context):
    return Model()
"""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[clientlib.Client]:
    root: Path = tmp_path_factory.mktemp("repository")
    packages: Path = tmp_path_factory.mktemp("packages")  # a backend that is installed need not know of streams
    (packages / "once-1.dist-info").mkdir()
    (packages / "once-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: once\nVersion: 1\n")
    (packages / "once-1.dist-info" / "entry_points.txt").write_text("[tensorbroker.backends]\nonce = once_backend\n")
    (packages / "once_backend.py").write_text(ONCE)
    for name, code, batch in (("streams", STREAMS, 0), ("batched", STREAMS, 4), ("once", "", 4)):
        (root / name / "1").mkdir(parents=True)
        (root / name / "initial_state").mkdir()
        (root / name / "initial_state" / "ten").write_bytes(np.int32(10).tobytes())
        (root / name / "config.pbtxt").write_text(CONFIG.replace('"own"', '"once"' if not code else '"own"') % batch)
        if code:
            (root / name / "backend.py").write_text(code)
    with (
        mock.patch.dict(
            os.environ, PYTHONPATH=os.pathsep.join(filter(None, (str(packages), os.environ.get("PYTHONPATH"))))
        ),
        Broker(root, tmp_path_factory.mktemp("run")) as broker,
        clientlib.connect(broker.ready().directory) as client,
    ):
        yield client


class Steps:
    """Steps of the sequences of one model."""

    def __init__(self, client: clientlib.Client, model: str, batched: bool) -> None:
        shape = (1, 1) if batched else (1,)
        region = client.create_region(f"steps-{model}", 4096)
        self.x = region.array(shape, np.int32)
        self.plan = client.prepare(model, {"X": region.tensor(shape, "INT32")})

    def step(self, number: int, value: int, start: bool = False, end: bool = False) -> list[int]:
        self.x[...] = value
        stream = self.plan.stream(sequence_id=number, sequence_start=start, sequence_end=end, timeout=20)
        results = list(stream)
        assert all(set(result) == {"Y"} for result in results), "a state is not an output"
        return [int(result["Y"].flat[0]) for result in results]


@pytest.mark.parametrize(("model", "batched"), [("streams", False), ("batched", True)])
def test_each_sequence_goes_on_with_its_own(client, model, batched):
    steps = Steps(client, model, batched)
    assert steps.step(1, 2, start=True) == [11, 12]
    assert steps.step(2, 1, start=True) == [11]
    assert steps.step(1, 3) == [13, 14, 15]
    assert steps.step(2, 0) == []
    assert steps.step(2, 1) == [12]
    assert steps.step(1, 1, start=True) == [11]
    assert steps.step(1, 1, end=True) == [12]


def test_a_backend_that_knows_nothing_of_streams(client):
    steps = Steps(client, "once", True)
    assert steps.step(1, 5, start=True) == [15]
    assert steps.step(1, 7) == [22]
    assert steps.step(1, 1, end=True) == [23]


def test_a_state_of_another_kind_is_the_model_s_error(client):
    region = client.create_region("wrong", 4096)
    region.array((1,), np.int32)[:] = 99
    plan = client.prepare("streams", {"X": region.tensor((1,), "INT32")})
    with pytest.raises(InferError, match=r"state 'SUM_OUT' of model 'streams' is INT32 \[1\], got int64 \[1\]"):
        list(plan.stream(sequence_id=9, sequence_start=True, sequence_end=True, timeout=20))
