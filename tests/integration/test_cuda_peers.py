"""A model on one GPU and its clients' memory on another (--cuda-peer-access): what is copied between them, and counted;
simulated, not run on hardware.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.repository.scheduling import DynamicBatching
from shm import statistics
from shm.errors import Code
from tests.fakes.cuda import CudaEnv
from tests.fakes.cuda_children import Child
from tests.fakes.cuda_worker import ROW, Caller, GpuMemory, add_plan, adder, copied, fill, result
from tests.fakes.lone_worker import LoneWorker

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def two(cuda_sim: CudaEnv) -> CudaEnv:
    return cuda_sim.with_settings(CUSIM_DEVICES=2)


@pytest.fixture(scope="module")
def worker(two: CudaEnv) -> Iterator[LoneWorker]:
    with LoneWorker("gpu0/test", two.environ, peers=True) as worker:
        yield worker


@pytest.fixture(scope="module")
def near(two: CudaEnv) -> Iterator[Child]:
    with Child(two, "tests.fakes.cuda_worker:Client", "0") as child:
        yield child


@pytest.fixture(scope="module")
def far(two: CudaEnv) -> Iterator[Child]:
    with Child(two, "tests.fakes.cuda_worker:Client", "1") as child:
        yield child


def test_what_lies_right_is_used_in_place_and_shown(
    tmp_path: Path, worker: LoneWorker, near: Child, far: Child
) -> None:
    config = adder(tmp_path)
    block = worker.load(config)
    with Caller(worker) as caller:
        memories = GpuMemory(worker, near), GpuMemory(worker, far)
        for memory in memories:
            plan = add_plan(caller if memory is not memories[0] else caller.attach(), config, memory)
            fill(memory, 0, 1, 2)
            assert caller.infer(plan).copied == 0
            assert result(memory) == [3.0] * 4
        assert copied(block) == {}
        here, there = (worker.word(word) for word in (statistics.GPU_OPEN_BYTES, statistics.GPU_PEER_BYTES))
        assert here == 2 * there > 0, "one of the two is on the other GPU"
        for memory in memories:
            worker.retire_region(memory)
        assert worker.word(statistics.GPU_PEER_BYTES) == 0


def test_what_does_not_is_copied_between_the_gpus(tmp_path: Path, worker: LoneWorker, far: Child) -> None:
    config = adder(tmp_path)
    block = worker.load(config)
    with Caller(worker) as caller:
        memory = GpuMemory(worker, far, offset=12)
        plan = add_plan(caller.attach(), config, memory)
        fill(memory, 0, 1, 2)
        assert caller.infer(plan).copied == 3 * ROW
        assert result(memory) == [3.0] * 4
        assert copied(block) == {"peer": 3 * ROW}
        worker.retire_region(memory)


def test_rows_of_both_in_one_batch_are_told_apart(tmp_path: Path, worker: LoneWorker, near: Child, far: Child) -> None:
    batching = DynamicBatching(preferred_batch_size=(3,), max_queue_delay_microseconds=20_000_000)
    config = adder(tmp_path, dynamic_batching=batching)
    block = worker.load(config)
    with Caller(worker) as caller:
        caller.attach()
        memories = [GpuMemory(worker, near), GpuMemory(worker, far), caller.memory]
        plans = [add_plan(caller, config, memory) for memory in memories]
        for at, memory in enumerate(memories):
            fill(memory, 0, at, 10)
        pending = [caller.submit(plan) for plan in plans]
        for each in pending:
            caller.wait(each)
            assert (each.code, each.text, each.copied) == (Code.OK, "", 3 * ROW)
        assert [result(memory)[0] for memory in memories] == [10, 11, 12]
        assert block[statistics.EXECUTIONS] == 1
        assert copied(block) == {"gather": 2 * 2 * ROW, "scatter": 2 * ROW, "peer": 3 * ROW}
