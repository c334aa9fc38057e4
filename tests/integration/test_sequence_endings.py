"""Backends with `sequence_ended` in a real broker: END, a new START, silence, a client that dies, unload."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

import clientlib
from shm.errors import InferError
from tests.fakes.broker import eventually
from tests.fakes.gateways import Gateway, url_of

BACKEND = """
import os


def load(context):
    return Model(os.path.join(context.config.directory, "told"))


class Model:
    def __init__(self, path):
        self.path = path
        self.running = False

    def bind(self, inputs, outputs):
        return Run(self, inputs[0], outputs[0])

    def execute(self, streams):
        for stream in streams:
            stream.send({"y": stream.inputs["x"] + 1}, final=True)

    def sequence_ended(self, which, reason):
        assert not self.running
        with open(self.path, "a") as file:
            print(which, reason, file=file)

    def close(self):
        pass


class Run:
    def __init__(self, model, x, y):
        self.model, self.x, self.y = model, x, y

    def run(self):
        self.model.running = True
        self.value = self.x.memory.view("float32").reshape(self.x.shape) + 1
        self.model.running = False

    def results(self):
        return [self.value]
"""
GROWS = """
import numpy as np


def load(context):
    return Model()


class Model:
    '''Answers with how many steps a sequence has had, as often as it is asked to.'''

    def __init__(self):
        self.steps = 0  # one sequence at a time

    def bind(self, inputs, outputs):
        named = {operand.name: operand for operand in inputs}
        return Run(self, named["x"], named["start"], named["ready"], [operand.name for operand in outputs])

    def close(self):
        pass


class Run:
    def __init__(self, model, x, start, ready, names):
        self.model, self.x, self.start, self.ready, self.names = model, x, start, ready, names

    def run(self):
        if self.ready.memory.view("int32")[0]:
            self.model.steps = 1 if self.start.memory.view("int32")[0] else self.model.steps + 1
        size = int(self.x.memory.view("float32")[0])
        sizes = [2 * size if name == "z" else size for name in self.names]
        self.given = [np.full((1, each), self.model.steps, np.float32) for each in sizes]

    def results(self):
        return self.given
"""
CONTROLS = ", ".join(
    f'{{ name: "{kind.lower()}" control {{ kind: CONTROL_SEQUENCE_{kind} int32_false_true: [ 0, 1 ] }} }}'
    for kind in ("START", "READY")
)
GROWING = f"""
backend: "grows"
max_batch_size: 1
input {{ name: "x" data_type: TYPE_FP32 dims: [ 1 ] }}
output {{ name: "y" data_type: TYPE_FP32 dims: [ -1 ] }}
output {{ name: "z" data_type: TYPE_FP32 dims: [ -1 ] }}
sequence_batching {{ max_sequence_idle_microseconds: 60000000 direct {{ }} control_input [ {CONTROLS} ] }}
"""
CONFIG = """
backend: "told"
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }
"""
TEXTS = """
      max_sequence_idle_microseconds: 60000000
      oldest { max_candidate_sequences: 4 }
      control_input { name: "id" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } }
"""
STRATEGIES = {
    "slots": "sequence_batching { max_sequence_idle_microseconds: 60000000 direct { } }",
    "ids": "sequence_batching { max_sequence_idle_microseconds: 60000000 oldest { max_candidate_sequences: 4 } }",
    "short": "sequence_batching { max_sequence_idle_microseconds: 200000 oldest { max_candidate_sequences: 4 } }",
    "texts": f"sequence_batching {{ {TEXTS} }}",
    "stream": f"model_transaction_policy {{ decoupled: true }} sequence_batching {{ {TEXTS} }}",
}
GOES = """
import os, sys
import clientlib

client = clientlib.connect(sys.argv[1])
region = client.create_region("steps", 64)
x, y = region.tensor((1, 1), "FP32"), region.tensor((1, 1), "FP32", offset=8)
client.prepare("ids", {"x": x}, {"y": y}).infer(sequence_id=77, sequence_start=True, timeout=20)
os._exit(0)
"""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    root = tmp_path_factory.mktemp("endings")
    for name, batching in STRATEGIES.items():
        (root / "models" / name / "1").mkdir(parents=True)
        (root / "models" / name / "config.pbtxt").write_text(CONFIG + batching)
        (root / "models" / name / "backend.py").write_text(BACKEND)
    (root / "models" / "grows" / "1").mkdir(parents=True)
    (root / "models" / "grows" / "config.pbtxt").write_text(GROWING)
    (root / "models" / "grows" / "backend.py").write_text(GROWS)
    (root / "run").mkdir(mode=0o700)
    flags = ["--model-control-mode=explicit", "--load-model=*"]
    with Gateway(root / "models", root / "run", *flags) as broker:
        yield broker.ready()


def told(broker: Gateway, model: str) -> list[str]:
    path = Path(broker.directory).parent / "models" / model / "told"
    return path.read_text().splitlines() if path.exists() else []


def news(broker: Gateway, model: str) -> Callable[[], list[str]]:
    """What the model is told from now on."""
    known = len(told(broker, model))
    return lambda: told(broker, model)[known:]


class Steps:
    """A client of one model."""

    def __init__(self, client: clientlib.Client, model: str) -> None:
        region = client.create_region("steps", 64)
        self.x = region.array((1, 1), np.float32)
        x, y = region.tensor((1, 1), "FP32"), region.tensor((1, 1), "FP32", offset=8)
        self.plan = client.prepare(model, {"x": x}, {"y": y})

    def __call__(self, number: int, *, start: bool = False, end: bool = False) -> None:
        self.x[...] = number
        result = self.plan.infer(sequence_id=number, sequence_start=start, sequence_end=end, timeout=20)
        assert result["y"].tolist() == [[number + 1]]


def cpu_s(pid: int) -> float:
    """Processor time that a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_each_end_is_told_once(broker: Gateway) -> None:
    heard = news(broker, "slots")
    with clientlib.connect(broker.directory) as client:
        step = Steps(client, "slots")
        step(5, start=True)
        step(6, start=True)
        step(5, end=True)
        eventually(lambda: heard() == ["0 end"], "END, with nothing else to run")
        step(6, start=True)
        eventually(lambda: heard() == ["0 end", "1 start"], "a new START")
        with pytest.raises(InferError, match="the sequence of this id is over: it has had its END"):
            step(5)
    eventually(lambda: heard() == ["0 end", "1 start", "1 client_gone"], "the client has left")


def test_silence(broker: Gateway) -> None:
    heard = news(broker, "short")
    with clientlib.connect(broker.directory) as client:
        step = Steps(client, "short")
        step(9, start=True)
        eventually(lambda: heard() == ["9 idle"])
        family = broker.descendants()

        def rests() -> bool:
            began, before = time.monotonic(), sum(map(cpu_s, family))
            time.sleep(0.3)
            return sum(map(cpu_s, family)) - before < (time.monotonic() - began) / 2

        eventually(rests, "nobody looks for it any more")
        with pytest.raises(InferError, match="nothing of it came for max_sequence_idle_microseconds"):
            step(9)


def test_a_client_that_dies(broker: Gateway) -> None:
    subprocess.run([sys.executable, "-c", GOES, broker.directory], check=True, timeout=60)
    eventually(lambda: told(broker, "ids") == ["77 client_gone"])


def test_ids_that_are_strings(broker: Gateway) -> None:
    """Which only clients of the gateways have."""
    with triton.InferenceServerClient(url_of(broker, "http").split("//")[1]) as client:
        given = triton.InferInput("x", [1, 1], "FP32")
        given.set_data_from_numpy(np.ones((1, 1), np.float32))
        client.infer("texts", [given], sequence_id="camera-7", sequence_start=True)
        client.infer("texts", [given], sequence_id="camera-7", sequence_end=True)
        eventually(lambda: told(broker, "texts") == ["camera-7 end"])
        with pytest.raises(InferenceServerException) as refused:
            client.infer("texts", [given], sequence_id="camera-7")
        assert refused.value.message().endswith("START flag on the first request of the sequence"), "as Triton says it"


def test_unload(broker: Gateway) -> None:
    with clientlib.connect(broker.directory) as client:
        client.load("short")
        heard, others = news(broker, "slots"), news(broker, "short")
        step = Steps(client, "slots")
        step(8, start=True)
        client.unload("slots")
        eventually(lambda: heard() == ["0 unload"])
        client.load("slots")
        assert others() == []
        with pytest.raises(InferError, match="is over: the model was unloaded, or replaced, and its state went with"):
            step(8)


def test_a_decoupled_model_with_ids_that_are_strings(broker: Gateway) -> None:
    ended: queue.Queue[Any] = queue.Queue()
    with triton_grpc.InferenceServerClient(url_of(broker, "grpc").split("//")[1]) as client:
        client.start_stream(lambda result, error: ended.put(error or result))
        given = triton_grpc.InferInput("x", [1, 1], "FP32")
        given.set_data_from_numpy(np.ones((1, 1), np.float32))
        client.async_stream_infer("stream", [given], sequence_id="door", sequence_start=True, sequence_end=True)
        assert ended.get(timeout=20).as_numpy("y").tolist() == [[2]]
        eventually(lambda: told(broker, "stream") == ["door end"])
        client.stop_stream()


def steps_natively(broker: Gateway, sizes: list[int]) -> list[Any]:
    with clientlib.connect(broker.directory) as client:
        region = client.create_region("x", 64)
        x = region.array((1, 1), np.float32)
        plan = client.prepare("grows", {"x": region.tensor((1, 1), "FP32")})
        given = []
        for at, size in enumerate(sizes):
            x[...] = size
            result = plan.infer(sequence_id=3, sequence_start=at == 0, sequence_end=at == len(sizes) - 1, timeout=20)
            given.append((result["y"].copy(), result["z"].copy()))
        return given


def steps_of_triton(module: Any, wire: str) -> Any:
    def steps(broker: Gateway, sizes: list[int]) -> list[Any]:
        given = []
        with module.InferenceServerClient(url_of(broker, wire).split("//")[1]) as client:
            for at, size in enumerate(sizes):
                x = module.InferInput("x", [1, 1], "FP32")
                x.set_data_from_numpy(np.full((1, 1), size, np.float32))
                start, end = at == 0, at == len(sizes) - 1
                result = client.infer("grows", [x], sequence_id=4, sequence_start=start, sequence_end=end)
                given.append((result.as_numpy("y"), result.as_numpy("z")))
        return given

    return steps


@pytest.mark.parametrize(
    "steps",
    [steps_natively, steps_of_triton(triton, "http"), steps_of_triton(triton_grpc, "grpc")],
    ids=["native", "http", "grpc"],
)
def test_a_step_whose_result_had_no_room_is_not_taken_twice(broker: Gateway, steps: Any) -> None:
    """The model keeps the state itself: it counts. Each result is larger than all before, of both outputs."""
    sizes = [10_000 * 4**at for at in range(4)]
    given = steps(broker, sizes)
    assert [(y.shape, z.shape) for y, z in given] == [((1, size), (1, 2 * size)) for size in sizes]
    assert [{*y.ravel(), *z.ravel()} for y, z in given] == [{1}, {2}, {3}, {4}]
