"""What goes wrong on a GPU, and who sees it: simulated; not run on hardware. See test_cuda_worker.py."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from shm import statistics
from shm.errors import Code
from tests.fakes.cuda import CudaEnv
from tests.fakes.cuda_children import Child
from tests.fakes.cuda_worker import Caller, GpuMemory, add_plan, adder, application, fill, gpu, result  # noqa: F401 (fixtures)
from tests.fakes.lone_worker import LIMIT_S, LoneWorker


def test_a_lost_context_ends_the_worker_and_its_replacement_answers(
    tmp_path: Path, cuda_env: CudaEnv, application: Child, capfd: pytest.CaptureFixture[str]
) -> None:
    broken, sound = adder(tmp_path / "broken" / "add", fault="sticky"), adder(tmp_path / "sound" / "add")
    with LoneWorker("gpu0/test", cuda_env.environ) as first:
        first.load(broken)
        caller = Caller(first)
        memory = GpuMemory(first, application)
        plan = add_plan(caller.attach(), broken, memory)
        fill(memory, 0, 1, 2)
        pending = caller.submit(plan)
        assert first.process.wait(LIMIT_S) == 71
    assert re.search("CUDA_ERROR_ILLEGAL_ADDRESS.*: the CUDA context is lost; this worker ends", capfd.readouterr().err)
    with caller, LoneWorker("gpu0/test", cuda_env.environ) as second:
        second.load(sound)
        memory.give(second)
        second.add_region(caller.memory)
        caller.worker = second
        for message in caller.bound:
            second.ask(message)
        caller.attach()
        caller.wait(pending)
        assert (pending.code, pending.text) == (Code.OK, "")
        assert result(memory) == [3.0] * 4


def test_a_killed_worker_is_replaced(tmp_path: Path, cuda_env: CudaEnv, application: Child) -> None:
    config = adder(tmp_path)
    with LoneWorker("gpu0/test", cuda_env.environ) as first:
        first.load(config)
        caller = Caller(first)
        memory = GpuMemory(first, application)
        plan = add_plan(caller.attach(), config, memory)
        fill(memory, 0, 1, 2)
        caller.infer(plan)
        first.process.send_signal(signal.SIGKILL)
        first.process.wait(LIMIT_S)
    fill(memory, 0, 5, 6)
    pending = caller.submit(plan)
    with caller, LoneWorker("gpu0/test", cuda_env.environ) as second:
        second.load(config)
        memory.give(second)
        second.add_region(caller.memory)
        caller.worker = second
        second.ask(caller.bound[0])
        caller.attach()
        caller.wait(pending)
        assert result(memory) == [11.0] * 4


def test_memory_that_runs_out_is_that_requests_error(tmp_path: Path, cuda_sim: CudaEnv, application: Child) -> None:
    config = adder(tmp_path)
    env = cuda_sim.with_settings(CUSIM_FAIL="cuMemAlloc:2")
    with LoneWorker("gpu0/test", env.environ) as worker, Caller(worker) as caller:
        block = worker.load(config)
        memory = GpuMemory(worker, application)
        on_gpu, on_host = (add_plan(caller, config, each) for each in (memory, caller.memory))
        fill(memory, 0, 1, 2)
        caller.attach().infer(on_gpu)
        code, text = caller.refused(on_host)
        assert code is Code.UNAVAILABLE
        assert text.startswith("the GPU has no 16 bytes left for this request")
        caller.infer(on_gpu)
        assert result(memory) == [3.0] * 4
        assert block[statistics.FAIL] == 1


def test_an_engine_that_fails_is_that_requests_error(tmp_path: Path, gpu: LoneWorker, application: Child) -> None:
    config = adder(tmp_path, fault="refuse")
    gpu.load(config)
    with Caller(gpu) as caller:
        plan = add_plan(caller.attach(), config, GpuMemory(gpu, application))
        for _ in range(2):
            code, text = caller.refused(plan)
            assert code is Code.INTERNAL
            assert text.startswith("TensorRT failed to run the model: IExecutionContext::enqueueV3")


def test_memory_that_its_client_freed_and_allocated_anew(tmp_path: Path, cuda_sim: CudaEnv, gpu: LoneWorker) -> None:
    """Without unregistering it first: the old region is lost, the new one at the same address works."""
    config = adder(tmp_path)
    gpu.load(config)
    with Caller(gpu) as caller, Child(cuda_sim, "tests.fakes.cuda_worker:Client") as application:
        old = GpuMemory(gpu, application)
        plan = add_plan(caller.attach(), config, old)
        fill(old, 0, 1, 2)
        caller.infer(plan)
        application.call("free", old.number)
        new = GpuMemory(gpu, application)
        again = add_plan(caller, config, new)
        fill(new, 0, 3, 4)
        caller.infer(again)
        assert result(new) == [7.0] * 4
        code, text = caller.refused(plan)
        assert code is Code.NOT_FOUND
        assert "its GPU memory was freed by its client, or unregistered; register it again" in text
        assert gpu.word(statistics.GPU_EVICTIONS) >= 1
