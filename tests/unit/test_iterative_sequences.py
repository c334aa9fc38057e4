"""Sequences that are one request, which its model has run again and again: turns, slots, cancels, random walks."""

from __future__ import annotations

import random
from typing import Any

import pytest

from broker.repository.scheduling import SequenceBatching
from broker.worker.sequence import Sequence
from broker.worker.strategies import DirectSequences, OldestSequences
from shm.admission import Request
from shm.errors import Code
from shm.layout import SEQUENCE_START
from tests.unit.test_sequences import request

START = SEQUENCE_START


def iterative(kind: str, slots: int, **config: Any) -> DirectSequences | OldestSequences:
    batching = SequenceBatching(iterative_sequence=True, oldest=kind == "oldest", **config)
    if kind == "direct":
        return DirectSequences("m", batching, 1, slots)
    return OldestSequences("m", batching, 1, slots, batch=slots)


def again(*rows: Request | None) -> None:
    for row in rows:
        if row is not None:
            assert isinstance(row.sequence, Sequence)
            row.sequence.again = True


@pytest.mark.parametrize("kind", ["direct", "oldest"])
def test_a_request_without_an_id_is_a_sequence_that_lasts_as_long_as_its_model_wants(kind: str) -> None:
    queue = iterative(kind, 1)
    first, second = request(0), request(0)
    assert queue.add(first, 1) is queue.add(second, 1) is None
    flags = []
    for _ in range(3):
        assert list(queue.take(2)) == [first]
        assert isinstance(first.sequence, Sequence)
        flags.append((first.sequence.run_flags, first.sequence.started))
        again(first)
        assert queue.done(0, [first]) == 1
        assert len(queue) == 2
    assert flags == [(START, True), (0, False), (0, False)]
    assert list(queue.take(3)) == [first]
    assert queue.done(0, [first]) == 0
    assert list(queue.take(3)) == [second], "the slot is free"
    assert first.sequence is not second.sequence
    assert first.sequence.id != second.sequence.id > 1 << 62
    queue.done(0, [second])
    assert not len(queue)
    assert not any(line for slots in queue._slots for line in slots)


def test_those_that_run_again_take_turns_with_the_others() -> None:
    queue = iterative("oldest", 3)
    queue._batch = 1
    requests = [request(0, now=at) for at in (1, 2, 3)]
    for each in requests:
        queue.add(each, each.arrival)
    order = []
    for now in range(10, 19):
        (row,) = queue.take(now)
        order.append(requests.index(row))
        again(row)
        queue.done(0, [row])
    assert order == [0, 1, 2] * 3


def test_what_has_begun_leaves_its_queue_by_running_only() -> None:
    queue = iterative("direct", 1, max_sequence_idle_microseconds=10)
    one, step = request(7, START), request(7)
    queue.add(one, 1)
    queue.add(step, 1)
    queue.take(1)
    again(one)
    queue.done(0, [one])
    one.ended = Code.CANCELLED
    assert not queue.remove(one), "whoever answers it ends it"
    step.ended = Code.CANCELLED
    assert queue.remove(step)
    assert queue.late(10**9) == []
    assert list(queue.take(10**9)) == [one]
    queue.done(0, [one])
    assert not any(line for slots in queue._slots for line in slots)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", ["direct", "oldest"])
def test_random_passes(seed: int, kind: str) -> None:
    """Every request runs as often as its model wants, one run at a time, and its slot is free afterwards."""
    chance = random.Random(seed)
    queue = iterative(kind, chance.randint(1, 4))
    wanted: dict[Request, int] = {}
    running: list[Request | None] = []
    now = 1
    while True:
        now += chance.randint(1, 10**6)
        if len(wanted) < 60:
            fresh = request(0, now=now)
            wanted[fresh] = chance.randint(1, 5)
            assert queue.add(fresh, now) is None
        if chance.random() < 0.5 or len(wanted) == 60:
            for row in filter(None, running):
                wanted[row] -= 1
                if wanted[row]:
                    again(row)
            queue.done(0, running)
            running = list(queue.take(now))
            if not running and len(wanted) == 60:
                break
        assert queue.late(now) == []
    assert set(wanted.values()) == {0}
    assert not len(queue)
    assert not queue._lines
    assert not queue._again
    assert not any(line for slots in queue._slots for line in slots)


def test_a_request_without_an_id_has_no_other_client_s_sequence() -> None:
    queue = iterative("direct", 2)
    one, other = request(1 << 63, START), request(0)
    queue.add(one, 1)
    queue.add(other, 1)
    assert queue.take(1) == [one, other]
