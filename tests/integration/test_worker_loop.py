"""A real worker process: what it does with requests, its queues, its end. The test is its broker and its clients."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker.worker import messages
from shm import statistics
from shm.errors import Code
from shm.layout import CONSUMED, TAIL, Geometry
from shm.memory import map_words
from tests.fakes.broker import eventually
from tests.fakes.channel import Plan
from tests.fakes.lone_worker import LIMIT_S, WAIT, Gate, LoneWorker, Session, counted

Open = Callable[..., Session]


@pytest.fixture(scope="module")
def started() -> Iterator[list[LoneWorker]]:
    with contextlib.ExitStack() as stack:
        yield (workers := [])
        for each in workers:
            stack.enter_context(each)


@pytest.fixture
def worker(started: list[LoneWorker]) -> LoneWorker:
    """That of the test before, unless it was to end."""
    if not started or started[-1].process.poll() is not None:
        started.append(LoneWorker())
    return started[-1]


def gate_of(worker: LoneWorker, directory: Path) -> Iterator[Gate]:
    gate = Gate(directory)
    yield gate
    if worker.process.poll() is None:
        worker.ask(messages.UnloadModel(model=directory.name, version=1))
    gate.close()


@pytest.fixture
def gate(tmp_path: Path, request: pytest.FixtureRequest, worker: LoneWorker) -> Iterator[Gate]:
    yield from gate_of(worker, tmp_path / request.node.name)


@pytest.fixture
def other(tmp_path: Path, request: pytest.FixtureRequest, worker: LoneWorker) -> Iterator[Gate]:
    yield from gate_of(worker, tmp_path / f"other than {request.node.name}")


@pytest.fixture
def session(worker: LoneWorker) -> Iterator[Open]:
    opened: list[Session] = []

    def open_session(**how: object) -> Session:
        opened.append(Session(worker, **how).attach())
        return opened[-1]

    yield open_session
    for one in opened:
        if worker.process.poll() is None:
            worker.ask(messages.DetachChannel(channel=one.channel))
        one.close()


def queued(block: memoryview, count: int) -> None:
    """Wait until so many requests are queued for the model."""
    eventually(lambda: block[statistics.PENDING] == count, f"{count} requests are queued")


def test_lone_requests_are_run_by_the_leader_itself(worker, gate, session):
    config = gate.config()
    block = worker.load(config)
    plan = session().bind(config)
    inline = count = 0
    while not inline and count < 2000:
        sent = plan.submit(count, count % 16)
        assert sent.result() == count + 1
        ((_, _, _, queue_ns, _, infer_ns, _, copied),) = sent.pending.entries
        assert infer_ns > 0
        assert copied == 0
        inline += not queue_ns  # a queued one has waited
        count += 1
    assert inline
    eventually(lambda: block[statistics.SUCCESS] == count, "what ran inline is counted when the leader pauses")
    eventually(lambda: block[statistics.EXECUTIONS] == block[statistics.INFERENCES] == count, "word after word")
    assert counted(block) == (count, 0, 0, 0)
    assert block[statistics.BATCH] == 0


def test_requests_of_two_channels_share_a_batch(worker, gate, session):
    config = gate.config(batch=8)
    block = worker.load(config)
    plans = [session().bind(config), session().bind(config, at=64)]
    first = plans[0].submit(WAIT, 15)
    gate.entered()
    sent = [plans[k % 2].submit(10 + k, k) for k in range(6)]
    queued(block, 6)
    gate.let()
    assert first.result() == 0
    assert [one.result() for one in sent] == [11 + k for k in range(6)]
    assert block[statistics.BATCHES + 4 * 5] == 1
    assert block[statistics.EXECUTIONS] == 2
    assert block[statistics.COPIED + statistics.REASONS.index("gather")] == 6 * 16
    queued(block, 0)


def test_every_instance_of_a_model_runs_at_once_and_others_beside_it(worker, gate, session, other):
    config = gate.config(count=3)
    worker.load(config)
    worker.load(other.config())
    client = session()
    plan, beside = client.bind(config), client.bind(other.config(), at=1024)
    sent = [plan.submit(WAIT, position) for position in range(4)]
    gate.entered(3)
    assert beside.infer(1) == 2
    assert gate.nobody_entered()
    gate.let(4)
    gate.entered(1)
    assert [one.result() for one in sent] == [0] * 4


def test_a_leader_stuck_in_a_batch_expected_to_be_short_is_deposed(worker, gate, session, other):
    config = gate.config()
    block = worker.load(config)
    worker.load(other.config())
    client, neighbour = session(), session()
    plan, beside = client.bind(config, positions=1), neighbour.bind(other.config())
    for value in range(200):  # known to be fast, and hot: the leader runs it itself
        assert plan.infer(value) == value + 1
    stuck = plan.submit(WAIT)
    gate.entered()
    for value in range(50):
        assert beside.infer(value) == value + 1
    assert not stuck.ended()
    assert block[statistics.BATCH] == 1
    draining = worker.send(messages.Drain())
    eventually(lambda: beside.submit(0).wait().code is Code.UNAVAILABLE, "nothing new is taken")
    assert worker.process.poll() is None, "its request is not forgotten"
    assert not worker.answered(draining)
    gate.let()
    worker.answer(draining)
    assert stuck.result() == 0
    assert worker.process.wait(LIMIT_S) == 0


# --- deadlines and cancels ------------------------------------------------------------------------------------------


def test_a_deadline_ends_a_queued_request_which_then_never_runs(worker, gate, session):
    config = gate.config()
    block = worker.load(config)
    plan = session().bind(config)
    missed, patience_ns = -1, 5_000_000
    while gate.nobody_entered():  # on a busy machine the first may come too late
        missed, patience_ns = missed + 1, 2 * patience_ns
        deadline_ns = time.monotonic_ns() + patience_ns
        running = plan.submit(WAIT, 0, deadline_ns)
        eventually(lambda: running.ended() or not gate.nobody_entered())  # noqa: B023  called at once
    gate.entered()
    late, patient = plan.submit(5, 1, time.monotonic_ns() + 30_000_000), plan.submit(6, 2)
    late.wait()
    assert (late.code, late.text) == (Code.UNAVAILABLE, "Request timeout expired")
    eventually(lambda: time.monotonic_ns() > deadline_ns)
    assert not running.ended(), "a running one is not interrupted"
    gate.let()
    assert (running.result(), patient.result()) == (0, 7)
    assert (late.output(), late.pending.finals) == (0, 1)
    assert counted(block) == (2, 0, 0, 1 + missed)


def test_a_request_that_comes_too_late_is_not_taken(worker, gate, session):
    config = gate.config()
    block = worker.load(config)
    plan = session().bind(config)
    sent = plan.submit(1, 0, time.monotonic_ns() - 1).wait()
    assert (sent.code, sent.text) == (Code.UNAVAILABLE, "Request timeout expired")
    assert counted(block) == (0, 0, 0, 1)


def test_a_deadline_far_away_is_no_deadline(worker, gate, session):
    config = gate.config()
    worker.load(config)
    plan = session().bind(config)
    running, far = plan.submit(WAIT, 0, (1 << 64) - 1), plan.submit(1, 1, (1 << 64) - 1)
    gate.entered()
    gate.let()
    assert running.result() == 0
    assert far.result() == 2


def test_a_cancel_drops_a_queued_request_and_not_a_running_one(worker, gate, session):
    config = gate.config()
    block = worker.load(config)
    plan = session().bind(config)
    running = plan.submit(WAIT, 0)
    gate.entered()
    sent = [plan.submit(value, value) for value in (1, 2, 3)]
    queued(block, 3)
    assert sent[1].cancel()
    assert running.cancel()
    sent[1].wait()
    assert (sent[1].code, sent[1].text) == (Code.CANCELLED, "the request was cancelled")
    assert not running.ended()
    gate.let()
    assert running.result() == 0
    assert [sent[0].result(), sent[2].result()] == [2, 4]
    assert sent[1].output() == 0
    assert counted(block) == (3, 0, 1, 0)


def test_what_cannot_be_taken_is_counted_as_failed(worker, gate, session):
    config = gate.config(batch=4)
    block = worker.load(config)
    client = session()
    plan = client.bind(config, positions=2)
    sent = plan.submit(1, 2).wait()
    assert sent.code is Code.INVALID_ARG
    assert "is outside the plan's 2 input and 2 output positions" in sent.text
    plan.drop()
    assert plan.submit(1).wait().code is Code.NOT_FOUND
    assert counted(block) == (0, 1, 0, 0)


# --- ends -----------------------------------------------------------------------------------------------------------


def test_a_drain_finishes_what_was_published_and_refuses_what_comes_later(worker, gate, session, other):
    config = gate.config()
    worker.load(config)
    worker.load(other.config())
    client, neighbour = session(), session()
    plan, probe = client.bind(config), neighbour.bind(other.config())
    sent = [plan.submit(WAIT, position) for position in range(4)]
    gate.entered()
    draining = worker.send(messages.Drain())
    eventually(lambda: (last := probe.submit(0).wait()).code is Code.UNAVAILABLE and "stopping" in last.text)
    late = plan.submit(1, 9).wait()
    assert (late.code, late.text) == (
        Code.UNAVAILABLE,
        "Server is stopping, scheduler for model has stopped accepting new inference requests",
    )
    assert not worker.answered(draining)
    gate.let(4)
    worker.answer(draining)
    assert [one.result() for one in sent] == [0] * 4
    assert worker.process.wait(LIMIT_S) == 0


def test_a_detached_channel_drops_what_is_queued_and_waits_for_what_runs(worker, gate, session):
    config = gate.config()
    block = worker.load(config)
    other = session().bind(config)
    with Session(worker) as client:
        before = worker.descriptors()
        client.attach()
        plan = client.bind(config)
        running, *dropped = [plan.submit(k or WAIT, k) for k in range(3)]
        gate.entered()
        queued(block, 2)
        detaching = worker.send(messages.DetachChannel(channel=client.channel))
        for one in dropped:
            assert (one.wait().code, one.text) == (Code.CANCELLED, "the session ended")
        behind = other.submit(7)
        assert not worker.answered(detaching)
        gate.let()
        worker.answer(detaching)
        assert running.result() == 0
        assert behind.result() == 8
        assert counted(block) == (2, 0, 2, 0)
        plan.drop()
        eventually(lambda: worker.descriptors() <= before, "its descriptors are closed")
        worker.ask(messages.DetachChannel(channel=client.channel))


def test_what_runs_for_a_session_that_ended_is_still_in_the_way(worker, gate, session):
    config = gate.config(count=2)
    worker.load(config)
    owner, other = session(), Session(worker)
    theirs = Session(worker, memory=owner.memory).attach()
    plan, shared = owner.bind(config), theirs.bind(config)
    running = plan.submit(WAIT)
    gate.entered()
    detaching = worker.send(messages.DetachChannel(channel=owner.channel))
    plan.drop()
    worker.retire_region(owner.memory)
    refused = shared.submit(WAIT).wait()
    assert refused.code is Code.INVALID_ARG
    assert "overlaps" in refused.text
    assert worker.maps(owner.memory)
    gate.let()
    worker.answer(detaching)
    assert running.result() == 0
    gate.let()
    assert shared.infer(WAIT) == 0
    worker.ask(messages.DetachChannel(channel=theirs.channel))
    other.close()
    theirs.close()


def test_a_retired_region_is_unmapped_when_its_last_request_has_ended(worker, gate, session):
    config = gate.config()
    block = worker.load(config)
    client = session()
    memory = client.memory
    other = Session(worker)  # its region stays
    plan = client.bind(config)
    assert plan.infer(1) == 2
    sent = [plan.submit(WAIT, position) for position in range(2)]
    gate.entered()
    queued(block, 1)
    worker.retire_region(memory)
    late = plan.submit(1, 5).wait()
    assert late.code is Code.NOT_FOUND
    assert late.text == f"Unable to find shared memory region: '{memory.info.name}'"
    assert worker.maps(memory)
    gate.let(2)
    assert [one.result() for one in sent] == [0, 0]
    eventually(lambda: not worker.maps(memory), "the mapping is gone")
    assert worker.maps(other.memory)
    assert block[statistics.SUCCESS] == 3
    other.close()


@pytest.mark.parametrize("rule", ["a ring that cannot be", "completions never consumed"])
def test_a_client_that_breaks_the_rules_is_reported_and_others_go_on(worker, gate, session, rule):
    config = gate.config()
    worker.load(config)
    bad, good = session(), session()
    before = len(worker.broken)
    plan, fine = bad.bind(config), good.bind(config)
    assert fine.infer(1) == 2
    geometry = Geometry(bad.twin.slots)
    memory, words = map_words(bad.twin.memory_fd, geometry.channel_bytes)
    if rule == "a ring that cannot be":
        words[TAIL] = 1000
        os.eventfd_write(bad.twin.bell_fd, 1)
    else:
        plan.submit(WAIT)
        gate.entered()
        words[CONSUMED] = 1 << 40
        gate.let()

    def reported() -> bool:
        os.eventfd_write(bad.twin.bell_fd, 1)
        worker.answered(0)
        return len(worker.broken) > before

    eventually(reported, "the broker is told")
    (message,) = worker.broken[before:]
    reasons = {
        "a ring that cannot be": f"published 1000 entries in a ring of {4 * bad.twin.slots}",
        "completions never consumed": "does not consume its completions",
    }
    assert (message.channel, message.reason) == (bad.channel, reasons[rule])
    words.release()
    memory.close()
    assert fine.infer(3) == 4
    worker.ask(messages.DetachChannel(channel=bad.channel))
    assert fine.infer(4) == 5
    assert len(worker.broken) == before + 1


def test_a_suspect_runs_again_alone_and_first(worker, gate, session):
    """The channel had a worker before, which died while it ran the first request."""
    config = gate.config(batch=8)
    block = worker.load(config)
    other = session().bind(config)
    with Session(worker) as client:
        plan = client.bind(config)
        word = plan.message.index | plan.message.generation << 32
        first, second = plan.submit(WAIT, 0), plan.submit(2, 1)
        dead = client.twin.worker({word: Plan(16, 16)})
        taken: list = []
        dead.take(1, time.monotonic_ns(), taken)
        dead.start([taken[0]])
        recovered = worker.word(statistics.RECOVERED)
        client.attach()
        gate.entered()
        beside = other.submit(3)
        queued(block, 2)
        assert block[statistics.BATCH] == 1
        gate.let()
        assert [first.result(), second.result(), beside.result()] == [0, 3, 4]
        assert block[statistics.RETRIED] == 1
        assert worker.word(statistics.RECOVERED) == recovered + 1
        worker.ask(messages.DetachChannel(channel=client.channel))


def test_a_worker_ends_with_its_broker(worker):
    worker.link.close()
    assert worker.process.wait(LIMIT_S) == 0
