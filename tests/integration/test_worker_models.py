"""A real worker process: loading, replacing and unloading models, idle and under traffic."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from broker.repository.config import TensorConfig
from broker.worker import messages
from shm import statistics
from shm.errors import Code, InferError
from tests.fakes.broker import eventually
from tests.fakes.loaded import Memory
from tests.fakes.lone_worker import LIMIT_S, SIZE, WAIT, Gate, LoneWorker, Session, counted, load_message


@pytest.fixture(scope="module")
def worker() -> Iterator[LoneWorker]:
    """One for all: what a model did is over when its test ends."""
    with LoneWorker() as worker:
        yield worker
        assert worker.process.poll() is None


@pytest.fixture
def gate(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Gate]:
    gate = Gate(tmp_path / request.node.name)
    yield gate
    gate.close()


@pytest.fixture
def session(worker: LoneWorker) -> Iterator[Session]:
    with Session(worker).attach() as session:
        yield session
        worker.ask(messages.DetachChannel(channel=session.channel))


def unload(worker: LoneWorker, config, version: int = 1) -> None:
    worker.ask(messages.UnloadModel(model=config.name, version=version))


def reload(worker: LoneWorker, config, blocks: tuple[int, ...], generation: int) -> int:
    """Ask for it; returns the number to wait for."""
    return worker.send(load_message(config, blocks, generation))


@pytest.mark.parametrize(
    ("text", "code", "expected"),
    [
        ("def load(context):\n    raise ValueError('no such file')\n", "INTERNAL", "ValueError: no such file"),
        ("def load(context):\n    raise SystemExit(3)\n", "INTERNAL", "SystemExit: 3"),
        (
            "def load(context):\n    raise KeyboardInterrupt\n",
            "INTERNAL",
            "KeyboardInterrupt: raised by the model's own",
        ),
        ("raise SystemExit(3)\n", "INTERNAL", "backend.py raised SystemExit: 3"),
        ("import nowhere_to_be_found\n", "INTERNAL", "No module named 'nowhere_to_be_found'"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_refused_and_costs_nothing_else(worker, tmp_path, text, code, expected):
    gate = Gate(tmp_path / "broken")
    (gate.directory / "backend.py").write_text(text)
    with pytest.raises(InferError, match=expected) as raised:
        worker.load(gate.config())
    assert raised.value.code == code
    gate.close()


def test_a_worker_whose_descriptors_a_model_closes_says_so_as_it_ends(tmp_path):
    gate = Gate(tmp_path / "closes")
    (gate.directory / "backend.py").write_text("import os\ndef load(context):\n    os.closerange(3, 4096)\n")
    config = gate.config()
    with LoneWorker() as worker:
        worker.send(load_message(config, worker.blocks(config), 1))
        assert worker.process.wait(LIMIT_S) == messages.CLOSED_DESCRIPTORS
    gate.close()


def test_a_version_that_is_not_there_is_refused(worker, gate):
    with pytest.raises(InferError, match="has no version 1") as raised:
        worker.load(replace(gate.config(), versions={}))
    assert raised.value.code == "NOT_FOUND"


def test_instances_loaded_before_the_one_that_fails_are_closed(worker, gate):
    backend = gate.directory / "backend.py"
    backend.write_text(
        gate.BACKEND.replace(
            "    return Model(", "    if context.name.endswith('_2'): raise OSError('third')\n    return Model("
        )
    )
    with pytest.raises(InferError, match="OSError: third"):
        worker.load(gate.config(count=3))
    gate.closed_are(2)


def test_a_plan_waits_for_its_model(worker, gate, session):
    config = gate.config()
    plan = session.bind(config)
    early = plan.submit(1).wait()
    assert (early.code, early.text) == (Code.UNAVAILABLE, f"model '{config.name}' is not loaded")
    worker.load(config)
    assert plan.infer(1) == 2
    unload(worker, config)
    gate.closed_are(1)
    assert plan.submit(1).wait().text == f"model '{config.name}' is not loaded"
    worker.load(config)
    assert plan.infer(3) == 4
    unload(worker, config)
    gate.closed_are(2)


def test_reloads_under_traffic_lose_nothing(worker, gate, session):
    config = gate.config(batch=8, count=2)
    blocks = worker.blocks(config)
    worker.load(config, blocks)
    plan = session.bind(config)
    done = 0
    for generation in range(2, 8):
        number = reload(worker, config, blocks, generation)
        rounds = 0
        while rounds < 20 or not worker.answered(number):
            sent = [plan.submit(done + k, k) for k in range(16)]
            assert [one.result() for one in sent] == [done + k + 1 for k in range(16)]
            done += 16
            rounds += 1
        worker.answer(number)
    gate.closed_are(12)
    assert [one.result() for one in (plan.submit(k, k) for k in range(16))] == list(range(1, 17))
    pages = [worker.page.block(block) for block in blocks]

    def counts() -> bool:
        return sum(page[statistics.SUCCESS] for page in pages) == done + 16

    eventually(counts, "every request is counted once, over all reloads")
    assert not any(page[statistics.FAIL] for page in pages)
    unload(worker, config)
    gate.closed_are(14)


def test_an_unload_finishes_what_it_has(worker, gate, session):
    config = gate.config()
    block = worker.load(config)
    plan = session.bind(config)
    sent = [plan.submit(WAIT, position) for position in range(3)]
    gate.entered()
    eventually(lambda: block[statistics.PENDING] == 2)
    unload(worker, config)
    late = plan.submit(1, 9).wait()
    assert (late.code, late.text) == (Code.UNAVAILABLE, f"model '{config.name}' is not loaded")
    assert gate.closed == 0
    gate.let(3)
    assert [one.result() for one in sent] == [0] * 3
    gate.closed_are(1)
    assert counted(block) == (3, 1, 0, 0)


def test_unloading_under_traffic_ends_every_request_once(worker, gate, session):
    config = gate.config(batch=4)
    blocks = worker.blocks(config)
    worker.load(config, blocks)
    plan = session.bind(config)
    succeeded = refused = 0
    for generation in range(2, 12):
        sent = [plan.submit(k, k) for k in range(8)]
        number = worker.send(messages.UnloadModel(model=config.name, version=1))
        sent += [plan.submit(k, k) for k in range(8, 16)]
        for k, one in enumerate(sent):
            one.wait()
            if one.code is Code.OK:
                assert one.output() == k + 1
                succeeded += 1
            else:
                assert (one.code, one.text) == (Code.UNAVAILABLE, f"model '{config.name}' is not loaded")
                refused += 1
        worker.answer(number)
        worker.load(config, blocks, generation)
    assert succeeded + refused == 160
    assert session.client.strays == 0
    gate.closed_are(10)
    block = worker.page.block(blocks[0])
    eventually(lambda: counted(block) == (succeeded, refused, 0, 0))
    unload(worker, config)


def test_a_cancel_finds_what_is_queued_for_the_model_that_was_replaced(worker, gate, session):
    config = gate.config()
    blocks = worker.blocks(config)
    block = worker.load(config, blocks)
    plan = session.bind(config)
    running, queued, kept = (plan.submit(value, k) for k, value in enumerate((WAIT, 5, 6)))
    gate.entered()
    eventually(lambda: block[statistics.PENDING] == 2)
    worker.load(config, blocks, 2)
    assert plan.infer(7, 3) == 8, "the new one serves while the old one is at work"
    queued.cancel()
    assert queued.wait().code is Code.CANCELLED
    gate.let()
    assert running.result() == 0
    assert kept.result() == 7
    assert queued.output() == 0
    gate.closed_are(1)
    unload(worker, config)
    gate.closed_are(2)


def test_a_reload_with_other_tensors_closes_plans(worker, gate, session):
    config = gate.config()
    blocks = worker.blocks(config)
    worker.load(config, blocks)
    plan = session.bind(config)
    assert plan.infer(1) == 2
    other = replace(config, output=(TensorConfig(name="z", datatype="FP32", dims=(1, SIZE)),))
    worker.load(other, blocks, 2)
    refused = plan.submit(1).wait()
    assert refused.code is Code.UNAVAILABLE
    assert "prepare the plan again" in refused.text
    gate.closed_are(1)
    worker.load(config, blocks, 3)
    assert plan.infer(2) == 3
    unload(worker, config)
    gate.closed_are(3)


def test_a_plan_follows_the_latest_version_or_stays(worker, gate, session):
    config = gate.config()
    config = replace(config, versions={1: config.versions[1], 2: config.versions[1]})
    block = {version: worker.blocks(config) for version in (1, 2)}

    def load(version: int) -> None:
        worker.ask(messages.LoadInstances(config=config, version=version, generation=version, blocks=block[version]))

    def served(version: int) -> int:
        return worker.page.block(block[version][0])[statistics.SUCCESS]

    load(1)
    latest, pinned = session.bind(config), session.bind(config, at=1024, follow_latest=False)
    load(2)
    assert latest.infer(1) == 2
    assert pinned.infer(1) == 2
    eventually(lambda: (served(1), served(2)) == (1, 1))
    unload(worker, config, 2)
    assert latest.infer(2) == 3
    eventually(lambda: served(1) == 2)
    unload(worker, config)
    gate.closed_are(2)
    assert pinned.submit(1).wait().code is Code.UNAVAILABLE


def test_a_plan_that_names_a_region_which_is_not_there_is_refused(worker, gate, session):
    config = gate.config()
    worker.retire_region(session.memory)
    with pytest.raises(InferError, match="Unable to find shared memory region") as raised:
        session.bind(config)
    assert raised.value.code == "NOT_FOUND"


def test_a_session_that_is_refused_for_a_while(worker, gate, session):
    config = gate.config()
    block = worker.load(config)
    plan = session.bind(config, refused_until_ns=(1 << 63) - 1)
    refused = plan.submit(1).wait()
    assert refused.code is Code.UNAVAILABLE
    assert "refused for another" in refused.text
    worker.ask(replace(plan.message, refused_until_ns=0))
    assert plan.infer(1) == 2
    eventually(lambda: counted(block) == (1, 1, 0, 0))
    unload(worker, config)


def test_a_worker_without_descriptors_refuses_what_needs_some_and_goes_on(worker, gate, session):
    config = gate.config()
    eventually(lambda: pipes(worker.pid) == 0, "the models of the tests before are closed")
    worker.load(config)
    plan = session.bind(config)
    limits = resource.prlimit(worker.pid, resource.RLIMIT_NOFILE)
    more = Memory(kind="system")
    for room in range(4):  # for none, for the message's, for the mapping's, for all three
        worker.ask(messages.Ping())  # what came with a message is closed after its answer, and before the next
        resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, (_next_descriptor(worker.pid, room), limits[1]))
        if room < 3:
            with pytest.raises(InferError, match=r"RLIMIT_NOFILE|Too many open files") as refused:
                worker.add_region(more)
            assert refused.value.code == "UNAVAILABLE"
        else:
            worker.add_region(more)
        assert plan.infer(1) == 2
    resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, limits)
    worker.retire_region(more)
    os.close(more.fd)


def pipes(pid: int) -> int:
    """How many named pipes, those of gates, a process has open."""
    opened = [os.path.realpath(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    return sum(os.path.basename(path) in ("gate", "told") for path in opened)


def _next_descriptor(pid: int, room: int) -> int:
    """The limit that leaves a process room for so many descriptors more."""
    taken = {int(fd) for fd in os.listdir(f"/proc/{pid}/fd")}
    free = [fd for fd in range(max(taken) + 5) if fd not in taken]
    return free[room]
