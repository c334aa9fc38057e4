"""Deaths of workers, zygote and broker, hangs, and stopping; real zygote and processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys

import pytest

from shm.errors import Code, InferError
from shm.memory import sealed_memfd
from shm.recovery import DIED, to_blame
from shm.statistics import STARTED
from tests.fakes.channel import PLAN, Plan, Twin, submit, take
from tests.fakes.processes import children, descriptors, in_loop, until
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


@pytest.mark.parametrize("retryable", [False, True])
@in_loop
async def test_endings_come_with_the_death(journal: Journal, retryable: bool) -> None:
    with Twin() as twin:
        async with running(Book(retryable)) as workers:
            worker = await load(workers, config())
            client, dying = twin.client(), twin.worker({PLAN: Plan()})
            _, started = submit(client)
            for request in take(dying):
                dying.start([request])
            _, queued = submit(client)
            await worker.attach_channel(record_of(twin))
            pid = worker.pid
            worker.kill("a test", "a test ended it")
            await replaced(worker, pid)
            client.reap()
            assert (started.finals, queued.finals) == (0 if retryable else 1, 0)
            if not retryable:
                assert started.code == Code.UNAVAILABLE
                assert started.text.startswith(f"a test ended it; {DIED}")
        client.reap()  # the broker has stopped: everything has its ending
        assert (started.finals, queued.finals) == (1, 1)
        assert "Server is stopping" in queued.text


@in_loop
async def test_two_deaths_alone_are_held_against_the_session(journal: Journal) -> None:
    book = Book()
    with Twin() as twin:
        async with running(book) as workers:
            worker = await load(workers, config())
            await worker.bind_plan(plan())
            await worker.attach_channel(record_of(twin))
            client = twin.client()
            for death in range(2):
                dying = twin.worker({PLAN: Plan()})
                _, pending = submit(client)
                for request in take(dying):
                    dying.start([request])
                    request.attempts = 1
                    dying.start([request])
                pid = worker.pid
                worker.kill("a test")
                await replaced(worker, pid)
                client.reap()
                assert pending.code == Code.UNAVAILABLE
                assert book.refused == ([(9, "m")] if death else [])
            (bound,) = (entry for entry in journal.entries(worker.pid) if entry["type"] == "BindPlan")
            assert bound["refused_until_ns"] > 0


@pytest.mark.parametrize(
    ("running_at_once", "ended_by_the_broker", "refused"), [(1, False, [(9, "m")]), (2, False, []), (1, True, [])]
)
@in_loop
async def test_a_stream_that_was_alone_is_blamed_at_once_since_it_never_runs_again(
    journal: Journal, running_at_once: int, ended_by_the_broker: bool, refused: list[tuple[int, str]]
) -> None:
    book = Book(retryable=False)
    with Twin() as twin:
        async with running(book) as workers:
            worker = await load(workers, config())
            await worker.bind_plan(plan())
            await worker.attach_channel(record_of(twin))
            client = twin.client()
            for death in range(2):
                dying = twin.worker({PLAN: Plan(output_positions=2)})
                pending = [submit(client, position)[1] for position in range(running_at_once)]
                dying.start(take(dying))
                pid = worker.pid
                assert pid is not None
                worker.kill("a test") if ended_by_the_broker else os.kill(pid, signal.SIGKILL)
                await replaced(worker, pid)
                client.reap()
                for each in pending:
                    assert each.code == Code.UNAVAILABLE
                    assert to_blame(each.text) is bool(refused)
                assert book.refused == (refused if death else [])


@in_loop
async def test_a_truncated_region_kills_once(journal: Journal) -> None:
    fd = os.memfd_create("test-region")
    os.ftruncate(fd, 8192)
    async with running() as workers:
        shrunk = []
        workers.on_region_shrunk = lambda *what: shrunk.append(what)
        worker = await load(workers, config())
        await worker.add_region(region_of(fd, 8192, "system"))
        for size, expected in ((8192, []), (4096, [(5, 6)])):
            os.ftruncate(fd, size)
            pid = worker.pid
            assert pid is not None
            os.kill(pid, signal.SIGBUS)
            again = await replaced(worker, pid)
            assert shrunk == expected
            assert ("AddRegion" in journal.types(again)) is not bool(expected)
        assert (5, 6) not in worker._state.regions
    os.close(fd)


@in_loop
async def test_a_hanging_worker_is_killed_and_named(journal: Journal) -> None:
    async with running() as workers:
        worker = await load(workers, config(on_load="hang", hang_timeout_s="0.05"))
        pid = worker.pid
        await until(lambda: worker.restarts > 0)
        assert "hung: model 'm' version 1 had run a batch of 3" in worker.last_death
        await replaced(worker, pid)


@in_loop
async def test_who_ran_last_is_named_where_descriptors_were_closed(journal: Journal) -> None:
    async with running() as workers:
        worker = workers.start(KEY)
        idle, blocks = (workers.blocks.take((name, 1), 1, KEY) for name in ("idle", "m"))
        workers.blocks.page.block(idle[0])[STARTED] = 1
        with pytest.raises(InferError, match=r"last: exit code 73: its descriptors were closed, not by itself"):
            await worker.load(config(on_load="closed"), 1, 1, blocks)
        assert worker.last_death.endswith("; model 'm' version 1 ran last")


@in_loop
async def test_the_death_of_the_zygote_is_survived(journal: Journal) -> None:
    async with running() as workers:
        worker = await load(workers, config())
        other = workers.start("cpu/other")
        await until(lambda: other.state == "ready")
        before = (workers.zygote_pid, worker.pid, other.pid)
        assert before[0] is not None
        os.kill(before[0], signal.SIGKILL)
        await replaced(worker, before[1])
        await replaced(other, before[2])
        assert worker.last_death == "killed by SIGKILL"
        assert set(before).isdisjoint((workers.zygote_pid, worker.pid, other.pid))
        assert children() == [workers.zygote_pid], "dead workers must be reaped"
        assert journal.types(worker.pid) == ["Start", "LoadInstances"]


BROKER = """
import asyncio
from broker.statistics_blocks import StatisticsBlocks
from broker.workers import Workers
from shm.statistics import StatisticsPage
from tests.fakes.workers import config, load

async def main():
    workers = Workers(StatisticsBlocks(StatisticsPage.create()), entry="tests.fakes.link_worker")
    worker = await load(workers, config(on_load="helper"))
    print(workers.zygote_pid, worker.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("is_stopped", [False, True])
def test_zygote_workers_and_what_models_started_die_with_the_broker(journal: Journal, is_stopped: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", BROKER], stdout=subprocess.PIPE, text=True) as broker:
        assert broker.stdout is not None
        pids = [int(pid) for pid in broker.stdout.readline().split()]
        assert len(pids) == 2
        pids += [entry["pid"] for entry in journal.entries() if entry["type"] == "helper"]
        assert len(pids) == 3
        pidfds = [os.pidfd_open(pid) for pid in pids]
        if is_stopped:
            os.kill(pids[0], signal.SIGSTOP)
        broker.kill()
        broker.wait()
        for pidfd in pidfds:
            assert select.select([pidfd], [], [], 30)[0]
        for pidfd in pidfds:  # only now: what ends before its parent is ours to reap when the parent has ended, too
            with contextlib.suppress(ChildProcessError):  # a worker may have been reaped by the zygote, else by us
                os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
            os.close(pidfd)


@in_loop
async def test_workers_die_when_the_zygote_exits(journal: Journal) -> None:
    """The zygote exits when its socket ends; its workers may not outlive it."""
    async with running() as workers:
        worker = await load(workers, config())
        pid = worker.pid
        assert pid is not None
        pidfd = os.pidfd_open(pid)
        await workers._zygote.stop()
        await until(lambda: worker.restarts == 1)
        with pytest.raises(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, 0)
        os.close(pidfd)


@in_loop
async def test_stopping_leaves_nothing(journal: Journal) -> None:
    async with running() as workers:
        before = descriptors()
        worker = await load(workers, config())
        workers.start("cpu/other")
        pid = worker.pid
    assert (worker.state, worker.pid, worker.restarts) == ("stopped", None, 0)
    assert journal.types(pid)[-1] == "Drain"
    assert children() == []
    assert descriptors() <= before
    with pytest.raises(InferError, match="Server is stopping"):
        await worker.bind_plan(plan())


@in_loop
async def test_a_worker_that_does_not_drain_is_killed(journal: Journal) -> None:
    async with running() as workers:
        worker = await load(workers, config())
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGSTOP)
        await workers.stop(0.05)
        assert worker.state == "stopped"
        assert children() == []


@in_loop
async def test_helper_processes_end_with_their_worker(journal: Journal) -> None:
    async with running() as workers:
        worker = await load(workers, config(on_load="helper"))
        (helper,) = (entry["pid"] for entry in journal.entries() if entry["type"] == "helper")
        pidfd = os.pidfd_open(helper)
        pid = worker.pid
        worker.kill("a test")
        await replaced(worker, pid)
        assert select.select([pidfd], [], [], 30)[0]
        os.close(pidfd)
        await until(lambda: not os.path.exists(f"/proc/{helper}"))  # the zygote has reaped it, too


@in_loop
async def test_a_module_that_starts_threads_is_left_to_the_workers(journal: Journal) -> None:
    async with running(entry="tests.fakes.threaded_worker") as workers:
        worker = await load(workers, config())
        assert worker.state == "ready"
        assert journal.types() == ["Start", "LoadInstances"]


@in_loop
async def test_a_worker_that_does_not_answer_is_killed(journal: Journal) -> None:
    async with running() as workers:
        worker = workers.start(KEY)
        await until(lambda: worker.state == "ready")
        workers.load_s = 0.3
        with pytest.raises(InferError, match=r"did not load model 'm' version 1 within 0\.3 s"):
            await load(workers, config(on_load="silent"))
        await until(lambda: worker.restarts == 1)
        assert worker.last_death == "did not load model 'm' version 1 within 0.3 s"
        await replaced(worker, None)
        assert journal.types(worker.pid) == ["Start"]


@in_loop
async def test_requests_end_when_no_worker_can_be_started(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with Twin() as twin:
        async with running() as workers:
            worker = workers.start(KEY)
            attaching = asyncio.create_task(worker.attach_channel(record_of(twin)))
            client = twin.client()
            _, pending = submit(client)
            await until(lambda: client.reap() or bool(pending.finals))
            assert pending.code == Code.UNAVAILABLE
            assert pending.text == "worker 'cpu/default' cannot be started: the zygote ended: exit code 1"
            await until(lambda: worker.state == "backoff")  # between two tries
        with pytest.raises(InferError, match="Server is stopping"):
            await attaching
        with pytest.raises(InferError, match="Server is stopping"):
            workers.start("cpu/other")


@in_loop
async def test_a_flood_of_messages_is_queued_with_its_descriptors(journal: Journal) -> None:
    fd = sealed_memfd("test-region", 4096)
    async with running() as workers:
        worker = await load(workers, config())
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGSTOP)
        binds = [asyncio.create_task(worker.bind_plan(plan(index))) for index in range(2000)]
        adding = asyncio.create_task(worker.add_region(region_of(copy := os.dup(fd))))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        os.close(copy)  # the number is free for others; the queued message has its own
        os.kill(worker.pid, signal.SIGCONT)
        await asyncio.gather(*binds, adding)
        assert [entry["index"] for entry in journal.entries() if entry["type"] == "BindPlan"] == list(range(2000))
        assert journal.entries()[-1]["type"] == "AddRegion"
        assert journal.entries()[-1]["fds"] == 1
        worker.quarantine(5, 6)
    os.close(fd)
