"""Requests through both sides of a channel, in one thread: what travels, what is refused, what is dropped."""

from __future__ import annotations

import struct
import sys

import pytest

from shm.admission import Request
from shm.errors import Code
from shm.layout import CTAIL, DONE, FINAL, MARK, NOTE_BYTES, STARTED, TAIL, TAKEN
from shm.worker_channel import WorkerChannel
from tests.fakes.channel import NOW, PLAN, Pending, Plan, Twin, respond, submit, take


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


def marks(worker: WorkerChannel) -> list[tuple[int, int, int]]:
    """(position, attempts, state) of every slot."""
    words = worker.ledger[MARK : MARK + worker.geometry.slots]
    return [(word >> 16, word >> 8 & 0xFF, word & 0xFF) for word in words]


# --- one request ----------------------------------------------------------------------------------------------------


def test_one_request_from_submit_to_its_ending(twin, client, worker, plan):
    ident, pending = submit(client)
    assert client.outstanding == 1
    assert worker.pending()
    (request,) = take(worker)
    assert not worker.pending()
    assert marks(worker)[ident & 0xFFFF] == (1, 0, TAKEN)
    worker.start([request])
    assert marks(worker)[ident & 0xFFFF] == (1, 1, STARTED)
    assert client.reap() == 0
    worker.complete([request])
    assert marks(worker)[ident & 0xFFFF] == (1, 1, DONE)
    assert client.reap() == 1
    assert client.reap() == 0
    assert pending.code is Code.OK
    assert pending.finals == 1
    assert client.outstanding == 0


def test_every_submitted_field_arrives(client, worker):
    pending = Pending()
    client.submit(pending, PLAN, 19, 7, 3, NOW + 1, request_id=2**63, priority=65535, flags=3, sequence_id=2**64 - 1)
    (request,) = take(worker)
    assert (request.input_position, request.output_position, request.rows) == (19, 7, 3)
    assert (request.deadline, request.request_id, request.priority) == (NOW + 1, 2**63, 65535)
    assert (request.flags, request.sequence_id) == (3, 2**64 - 1)
    assert (request.arrival, request.attempts, request.plan) == (NOW, 0, worker.plans[PLAN])


def test_no_rows_means_as_prepared(client, worker):
    submit(client)
    assert take(worker)[0].rows == 4


def test_every_completed_field_arrives(client, worker):
    _, pending = submit(client)
    (request,) = take(worker)
    request.queue_ns, request.input_ns, request.infer_ns, request.output_ns, request.copied = 1, 2, 3, 4, 2**63
    request.note = struct.pack("<3Q", 2, 640, 480)
    worker.complete([request])
    client.reap()
    assert pending.entries[0][3:] == (1, 2, 3, 4, 2**63)
    assert pending.notes[0][:24] == request.note
    assert pending.notes[0][24:] == bytes(NOTE_BYTES - 24)


def test_without_a_note_none_is_reported_even_where_an_earlier_one_lies(client, worker):
    for text in ["first", "", "", "", "", "", "", "", ""]:  # once around the 8 completions
        _, pending = submit(client)
        (request,) = take(worker)
        if text:
            request.fail(Code.INTERNAL, text)
        worker.complete([request])
        client.reap()
        assert pending.text == text
    assert pending.code is Code.OK


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("short", "short"),
        ("x" * 512, "x" * 512),
        ("x" * 513, "x" * 512),
        ("x" * 511 + "é", "x" * 511),  # never half a character
        ("x" * 510 + "é", "x" * 510 + "é"),
        ("name\udcff", "name?"),  # as os.fsdecode leaves bytes that are no UTF-8
    ],
)
def test_a_message_is_cut_to_512_bytes_of_text(client, worker, message, expected):
    _, pending = submit(client)
    (request,) = take(worker)
    request.fail(Code.INVALID_ARG, message)
    worker.complete([request])
    client.reap()
    assert pending.code is Code.INVALID_ARG
    assert pending.text == expected


@pytest.mark.parametrize(
    "field",
    [{"priority": 65536}, {"sequence_id": -1}, {"request_id": 2**64}, {"flags": 65536}],
)
def test_a_field_out_of_range_costs_no_slot(client, worker, field):
    for _ in range(5):
        with pytest.raises(struct.error):
            client.submit(Pending(), PLAN, 0, 0, 0, 0, **field)
    assert client.outstanding == 0
    assert not worker.pending()
    submit(client)
    assert len(take(worker)) == 1


# --- many -----------------------------------------------------------------------------------------------------------


def test_a_full_channel_says_so_and_a_final_completion_makes_room(client, worker):
    for position in range(4):
        submit(client, position)
    assert client.submit(Pending(), PLAN, 0, 4, 0, 0) == 0
    requests = take(worker)
    worker.complete(requests[2:3])
    assert client.submit(Pending(), PLAN, 0, 4, 0, 0) == 0  # not before the completion is read
    client.reap()
    assert client.submit(Pending(), PLAN, 0, 4, 0, 0) != 0
    assert client.outstanding == 4


def test_completions_may_come_in_any_order_and_one_by_one(client, worker):
    pendings = [submit(client, position)[1] for position in range(4)]
    requests = take(worker)
    for request in requests:
        request.copied = request.output_position
    for done, index in enumerate([2, 0, 3, 1], start=1):
        worker.complete([requests[index]])
        assert client.reap() == 1
        assert [pending.finals for pending in pendings].count(1) == done
        assert pendings[index].entries[0][7] == index


def test_a_batch_is_committed_by_one_store(client, worker):
    pendings = [submit(client, position)[1] for position in range(3)]
    requests = take(worker)
    before = worker.words[CTAIL]
    worker.complete(requests)
    assert worker.words[CTAIL] == before + 3
    assert client.reap() == 3
    assert all(pending.code is Code.OK for pending in pendings)


def test_take_stops_at_its_limit_and_goes_on_there(client, worker):
    for position in range(4):
        submit(client, position)
    assert [request.output_position for request in take(worker, 3)] == [0, 1, 2]
    assert worker.pending()
    assert [request.output_position for request in take(worker, 3)] == [3]


def test_rings_and_completions_wrap_around(client, worker):
    random = 12345
    for round_ in range(200):  # 400 to 800 requests: 25 times around the ring and 50 times around the completions
        random = (random * 1103515245 + 12345) % 2**31
        count = 1 + random % 4
        pendings = [submit(client, position)[1] for position in range(count)]
        requests = take(worker)
        assert len(requests) == count
        for request in requests:
            request.copied = round_ << 8 | request.output_position
            if random % 3 == 0:
                request.fail(Code.INTERNAL, f"{round_}/{request.output_position}")
        if random % 2:
            requests.reverse()
        worker.complete(requests[: random % 3])
        worker.complete(requests[random % 3 :])
        assert client.reap() == count
        for position, pending in enumerate(pendings):
            assert pending.entries[0][7] == round_ << 8 | position
            assert pending.text == (f"{round_}/{position}" if random % 3 == 0 else "")
    assert (worker.broken, worker.refused) == ("", 0)
    assert client.outstanding == 0


def test_both_sides_can_be_opened_again_in_the_middle(twin, client, worker, plan):
    _, pending = submit(client)
    worker.complete(take(worker))
    client.reap()
    again, replacement = twin.client(), twin.worker({PLAN: plan})
    ident, pending = submit(again)
    assert ident >> 16 == 2
    replacement.complete(take(replacement))
    assert again.reap() == 1
    assert pending.code is Code.OK


# --- completions that name nothing ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "forge",
    [
        lambda request: setattr(request, "position", request.position + 1),
        lambda request: setattr(request, "slot", request.slot + 1),
    ],
)
def test_a_completion_that_names_no_pending_request_is_dropped(client, worker, forge):
    _, pending = submit(client)
    (request,) = take(worker)
    honest = (request.position, request.slot)
    forge(request)
    worker.complete([request])
    assert client.reap() == 0
    assert pending.entries == []
    assert client.outstanding == 1
    request.position, request.slot = honest
    worker.complete([request])
    assert client.reap() == 1
    assert pending.code is Code.OK


def test_responses_come_before_the_ending_and_keep_the_slot(client, worker):
    _, pending = submit(client)
    (request,) = take(worker)
    respond(worker, request, Code.OK)
    respond(worker, request, Code.OK)
    assert client.reap() == 2
    assert client.outstanding == 1
    respond(worker, request, FINAL)
    assert client.reap() == 1
    assert client.outstanding == 0
    assert [entry[0] for entry in pending.entries] == [1, 2, 3]
    assert pending.finals == 1


def test_a_second_ending_is_dropped(client, worker):
    _, pending = submit(client)
    (request,) = take(worker)
    worker.complete([request])
    worker.complete([request])
    assert client.reap() == 1
    _, later = submit(client)
    assert client.reap() == 0
    assert pending.finals == 1
    assert later.entries == []
    assert client.outstanding == 1


# --- cancel ---------------------------------------------------------------------------------------------------------


def test_cancel_before_it_is_taken(client, worker):
    ident, pending = submit(client)
    assert client.cancel(ident)
    out: list[Request] = []
    notable = worker.take(100, NOW, out)
    assert out == []
    ((request, admitted),) = notable  # once, though it is found twice: in its slot and as an entry of its own
    assert not admitted
    worker.complete([request])
    client.reap()
    assert pending.code is Code.CANCELLED
    assert not worker.pending()


def test_cancel_after_it_was_taken(client, worker):
    ident, pending = submit(client)
    (request,) = take(worker)
    assert not request.ended
    assert client.cancel(ident)
    out: list[Request] = []
    assert worker.take(100, NOW, out) == [(request, True)]
    assert out == []
    assert request.ended is Code.CANCELLED
    request.fail(Code.CANCELLED, "cancelled")
    worker.complete([request])
    client.reap()
    assert pending.code is Code.CANCELLED


def test_cancel_of_one_that_has_ended_is_refused(client, worker):
    ident, _ = submit(client)
    worker.complete(take(worker))
    client.reap()
    assert not client.cancel(ident)
    assert not worker.pending()


def test_cancel_of_an_old_request_does_not_touch_the_slots_next_one(client, worker):
    old, _ = submit(client)
    worker.complete(take(worker))
    assert client.cancel(old)  # its ending is there, but unread
    client.reap()
    new, pending = submit(client)
    assert new & 0xFFFF == old & 0xFFFF
    assert not client.cancel(old)
    (request,) = take(worker)  # the old cancel is in front of it
    worker.complete([request])
    client.reap()
    assert pending.code is Code.OK
    assert worker.refused == 0


def test_cancelling_again_and_again_takes_no_more_room(client, worker):
    ident, _ = submit(client)
    for _ in range(100):
        assert client.cancel(ident)
    assert worker.words[TAIL] == 2
    worker.take(100, NOW, [])
    assert not worker.broken


def test_a_signal_handler_finds_the_lock_of_submissions_free(client):
    """Handlers run after calls, so none may be made while it is held, but for the one that lets it go."""
    held = []

    def look(frame, event, called):
        if event in ("call", "c_call") and client._lock.locked() and getattr(called, "__name__", "") != "__exit__":
            held.append((frame.f_code.co_name, frame.f_lineno))

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        ident, _ = submit(client)
        cancelled = client.cancel(ident), client.cancel(ident), client.cancel(ident + 1)
        left = client.abandoned()
    finally:
        sys.setprofile(before)
    assert (cancelled, len(left), held) == ((True, True, False), 1, [])


def test_what_does_not_fit_costs_no_slot_and_neither_does_the_end_of_a_channel(client):
    for _ in range(client.slots + 1):
        with pytest.raises(struct.error):
            client.submit(Pending(), PLAN, -1, 0, 0, 0)
    assert client.outstanding == 0
    for _ in range(2):
        pending = [submit(client, position)[1] for position in range(client.slots)]
        assert client.submit(Pending(), PLAN, 0, 0, 0, 0) == 0
        assert sorted(map(id, client.abandoned())) == sorted(map(id, pending))
        assert client.outstanding == 0
