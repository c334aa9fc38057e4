"""What a real worker says of the regions that requests use: retired ones, and those that may have been forgotten."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from broker.worker import messages
from shm.errors import Code
from shm.statistics import PENDING
from tests.fakes.broker import eventually
from tests.fakes.loaded import Memory
from tests.fakes.lone_worker import WAIT, Gate, LoneWorker, Session


@contextlib.contextmanager
def opened(tmp_path: Path) -> Iterator[tuple[LoneWorker, Gate, Session]]:
    """A worker, a model that waits, and a client of it on system memory."""
    gate = Gate(tmp_path / "gate")
    with LoneWorker() as worker, contextlib.closing(gate), Session(worker, kind="system") as session:
        yield worker, gate, session.attach()


def idle(worker: LoneWorker, memory: Memory) -> bool:
    worker.ask(messages.Ping())
    return messages.RegionIdle(region=memory.info.region, generation=memory.info.generation) in worker.idle


def test_a_region_is_in_use_until_its_last_request_has_ended(tmp_path: Path) -> None:
    with opened(tmp_path) as (worker, gate, session):
        config = gate.config()
        block = worker.load(config)
        plan, memory = session.bind(config), session.memory
        assert plan.infer(1) == 2
        sent = [plan.submit(WAIT, position) for position in range(2)]
        gate.entered()
        eventually(lambda: block[PENDING] == 1, "the second one is queued")
        assert worker.retire_region(memory) == messages.IN_USE
        assert worker.retire_region(memory) == "", "it is known no more"
        gate.let()
        assert sent[0].result() == 0
        gate.entered()
        assert not idle(worker, memory)
        gate.let()
        assert sent[1].result() == 0
        worker.ask_region(memory)  # whatever is due comes before the answer
        assert [(said.region, said.generation) for said in worker.idle] == [
            (memory.info.region, memory.info.generation)
        ]


def test_it_is_said_without_being_asked(tmp_path: Path) -> None:
    with opened(tmp_path) as (worker, gate, session):
        config = gate.config()
        worker.load(config)
        plan, memory = session.bind(config), session.memory
        sent = plan.submit(WAIT)
        gate.entered()
        plan.drop()  # a plan that was released before counts, too
        assert worker.retire_region(memory) == messages.IN_USE
        gate.let()
        assert sent.result() == 0
        eventually(lambda: idle(worker, memory), "the last request has ended")


def test_an_idle_region_is_not_in_use(tmp_path: Path) -> None:
    with opened(tmp_path) as (worker, gate, session):
        config = gate.config()
        worker.load(config)
        plan = session.bind(config)
        assert plan.infer(1) == 2
        assert worker.retire_region(session.memory) == ""
        late = plan.submit(1).wait()
        assert late.code is Code.NOT_FOUND
        assert worker.idle == []


def test_use_is_told_once(tmp_path: Path) -> None:
    with opened(tmp_path) as (worker, gate, session):
        config = gate.config()
        worker.load(config)
        plan, memory = session.bind(config), session.memory
        assert worker.ask_region(memory) == ""
        assert plan.infer(1) == 2
        assert worker.ask_region(memory) == messages.USED
        assert worker.ask_region(memory) == ""
        sent = plan.submit(WAIT)
        gate.entered()
        assert worker.ask_region(memory) == messages.USED
        assert worker.ask_region(memory) == messages.USED, "a request that runs uses it"
        gate.let()
        assert sent.result() == 0
        assert worker.ask_region(Memory()) == "", "a region it does not know"
