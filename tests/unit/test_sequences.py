"""Sequence batching: rules, slots, time-outs; random walks on a simulated clock."""

from __future__ import annotations

import random
from typing import Any

import pytest

from broker.repository.scheduling import SequenceBatching
from broker.worker.sequence import Sequence
from broker.worker.sequences import EXPIRED, STOPPING
from broker.worker.strategies import DirectSequences, OldestSequences
from shm.admission import Request
from shm.errors import Code
from shm.layout import SEQUENCE_END, SEQUENCE_START

START, END = SEQUENCE_START, SEQUENCE_END
SIGNATURE = object()


def request(number: int, flags: int = 0, now: int = 1, rows: int = 1, deadline: int = 0) -> Request:
    channel: Any = None
    made = Request(channel, 0, (1, 0, 0, deadline, 0, 0, rows, number, flags, 0), None, now)
    made.signature = SIGNATURE
    return made


def direct(slots: int = 2, **config: Any) -> DirectSequences:
    return DirectSequences("m", SequenceBatching(**config), 1, slots)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (request(0), "inference request to model 'm' must specify a non-zero or non-empty correlation ID"),
        (
            request(5),
            "inference request for sequence 5 to model 'm' must specify the START flag on the first request of the"
            " sequence",
        ),
        (
            request(5, START, rows=2),
            "inference request to model 'm' must specify batch-size 1 due to requirements of sequence batcher",
        ),
    ],
)
def test_wrong_use(wrong: Request, text: str) -> None:
    queue = direct()
    verdict = queue.add(wrong, 1)
    assert verdict is not None
    assert verdict[1] == text
    assert not len(queue)


def test_empty_slots_are_none_up_to_the_highest_occupied() -> None:
    queue = direct(4)
    first, second = request(1, START), request(2, START)
    queue.add(first, 1)
    queue.add(second, 1)
    assert queue.take(1) == [first, second]
    queue.done(0, [first, second])
    step = request(2, END)
    queue.add(step, 2)
    assert queue.take(2) == [None, step]
    queue.done(0, [None, step])
    last = request(1, END)
    queue.add(last, 3)
    assert queue.take(3) == [last]


def test_an_idle_sequence_frees_its_slot_for_the_backlog() -> None:
    queue = direct(1, max_sequence_idle_microseconds=10)
    queue.add(request(1, START), 1)
    (first,) = queue.take(1)
    assert first is not None
    first.infer_ns = 3_000  # its run is no idleness
    queue.done(0, [first])
    queue.add(request(2, START), 5_000)
    queue.add(request(3, START), 5_000)
    assert queue.late_at == 13_001
    assert queue.late(13_000) == []
    assert not queue.take(13_000)
    assert queue.late(13_001) == []
    rows = queue.take(13_001)
    assert [row and row.sequence_id for row in rows] == [2]
    assert queue.add(request(1), 13_002) is not None


def test_who_waits_in_the_backlog_is_not_idle() -> None:
    queue = direct(1, max_sequence_idle_microseconds=10)
    queue.add(request(1, START), 1)
    running = queue.take(1)
    queue.add(request(2, START), 2)
    assert queue.late(10**9) == []
    last = request(1, END)
    queue.add(last, 10**9)
    queue.done(0, running)
    queue.done(0, queue.take(10**9))
    assert [row and row.sequence_id for row in queue.take(10**9)] == [2]


def test_a_deadline_in_the_backlog_ends_the_sequence() -> None:
    queue = direct(1)
    queue.add(request(1, START), 1)
    waits = [request(2, START, deadline=100), request(2)]
    for each in waits:
        queue.add(each, 2)
    assert queue.late(100) == [(each, EXPIRED) for each in waits]


def test_start_on_a_live_id_gets_a_new_state() -> None:
    queue = direct()
    old, new = request(1, START), request(1, START)
    queue.add(old, 1)
    queue.add(new, 1)
    assert old.sequence is not new.sequence
    assert queue.take(1) == [old]
    assert not queue.take(1)


@pytest.mark.parametrize("oldest", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_random_walk(oldest: bool, seed: int) -> None:
    chance = random.Random(seed)
    config = SequenceBatching(max_sequence_idle_microseconds=10**6, oldest=oldest)
    queue = OldestSequences("m", config, 2, 3, batch=3) if oldest else DirectSequences("m", config, 2, 3)
    now, left, waiting = 1, set[Request](), list[Request]()
    running: dict[int, Any] = {}
    seen: dict[int, int] = {}
    for _ in range(2000):
        now += chance.randrange(1000)
        act = chance.random()
        if act < 0.5:
            made = request(chance.randrange(1, 20), chance.choice((START, 0, 0, END)), now)
            if queue.add(made, now) is None:
                waiting.append(made)
        elif act < 0.55 and waiting:
            gone = chance.choice(waiting)
            if queue.remove(gone):
                left.add(gone)
        elif (instance := chance.randrange(2)) in running:
            queue.done(instance, running.pop(instance))
        else:
            rows = queue.take(now, instance)
            if rows:
                running[instance] = rows
            for row in filter(None, rows):
                assert row not in left
                left.add(row)
                record = row.sequence
                assert isinstance(record, Sequence)
                assert record.id == row.sequence_id
                place = waiting.index(row)
                assert seen.get(id(record), -1) < place
                seen[id(record)] = place
            records = [id(row.sequence) for batch in running.values() for row in batch if row is not None]
            assert len(records) == len(set(records))
        left.update(each for each, _ in queue.late(now))
    while running or len(queue):
        now += 10**10
        for instance in range(2):
            queue.done(instance, running.pop(instance, ()))
            rows = queue.take(now, instance)
            left.update(filter(None, rows))
            if rows:
                running[instance] = rows
        left.update(each for each, _ in queue.late(now))
    for _ in range(2):
        now += 10**10
        queue.late(now)
    assert left == set(waiting)
    assert not queue._backlog
    assert not any(line for slots in queue._slots for line in slots)


def test_new_sequences_are_refused_while_those_that_run_end() -> None:
    queue = direct()
    queue.add(request(1, START), 1)
    queue.done(0, queue.take(1))
    queue.drain(10)
    assert queue.add(request(2, START), 2) == STOPPING
    assert queue.add(request(1, END), 2) is None
    assert [row and row.sequence_id for row in queue.take(2)] == [1]


def test_hooks_hold_all_until_enough_wait() -> None:
    """As in Triton, so many of sequences that have a slot, and so many of others."""
    queue = DirectSequences("m", SequenceBatching(), 1, 1, delay=2, backlog_delay=1)
    for number, flags in ((1, START), (2, START), (2, 0)):
        queue.add(request(number, flags), 1)
        assert not queue.take(1)
    queue.add(request(1, END), 1)
    assert [row and row.sequence_id for row in queue.take(1)] == [1]


def test_slots_fill_to_the_minimum_or_the_delay_passes() -> None:
    queue = direct(4, minimum_slot_utilization=0.5, max_queue_delay_microseconds=10)
    queue.add(request(1, START, 1), 1)
    assert not queue.take(10_000)
    assert queue.due() == 10_001
    queue.add(request(2, START, 5_000), 5_000)
    assert len(queue.take(5_000)) == 2
    alone = direct(4, minimum_slot_utilization=0.5, max_queue_delay_microseconds=10)
    alone.add(request(1, START, 1), 1)
    assert len(alone.take(10_001)) == 1


def test_oldest_prefers_sizes_and_joins_only_what_is_alike() -> None:
    config = SequenceBatching(oldest=True, preferred_batch_size=(2,), max_queue_delay_microseconds=10)
    queue = OldestSequences("m", config, 1, 8, batch=4)
    queue.add(request(1, START, 1), 1)
    assert not queue.take(1)
    odd = request(2, START, 2)
    odd.signature = object()
    queue.add(odd, 2)
    assert not queue.take(2)
    for number in (3, 4):
        queue.add(request(number, START, 3), 3)
    assert [row and row.sequence_id for row in queue.take(3)] == [1, 3]
    assert queue.take(10_002) == [odd]


def test_a_thousand_sequences_on_sixty_four_slots() -> None:
    """Every step runs once, in its order, with the record of its own sequence; slots are always full enough."""
    chance = random.Random(1)
    queue = DirectSequences("m", SequenceBatching(max_sequence_idle_microseconds=10**9), 2, 32)
    steps = dict.fromkeys(range(1, 1001), 0)
    records: dict[int, object] = {}
    due = 20
    for now, number in enumerate(chance.sample([n for n in steps for _ in range(due)], 1000 * due), 1):
        at = steps[number] = steps[number] + 1
        assert queue.add(request(number, START if at == 1 else END if at == due else 0, now), now) is None
    ran = dict.fromkeys(steps, 0)
    while len(queue):
        for instance in range(2):
            rows = queue.take(10**6, instance)
            assert len(rows) <= 32
            for row in filter(None, rows):
                ran[row.sequence_id] += 1
                assert bool(row.flags & START) == (ran[row.sequence_id] == 1)
                assert records.setdefault(row.sequence_id, row.sequence) is row.sequence
            queue.done(instance, rows)
    assert set(ran.values()) == {due}
    assert len(set(map(id, records.values()))) == len(records)


def test_equal_ids_of_two_clients_are_two_sequences():
    """A client can neither end another's sequence nor take a step on its state."""

    class Owned:
        def __init__(self, owner):
            self.owner = owner

    queue = OldestSequences("m", SequenceBatching(), 1, 4, batch=4)
    first, second, stray = request(7, SEQUENCE_START), request(7, SEQUENCE_START), request(7)
    for owner, each in ((1, first), (2, second), (3, stray)):
        each.plan = Owned(owner)
    assert queue.add(first, 1) is queue.add(second, 1) is None
    assert first.sequence is not second.sequence
    code, text = queue.add(stray, 1)
    assert code == Code.INVALID_ARG
    assert "must specify the START flag" in text


@pytest.mark.parametrize("kind", ["direct", "oldest"])
@pytest.mark.parametrize("at", ["slot", "backlog", "behind a run"])
def test_a_cancelled_step_ends_its_sequence(kind: str, at: str) -> None:
    oldest = OldestSequences("m", SequenceBatching(oldest=True, max_candidate_sequences=1), 1, 1)
    queue = direct(1) if kind == "direct" else oldest
    other = []
    if at == "backlog":
        other = [request(9, START | END)]
        queue.add(other[0], 1)
    steps = [request(1, START), request(1), request(1), request(1, END)]
    for step in steps:
        queue.add(step, 1)
    running = queue.take(1) if at == "behind a run" else ()
    cancelled = steps[2]
    cancelled.ended = Code.CANCELLED
    assert queue.remove(cancelled)
    rest = [step for step in steps if step is not cancelled and step not in running]
    assert queue.late_at == 1
    assert [(each, verdict[0]) for each, verdict in queue.late(2)] == [(each, Code.CANCELLED) for each in rest]
    assert queue.add(request(1), 3) is not None, "nobody knows the sequence any more"
    queue.done(0, running)
    queue.add(request(2, START), 4)
    assert [row and row.sequence_id for row in queue.take(4)] == [9 if other else 2]


def test_what_follows_a_cancelled_step_may_be_cancelled_itself() -> None:
    queue = direct(1)
    steps = [request(1, START), request(1), request(1)]
    for step in steps:
        queue.add(step, 1)
    for step in reversed(steps):
        step.ended = Code.CANCELLED
        assert queue.remove(step)
        assert not queue.remove(step)
    assert queue.late(2) == []
    assert not len(queue)


def test_a_sequence_goes_on_without_a_step_whose_deadline_has_passed() -> None:
    queue = direct(1)
    first, second, third = request(1, START), request(1, deadline=5), request(1, END)
    for step in (first, second, third):
        queue.add(step, 1)
    assert queue.remove(second)
    assert queue.late(6) == []
    assert list(queue.take(6)) == [first]
    queue.done(0, [first])
    assert list(queue.take(6)) == [third]


def test_how_long_the_sequences_of_a_replaced_model_go_on() -> None:
    queue = direct(2)
    for number in (1, 2):
        queue.add(request(number, START), 1)
    queue.done(0, queue.take(1))
    assert not queue.continues(request(1))
    assert not queue.goes_on(1)
    queue.drain(100)
    assert queue.continues(request(1, now=99))
    assert not queue.continues(request(1, now=100))
    assert not queue.continues(request(1, START, now=50))
    assert not queue.continues(request(3, now=50))
    assert queue.goes_on(99)
    assert not queue.goes_on(100)
    for number in (1, 2):
        assert queue.goes_on(50)
        queue.add(request(number, END, now=50), 50)
    assert not queue.goes_on(51)


def test_a_step_that_was_cancelled_before_it_came_ends_its_sequence() -> None:
    queue = direct(1)
    first = request(1, START)
    queue.add(first, 1)
    queue.miss(request(2))
    assert queue.late_at != 1
    queue.miss(request(1))
    assert [(each, verdict[0]) for each, verdict in queue.late(2)] == [(first, Code.CANCELLED)]
    assert queue.add(request(1), 3) is not None
    steps = [request(1, START), request(1, END)]
    for step in steps:
        queue.add(step, 4)
    queue.miss(request(1))  # taken in one go: those around it came before
    assert [each for each, _ in queue.late(5)] == steps
