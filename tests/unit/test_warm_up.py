"""Warm-up: what instances are run on before they serve, and that nothing of it shows."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace
from onnx import TensorProto

from broker.repository.config import ModelConfig
from broker.repository.scheduling import Control, InitialState, SequenceBatching, State, WarmUp, WarmUpInput
from broker.worker.backends import Operand
from broker.worker.warm_up import warm_up
from shm import datatypes, statistics
from shm.errors import Code, InferError
from tests.fakes import models
from tests.fakes.loaded import Loaded
from tests.fakes.loading import config_of

Config = Callable[..., ModelConfig]


class Runtime:
    """Notes what it is bound to and how often it runs."""

    def __init__(self) -> None:
        self.inputs: dict[str, Operand] = {}
        self.outputs: list[Operand] = []
        self.runs = 0

    def bind(self, inputs: list[Operand], outputs: list[Operand]) -> SimpleNamespace:
        self.inputs = {operand.name: operand for operand in inputs}
        self.outputs = outputs
        return SimpleNamespace(run=self.run)

    def run(self) -> None:
        self.runs += 1

    def close(self) -> None:
        pass

    def array(self, name: str) -> np.ndarray:
        operand = self.inputs[name]
        assert operand.memory is not None
        if operand.datatype == "BYTES":
            return datatypes.decode_bytes(operand.memory, datatypes.element_count(operand.shape), name)
        return operand.memory.view(datatypes.numpy_dtype(operand.datatype)).reshape(operand.shape)


def sample(name: str = "s", batch: int = 1, count: int = 1, **given) -> WarmUp:
    values = {"name": "x", "datatype": "FP32", "dims": (4,), "kind": "zero", **given}
    return WarmUp(name=name, batch_size=batch, count=count, inputs=(WarmUpInput(**values),))


def run(config: ModelConfig, *samples: WarmUp) -> Runtime:
    runtime = Runtime()
    warm_up(replace(config, warm_up=samples), runtime, lambda _, shape: shape)
    return runtime


@pytest.fixture
def add1(tmp_path: Path) -> ModelConfig:
    return config_of(tmp_path, models.add1(), None)


def test_every_instance_is_run_before_it_serves_and_nothing_is_counted(add1):
    group = replace(add1.instance_group[0], count=2)
    config = replace(add1, instance_group=(group,), warm_up=(sample(count=3), sample("r", 2, kind="random")))
    with Loaded(config) as loaded:
        assert len(loaded.model.free) == 2
        for word in (statistics.SUCCESS, statistics.FAIL, statistics.EXECUTIONS, statistics.INFERENCES):
            assert loaded.count(word) == 0
        assert loaded.batches() == {}


def test_samples_run_as_often_as_they_say(add1):
    assert run(add1, sample(count=3), sample(count=2)).runs == 5


def test_zeros_random_numbers_and_files_for_every_row(add1):
    runtime = run(add1, sample(batch=3))
    assert np.array_equal(runtime.array("x"), np.zeros((3, 4), np.float32))
    random = run(add1, sample(batch=1, kind="random")).array("x")
    assert 0 <= random.min() <= random.max() < 1
    assert random.any()
    data = np.arange(4, dtype=np.float32)
    assert np.array_equal(run(add1, sample(batch=2, kind="file", data=data.tobytes())).array("x"), [data, data])
    assert [operand.memory for operand in runtime.outputs] == [None]


@pytest.mark.parametrize("datatype", [name for name in datatypes.DATATYPES if name != "BYTES"])
def test_random_data_of_every_type(add1, datatype):
    runtime = run(add1, sample(datatype=datatype, kind="random", dims=(2, 2)))
    assert runtime.array("x").shape == (1, 2, 2)


def test_strings(add1):
    assert list(run(add1, sample(datatype="BYTES", dims=(2,))).array("x")) == [b"", b""]
    assert [len(text) for text in run(add1, sample(datatype="BYTES", dims=(2,), kind="random")).array("x")] == [8, 8]
    data = b"\2\0\0\0ab\1\0\0\0c"
    texts = run(add1, sample(batch=2, datatype="BYTES", dims=(2,), kind="file", data=data)).array("x")
    assert list(texts) == [b"ab", b"c"] * 2


def test_strings_on_the_real_runtime(tmp_path):
    config = config_of(tmp_path, models.identity(TensorProto.STRING, [None]), "max_batch_size: 0\n")
    with Loaded(replace(config, warm_up=(sample(datatype="BYTES", dims=(2,), kind="random"),))) as loaded:
        assert loaded.model.free


def test_a_sequence_model_gets_what_its_first_request_would(add1):
    controls = (
        Control(name="start", kind="CONTROL_SEQUENCE_START", datatype="INT32", off=0, on=7),
        Control(name="end", kind="CONTROL_SEQUENCE_END", datatype="FP32", off=-1, on=1),
        Control(name="ready", kind="CONTROL_SEQUENCE_READY", datatype="BOOL"),
        Control(name="id", kind="CONTROL_SEQUENCE_CORRID", datatype="UINT64"),
        Control(name="text", kind="CONTROL_SEQUENCE_CORRID", datatype="BYTES"),
    )
    first = InitialState(name="i", datatype="INT32", dims=(1,), data=b"\5\0\0\0")
    states = (
        State(input_name="a", output_name="b", datatype="INT32", dims=(1,), initial_state=first),
        State(input_name="c", output_name="d", datatype="FP32", dims=(-1, 3)),
    )
    sequence = SequenceBatching(control_input=controls, state=states)
    runtime = run(replace(add1, sequence_batching=sequence), sample(batch=2))
    values = {name: runtime.array(name).tolist() for name in ("start", "end", "ready", "id", "a", "c")}
    assert values == {
        "start": [[7], [7]],
        "end": [[-1], [-1]],
        "ready": [[True], [True]],
        "id": [[1], [1]],
        "a": [[5], [5]],
        "c": [[[0, 0, 0]]] * 2,
    }
    assert list(runtime.array("text")) == [b"1", b"1"]


def test_a_sample_that_fails_says_which(tmp_path):
    config = config_of(tmp_path, models.matmul(), None)
    config = replace(config, warm_up=(sample(), sample("wide", dims=(5,))))
    with pytest.raises(InferError, match="failed to run warmup sample 'wide': onnx runtime error: ") as raised:
        Loaded(config)
    assert raised.value.code in (Code.INVALID_ARG.name, Code.INTERNAL.name)


def test_a_backend_that_exits_fails_the_sample(add1, monkeypatch):
    monkeypatch.setattr(Runtime, "run", lambda self: sys.exit("enough"))
    with pytest.raises(InferError, match="failed to run warmup sample 's': SystemExit: enough"):
        run(add1, sample())


def test_a_sample_without_data_for_an_input_is_refused(add1):
    with pytest.raises(InferError, match="failed to run warmup sample 's': it has no data for input 'x'"):
        run(add1, WarmUp(name="s", batch_size=1, inputs=()))


class Answering(Runtime):
    """A decoupled one: sends what it is told to send."""

    def __init__(self, *sends: dict) -> None:
        super().__init__()
        self.sends = sends
        self.seen: list[np.ndarray] = []

    def execute(self, streams) -> None:
        self.runs += 1
        for stream in streams:
            self.seen.append(stream.inputs["x"])
            for send in self.sends:
                stream.send(**send)


ZEROS = WarmUpInput(name="x", datatype="FP32", dims=(4,), kind="zero")
SAMPLE = WarmUp(name="w", batch_size=2, inputs=(ZEROS,), count=3)


@pytest.fixture
def decoupled(tmp_path):
    return replace(config_of(tmp_path, models.add1(), "max_batch_size: 4\n"), decoupled=True, warm_up=(SAMPLE,))


def test_a_decoupled_model_is_run_until_its_final_responses(decoupled):
    runtime = Answering({"outputs": {"y": np.zeros((2, 4), np.float32)}}, {"final": True})
    warm_up(decoupled, runtime, lambda name, shape: shape)
    assert runtime.runs == 3
    assert [seen.shape for seen in runtime.seen] == [(2, 4)] * 3


def test_a_decoupled_model_that_knows_nothing_of_streams_is_run_like_others(decoupled):
    runtime = Runtime()
    warm_up(decoupled, runtime, lambda name, shape: shape)
    assert runtime.runs == 3


@pytest.mark.parametrize("sends", [[{"error": "no", "final": True}], [{"error": "no"}, {"final": True}]])
def test_an_error_of_a_decoupled_model_fails_the_warm_up(decoupled, sends):
    with pytest.raises(InferError, match="failed to run warmup sample 'w': no"):
        warm_up(decoupled, Answering(*sends), lambda name, shape: shape)


def test_a_decoupled_model_that_forgets_its_sample_fails_the_warm_up(decoupled):
    with pytest.raises(InferError, match="let go of the request without a final response"):
        warm_up(decoupled, Answering(), lambda name, shape: shape)
