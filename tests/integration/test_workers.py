"""What a worker must have outlives its processes: loads, replays, calls; real zygote and processes."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from msgspec.structs import replace

from broker.silence import first_to_respond
from broker.worker.messages import PlanTensor
from shm.errors import Code, InferError
from shm.memory import sealed_memfd
from shm.messages import TensorSpec
from tests.fakes.channel import PLAN, Twin, submit
from tests.fakes.processes import in_loop, name_of, until
from tests.fakes.workers import (  # noqa: F401 (fixtures)
    KEY,
    ROOT,
    Book,
    Journal,
    _no_process_is_left,
    config,
    journal,
    load,
    plan,
    record_of,
    region_of,
    replaced,
    running,
)


@in_loop
async def test_a_replacement_is_brought_everything_in_order(journal: Journal) -> None:
    fd = sealed_memfd("test-region", 4096)
    with Twin() as twin:
        async with running() as workers:
            worker = await load(workers, config())
            await worker.add_region(region_of(fd))
            await worker.bind_plan(plan())
            await worker.attach_channel(record_of(twin))
            first = worker.pid
            assert first is not None
            assert (5, 6) in worker._state.regions
            assert (5, 7) not in worker._state.regions
            assert os.getsid(first) == first, "Ctrl-C must not reach a worker"
            assert name_of(first) == "tb-worker"

            os.kill(first, signal.SIGKILL)
            second = await replaced(worker, first)

            assert journal.types(second) == ["Start", "LoadInstances", "AddRegion", "BindPlan", "AttachChannel"]
            assert [entry["fds"] for entry in journal.entries(second)] == [1, 0, 1, 0, 4]
            assert (worker.restarts, worker.last_death) == (1, "killed by SIGKILL")
        assert journal.types(second)[-1] == "Drain"
    os.close(fd)


@in_loop
async def test_a_plan_whose_region_is_gone_is_not_brought(journal: Journal, caplog: pytest.LogCaptureFixture) -> None:
    """Whose it is has not let go of it yet: no request of it can run, and nobody must be told."""
    fd = sealed_memfd("test-region", 4096)
    async with running() as workers:
        worker = await load(workers, config())
        await worker.add_region(region_of(fd))
        await worker.bind_plan(plan())
        spec = TensorSpec(name="x", region="r", datatype="FP32", shape=(1,), byte_size=4)
        on_region = replace(plan(77), inputs=(PlanTensor(spec=spec, region=5, generation=6),))
        await worker.bind_plan(on_region)
        await worker.retire_region(5, 6)
        first = worker.pid
        worker.kill("a test")
        second = await replaced(worker, first)
        assert journal.types(second) == ["Start", "LoadInstances", "BindPlan"]
        assert "cannot be given" not in caplog.text
        worker.drop_plan(9, 77, on_region.generation)
    os.close(fd)


@in_loop
async def test_what_was_taken_back_is_not_brought_again(journal: Journal) -> None:
    fd = sealed_memfd("test-region", 4096)
    with Twin() as twin:
        async with running() as workers:
            broken = []
            workers.on_channel_broken = lambda channel, reason: broken.append((channel, reason))
            worker = await load(workers, config())
            await worker.add_region(region_of(fd))
            await worker.add_region(region_of(fd))
            await worker.bind_plan(plan())
            await worker.attach_channel(record_of(twin))
            await worker.detach_channel(1)
            worker.drop_plan(9, PLAN & 0xFFFFFFFF, PLAN >> 32)
            await worker.retire_region(5, 6)
            await worker.unload("m", 1)
            assert broken == [(1, "said at the detach")]
            assert journal.types().count("AddRegion") == 1
            assert journal.types()[-4:] == ["DetachChannel", "DropPlan", "RetireRegion", "UnloadModel"]
            first = worker.pid
            worker.kill("a test")
            assert journal.types(await replaced(worker, first)) == ["Start"]
            assert worker.last_death == "a test"
    os.close(fd)


@in_loop
async def test_a_channel_that_a_replacement_refuses_is_ended_and_its_client_hung_up(journal: Journal) -> None:
    refuse = journal.path.with_name(journal.path.name + ".refuse")
    with Twin() as twin:
        async with running() as workers:
            broken = []
            workers.on_channel_broken = lambda channel, reason: broken.append((channel, reason))
            worker = await load(workers, config())
            await worker.attach_channel(record_of(twin))
            client = twin.client()
            _, pending = submit(client)
            refuse.touch()
            pid = worker.pid
            worker.kill("a test")
            await replaced(worker, pid)
            client.reap()
            assert (pending.finals, pending.code) == (1, Code.UNAVAILABLE)
            why = "worker 'cpu/default' cannot serve %s any more: no descriptors left"
            assert pending.text == why % "this channel"
            assert broken == [(1, why % "it")]
            await worker.detach_channel(1)
            assert journal.types(worker.pid)[-1] == "AttachChannel", "a refused channel needs no detaching"


@in_loop
async def test_giving_up_on_what_is_there_already_takes_nothing_away(journal: Journal, tmp_path: Path) -> None:
    crashing = tmp_path / "crashing"
    fd = sealed_memfd("test-region", 4096)
    async with running(model_load_deaths=1000) as workers:
        worker = await load(workers, config(on_load=f"SIGSEGV while {crashing}"))
        await worker.add_region(region_of(fd))
        crashing.touch()
        pid = worker.pid
        worker.kill("a test")
        await until(lambda: worker.restarts >= 2)
        again = asyncio.create_task(worker.add_region(region_of(fd)))
        await asyncio.sleep(0)
        again.cancel()
        await asyncio.wait([again])
        assert again.cancelled()
        crashing.unlink()
        assert "AddRegion" in journal.types(await replaced(worker, pid))
        assert (5, 6) in worker._state.regions
    os.close(fd)


@in_loop
async def test_a_call_outlives_the_process_it_was_made_to(journal: Journal, tmp_path: Path) -> None:
    crashing = tmp_path / "crashing"
    crashing.touch()
    async with running(model_load_deaths=1000) as workers:
        loading = asyncio.create_task(load(workers, config(on_load=f"SIGSEGV while {crashing}")))
        await until(lambda: journal.types().count("LoadInstances") >= 2)
        assert not loading.done()
        crashing.unlink()
        worker = await loading
        assert worker.state == "ready"
        assert worker.last_death == "killed by SIGSEGV"
        assert worker.restarts >= 2


@in_loop
async def test_a_model_that_kills_its_worker_is_left_behind(journal: Journal) -> None:
    async with running(model_load_deaths=3) as workers:
        lost = []
        workers.on_model_lost = lambda *what: lost.append(what)
        worker = await load(workers, config("good"))
        with pytest.raises(InferError, match="died 3 times in a row while loading it") as raised:
            await load(workers, config("bad", "SIGABRT"))
        assert raised.value.code == "UNAVAILABLE"
        assert "last: killed by SIGABRT" in raised.value.message
        assert lost == [("bad", 1, 1, raised.value.message)]
        await replaced(worker, None)
        assert [entry["config"]["name"] for entry in journal.entries(worker.pid) if "config" in entry] == ["good"]


@in_loop
async def test_nobody_waits_between_the_deaths_of_a_load(journal: Journal, caplog: pytest.LogCaptureFixture) -> None:
    async with running() as workers:
        with pytest.raises(InferError, match="died 5 times in a row while loading it"):
            await load(workers, config("bad", "SIGABRT"))
        await load(workers, config("good"))
        starts = [record.message for record in caplog.records if "next start in" in record.message]
        assert [start.rsplit("; ")[-1] for start in starts] == ["next start in 0 s"] * 5


@in_loop
async def test_a_load_that_does_not_end_keeps_no_other_from_beginning(journal: Journal) -> None:
    async with running() as workers:
        endless = asyncio.create_task(load(workers, config("slow", "silent")))
        await load(workers, config("good"))  # asked for before there was a process
        assert not endless.done()
        endless.cancel()
        await asyncio.wait((endless,))


@in_loop
async def test_models_that_load_together_are_told_apart(journal: Journal) -> None:
    async with running(model_load_deaths=2) as workers:
        names = ("a", "bad", "c")
        models = [config(name, "SIGSEGV" if name == "bad" else "") for name in names]
        results = await asyncio.gather(*(load(workers, model) for model in models), return_exceptions=True)
        assert [isinstance(result, InferError) for result in results] == [False, True, False]


@in_loop
async def test_a_reload_that_kills_leaves_the_old_generation(journal: Journal) -> None:
    async with running(model_load_deaths=2) as workers:
        lost = []
        workers.on_model_lost = lambda *what: lost.append(what[:3])
        worker = await load(workers, config(), 1)
        with pytest.raises(InferError):
            await load(workers, config(on_load="SIGSEGV"), 2)
        await replaced(worker, None)
        assert lost == [("m", 1, 2)]
        assert [entry["generation"] for entry in journal.entries(worker.pid) if "config" in entry] == [1]
        await load(workers, config(), 3)
        pid = worker.pid
        worker.kill("a test")
        again = await replaced(worker, pid)
        assert [entry["generation"] for entry in journal.entries(again) if "config" in entry] == [3]


@in_loop
async def test_a_refused_model_is_not_tried_again(journal: Journal) -> None:
    async with running() as workers:
        with pytest.raises(InferError, match="cannot load this"):
            await load(workers, config(on_load="refuse"))
        worker = workers.of(KEY)
        pid = worker.pid
        worker.kill("a test")
        assert journal.types(await replaced(worker, pid)) == ["Start"]


@in_loop
async def test_a_model_that_only_the_replacement_refuses_is_reported_as_the_models_fault(
    journal: Journal, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refusing = tmp_path / "refusing"
    async with running() as workers:
        lost = []
        workers.on_model_lost = lambda *what: lost.append(what)
        worker = await load(workers, config(on_load=f"refuse while {refusing}"))
        refusing.touch()
        pid = worker.pid
        worker.kill("a test")
        await replaced(worker, pid)
        assert lost == [("m", 1, 1, "cannot load this")]
        assert "cannot be given" not in caplog.text


@in_loop
async def test_a_process_that_is_stopped_does_not_respond_and_its_clients_are_told(journal: Journal) -> None:
    with Twin() as twin:
        async with running(ping_limit_s=600.0) as workers:
            worker, other = await load(workers, config()), workers.start("cpu/other")
            await other.until_up()
            await worker.attach_channel(record_of(twin))
            client, pid = twin.client(), worker.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            try:
                while await first_to_respond([worker, other]) is not other:
                    pass  # that one is slow today
                await until(lambda: client.away)
                assert not client.replaced
                assert not await worker.responds()
                assert (worker.state, worker.pid) == ("ready", pid)
                assert await first_to_respond([worker]) is worker, "where there is no other, it is waited for"
            finally:
                os.kill(pid, signal.SIGCONT)
            await until(lambda: not client.away)
            while await first_to_respond([worker, other]) is not worker:
                pass
            assert worker.restarts == 0
