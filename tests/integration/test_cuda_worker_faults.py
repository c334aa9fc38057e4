"""What goes wrong on a GPU, and who sees it: simulated; not run on hardware. See test_cuda_worker.py."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from msgspec.structs import replace

from broker.repository.config import TensorConfig
from broker.repository.scheduling import DynamicBatching
from broker.worker import messages
from shm import statistics
from shm.errors import Code, InferError
from tests.fakes import mover_backend
from tests.fakes.broker import eventually
from tests.fakes.cuda import CudaEnv
from tests.fakes.cuda_children import Child
from tests.fakes.cuda_worker import Caller, GpuMemory, add_plan, adder, application, doubled, fill, gpu, result  # noqa: F401 (fixtures)
from tests.fakes.loaded import Memory, spec
from tests.fakes.lone_worker import LIMIT_S, LoneWorker


def test_a_lost_context_ends_the_worker_and_its_replacement_answers(
    tmp_path: Path, cuda_sim: CudaEnv, application: Child, capfd: pytest.CaptureFixture[str]
) -> None:
    broken, sound = adder(tmp_path / "broken" / "add", fault="sticky"), adder(tmp_path / "sound" / "add")
    with LoneWorker("gpu0/test", cuda_sim.environ) as first:
        first.load(broken)
        caller = Caller(first)
        memory = GpuMemory(first, application)
        plan = add_plan(caller.attach(), broken, memory)
        fill(memory, 0, 1, 2)
        pending = caller.submit(plan)
        assert first.process.wait(LIMIT_S) == 71
    assert re.search("CUDA_ERROR_ILLEGAL_ADDRESS.*: the CUDA context is lost; this worker ends", capfd.readouterr().err)
    with caller, LoneWorker("gpu0/test", cuda_sim.environ) as second:
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


@pytest.mark.parametrize("how", ["free", "kill"])
def test_memory_that_goes_while_a_model_runs_on_it(tmp_path: Path, cuda_sim: CudaEnv, how: str) -> None:
    """Freed or not, killed or not: the request ends, and the next client is served."""
    config = adder(tmp_path)
    slow = cuda_sim.with_settings(CUSIM_DELAY_US=20_000)
    with LoneWorker("gpu0/test", slow.environ) as worker, Caller(worker) as caller:
        worker.load(config)
        caller.attach()
        for _ in range(2):
            with Child(cuda_sim, "tests.fakes.cuda_worker:Client") as application:
                memory = GpuMemory(worker, application)
                plan = add_plan(caller, config, memory)
                runs = cuda_sim.calls(worker.pid).get("cuLaunchHostFunc", 0)
                pending = caller.submit(plan)
                eventually(lambda: cuda_sim.calls(worker.pid).get("cuLaunchHostFunc", 0) > runs, "it runs")  # noqa: B023
                application.kill() if how == "kill" else application.call("free", memory.number)
                assert caller.wait(pending).code in (Code.OK, Code.INTERNAL, Code.NOT_FOUND)
                worker.retire_region(memory)
        assert worker.process.poll() is None


def test_one_handle_under_two_names(tmp_path: Path, cuda_sim: CudaEnv, gpu: LoneWorker, application: Child) -> None:
    config = adder(tmp_path)
    gpu.load(config)
    before = cuda_sim.calls(gpu.pid)
    with Caller(gpu) as caller:
        one = GpuMemory(gpu, application)
        number = one.info.region + 100_000
        other = replace(one.info, region=number, generation=number, name="other")
        gpu.ask(other)
        plan = add_plan(caller.attach(), config, one)
        gpu.ask(messages.RetireRegion(region=number, generation=number))
        fill(one, 0, 1, 2)
        caller.infer(plan)
        assert result(one) == [3.0] * 4
        calls = cuda_sim.calls(gpu.pid)
        assert calls["cuIpcCloseMemHandle"] == before.get("cuIpcCloseMemHandle", 0)
        gpu.retire_region(one)
        assert cuda_sim.calls(gpu.pid)["cuIpcCloseMemHandle"] == before.get("cuIpcCloseMemHandle", 0) + 1


def test_a_pinned_file_that_is_truncated(tmp_path: Path, gpu: LoneWorker) -> None:
    config = adder(tmp_path)
    gpu.load(config)
    fd = os.memfd_create("truncated")
    os.ftruncate(fd, 1 << 16)
    memory = gpu.add_region(Memory(fd=fd, kind="system"))
    with Caller(gpu) as caller:
        plan = add_plan(caller.attach(), config, memory)
        caller.infer(plan)
        os.ftruncate(fd, 0)
        code, text = caller.refused(plan)
        assert code is Code.INTERNAL
        assert text == f"shared memory region '{memory.info.name}' changed size: register it again"
        gpu.retire_region(memory)
        other = add_plan(caller, config, caller.memory)
        caller.infer(other)
    os.close(fd)
    os.close(memory.fd)


def test_no_memory_for_a_model_is_its_loads_error(tmp_path: Path, gpu: LoneWorker) -> None:
    with pytest.raises(InferError) as raised:
        gpu.load(adder(tmp_path / "large", fault="no memory"))
    assert raised.value.code == "UNAVAILABLE"
    assert raised.value.message.startswith("unable to create TensorRT context: Error Code 2: OutOfMemory")
    gpu.load(adder(tmp_path / "small"))


def test_what_a_large_request_takes_of_a_gpu_ends_with_it(
    tmp_path: Path, cuda_sim: CudaEnv, gpu: LoneWorker, application: Child
) -> None:
    """Alone or in a batch; a small one's stays for the next. An instance of this model keeps 64 bytes per tensor."""
    source = Path(mover_backend.__file__).read_text().replace("Scratch(device.ordinal)", "Scratch(device.ordinal, 64)")
    given, made = (TensorConfig(name=name, datatype="FP32", dims=(4,)) for name in ("INPUT0", "OUTPUT0"))
    batching = DynamicBatching(preferred_batch_size=(2,), max_queue_delay_microseconds=20_000_000)
    configs = [
        doubled(tmp_path / name, b"", [given], [made], max_batch_size=8, **more)
        for name, more in (("alone", {}), ("batched", {"dynamic_batching": batching}))
    ]

    def kept() -> int:
        calls = cuda_sim.calls(gpu.pid)
        return calls.get("cuMemAlloc", 0) - calls.get("cuMemFree", 0)

    with Caller(gpu) as caller:
        plans = []
        for config in configs:
            (Path(config.directory) / "backend.py").write_text(source)
            gpu.load(config)
            for rows in (1, 8) if config.name == "alone" else (1,):
                places = spec("INPUT0", (rows, 4), stride=128), spec("OUTPUT0", (rows, 4), offset=1024, stride=128)
                inputs, outputs = [(caller.memory, places[0])], [(caller.memory, places[1])]
                plans.append(caller.plan(config, inputs, outputs, 2, rows=rows))
        caller.attach()
        before = kept()
        for _ in range(2):
            caller.infer(plans[0])
        assert kept() == before + 2, "its input's place and its output's"
        for _ in range(2):
            caller.infer(plans[1])
            assert kept() == before + 2
        pending = [caller.submit(plans[2], position) for position in range(2)]
        for each in pending:
            assert caller.wait(each).code is Code.OK, each.text
        assert kept() == before + 2, "rows of eight, of which two came"
