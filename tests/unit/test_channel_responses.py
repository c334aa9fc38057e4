"""Several responses to one request on a channel: order, credit, and room for every ending."""

from __future__ import annotations

import random

import pytest

from shm.errors import Code
from shm.layout import CODE_MASK, CONSUMED, FINAL
from shm.recovery import recover
from tests.fakes.channel import NOW, PLAN, Pending, Plan, Twin, submit, take


@pytest.fixture
def twin():
    with Twin(slots=4) as twin:
        yield twin


def test_responses_come_in_order_and_before_the_ending(twin):
    client, worker = twin.client(), twin.worker({PLAN: Plan(output_positions=4)})
    _, pending = submit(client)
    (request,) = take(worker)
    worker.start([request])
    for text in (b"one", b"two"):
        request.note = text
        assert worker.respond(request)
    assert client.reap() == 2
    assert client.outstanding == 1
    request.note = b""
    worker.complete([request])
    client.reap()
    assert [note.rstrip(b"\0") for note in pending.notes] == [b"one", b"two", b""]
    assert [bool(entry[2] & FINAL) for entry in pending.entries] == [False, False, True]
    assert client.outstanding == 0


def test_an_error_among_the_responses_is_no_ending(twin):
    client, worker = twin.client(), twin.worker({PLAN: Plan(output_positions=4)})
    _, pending = submit(client)
    (request,) = take(worker)
    worker.start([request])
    request.fail(Code.INVALID_ARG, "this one failed")
    assert worker.respond(request)
    request.code, request.note = Code.OK, b""
    worker.complete([request])
    client.reap()
    assert [entry[2] & CODE_MASK for entry in pending.entries] == [Code.INVALID_ARG, Code.OK]


def test_no_more_responses_are_unread_than_the_channel_has_slots(twin):
    client, worker = twin.client(), twin.worker({PLAN: Plan(output_positions=4)})
    submit(client)
    (request,) = take(worker)
    worker.start([request])
    numbers = [worker.respond(request) for _ in range(5)]
    assert numbers[:4] == [1, 2, 3, 4]
    assert numbers[4] == 0
    assert not worker.was_read(1)
    client.reap()
    assert worker.was_read(4)
    assert not worker.was_read(5)
    assert worker.respond(request) == 5


def test_a_successor_counts_what_its_predecessor_left_unread(twin):
    client = twin.client()
    plans = {PLAN: Plan(output_positions=4, retryable=False)}
    worker = twin.worker(plans)
    _, pending = submit(client)
    (request,) = take(worker)
    worker.start([request])
    assert [bool(worker.respond(request)) for _ in range(5)] == [True] * 4 + [False]
    successor = twin.worker(plans)
    recover(successor, NOW)  # ends it: the fifth that is unread
    _, second = submit(client, output_position=1)
    (again,) = take(successor)
    successor.start([again])
    assert successor.respond(again) == 0
    client.reap()
    assert pending.finals == 1
    assert successor.respond(again) == 6
    successor.complete([again])
    client.reap()
    assert second.finals == 1
    assert successor.broken == ""


def test_a_client_that_lies_about_what_it_has_read_harms_nobody_else(twin):
    client, worker = twin.client(), twin.worker({PLAN: Plan(output_positions=4)})
    submit(client)
    (request,) = take(worker)
    worker.start([request])
    for claimed in (2**64 - 1, 2**40):
        worker.words[CONSUMED] = claimed
        assert worker.respond(request)
        assert worker.broken == "does not consume its completions"


@pytest.mark.parametrize("seed", range(20))
def test_every_ending_finds_room_however_many_responses_are_unread(seed):
    random_ = random.Random(seed)
    slots = random_.choice((1, 2, 4, 16))
    with Twin(slots) as twin:
        client, worker = twin.client(), twin.worker({PLAN: Plan(output_positions=slots)})
        sent: dict[int, int] = {}
        running: dict[int, object] = {}
        told: dict[int, Pending] = {}
        number = 0
        for _ in range(2000):
            what = random_.random()
            if what < 0.3:
                free = next((p for p in range(slots) if all(r.output_position != p for r in running.values())), None)
                pending = Pending()
                if free is not None and client.submit(pending, PLAN, 0, free, 0, 0, request_id=number):
                    told[number], sent[number] = pending, 0
                    (request,) = take(worker)
                    worker.start([request])
                    running[number] = request
                    number += 1
            elif what < 0.8 and running:
                ident, request = random_.choice(list(running.items()))
                request.note = sent[ident].to_bytes(8, "little")
                sent[ident] += bool(worker.respond(request))
            elif what < 0.9 and running:
                ident = random_.choice(list(running))
                request = running.pop(ident)
                request.note = b""
                worker.complete([request])
            else:
                client.reap()
            assert worker.broken == ""
        worker.complete(list(running.values()))
        client.reap()
        assert client.strays == 0
        for ident, pending in told.items():
            assert pending.finals == 1
            assert [int.from_bytes(note[:8], "little") for note in pending.notes[:-1]] == list(range(sent[ident]))
