"""Why a batch was closed, on a clock of the test's own: full, delay, preferred, or idle."""

from __future__ import annotations

from typing import Any

import pytest

from broker.repository.scheduling import SequenceBatching
from broker.worker.batcher import SingleQueue
from broker.worker.strategies import OldestSequences
from shm.statistics import DELAY, FULL, IDLE, PREFERRED
from tests.unit.test_batcher import US, B, Queued, batcher, fill, many
from tests.unit.test_sequences import START, direct, request


@pytest.mark.parametrize(
    ("preferred", "delay", "rows", "at", "taken", "reason"),
    [
        ((), 0, [1], 0, 1, IDLE),
        ((), 0, [1, 1, 1], 0, 3, IDLE),
        ((), 0, [4, 4], 0, 2, FULL),
        ((), 0, [4, 4, 1], 0, 2, FULL),
        ((), 0, [5, 4], 0, 1, FULL),  # the second would be too much
        ((4,), 0, [1, 1, 1, 1, 1], 0, 4, PREFERRED),
        ((4,), 0, [1, 1, 1], 0, 3, IDLE),
        ((4,), 0, [3, 2], 0, 1, PREFERRED),  # it would outgrow all that are preferred
        ((4, 8), 0, [4, 4], 0, 2, FULL),
        ((), 100, [1, 1], 99, 0, None),
        ((), 100, [1, 1], 100, 2, DELAY),
        ((), 100, [4, 4], 100, 2, FULL),
        ((2,), 100, [1, 1, 1], 99, 2, PREFERRED),
        ((2,), 100, [1, 1, 1], 100, 3, DELAY),  # all go along
        ((4,), 100, [5], 0, 1, PREFERRED),  # larger by itself
    ],
)
def test_why_a_batch_was_closed(preferred, delay, rows, at, taken, reason):
    queue = batcher(8, preferred, delay)
    requests = fill(queue, *(Queued(size) for size in rows))
    assert queue.take(at * US) == requests[:taken]
    if taken:
        assert queue.closed_by == reason


def test_what_does_not_fit_in_closes_a_batch_and_an_instances_share_does_not():
    queue = batcher(8, delay=100)
    fill(queue, Queued(), Queued(signature=B))
    assert len(queue.take(0)) == 1
    assert queue.closed_by == FULL
    fill(queue, Queued(signature=None))
    queue.take(100 * US)
    assert queue.closed_by == FULL
    assert len(queue.take(0)) == 1, "it runs alone, so it does not wait"
    assert queue.closed_by == FULL
    queue = batcher(8)
    fill(queue, *many(4))
    assert [len(queue.take(0, 0, 2)), len(queue.take(0, 0, 2))] == [2, 2]
    assert queue.closed_by == IDLE
    single = SingleQueue()
    fill(single, Queued(8))
    assert single.take(0)
    assert single.closed_by == IDLE


@pytest.mark.parametrize(
    ("steps", "config", "at", "taken", "reason"),
    [
        (2, {}, 1, 2, FULL),
        (1, {}, 1, 1, IDLE),
        (1, {"max_queue_delay_microseconds": 10, "minimum_slot_utilization": 1.0}, 1, 0, None),
        (1, {"max_queue_delay_microseconds": 10, "minimum_slot_utilization": 1.0}, 10_001, 1, DELAY),
        (1, {"max_queue_delay_microseconds": 10, "minimum_slot_utilization": 0.5}, 1, 1, PREFERRED),
        (2, {"max_queue_delay_microseconds": 10, "minimum_slot_utilization": 0.5}, 1, 2, FULL),
    ],
)
def test_why_a_batch_of_slots_was_closed(
    steps: int, config: dict[str, Any], at: int, taken: int, reason: int | None
) -> None:
    queue = direct(2, **config)
    for number in range(1, steps + 1):
        queue.add(request(number, START), 1)
    assert len([row for row in queue.take(at) if row is not None]) == taken
    if taken:
        assert queue.closed_by == reason


@pytest.mark.parametrize(
    ("steps", "preferred", "delay", "at", "taken", "reason"),
    [
        (1, (), 0, 1, 1, IDLE),
        (4, (), 0, 1, 4, FULL),
        (6, (), 0, 1, 4, FULL),
        (3, (), 10, 1, 0, None),
        (3, (), 10, 10_001, 3, DELAY),
        (3, (2,), 10, 1, 2, PREFERRED),
    ],
)
def test_why_a_batch_of_candidates_was_closed(
    steps: int, preferred: tuple[int, ...], delay: int, at: int, taken: int, reason: int | None
) -> None:
    config = SequenceBatching(oldest=True, preferred_batch_size=preferred, max_queue_delay_microseconds=delay)
    queue = OldestSequences("m", config, 1, 8, batch=4)
    for number in range(1, steps + 1):
        queue.add(request(number, START), 1)
    assert len(queue.take(at)) == taken
    if taken:
        assert queue.closed_by == reason


@pytest.mark.parametrize("delay", [0, 10_000])
def test_a_batch_does_not_grow_beyond_all_preferred_sizes(delay):
    queue = batcher(preferred=(2, 6), delay=delay)
    first, second = fill(queue, Queued(rows=3, arrival=1), Queued(rows=4, arrival=2))
    assert list(queue.take(3)) == [first]
    assert list(queue.take(3)) == ([] if delay else [second])
    fill(queue, Queued(rows=2, arrival=4))
    if delay:
        assert len(queue.take(5)) == 2  # 4 and 2 are preferred


def test_a_batch_that_has_waited_takes_all_that_fit():
    queue = batcher(preferred=(2, 6), delay=10)
    both = fill(queue, Queued(rows=3, arrival=1), Queued(rows=4, arrival=2))
    assert list(queue.take(20 * US)) == both
