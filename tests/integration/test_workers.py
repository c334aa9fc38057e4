"""Workers with a real zygote and real processes; the worker's own side is tests.fakes.link_worker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from broker.logical_worker import Worker
from broker.records import ChannelRecord, RegionEntry
from broker.repository.config import InstanceGroup, ModelConfig
from broker.statistics_blocks import StatisticsBlocks
from broker.worker.messages import BindPlan
from broker.workers import Workers
from shm.errors import Code, InferError
from shm.memory import sealed_memfd
from shm.statistics import StatisticsPage
from tests.fakes.channel import PLAN, Plan, Twin, submit, take
from tests.fakes.processes import children, descriptors, in_loop, name_of, subreaper, until

ROOT = Path(__file__).parent.parent.parent
KEY = "cpu/default"


class Book:
    """Plans as the coroner sees them."""

    def __init__(self, retryable: bool = True) -> None:
        self.can_retry = retryable
        self.refused: list[tuple[int, str]] = []

    def retryable(self, session: int, plan_word: int) -> bool:
        return self.can_retry

    def model_of(self, session: int, plan_word: int) -> tuple[str, int] | None:
        return "m", 1

    def refuse(self, session: int, model: str, until_ns: int) -> None:
        self.refused.append((session, model))


class Journal:
    """What the workers were told."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def entries(self, pid: int | None = None) -> list[dict]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [entry for entry in map(json.loads, lines) if pid in (None, entry["pid"])]

    def types(self, pid: int | None = None) -> list[str]:
        return [entry["type"] for entry in self.entries(pid)]


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    with subreaper():
        yield


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Journal:
    monkeypatch.setenv("TEST_JOURNAL", str(tmp_path / "journal"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return Journal(tmp_path / "journal")


@contextlib.asynccontextmanager
async def running(
    book: Book | None = None, entry: str = "tests.fakes.link_worker", **options
) -> AsyncIterator[Workers]:
    page = StatisticsPage.create()
    workers = Workers(StatisticsBlocks(page), entry=entry, **options)
    workers.plans = book or Book()
    try:
        yield workers
    finally:
        await workers.stop(5.0)
        os.close(page.fd)


def config(name: str = "m", on_load: str = "", **parameters: str) -> ModelConfig:
    return ModelConfig(
        name=name,
        platform="onnxruntime_onnx",
        backend="onnxruntime",
        directory="",
        versions={1: ""},
        default_model_filename="model.onnx",
        max_batch_size=0,
        input=(),
        output=(),
        instance_group=(InstanceGroup(name=name),),
        parameters={"on_load": on_load, **parameters},
    )


async def load(workers: Workers, model: ModelConfig, generation: int = 1) -> Worker:
    worker = workers.start(KEY)
    await worker.load(model, 1, generation, workers.blocks.take((model.name, 1), 1))
    return worker


def region_of(fd: int, byte_size: int = 4096, kind: str = "pool") -> RegionEntry:
    return RegionEntry(
        region=5,
        generation=6,
        name="r",
        kind=kind,
        fd=fd,
        byte_size=byte_size,
        offset=0,
        file_size=byte_size,
        device=0,
        inode=0,
        writable=True,
    )


def plan(index: int = PLAN & 0xFFFFFFFF) -> BindPlan:
    return BindPlan(
        session=9,
        index=index,
        generation=PLAN >> 32,
        model="m",
        version=1,
        inputs=(),
        outputs=(),
        input_positions=1,
        output_positions=1,
        rows=1,
    )


def record_of(twin: Twin) -> ChannelRecord:
    return ChannelRecord(1, 9, twin.slots, twin.memory_fd, twin.ledger_fd, twin.bell_fd, twin.pipe_write)


async def replaced(worker: Worker, pid: int | None) -> int:
    await until(lambda: worker.state == "ready" and worker.pid not in (None, pid))
    assert worker.pid is not None
    return worker.pid


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
            assert worker.has_region(5, 6)
            assert not worker.has_region(5, 7)
            assert os.getsid(first) == first, "Ctrl-C must not reach a worker"
            assert name_of(first) == "tb-worker"
            assert journal.entries(first)[-1]["recover"] is False

            os.kill(first, signal.SIGKILL)
            second = await replaced(worker, first)

            assert journal.types(second) == ["Start", "LoadInstances", "AddRegion", "BindPlan", "AttachChannel"]
            assert [entry["fds"] for entry in journal.entries(second)] == [1, 0, 1, 0, 4]
            assert journal.entries(second)[-1]["recover"] is True
            assert (worker.restarts, worker.last_death) == (1, "killed by SIGKILL")
        assert journal.types(second)[-1] == "Drain"
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
async def test_a_call_outlives_the_process_it_was_made_to(journal: Journal, tmp_path: Path) -> None:
    crashing = tmp_path / "crashing"
    crashing.touch()
    async with running() as workers:
        loading = asyncio.create_task(load(workers, config(on_load=f"SIGSEGV while {crashing}")))
        await until(lambda: journal.types().count("LoadInstances") == 2)
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


@pytest.mark.parametrize("retryable", [False, True])
@in_loop
async def test_endings_come_with_the_death(journal: Journal, retryable: bool) -> None:
    with Twin() as twin:
        async with running(Book(retryable)) as workers:
            worker = await load(workers, config())
            client, dying = twin.client(), twin.worker({PLAN: Plan()})
            _, started = submit(client)
            for request in take(dying):
                dying.start(request)
            _, queued = submit(client)
            await worker.attach_channel(record_of(twin))
            pid = worker.pid
            worker.kill("a test")
            await replaced(worker, pid)
            client.reap()
            assert (started.finals, queued.finals) == (0 if retryable else 1, 0)
            if not retryable:
                assert started.code == Code.UNAVAILABLE
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
                    dying.start(request)
                    request.attempts = 1
                    dying.start(request)
                pid = worker.pid
                worker.kill("a test")
                await replaced(worker, pid)
                client.reap()
                assert pending.code == Code.UNAVAILABLE
                assert book.refused == ([(9, "m")] if death else [])
            (bound,) = (entry for entry in journal.entries(worker.pid) if entry["type"] == "BindPlan")
            assert bound["refused_until_ns"] > 0


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
        assert not worker.has_region(5, 6)
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

async def main():
    workers = Workers(StatisticsBlocks(StatisticsPage.create()), entry="tests.fakes.link_worker")
    worker = workers.start("cpu/default")
    while worker.state != "ready":
        await asyncio.sleep(0.01)
    print(workers.zygote_pid, worker.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_zygote_and_workers_die_with_the_broker(journal: Journal) -> None:
    with subprocess.Popen([sys.executable, "-c", BROKER], stdout=subprocess.PIPE, text=True) as broker:
        assert broker.stdout is not None
        pidfds = [os.pidfd_open(int(pid)) for pid in broker.stdout.readline().split()]
        assert len(pidfds) == 2
        broker.kill()
        for pidfd in pidfds:
            assert select.select([pidfd], [], [], 30)[0]
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


@in_loop
async def test_a_module_that_starts_threads_is_left_to_the_workers(journal: Journal) -> None:
    async with running(entry="tests.fakes.threaded_worker") as workers:
        worker = await load(workers, config())
        assert worker.state == "ready"
        assert journal.types() == ["Start", "LoadInstances"]


@in_loop
async def test_a_worker_that_does_not_answer_is_killed(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.logical_worker.LOAD_S", 0.3)
    async with running() as workers:
        worker = workers.start(KEY)
        await until(lambda: worker.state == "ready")
        with pytest.raises(InferError, match="did not answer LoadInstances within"):
            await load(workers, config(on_load="silent"))
        await until(lambda: worker.restarts == 1)
        assert worker.last_death == "did not answer LoadInstances within 0.3 s"
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
            assert worker.state == "backoff"
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
