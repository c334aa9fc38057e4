"""Workers that are stopped or stuck while nothing runs in them; real zygote and processes."""

from __future__ import annotations

import os
import signal
import time

import pytest

from broker.logical_worker import Worker
from broker.worker.messages import Ping
from tests.fakes.processes import in_loop, until
from tests.fakes.workers import (  # noqa: F401 (fixtures)
    KEY,
    Journal,
    _no_process_is_left,
    config,
    journal,
    load,
    replaced,
    running,
)


@in_loop
async def test_a_worker_that_is_stopped_while_idle_is_replaced(journal: Journal) -> None:
    async with running(ping_every_s=0.05, ping_limit_s=0.5) as workers:
        worker = await load(workers, config())
        pid = worker.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await replaced(worker, pid)
        assert worker.last_death.startswith("gave no sign of life for 0.5 s although no model ran in it")


@in_loop
async def test_a_worker_that_is_stopped_and_goes_on_is_silent_meanwhile(journal: Journal) -> None:
    async with running(ping_every_s=0.05) as workers:
        worker = await load(workers, config())
        pid = worker.pid
        assert pid is not None
        assert worker.silent_s == 0
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: worker.silent_s > 0)
        os.kill(pid, signal.SIGCONT)
        await until(lambda: worker.silent_s == 0)
        assert worker.restarts == 0


@in_loop
async def test_the_replacement_of_a_silent_worker_is_not_silent(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(ping_every_s=0.05) as workers:
        worker = await load(workers, config())
        pid = worker.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: worker.silent_s > 0)
        monkeypatch.setattr(Worker, "look_after", lambda *_: None)  # from here on nobody looks at it
        os.kill(pid, signal.SIGKILL)
        await replaced(worker, pid)
        assert worker.silent_s == 0


@in_loop
async def test_a_worker_that_answers_is_left_alone_however_often_it_is_asked(journal: Journal) -> None:
    async with running(ping_every_s=0.0) as workers:
        worker = await load(workers, config())
        process = worker._state.process
        assert process is not None
        for _ in range(100):
            await until(lambda: process.answered)
            worker.look_after(False, time.monotonic_ns())
        assert worker.restarts == 0


@in_loop
async def test_the_real_worker_answers(journal: Journal) -> None:
    async with running(entry="broker.worker.process") as workers:
        worker = workers.start(KEY)
        await until(lambda: worker.state == "ready")
        process = worker._state.process
        assert process is not None
        await process.request(Ping())
