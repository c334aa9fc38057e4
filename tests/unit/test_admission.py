"""What the worker refuses to take, and what it says."""

from __future__ import annotations

import pytest

from shm.admission import Request
from shm.errors import Code
from shm.layout import MARK, QUEUE_TIMEOUT, RING, STARTED, SUBMISSION, TAIL
from shm.worker_channel import WorkerChannel
from tests.fakes.channel import NOW, PLAN, Pending, Plan, Twin, submit, take


@pytest.fixture
def twin():
    with Twin(slots=4) as twin:
        yield twin


@pytest.fixture
def plan():
    return Plan(input_positions=20, output_positions=8, rows=4)


@pytest.fixture
def client(twin):
    return twin.client()


@pytest.fixture
def worker(twin, plan):
    return twin.worker({PLAN: plan})


def refuse(worker: WorkerChannel) -> Request:
    """Take one entry that must not be admitted."""
    out: list[Request] = []
    ((request, admitted),) = worker.take(1, NOW, out)
    assert not admitted
    assert out == []
    worker.complete([request])
    return request


def test_a_deadline_that_has_passed_ends_the_request(client, worker):
    _, pending = submit(client, deadline_ns=NOW)
    refuse(worker)
    client.reap()
    assert pending.code is Code.UNAVAILABLE
    assert pending.text == "Request timeout expired"


def test_a_deadline_to_come_does_not(client, worker):
    submit(client, deadline_ns=NOW + 1)
    assert len(take(worker)) == 1


@pytest.mark.parametrize("timeout", [1, NOW, NOW + 1])
def test_a_queue_timeout_is_no_deadline(client, worker, timeout):
    submit(client, deadline_ns=timeout, flags=QUEUE_TIMEOUT)
    (request,) = take(worker)
    assert request.deadline == 0
    assert request.queue_timeout == timeout


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ((20, 0, 0), "position 20/0 is outside the plan's 20 input and 8 output positions"),
        ((0, 8, 0), "position 0/8 is outside the plan's 20 input and 8 output positions"),
        ((0, 65535, 0), "position 0/65535 is outside the plan's 20 input and 8 output positions"),
        ((0, 0, 5), "5 rows asked of a plan prepared for 4"),
        ((0, 0, 2**32 - 1), "4294967295 rows asked of a plan prepared for 4"),
    ],
)
def test_positions_and_rows_outside_the_plan_are_refused(client, worker, plan, fields, text):
    pending = Pending()
    client.submit(pending, PLAN, *fields, 0)
    refuse(worker)
    client.reap()
    assert (pending.code, pending.text) == (Code.INVALID_ARG, text)
    assert not any(plan.busy)


@pytest.mark.parametrize("word", [0, 3, 6 << 32 | 3, 8 << 32 | 3, 2**64 - 1])
def test_a_plan_of_another_generation_is_not_found(client, worker, word):
    pending = Pending()
    client.submit(pending, word, 0, 0, 0, 0)
    refuse(worker)
    client.reap()
    assert pending.code is Code.NOT_FOUND
    assert "prepare it again" in pending.text


def test_a_closed_plan_gives_its_reason(client, worker, plan):
    plan.closed = Code.UNAVAILABLE, "model 'yolo' is being unloaded"
    _, pending = submit(client)
    refuse(worker)
    client.reap()
    assert (pending.code, pending.text) == plan.closed


def test_a_refused_plan_is_refused_until_then(client, worker, plan):
    plan.refused_until_ns = NOW + 41_000_000_001
    _, pending = submit(client)
    refuse(worker)
    client.reap()
    assert pending.code is Code.UNAVAILABLE
    assert pending.text == (
        "requests of this client for model 'm' are refused for another 42 s: two of them ended a worker while running "
        "alone"
    )
    plan.refused_until_ns = NOW
    submit(client)
    assert len(take(worker)) == 1


def test_an_output_position_is_busy_until_its_request_has_ended(client, worker, plan):
    _, first = submit(client, 5)
    _, second = submit(client, 5)
    out: list[Request] = []
    ((refused, admitted),) = worker.take(100, NOW, out)
    assert not admitted
    assert list(plan.busy) == [0, 0, 0, 0, 0, 1, 0, 0]
    worker.complete([refused])
    assert plan.busy[5]  # the refused one never held it
    worker.complete(out)
    assert not any(plan.busy)
    client.reap()
    assert first.code is Code.OK
    assert (second.code, second.text) == (Code.INVALID_ARG, "output position 5 is in use")
    submit(client, 5)
    assert len(take(worker)) == 1


def test_a_slot_that_is_still_live_is_not_taken_again(client, worker):
    ident, pending = submit(client)
    (request,) = take(worker)
    tail, slot = worker.words[TAIL], ident & 0xFFFF
    memory = worker.memory
    entry = list(SUBMISSION.unpack_from(memory, (worker.geometry.submissions + 8 * slot) * 8))
    entry[0], entry[5] = tail + 1, 1  # everything about it is right but its slot
    SUBMISSION.pack_into(memory, (worker.geometry.submissions + 8 * slot) * 8, *entry)
    worker.words[RING + tail] = slot
    worker.words[TAIL] = tail + 1
    assert worker.peek(NOW) is None
    assert take(worker) == []
    assert worker.refused == 1
    worker.complete([request])
    client.reap()
    assert pending.code is Code.OK


def test_the_usual_entry_is_taken_and_started_at_once(client, worker, plan):
    ident, pending = submit(client, 5)
    request = worker.peek(NOW)
    assert request is not None
    assert worker.pending()
    assert worker.ledger[MARK + (ident & 0xFFFF)] == 0  # not taken by looking
    assert not any(plan.busy)
    worker.begin(request)
    assert not worker.pending()
    assert worker.ledger[MARK + (ident & 0xFFFF)] == ident >> 16 << 16 | 1 << 8 | STARTED
    assert plan.busy[5]
    assert (request.rows, request.output_position, request.arrival, request.attempts) == (4, 5, NOW, 1)
    worker.complete([request])
    client.reap()
    assert pending.code is Code.OK
    assert not any(plan.busy)


@pytest.mark.parametrize(
    "unusual",
    [
        {"input_position": 20},
        {"output_position": 8},
        {"output_position": 3},  # busy
        {"rows": 5},
        {"deadline_ns": NOW},
        {"plan_word": PLAN + 1},
    ],
)
def test_an_unusual_entry_is_left_to_take(client, worker, plan, unusual):
    plan.busy[3] = 1
    usual = {"plan_word": PLAN, "input_position": 0, "output_position": 0, "rows": 0, "deadline_ns": 0}
    client.submit(Pending(), **usual | unusual)
    assert worker.peek(NOW) is None
    refuse(worker)
    client.submit(Pending(), **usual)
    assert worker.peek(NOW) is not None


def test_a_plan_that_needs_more_than_a_look_a_cancelled_entry_and_a_cancel_are_left_to_take(client, worker, plan):
    ident, _ = submit(client)
    plan.simple = False
    assert worker.peek(NOW) is None
    plan.simple, plan.refused_until_ns = True, NOW + 1
    assert worker.peek(NOW) is None
    plan.refused_until_ns = NOW
    assert worker.peek(NOW) is not None
    client.cancel(ident)
    assert worker.peek(NOW) is None
    refuse(worker)
    assert worker.peek(NOW) is None  # what follows is the cancel's own entry, taken with it or later
    worker.take(1, NOW, [])
    assert not worker.pending()


@pytest.mark.parametrize("tag", [0, 1, 3, 2**64 - 1])
def test_an_entry_that_bears_another_position_is_not_taken(client, worker, tag):
    submit(client)
    take(worker)
    ident, _ = submit(client, 1)
    worker.words[worker.geometry.submissions + 8 * (ident & 0xFFFF)] = tag
    assert take(worker) == []
    assert worker.refused == 1
    assert worker.live[ident & 0xFFFF] is None


@pytest.mark.parametrize("published", [17, 2**32, 2**64 - 1])
def test_a_tail_beyond_the_ring_breaks_the_channel(worker, published):
    worker.words[TAIL] = published
    assert worker.pending()
    assert worker.take(100, NOW, []) == []
    assert "entries in a ring of 16" in worker.broken
    assert not worker.pending()


def test_a_tail_behind_what_was_taken_breaks_the_channel(client, worker):
    submit(client)
    take(worker)
    worker.words[TAIL] = 0
    assert worker.take(100, NOW, []) == []
    assert worker.broken


def test_a_client_that_never_reads_its_completions_breaks_the_channel(worker, client):
    for _ in range(9):
        submit(client)
        worker.complete(take(worker))
        client._pending[:] = [None] * 4  # as if it had been told of the ending
        client._free[:] = [3, 2, 1, 0]
    assert worker.broken == "does not consume its completions"
