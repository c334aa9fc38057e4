"""Worker processes and clients' GPU memory: simulated; not run on hardware.

A real worker, an application of its own with GPU memory, and the driver of --cuda. Models on the CPU are the real
runtimes; TensorRT is a double (tests/doubles/tensorrt.py).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from broker.repository.config import InstanceGroup, TensorConfig
from broker.repository.scheduling import DynamicBatching
from broker.worker import messages
from shm import statistics
from shm.errors import Code, InferError
from tests.doubles import tensorrt as double
from tests.fakes.broker import eventually
from tests.fakes.cuda import CudaEnv
from tests.fakes.cuda_children import Child
from tests.fakes.cuda_worker import (  # noqa: F401 (fixtures)
    ROW,
    Caller,
    GpuMemory,
    add_plan,
    adder,
    application,
    config_of,
    copied,
    cpu,
    doubled,
    fill,
    gpu,
    onnx_add1,
    result,
    rows,
)
from tests.fakes.loaded import shapes_of, spec
from tests.fakes.lone_worker import LoneWorker


def grown(env: CudaEnv, worker: LoneWorker, before: dict[str, int]) -> dict[str, int]:
    """How often each function was called since then; without those that were not."""
    now = env.calls(worker.pid)
    return {name: calls - before.get(name, 0) for name, calls in now.items() if calls != before.get(name)}


# --- models on a GPU ------------------------------------------------------------------------------------------------


def test_a_request_on_gpu_memory_runs_in_place(
    tmp_path: Path, cuda_env: CudaEnv, gpu: LoneWorker, application: Child
) -> None:
    config = adder(tmp_path)
    block = gpu.load(config)
    with Caller(gpu) as caller:
        memory = GpuMemory(gpu, application)
        plan = add_plan(caller.attach(), config, memory)
        fill(memory, 1, 1, 2)
        caller.infer(plan, 1)  # makes the binding
        before = cuda_env.calls(gpu.pid)
        for _ in range(10):
            assert caller.infer(plan, 1).copied == 0
        steady = grown(cuda_env, gpu, before)
        assert result(memory, 1) == [3.0] * 4
        assert copied(block) == {}
        if cuda_env.simulated:
            doubles = {"cuMemcpyDtoHAsync": 20, "cuMemcpyHtoDAsync": 10, "cuLaunchHostFunc": 10}
            steady.pop("cuCtxPushCurrent", 0)  # of a thread that leads for the first time
            assert steady == {**doubles, "cuEventRecord": 10, "cuEventSynchronize": 10}


IDLE = """
from broker.worker.cuda.staging import Scratch
from broker.worker.cuda.streams import Lane
from shm.cuda.driver import find_device

def load(context):
    return Model(find_device(context.device, "this test"))

class Model:
    def __init__(self, device):
        self.lane, self.scratch = Lane(device), Scratch(device.ordinal)

    def bind(self, inputs, outputs):
        return self

    def run(self):
        self.lane.enter()

    def results(self):
        return []

    def close(self):
        self.lane.close()
"""


def test_a_lone_short_request_runs_at_once(tmp_path: Path, gpu: LoneWorker, application: Child) -> None:
    """It has not waited in a queue then. (A loaded machine may make it look long for a while.)"""
    (tmp_path / "1").mkdir()
    (tmp_path / "backend.py").write_text(IDLE)
    given, made = (TensorConfig(name=name, datatype="FP32", dims=(4,)) for name in ("INPUT0", "OUTPUT0"))
    config = config_of(tmp_path, [given], [made])
    block = gpu.load(config)
    with Caller(gpu) as caller:
        memory = GpuMemory(gpu, application)
        places = spec("INPUT0", (4,)), spec("OUTPUT0", (4,), offset=1024)
        plan = caller.attach().plan(config, [(memory, places[0])], [(memory, places[1])])
        assert caller.infer(plan).queued_ns > 0, "nobody knew that it is short"
        eventually(lambda: caller.infer(plan).queued_ns == 0, "one runs at once")
        assert copied(block) == {}
        gpu.retire_region(memory)
        assert caller.refused(plan)[0] is Code.NOT_FOUND


def test_host_memory_is_pinned_once_and_copied_to_the_gpu(tmp_path: Path, cuda_env: CudaEnv, gpu: LoneWorker) -> None:
    config = adder(tmp_path)
    block = gpu.load(config)
    before = cuda_env.calls(gpu.pid)
    with Caller(gpu) as caller:
        plan = add_plan(caller.attach(), config, caller.memory)
        fill(caller.memory, 0, 3, 4)
        for _ in range(3):
            assert caller.infer(plan).copied == 3 * ROW
        assert result(caller.memory) == [7.0] * 4
        assert copied(block) == {"transfer": 9 * ROW}
        if cuda_env.simulated:
            calls = grown(cuda_env, gpu, before)
            assert calls["cuMemHostRegister"] == 1
            assert calls["cuMemAlloc"] == 3, "a place for each tensor, used again"
        pinned = gpu.word(statistics.PINNED_BYTES)
        gpu.retire_region(caller.memory)
        assert pinned - gpu.word(statistics.PINNED_BYTES) == caller.memory.info.byte_size
        if cuda_env.simulated:
            assert grown(cuda_env, gpu, before)["cuMemHostUnregister"] == 1


def test_batches_are_put_together_on_the_gpu(
    tmp_path: Path, cuda_env: CudaEnv, gpu: LoneWorker, application: Child
) -> None:
    """Rows of two sessions, of GPU and host memory, aligned or not: a copy for each, and two waits for all."""
    batching = DynamicBatching(preferred_batch_size=(6,), max_queue_delay_microseconds=20_000_000)
    config = adder(tmp_path, dynamic_batching=batching)
    block = gpu.load(config)
    with Caller(gpu) as one, Caller(gpu) as two:
        memories = [GpuMemory(gpu, application), one.memory, GpuMemory(gpu, application, offset=12)]
        plans = [
            (one.attach(), add_plan(one, config, memories[0])),
            (one, add_plan(one, config, memories[1])),
            (two.attach(), add_plan(two, config, memories[2])),
        ]
        for turn in (1, 2):
            before = cuda_env.calls(gpu.pid)
            pending = []
            for at, (caller, plan) in enumerate(plans):
                for position in range(2):
                    fill(memories[at], position, 10 * at, position)
                    pending.append((caller, caller.submit(plan, position)))
            for caller, each in pending:
                caller.wait(each)
                assert (each.code, each.text) == (Code.OK, "")
                assert each.copied == 3 * ROW
            found = [[result(memory, position)[0] for position in range(2)] for memory in memories]
            assert found == [[0, 1], [10, 11], [20, 21]]
            assert copied(block) == {"gather": turn * 6 * 2 * ROW, "scatter": turn * 6 * ROW}
            assert block[statistics.EXECUTIONS] == turn
        if cuda_env.simulated:
            calls = grown(cuda_env, gpu, before)
            calls.pop("cuCtxPushCurrent", 0)  # of a thread that is here for the first time
            doubles = {"cuMemcpyDtoHAsync": 2, "cuMemcpyHtoDAsync": 1, "cuLaunchHostFunc": 1}
            ours = {"cuMemcpyDtoDAsync": 4 * 3, "cuMemcpyHtoDAsync": 2 * 2, "cuMemcpyDtoHAsync": 2}
            assert calls == Counter(doubles) + Counter(ours) + Counter(cuEventRecord=2, cuEventSynchronize=2)


def test_neighbours_of_a_ring_run_in_place(tmp_path: Path, gpu: LoneWorker, application: Child) -> None:
    batching = DynamicBatching(preferred_batch_size=(3,), max_queue_delay_microseconds=20_000_000)
    config = adder(tmp_path, dynamic_batching=batching)
    block = gpu.load(config)
    with Caller(gpu) as caller:
        memory = GpuMemory(gpu, application)
        places = [spec(name, (1, 4), offset=1024 * at) for at, name in enumerate(("INPUT0", "INPUT1", "OUTPUT0"))]
        ring = [replace(place, stride=ROW) for place in places]
        inputs = [(memory, each) for each in ring[:2]]
        plan = caller.attach().plan(config, inputs, [(memory, ring[2])], positions=4, rows=1)
        memory.put(0, np.arange(16, dtype=np.float32).reshape(4, 4))
        memory.put(1024, np.zeros((4, 4), np.float32))
        memory.put(2048, np.full((4, 4), -1, np.float32))
        pending = [caller.submit(plan, position) for position in (2, 0, 1)]
        for each in pending:
            caller.wait(each)
            assert (each.code, each.copied) == (Code.OK, 0)
        assert memory.get(2048, (16,)).tolist() == [*range(12), -1, -1, -1, -1]
        assert block[statistics.EXECUTIONS] == 1
        pending = [caller.submit(plan, position) for position in (3, 2, 1)]
        for each in pending:
            caller.wait(each)
            assert (each.code, each.copied) == (Code.OK, 3 * ROW), "what begins between 256 bytes is moved on the GPU"
        assert memory.get(2048, (16,)).tolist() == list(range(16))
        assert copied(block) == {"align": 9 * ROW}


def test_each_worker_uses_its_own_gpu(tmp_path: Path, cuda_sim: CudaEnv) -> None:
    two = cuda_sim.with_settings(CUSIM_DEVICES=2)
    config = adder(tmp_path)
    with (
        Child(two, "tests.fakes.cuda_worker:Client", "1") as there,
        Child(two, "tests.fakes.cuda_worker:Client", "0") as elsewhere,
        LoneWorker("gpu1/test", two.environ) as worker,
        Caller(worker) as caller,
    ):
        block = worker.load(config)
        memory = GpuMemory(worker, there)
        plan = add_plan(caller.attach(), config, memory)
        fill(memory, 0, 1, 2)
        caller.infer(plan)
        assert result(memory) == [3.0] * 4
        assert copied(block) == {}
        with pytest.raises(InferError, match=r"invalid args: it is memory of GPU-.*, this worker runs on GPU-"):
            GpuMemory(worker, elsewhere)


def test_a_completion_means_that_the_gpu_is_done(tmp_path: Path, cuda_sim: CudaEnv, application: Child) -> None:
    """Every operation of a stream takes 3 ms there; what is read at once after a completion is the result."""
    slow = cuda_sim.with_settings(CUSIM_DELAY_US=3000)
    alone = adder(tmp_path / "alone")
    batching = DynamicBatching(preferred_batch_size=(2,), max_queue_delay_microseconds=20_000_000)
    together = adder(tmp_path / "together", dynamic_batching=batching)
    with LoneWorker("gpu0/test", slow.environ) as worker, Caller(worker) as caller:
        caller.attach()
        for config in (alone, together):
            worker.load(config)
            for memory in (GpuMemory(worker, application), caller.memory, GpuMemory(worker, application, offset=12)):
                plan = add_plan(caller, config, memory)
                for value in (1.0, 2.0):
                    fill(memory, 0, value, value)
                    fill(memory, 1, value, -value)
                    for pending in [caller.submit(plan, position) for position in range(2)]:
                        caller.wait(pending)
                        assert pending.code is Code.OK
                    assert (result(memory, 0)[0], result(memory, 1)[0]) == (2 * value, 0)


def test_results_of_unknown_size_go_to_gpu_memory(tmp_path: Path, gpu: LoneWorker, application: Child) -> None:
    plan = double.plan("nonzero", [double.tensor("INPUT0", [8], "INT32")], [double.tensor("OUTPUT0", [-1], "INT32")])
    config = doubled(
        tmp_path,
        plan,
        [TensorConfig(name="INPUT0", datatype="INT32", dims=(8,))],
        [TensorConfig(name="OUTPUT0", datatype="INT32", dims=(-1,))],
    )
    block = gpu.load(config)
    with Caller(gpu) as caller:
        memory = GpuMemory(gpu, application)
        memory.put(1024, np.full(8, -1, np.int32))
        word = caller.attach().plan(
            config,
            [(memory, spec("INPUT0", (8,), "INT32"))],
            [(memory, spec("OUTPUT0", (-1,), "INT32", offset=1024, byte_size=16))],
        )
        memory.put(0, np.array([0, 5, 0, 0, 7, 9, 0, 0], np.int32))
        pending = caller.infer(word)
        assert shapes_of(pending)[0] == (3,)
        assert memory.get(1024, (8,), "INT32").tolist() == [1, 4, 5, -1, -1, -1, -1, -1]
        assert (pending.copied, copied(block)) == (12, {"output": 12})
        memory.put(0, np.ones(8, np.int32))
        code, text = caller.refused(word)
        assert code is Code.INVALID_ARG
        assert text.startswith("shared memory size specified with the request for output 'OUTPUT0' (16 bytes)")
        assert memory.get(1024, (4,), "INT32").tolist() == [1, 4, 5, -1], "nothing was written"


def test_an_unloaded_model_gives_its_gpu_memory_back(tmp_path: Path, cuda_sim: CudaEnv, gpu: LoneWorker) -> None:
    config = adder(tmp_path)
    before = cuda_sim.calls(gpu.pid)
    gpu.load(config)
    with Caller(gpu) as caller:
        plan = add_plan(caller.attach(), config, caller.memory)
        caller.infer(plan)
        gpu.ask(messages.Ping())
        used = gpu.word(statistics.GPU_USED)
        gpu.ask(messages.UnloadModel(model=config.name, version=1))
        code, _ = caller.refused(plan)
        assert code is Code.UNAVAILABLE

        def given_back() -> bool:
            calls = grown(cuda_sim, gpu, before)
            memory = calls["cuMemAlloc"] == calls.get("cuMemFree")
            return memory and calls["cuStreamCreate"] == calls.get("cuStreamDestroy")

        eventually(given_back, "memory and stream are given back")
        gpu.ask(messages.Ping())
        assert 0 <= gpu.word(statistics.GPU_USED) < used


# --- regions come and go --------------------------------------------------------------------------------------------


def test_a_region_is_closed_when_it_is_unregistered(
    tmp_path: Path, cuda_env: CudaEnv, gpu: LoneWorker, application: Child
) -> None:
    config = adder(tmp_path)
    gpu.load(config)
    before = cuda_env.calls(gpu.pid)
    words = (statistics.GPU_OPENS, statistics.GPU_CLOSES, statistics.GPU_OPEN_BYTES)
    opens, closes, held = (gpu.word(word) for word in words)
    with Caller(gpu) as caller:
        memory = GpuMemory(gpu, application, 4096)
        plan = add_plan(caller.attach(), config, memory)
        caller.infer(plan)
        assert [gpu.word(word) for word in words] == [opens + 1, closes, held + 4096]
        assert gpu.retire_region(memory) == ""
        assert [gpu.word(word) for word in words] == [opens + 1, closes + 1, held]
        if cuda_env.simulated:
            calls = grown(cuda_env, gpu, before)
            assert calls["cuIpcOpenMemHandle"] == calls["cuIpcCloseMemHandle"] == 1
        assert caller.refused(plan) == (
            Code.NOT_FOUND, f"Unable to find shared memory region: '{memory.info.name}'",
        )  # fmt: skip


def test_handles_that_are_none_are_refused(gpu: LoneWorker, application: Child) -> None:
    memory = GpuMemory(gpu, application)
    bad = replace(memory.info, region=9999, cuda=replace(memory.info.cuda, handle=bytes(64)))
    with pytest.raises(InferError, match=r"^\[INVALID_ARG\] failed to register shared memory region .*invalid args"):
        gpu.ask(bad)
    with pytest.raises(InferError, match="invalid args"):
        gpu.ask(replace(memory.info, region=9998, generation=9998, cuda=replace(memory.info.cuda, handle=b"\1" * 64)))


def test_memory_of_an_application_that_was_killed_stays_until_it_is_unregistered(
    tmp_path: Path, cuda_env: CudaEnv, gpu: LoneWorker
) -> None:
    config = adder(tmp_path)
    gpu.load(config)
    with Caller(gpu) as caller, Child(cuda_env, "tests.fakes.cuda_worker:Client") as application:
        memory = GpuMemory(gpu, application)
        plan = add_plan(caller.attach(), config, memory)
        application.kill()
        caller.infer(plan)
        assert gpu.retire_region(memory) == ""


# --- kinds of models that cannot ------------------------------------------------------------------------------------


def test_responses_of_decoupled_models_are_not_written_to_a_gpu(
    tmp_path: Path, cpu: LoneWorker, application: Child
) -> None:
    tensors = [
        TensorConfig(name=name, datatype=kind, dims=(-1,)) for name, kind in (("IN", "INT32"), ("DELAY", "UINT32"))
    ]
    tensors.append(TensorConfig(name="WAIT", datatype="UINT32", dims=(1,)))
    outputs = [TensorConfig(name="OUT", datatype="INT32", dims=(1,))]
    config = config_of(tmp_path, tensors, outputs, backend="repeat", decoupled=True)
    cpu.load(config)
    with Caller(cpu) as caller:
        memory = GpuMemory(cpu, application)
        inputs = [(memory, spec(each.name, (1,), each.datatype, offset=at * 256)) for at, each in enumerate(tensors)]
        plan = caller.attach().plan(config, inputs, [(memory, spec("OUT", (1,), "INT32", offset=1024))])
        code, text = caller.refused(plan)
        assert code is Code.UNSUPPORTED
        assert "is decoupled: each of its responses would overwrite the one before in GPU memory; have its" in text


def test_a_runtime_without_cuda_is_told_apart_from_one_with(tmp_path: Path, gpu: LoneWorker) -> None:
    """The package that is installed for tests is the one for the CPU."""
    config = replace(
        onnx_add1(tmp_path),
        backend="onnxruntime",
        instance_group=(InstanceGroup(name="m", kind="KIND_GPU", gpus=(0,)),),
    )
    with pytest.raises(InferError) as raised:
        gpu.load(config)
    assert raised.value.code == "UNAVAILABLE"
    assert "runs it by CPUExecutionProvider: the installed package is the runtime for the CPU" in raised.value.message
