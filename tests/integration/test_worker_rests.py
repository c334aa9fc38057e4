"""Workers that serve nothing rest, and wake for whatever is wanted of them; real zygote, processes and broker."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clientlib
from broker.logical_worker import Worker
from broker.workers import Workers
from shm.memory import sealed_memfd
from shm.statistics import TAKEN
from tests.fakes import models
from tests.fakes.broker import Broker, alive, eventually
from tests.fakes.channel import PLAN, Twin, submit
from tests.fakes.processes import in_loop, until
from tests.fakes.workers import (  # noqa: F401 (fixtures)
    KEY,
    Journal,
    _no_process_is_left,
    config,
    journal,
    load,
    plan,
    record_of,
    region_of,
    running,
)

OTHER = "cpu/other"


async def serve(workers: Workers, generation: int = 1) -> Worker:
    """Load model "m" on a worker that is not the default one, as `broker.version_life` does."""
    worker = workers.start(OTHER)
    await worker.until_up()
    await worker.load(config(), 1, generation, workers.blocks.take(("m", 1), 1, OTHER))
    return worker


async def rests(workers: Workers, worker: Worker) -> None:
    pid = worker.pid
    assert pid is not None
    await worker.unload("m", 1)
    await until(lambda: worker.state == "resting")
    assert worker.pid is None
    assert not alive(pid)


@in_loop
async def test_one_that_rests_has_no_process_and_wakes_with_all_that_its_clients_have_there(journal: Journal) -> None:
    fd = sealed_memfd("test-region", 4096)
    with Twin() as twin:
        async with running(rest_after_s=0.0) as workers:
            worker = await serve(workers)
            await worker.add_region(region_of(fd))
            await worker.bind_plan(plan())
            await worker.attach_channel(record_of(twin))
            await asyncio.sleep(0.6)  # two looks at least: it has a model
            assert worker.state == "ready"
            await rests(workers, worker)
            assert workers.of(OTHER) is worker, "somebody has something there"
            assert not await worker.region_used(5, 6)

            client = twin.client()
            submit(client)
            await until(lambda: journal.types().count("AttachChannel") >= 2)
            second = [entry["pid"] for entry in journal.entries() if entry["type"] == "Start"][1]
            assert journal.types(second) == ["Start", "AddRegion", "BindPlan", "AttachChannel"]
            assert (worker.restarts, worker.last_death) == (0, ""), "that was no death"

            # The fake answers nothing, so what waits in the channel wakes the next process at once, rung for or not.
            await until(lambda: journal.types().count("AttachChannel") >= 3)
            await worker.detach_channel(1)
            worker.drop_plan(9, PLAN & 0xFFFFFFFF, PLAN >> 32)
            await worker.retire_region(5, 6)
            await until(lambda: not [worker for worker in workers if worker.key == OTHER])
    os.close(fd)


@in_loop
async def test_a_channel_that_is_closed_while_its_worker_rests_is_not_listened_to(journal: Journal) -> None:
    with Twin() as twin, Twin() as left:
        async with running(rest_after_s=0.0) as workers:
            worker = await serve(workers)
            await worker.attach_channel(replace(record_of(left), channel=2))
            await worker.attach_channel(record_of(twin))
            await rests(workers, worker)
            await worker.detach_channel(1)
            submit(twin.client())  # its client's descriptors are open longer than the broker's
            await asyncio.sleep(0.1)
            assert worker.state == "resting"
            submit(left.client())
            await until(lambda: journal.types().count("Start") >= 2)


@in_loop
async def test_one_that_nobody_has_anything_at_is_forgotten_with_its_block(journal: Journal) -> None:
    async with running(rest_after_s=0.0) as workers:
        worker = await serve(workers)
        free = len(workers.blocks._free)
        await worker.unload("m", 1)
        await until(lambda: not list(workers))
        assert len(workers.blocks._free) == free + 1
        await until(lambda: worker.state == "stopped")
        again = await serve(workers, 2)
        assert again is not worker
        assert again.state == "ready"


@in_loop
async def test_one_that_is_asked_for_models_that_are_gone_does_not_rest(journal: Journal) -> None:
    async with running(rest_after_s=60.0) as workers:
        worker = await serve(workers)
        await worker.unload("m", 1)
        start_ns, minute = time.monotonic_ns(), 61_000_000_000  # no look of its own comes between these
        for look in range(1, 5):
            workers.blocks.of_worker(OTHER)[TAKEN] += 1
            worker.let_rest(False, start_ns + look * minute)
            assert not worker._rest.begun
        for look in (5, 6):
            worker.let_rest(False, start_ns + look * minute)
        assert worker._rest.begun


@in_loop
async def test_memory_of_a_gpu_is_opened_by_its_worker_also_when_that_rests(journal: Journal) -> None:
    fd = sealed_memfd("test-region", 4096)
    async with running(rest_after_s=0.0) as workers:
        workers.gpu_uuid = "GPU-{}".format
        await workers.start(KEY).until_up()
        assert await workers.on_gpu("GPU-0") is workers.of(KEY)
        worker = workers.start("gpu0/default")
        assert await workers.on_gpu("GPU-0") is None, "it is about to come up"
        await worker.until_up()
        await worker.add_region(region_of(fd))
        await until(lambda: worker.state == "resting")
        assert await workers.on_gpu("GPU-0") is worker
        assert await workers.on_gpu("GPU-1") is workers.of(KEY)
        await worker.add_region(replace(region_of(fd), region=7))
        await until(lambda: worker.state == "resting")
    os.close(fd)


@in_loop
async def test_the_default_worker_never_rests(journal: Journal) -> None:
    async with running(rest_after_s=0.0) as workers:
        worker = await load(workers, config())
        await worker.unload("m", 1)
        for _ in range(3):
            workers._sample(time.monotonic_ns())
        assert (worker.key, worker.state) == (KEY, "ready")


@in_loop
async def test_a_worker_of_a_failed_load_rests(journal: Journal) -> None:
    async with running(rest_after_s=0.0) as workers:
        worker = workers.start(OTHER)
        await worker.until_up()
        with pytest.raises(clientlib.InferError, match="cannot load this"):
            await worker.load(config(on_load="refuse"), 1, 1, workers.blocks.take(("m", 1), 1, OTHER))
        await until(lambda: not list(workers))


@pytest.mark.parametrize(
    "wait", [Worker.until_up, lambda worker: worker.add_region(region_of(0))], ids=["up", "region"]
)
@in_loop
async def test_a_worker_that_cannot_be_started_rests_unless_somebody_waits_for_it(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, wait: Callable[[Worker], Coroutine[Any, Any, None]]
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    async with running(rest_after_s=0.0) as workers:
        worker = workers.start(OTHER)
        waiting = asyncio.create_task(wait(worker))
        await until(lambda: worker.state == "backoff")
        for _ in range(2):
            assert not worker.let_rest(False, time.monotonic_ns())
        assert not worker._rest.begun
        waiting.cancel()
        await until(lambda: not list(workers))


@in_loop
async def test_a_load_that_comes_while_a_worker_goes_to_rest_is_served(journal: Journal) -> None:
    """At every moment of it: before, while its process dies, at rest, when it is forgotten."""
    async with running(rest_after_s=0.0) as workers:
        for turns in (*range(12), 0.002, 0.005, 0.01, 0.02, 0.05):
            worker = await serve(workers, int(turns * 1000) + 1)
            await worker.unload("m", 1)
            for _ in range(2):
                workers._sample(time.monotonic_ns())
            if isinstance(turns, float):
                await asyncio.sleep(turns)
                workers._sample(time.monotonic_ns())
            for _ in range(int(turns)):
                await asyncio.sleep(0)
                workers._sample(time.monotonic_ns())
        assert all(worker.restarts == 0 for worker in workers)
        assert journal.types().count("Start") >= 17, "each time it went to rest"


class RestlessBroker(Broker):
    module = "tests.fakes.restless_broker"


GROUP = 'parameters { key: "worker_group" value { string_value: "other" } }\n'


def test_clients_do_not_notice(tmp_path: Path) -> None:
    root = tmp_path / "models"
    models.write_model(root, "add1", models.add1(), config=f'backend: "onnxruntime"\nmax_batch_size: 4\n{GROUP}')
    flags = ("--model-control-mode=explicit", "--load-model=add1")
    with RestlessBroker(root, tmp_path / "run", *flags) as broker:
        broker.ready()

        asking = broker.client()

        def shown(of: str) -> Any:
            rows = asking.ask("GetStatus")["status"]["workers"]
            return next((row[of] for row in rows if row["key"] == OTHER), None)

        with clientlib.connect(f"ipc://{broker.directory}") as client:
            x, y = client.create_region("x", 4096), client.create_region("y", 4096)
            prepared = client.prepare("add1", {"x": x.tensor((1, 2), "FP32")}, {"y": y.tensor((1, 2), "FP32")})
            for number in range(3):
                x.array((1, 2), np.float32)[:] = number
                assert prepared.infer(timeout=30)["y"].tolist() == [[number + 1] * 2]
                client.unload("add1")
                eventually(lambda: shown("state") == "resting", "its worker rests")
                if number < 2:  # one of its requests wakes the worker
                    before = shown("requests")
                    with pytest.raises(clientlib.InferError, match="has no available versions"):
                        prepared.infer(timeout=30)
                    eventually(lambda before=before: shown("requests") > before, "refused ones count, too")
                client.load("add1")
            assert prepared.infer(timeout=30)["y"].tolist() == [[3] * 2]
            client.unload("add1")
        eventually(lambda: shown("state") is None, "it is forgotten once its client is gone")
        assert "rests until it is wanted" in broker.log()
        assert "next start in" not in broker.log()
