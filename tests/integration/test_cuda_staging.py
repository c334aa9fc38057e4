"""Models on the CPU and clients' GPU memory, which they get copies of: simulated; not run on hardware.

A real worker, an application of its own with GPU memory, and the driver of --cuda.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from broker.repository.config import TensorConfig
from broker.repository.scheduling import Control, DynamicBatching, SequenceBatching
from broker.worker.cuda.mirrors import PIN_AFTER, PIN_LEAST
from shm import datatypes, statistics
from shm.errors import Code
from shm.layout import SEQUENCE_AGAIN, SEQUENCE_START
from tests.fakes.broker import eventually
from tests.fakes.cuda import CudaEnv
from tests.fakes.cuda_children import Child
from tests.fakes.cuda_worker import (  # noqa: F401 (fixtures)
    ROW,
    Asked,
    Caller,
    GpuMemory,
    X,
    Z,
    application,
    config_of,
    copied,
    cpu,
    fill,
    onnx_add1,
    result,
    rows,
)
from tests.fakes.loaded import shapes_of, spec
from tests.fakes.lone_worker import LoneWorker

GROWS = """
import numpy as np


def load(context):
    return Model()


class Model:
    # Y: x times the number of steps that it has run; Z: that number, once.

    steps = 0

    def bind(self, inputs, outputs):
        return Run(self, next(each for each in inputs if each.name == "X"), outputs)

    def close(self):
        pass


class Run:
    def __init__(self, model, x, outputs):
        self.model, self.x, self.outputs = model, x, outputs

    def run(self):
        self.model.steps += 1
        sizes = {"Y": int(self.x.memory.view("float32")[0]), "Z": 1}
        self.given = [np.full((1, sizes[each.name]), self.model.steps, np.float32) for each in self.outputs]

    def results(self):
        return self.given
"""


def test_a_worker_on_the_cpu_loads_no_driver_before_it_is_asked_for(cuda_env: CudaEnv, application: Child) -> None:
    with LoneWorker(environ=cuda_env.environ) as worker, Caller(worker):
        assert not loads_driver(worker)
        GpuMemory(worker, application)
        assert loads_driver(worker)


def loads_driver(worker: LoneWorker) -> bool:
    return "libcuda" in Path(f"/proc/{worker.pid}/maps").read_text()


@pytest.mark.parametrize("backend", ["identity", "onnxruntime"])
def test_models_on_the_cpu_get_copies_of_gpu_memory(
    tmp_path: Path, cpu: LoneWorker, application: Child, backend: str
) -> None:
    config = onnx_add1(tmp_path)
    name, other = "x", "y"
    if backend == "identity":
        name, other = "INPUT0", "OUTPUT0"
        tensors = [TensorConfig(name=name, datatype="FP32", dims=(-1, -1), zero_copy=True)]
        config = config_of(tmp_path, tensors, [TensorConfig(name=other, datatype="FP32", dims=(-1, -1))])
    config = replace(config, backend=backend)
    block = cpu.load(config)
    with Caller(cpu) as caller:
        caller.attach()
        memory = GpuMemory(cpu, application)
        plan = caller.plan(config, [(memory, spec(name, (2, 4)))], [(memory, spec(other, (2, 4), offset=1024))])
        for value in (1.0, 2.0):
            memory.put(0, rows(2, value))
            assert caller.infer(plan).copied == 2 * 2 * ROW
            assert (memory.get(1024, (2, 4)) == value + (backend != "identity")).all()
        assert (memory.get(1024 + 2 * ROW, (4,)) != value).all(), "and no byte beyond"
        assert copied(block) == {"transfer": 4 * 2 * ROW}
        mixed = caller.plan(config, [(caller.memory, spec(name, (2, 4)))], [(memory, spec(other, (2, 4), offset=2048))])
        caller.memory.put(0, rows(2, 5))
        assert caller.infer(mixed).copied == 2 * ROW
        assert (memory.get(2048, (2, 4)) == 5 + (backend != "identity")).all()


def test_batches_on_the_cpu_of_gpu_and_host_memory(tmp_path: Path, cpu: LoneWorker, application: Child) -> None:
    batching = DynamicBatching(preferred_batch_size=(4,), max_queue_delay_microseconds=20_000_000)
    tensors = [TensorConfig(name=name, datatype="FP32", dims=(4,)) for name in ("INPUT0", "OUTPUT0")]
    config = config_of(
        tmp_path, tensors[:1], tensors[1:], backend="identity", max_batch_size=4, dynamic_batching=batching
    )
    block = cpu.load(config)
    with Caller(cpu) as caller:
        caller.attach()
        memories = [GpuMemory(cpu, application), caller.memory]
        pending = []
        for at, memory in enumerate(memories):
            inputs = [(memory, spec("INPUT0", (1, 4), **X))]
            plan = caller.plan(config, inputs, [(memory, spec("OUTPUT0", (1, 4), **Z))], positions=2, rows=1)
            for position in range(2):
                fill(memory, position, 10 * at + position, 0)
                pending.append(caller.submit(plan, position))
        for each in pending:
            caller.wait(each)
            assert (each.code, each.text) == (Code.OK, "")
        assert [result(memory, position)[0] for memory in memories for position in range(2)] == [0, 1, 10, 11]
        assert block[statistics.EXECUTIONS] == 1
        assert copied(block) == {"gather": 4 * ROW, "scatter": 4 * ROW, "transfer": 4 * ROW}


def test_strings_may_lie_in_gpu_memory(tmp_path: Path, cpu: LoneWorker, application: Child) -> None:
    tensors = [TensorConfig(name=name, datatype="BYTES", dims=(-1,)) for name in ("INPUT0", "OUTPUT0")]
    config = config_of(tmp_path, tensors[:1], tensors[1:], backend="identity")
    cpu.load(config)
    words = datatypes.encode_bytes(np.array([b"one", b"three"], object))
    with Caller(cpu) as caller:
        memory = GpuMemory(cpu, application)
        memory.put(0, np.frombuffer(words, np.uint8))
        memory.put(1024, np.full(64, 7, np.uint8))
        places = (
            spec("INPUT0", (2,), "BYTES", byte_size=len(words)),
            spec("OUTPUT0", (2,), "BYTES", offset=1024, byte_size=64),
        )
        plan = caller.attach().plan(config, [(memory, places[0])], [(memory, places[1])])
        assert shapes_of(caller.infer(plan))[0] == (2,)
        assert memory.get(1024, (64,), "UINT8").tobytes() == words + bytes([7]) * (64 - len(words))


def test_sequences_step_on_gpu_memory(tmp_path: Path, cpu: LoneWorker, application: Child) -> None:
    """A model whose batches are put together in its own memory: sums of a sequence, slot by slot."""
    controls = tuple(
        Control(name=name, kind=f"CONTROL_SEQUENCE_{name}", datatype="INT32", off=0, on=1)
        for name in ("START", "READY")
    )
    tensors = [TensorConfig(name=name, datatype="INT32", dims=(1,)) for name in ("INPUT", "OUTPUT")]
    config = config_of(
        tmp_path,
        tensors[:1],
        tensors[1:],
        backend="sequence",
        max_batch_size=2,
        sequence_batching=SequenceBatching(max_sequence_idle_microseconds=60_000_000, control_input=controls),
    )
    cpu.load(config)
    with Caller(cpu) as caller:
        memory = GpuMemory(cpu, application)
        inputs = [(memory, spec("INPUT", (1, 1), "INT32"))]
        plan = caller.attach().plan(config, inputs, [(memory, spec("OUTPUT", (1, 1), "INT32", offset=1024))], rows=1)
        sums = []
        for step in range(1, 4):
            memory.put(0, np.array([step], np.int32))
            pending = Asked()
            assert caller.client.submit(pending, plan, 0, 0, 0, 0, 0, 0, SEQUENCE_START if step == 1 else 0, 9)
            assert caller.wait(pending).code is Code.OK, pending.text
            sums.append(int(memory.get(1024, (1,), "INT32")[0]))
        assert sums == [1, 3, 6]


def test_what_a_step_has_given_is_handed_over_on_the_gpu_too(
    tmp_path: Path, cpu: LoneWorker, application: Child
) -> None:
    (tmp_path / "backend.py").write_text(GROWS)
    config = config_of(
        tmp_path,
        [TensorConfig(name="X", datatype="FP32", dims=(1,))],
        [TensorConfig(name="Y", datatype="FP32", dims=(-1,)), TensorConfig(name="Z", datatype="FP32", dims=(1,))],
        max_batch_size=1,
        sequence_batching=SequenceBatching(max_sequence_idle_microseconds=60_000_000),
    )
    cpu.load(config)
    with Caller(cpu) as caller:
        caller.attach()
        memory, host = GpuMemory(cpu, application), caller.memory
        narrow, wide = (
            caller.plan(
                config,
                [(host, spec("X", (1, 1)))],
                [(host, spec("Y", (1, -1), offset=1024, byte_size=size)), (memory, spec("Z", (1, 1), offset=512))],
                rows=1,
            )
            for size in (16, 4096)
        )

        def step(plan: int, size: int, flags: int) -> Asked:
            host.put(0, np.array([size], np.float32))
            pending = Asked()
            assert caller.client.submit(pending, plan, 0, 0, 0, 0, 0, 0, flags, 9)
            return caller.wait(pending)

        for number, size in enumerate((4, 1000, 2), 1):
            first = SEQUENCE_START if number == 1 else 0
            pending = step(narrow, size, first)
            if size > 4:
                assert "should be at least 4000 bytes" in pending.text
                assert memory.get(512, (1,)) == number - 1
                pending = step(wide, 1, first | SEQUENCE_AGAIN)
            assert pending.code is Code.OK, pending.text
            assert memory.get(512, (1,)) == number
            assert (host.get(1024, (size,)) == number).all()


def test_a_copy_that_is_used_often_is_pinned(
    tmp_path: Path,
    cuda_env: CudaEnv,
    cpu: LoneWorker,
    application: Child,
) -> None:
    config = replace(onnx_add1(tmp_path), backend="onnxruntime")
    cpu.load(config)
    count = PIN_LEAST // 8  # elements: the input is one half of the region, the output the other
    with Caller(cpu) as caller:
        memory = GpuMemory(cpu, application, PIN_LEAST)
        places = spec("x", (1, count)), spec("y", (1, count), offset=4 * count)
        plan = caller.attach().plan(config, [(memory, places[0])], [(memory, places[1])])
        before = cuda_env.calls(cpu.pid)
        for value in range(2 * PIN_AFTER):
            memory.put(0, np.full(count, value, np.float32))
            caller.infer(plan)
            assert memory.get(4 * count, (count,)).tolist() == [value + 1] * count
        eventually(lambda: cpu.word(statistics.PINNED_BYTES) == PIN_LEAST, "it is pinned")
        memory.put(0, np.full(count, -1, np.float32))
        caller.infer(plan)
        assert not memory.get(4 * count, (count,)).any()
        cpu.retire_region(memory)
        assert cpu.word(statistics.PINNED_BYTES) == 0
        if cuda_env.simulated:
            calls = {name: grown - before.get(name, 0) for name, grown in cuda_env.calls(cpu.pid).items()}
            assert (calls["cuMemHostRegister"], calls["cuMemHostUnregister"]) == (1, 1)
