"""Triton's dynamic batcher on a clock of the test's own: times in microseconds here, nanoseconds there."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from broker.repository.config import ModelConfig
from broker.repository.scheduling import DynamicBatching, QueuePolicy
from broker.worker.batcher import DynamicBatcher, SingleQueue, queue_for
from shm.statistics import DELAY, FULL, IDLE, PREFERRED

US = 1000
A, B = ("a",), ("b",)  # signatures


@dataclass(eq=False)
class Queued:
    rows: int = 1
    arrival: int = 0
    priority: int = 0
    signature: object = A
    client: object = None
    plan: object = None  # as of Triton's clients
    deadline: int = 0
    queue_timeout: int = 0


def batcher(max_batch_size: int = 8, preferred: tuple[int, ...] = (), delay: int = 0, **config) -> DynamicBatcher:
    config = DynamicBatching(preferred_batch_size=preferred, max_queue_delay_microseconds=delay, **config)
    return DynamicBatcher(max_batch_size, config)


def fill(queue, *requests: Queued) -> list[Queued]:
    for request in requests:
        queue.add(request, request.arrival)
    return list(requests)


def many(count: int, **fields) -> list[Queued]:
    return [Queued(**fields) for _ in range(count)]


def test_the_configuration_decides_which_queue():
    def queue(most, batching):
        config = ModelConfig(
            name="m",
            platform="",
            backend="none",
            directory="",
            versions={},
            default_model_filename="",
            max_batch_size=most,
            input=(),
            output=(),
            instance_group=(),
            dynamic_batching=batching,
        )
        return queue_for(config, 1)

    assert isinstance(queue(8, None), SingleQueue)
    assert isinstance(queue(1, DynamicBatching()), SingleQueue)
    assert isinstance(queue(0, DynamicBatching()), SingleQueue)
    assert isinstance(queue(2, DynamicBatching()), DynamicBatcher)


# --- without a delay ------------------------------------------------------------------------------------------------


def test_without_a_delay_whatever_is_queued_goes():
    queue = batcher()
    requests = fill(queue, *many(3))
    assert queue.take(0) == requests
    assert queue.take(0) == []
    assert len(queue) == 0


def test_never_more_than_the_maximum():
    queue = batcher(8)
    requests = fill(queue, *many(19))
    assert [queue.take(0), queue.take(0), queue.take(0)] == [requests[:8], requests[8:16], requests[16:]]


def test_rows_count_not_requests():
    queue = batcher(8)
    requests = fill(queue, Queued(3), Queued(3), Queued(3), Queued(8), Queued(1))
    assert queue.take(0) == requests[:2]  # the third would make nine
    assert queue.take(0) == requests[2:3]
    assert queue.take(0) == requests[3:4]
    assert queue.take(0) == requests[4:]


@pytest.mark.parametrize(("queued", "taken"), [(3, 3), (4, 4), (5, 4), (6, 6), (7, 6), (8, 6), (9, 6)])
def test_the_largest_preferred_size_that_is_reached_goes_first(queued, taken):
    queue = batcher(8, preferred=(4, 6))
    requests = fill(queue, *many(queued))
    assert queue.take(0) == requests[:taken]
    assert len(queue) == queued - taken


def test_preferred_sizes_are_of_rows():
    queue = batcher(8, preferred=(4,))
    requests = fill(queue, Queued(3), Queued(2), Queued(2))  # 3, 5: never exactly 4; then 2, 4
    assert queue.take(0) == requests[:1]
    assert queue.take(0) == requests[1:]


def test_a_preferred_size_beyond_the_maximum_is_never_reached():
    queue = batcher(4, preferred=(16,))
    requests = fill(queue, *many(6))
    assert queue.take(0) == requests[:4]


# --- with a delay ---------------------------------------------------------------------------------------------------


def test_with_a_delay_a_small_batch_waits_for_it():
    queue = batcher(delay=100)
    requests = fill(queue, Queued(arrival=1000 * US), Queued(arrival=1050 * US))
    assert queue.due() == 1100 * US
    assert queue.take(1050 * US) == []
    assert queue.take(1100 * US - 1) == []
    assert queue.take(1100 * US) == requests


def test_a_full_batch_does_not_wait():
    queue = batcher(4, delay=100)
    requests = fill(queue, *many(5))
    assert queue.take(0) == requests[:4]
    assert queue.take(0) == []
    assert queue.take(100 * US) == requests[4:]


def test_a_preferred_size_does_not_wait():
    queue = batcher(8, preferred=(2, 4), delay=100)
    requests = fill(queue, *many(3))
    assert queue.take(0) == requests[:2]
    assert queue.take(0) == []
    more = fill(queue, *many(3))
    assert queue.take(0) == [requests[2], *more]


def test_whoever_has_waited_long_enough_takes_all_along():
    queue = batcher(8, preferred=(2,), delay=100)
    requests = fill(queue, Queued(arrival=0), Queued(arrival=90 * US), Queued(arrival=95 * US))
    assert queue.take(100 * US) == requests  # not the preferred two: the oldest is late already


def test_what_would_be_more_than_the_largest_preferred_size_does_not_wait():
    queue = batcher(8, preferred=(4,), delay=100)
    requests = fill(queue, Queued(3), Queued(3), Queued(5))
    assert queue.take(0) == requests[:1]
    assert queue.take(0) == requests[1:2]
    assert queue.take(0) == requests[2:], "it is larger by itself"


def test_a_batch_that_cannot_grow_does_not_wait():
    queue = batcher(8, delay=100)
    requests = fill(queue, Queued(5), Queued(5))
    assert queue.take(0) == requests[:1]
    assert queue.take(0) == []  # the second still can
    other = fill(queue, Queued(1, signature=B))
    assert queue.take(0) == requests[1:]
    assert queue.take(0) == []
    assert queue.take(100 * US) == other


def test_what_never_shares_a_batch_does_not_wait():
    queue = batcher(delay=100)
    requests = fill(queue, Queued(signature=None), Queued(signature=None), Queued())
    assert [queue.take(0) for _ in range(3)] == [requests[:1], requests[1:2], []]


def test_another_signature_cuts_the_batch():
    queue = batcher()
    requests = fill(queue, Queued(), Queued(), Queued(signature=B), Queued(), Queued(signature=None), Queued())
    assert [len(queue.take(0)) for _ in range(6)] == [2, 1, 1, 1, 1, 0]
    assert len(requests) == 6


def test_nothing_is_due_when_nothing_is_queued():
    for queue in (batcher(), batcher(delay=100), SingleQueue()):
        assert queue.due() == 0
        assert queue.take(1 << 62) == []


# --- priorities -----------------------------------------------------------------------------------------------------


def test_level_1_goes_first_and_levels_share_a_batch():
    queue = batcher(4, priority_levels=3, default_priority_level=2)
    low, first, default, second, odd = fill(queue, *(Queued(priority=p) for p in (3, 1, 0, 1, 9)))
    assert queue.take(0) == [first, second, default, odd]
    assert queue.take(0) == [low]


def test_a_low_level_is_late_like_any_other():
    queue = batcher(8, delay=100, priority_levels=2, default_priority_level=1)
    low, high = fill(queue, Queued(priority=2, arrival=0), Queued(priority=1, arrival=80 * US))
    assert queue.due() == 100 * US
    assert queue.take(99 * US) == []
    assert queue.take(100 * US) == [high, low]


def test_without_levels_priorities_do_not_matter():
    queue = batcher()
    requests = fill(queue, Queued(priority=5), Queued(priority=1), Queued())
    assert queue.take(0) == requests


# --- taking back ----------------------------------------------------------------------------------------------------


def queues() -> list[SingleQueue | DynamicBatcher]:
    return [SingleQueue(), batcher(), batcher(priority_levels=2, default_priority_level=2)]


@pytest.mark.parametrize("queue", queues())
def test_a_request_is_taken_back_once(queue):
    first, second, third = fill(queue, *many(3))
    assert queue.remove(second)
    assert not queue.remove(second)
    assert len(queue) == 2
    taken = queue.take(0) + queue.take(0)
    assert taken == [first, third]
    assert not queue.remove(first)


def test_one_at_a_time_in_order():
    queue = SingleQueue()
    requests = fill(queue, Queued(5, arrival=7), Queued(1, priority=1, arrival=9))
    assert queue.due() == 7
    assert queue.take(0) == requests[:1]
    assert queue.due() == 9
    assert queue.take(0) == requests[1:]


# --- whatever happens -----------------------------------------------------------------------------------------------

configurations = st.builds(
    lambda maximum, preferred, delay, levels: (maximum, [p for p in preferred if p <= maximum], delay, levels),
    st.integers(2, 12),
    st.lists(st.integers(1, 12), max_size=3, unique=True),
    st.sampled_from([0, 50]),
    st.integers(0, 3),
)


class Queueing(RuleBasedStateMachine):
    """Requests come and are cancelled; an instance is free at times. Checked against plain bookkeeping."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: DynamicBatcher | None = None
        self.now = 1_000_000
        self.levels: list[list[Queued]] = []

    @precondition(lambda self: self.queue is None)
    @rule(configuration=configurations)
    def configure(self, configuration):
        self.maximum, preferred, self.delay, levels = configuration
        self.queue = batcher(
            self.maximum, tuple(preferred), self.delay, priority_levels=levels, default_priority_level=1
        )
        self.preferred = set(preferred) or {self.maximum}
        self.levels = [[] for _ in range(max(1, levels))]

    @precondition(lambda self: self.queue is not None)
    @rule(
        rows=st.integers(1, 12),
        signature=st.sampled_from([A, A, A, B, None]),
        priority=st.integers(0, 4),
    )
    def add(self, rows, signature, priority):
        request = Queued(min(rows, self.maximum), self.now, priority, signature)
        assert self.queue.add(request, self.now) is None
        self.levels[priority - 1 if 1 <= priority <= len(self.levels) else 0].append(request)

    @rule(microseconds=st.integers(1, 60))
    def time_passes(self, microseconds):
        self.now += microseconds * US

    @precondition(lambda self: any(self.levels))
    @rule(data=st.data())
    def cancel(self, data):
        level = data.draw(st.sampled_from([level for level in self.levels if level]))
        request = data.draw(st.sampled_from(level))
        assert self.queue.remove(request)
        level.remove(request)

    @precondition(lambda self: any(self.levels))
    @rule()
    def an_instance_is_free(self):
        waiting = [request for level in self.levels for request in level]
        oldest = min(request.arrival for request in waiting)
        batch = self.queue.take(self.now)
        assert batch == waiting[: len(batch)], "nothing overtakes within a level, and level 1 goes first"
        rows = sum(request.rows for request in batch)
        assert rows <= self.maximum
        assert len(batch) <= 1 or {request.signature for request in batch} in ({A}, {B})
        if not batch:
            assert self.delay
            assert self.now - oldest < self.delay * US, "nobody waits longer than the delay beside a free instance"
            assert self.queue.due() == oldest + self.delay * US
            assert len({request.signature for request in waiting}) == 1
            assert sum(request.rows for request in waiting) < max(self.preferred)
        # Could it have been a preferred size?
        reached, sizes, outgrown = 0, [], 0
        for request in waiting:
            if sizes and (request.signature is None or request.signature is not waiting[0].signature):
                break
            reached += request.rows
            if sizes and reached > max(self.preferred) and not self.preferred & set(sizes):
                outgrown = outgrown or sizes[-1]
            if reached > self.maximum:
                break
            sizes.append(reached)
        largest = max(self.preferred & set(sizes), default=0) or outgrown
        overdue = self.delay and min(r.arrival for r in waiting[: len(sizes)]) + self.delay * US <= self.now
        if largest and not overdue:
            assert rows == largest
        elif batch:
            assert rows == sizes[-1], "else everything that fits"
        if batch:
            assert self.queue.closed_by == self.reason(batch, waiting, overdue)
        taken = set(map(id, batch))
        self.levels = [[request for request in level if id(request) not in taken] for level in self.levels]

    def reason(self, batch, waiting, overdue):
        rows, rest = sum(request.rows for request in batch), waiting[len(batch) :]
        fits = [r for r in rest[:1] if r.signature is batch[0].signature and rows + r.rows <= self.maximum]
        if rows == self.maximum or batch[0].signature is None or (rest and not fits):
            return FULL
        if overdue:
            return DELAY
        if rows in self.preferred or rows > max(self.preferred):
            return PREFERRED
        if fits and rows + fits[0].rows > max(self.preferred):
            return PREFERRED
        assert not self.delay, "nothing asks it to wait"
        return IDLE

    @invariant()
    def nothing_is_lost(self):
        if self.queue is not None:
            waiting = [request for level in self.levels for request in level]
            assert len(self.queue) == len(waiting)


Queueing.TestCase.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
TestQueueing = Queueing.TestCase


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 8), max_size=40), st.sampled_from([0, 50]))
def test_everything_comes_out_once_and_in_order(sizes, delay):
    queue = batcher(8, delay=delay)
    requests = fill(queue, *map(Queued, sizes))
    taken: list[Queued] = []
    while batch := queue.take(delay * US):
        taken += batch
    assert taken == requests


@pytest.mark.parametrize(
    ("allowed", "timeout", "own", "late"),
    [
        (True, 100, 40, 40),
        (True, 100, 400, 100),  # it may only be shorter
        (True, 100, 0, 100),
        (False, 100, 40, 100),
        (True, 0, 40, 0),  # without a default there is nothing to override, as in Triton
    ],
)
def test_a_requests_own_timeout_counts_where_the_policy_allows_it(allowed, timeout, own, late):
    policy = QueuePolicy(default_timeout_microseconds=timeout, allow_timeout_override=allowed)
    queue = batcher(delay=10_000, default_queue_policy=policy)
    others = fill(queue, Queued(arrival=1))
    one = Queued(arrival=1, queue_timeout=own and 1 + own * US)
    fill(queue, one)
    assert queue.late_at == (1 + late * US if late else 0)
    assert [request for request, _ in queue.late(late * US)] == []
    gone = [request for request, _ in queue.late(1 + late * US)]
    assert (one in gone) == bool(late)
    assert (others[0] in gone) == (late == timeout > 0)


def test_a_timeout_of_its_own_delays_a_request_where_that_is_the_action():
    policy = QueuePolicy(default_timeout_microseconds=100, allow_timeout_override=True, timeout_action="DELAY")
    queue = batcher(max_batch_size=1, delay=0, default_queue_policy=policy)
    hurried, calm = fill(queue, Queued(arrival=1, queue_timeout=1 + 10 * US), Queued(arrival=2))
    assert queue.late(50 * US) == []
    assert list(queue.take(50 * US)) == [calm]
    assert list(queue.take(50 * US)) == [hurried]
