"""Queue policies and turns between clients, on a clock of the test's own."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest

from broker.repository.scheduling import DynamicBatching, QueuePolicy
from broker.worker.batcher import DynamicBatcher, SingleQueue
from broker.worker.levels import FULL
from shm.admission import EXPIRED
from tests.unit.test_batcher import US, A, B, Queued, fill, many


def of(client, count, **fields):
    return [Queued(client=client, **fields) for _ in range(count)]


def policed(most=8, levels=0, hold=0, delay=0, per_level=None, **policy):
    config = DynamicBatching(
        default_queue_policy=QueuePolicy(**policy),
        priority_levels=levels,
        default_priority_level=min(1, levels),
        priority_queue_policy=per_level or {},
        max_queue_delay_microseconds=delay,
    )
    return DynamicBatcher(most, config, hold)


@pytest.mark.parametrize("queue", [SingleQueue(), policed(1)])
def test_a_client_that_sends_much_delays_only_itself(queue):
    many_, few = fill(queue, *of("x", 4)), fill(queue, *of("y", 2))
    taken = [queue.take(0)[0] for _ in range(6)]
    assert taken == [many_[0], few[0], many_[1], few[1], many_[2], many_[3]]
    assert not queue.take(0)


@pytest.mark.parametrize("queue", [SingleQueue(), policed(1)])
def test_who_asks_once_waits_for_what_runs_and_no_more(queue):
    """Batch 1, one with 100 requests, of which the first runs: another's request is the next one, and so each time."""
    flood = fill(queue, *of("x", 100))
    taken = queue.take(0)
    for number in range(1, 40):
        (polite,) = fill(queue, *of("y", 1))
        assert taken == [flood[number - 1]]
        assert queue.take(0) == [polite]
        taken = queue.take(0)


def test_nobody_is_overtaken_for_ever():
    """Two whose next request comes as soon as the one before has run, and one with many: each has every third turn."""
    queue = SingleQueue()
    flood = fill(queue, *of("x", 30))
    fill(queue, *of("y", 1), *of("z", 1))
    taken = []
    for _ in range(30):
        (one,) = queue.take(0)
        taken.append(one.client)
        if one not in flood:
            fill(queue, *of(one.client, 1))
    assert Counter(taken) == {"x": 10, "y": 10, "z": 10}


def test_clients_share_a_batch_evenly():
    queue = policed(4)
    x, y = fill(queue, *of("x", 9)), fill(queue, *of("y", 2))
    assert queue.take(0) == [x[0], y[0], x[1], y[1]]
    assert queue.take(0) == x[2:6]


def test_a_client_that_does_not_fit_is_passed_over_and_begins_the_next_batch():
    queue = policed(4)
    x, y, z = (
        fill(queue, *of("x", 2)),
        fill(queue, *of("y", 2, signature=B)),
        fill(queue, *of("z", 2)),
    )
    assert queue.take(0) == [x[0], z[0], x[1], z[1]]
    assert queue.take(0) == y


def test_a_full_queue_refuses():
    queue = policed(max_queue_size=2)
    first = fill(queue, *many(2))
    assert queue.add(Queued(), 0) == FULL
    assert queue.take(0) == first
    assert queue.add(Queued(), 0) is None


def test_a_client_that_fills_the_queue_keeps_nobody_out():
    queue = policed(max_queue_size=4)
    x = fill(queue, *of("x", 4))
    assert queue.add(Queued(client="x"), 0) == FULL
    y = fill(queue, *of("y", 2))
    assert queue.add(Queued(client="y"), 0) == FULL, "now both have as much"
    assert queue.late(0) == [(x[3], FULL), (x[2], FULL)]
    assert queue.take(0) == [x[0], y[0], x[1], y[1]]


@pytest.mark.parametrize("level", [1, 2])
def test_whoever_floods_waits_for_himself(level):
    """A thousand requests of one client, and new ones whenever some have run: another is in the next batch."""
    queue = policed(4, levels=2, max_queue_size=100)
    flood = [Queued(client="x", priority=level) for _ in range(1000)]
    for number, request in enumerate(flood):
        assert queue.add(request, 0) == (None if number < 100 else FULL)
    for now in range(1, 50):
        polite = Queued(client="y", priority=level, arrival=now)
        assert queue.add(polite, now) is None
        assert polite in queue.take(now)
        for _ in range(8):
            queue.add(Queued(client="x", priority=level), now)
        queue.late(now)
    assert len(queue) <= 100


def test_a_full_queue_lets_the_oldest_of_the_greediest_go():
    queue = policed(max_queue_size=3, drop_oldest=True)
    x, y = fill(queue, *of("x", 2)), fill(queue, *of("y", 1))
    new = Queued(client="y", arrival=5)
    assert queue.add(new, 5) is None
    assert 0 < queue.late_at <= 5
    ((dropped, (_, text)),) = queue.late(5)
    assert dropped is x[0]
    assert "max_queue_size" in text
    assert queue.late_at == 0
    assert sorted(map(id, queue.take(5))) == sorted(map(id, [x[1], *y, new]))


def test_who_waits_too_long_is_refused():
    queue = policed(default_timeout_microseconds=100)
    old, new = fill(queue, Queued(arrival=0), Queued(arrival=50 * US))
    assert queue.late_at == 100 * US
    assert queue.late(100 * US - 1) == []
    assert queue.take(100 * US) == [new], "not even when nobody has asked `late` before"
    assert queue.late(100 * US) == [(old, EXPIRED)]
    assert queue.late_at == 0
    assert len(queue) == 0


def test_who_waits_too_long_is_delayed():
    queue = policed(1, default_timeout_microseconds=100, timeout_action="DELAY")
    old, new = fill(queue, Queued(arrival=0), Queued(arrival=50 * US))
    assert queue.late(120 * US) == []
    assert [queue.take(120 * US), queue.take(120 * US)] == [[new], [old]]


def test_each_level_has_its_policy():
    queue = policed(
        levels=2, max_queue_size=1, per_level={2: QueuePolicy(default_timeout_microseconds=10, max_queue_size=2)}
    )
    low = fill(queue, Queued(priority=2), Queued(priority=2))
    fill(queue, Queued(priority=1))
    assert queue.add(Queued(priority=1), 0) == FULL
    assert queue.add(Queued(priority=2), 0) == FULL
    assert [request for request, _ in queue.late(10 * US)] == low


def test_the_first_batch_is_held_for_so_many_requests():
    queue = policed(4, hold=5)
    requests = fill(queue, *many(4))
    assert queue.take(1 << 40) == []
    assert queue.due() == 0
    requests += fill(queue, Queued())
    assert queue.take(0) == requests[:4]
    assert queue.take(0) == requests[4:], "only once"


def empty(queue, now, leaves):
    for request, _ in queue.late(now):
        leaves(request)
    while batch := queue.take(now):
        for request in batch:
            leaves(request)
    for request, _ in queue.late(now):
        leaves(request)


@pytest.mark.parametrize("seed", range(60))
def test_every_request_leaves_once_and_a_client_keeps_its_order(seed):
    rng = random.Random(seed)
    levels = rng.choice([0, 0, 3])
    action = rng.choice(["REJECT", "DELAY"])
    policy = {
        "max_queue_size": rng.choice([0, 3, 10]),
        "drop_oldest": rng.random() < 0.5,
        "default_timeout_microseconds": rng.choice([0, 40]),
    }
    queue = policed(rng.choice([1, 4, 8]), levels, delay=rng.choice([0, 30]), timeout_action=action, **policy)
    timed = policy["default_timeout_microseconds"]
    now, waiting = 1, {}
    lines: dict[object, deque[Queued]] = {}

    def leaves(request):
        assert id(request) in waiting
        lines[request.client, request.priority].remove(waiting.pop(id(request)))

    for _ in range(400):
        now += rng.choice([0, 1, 10]) * US
        kind = rng.random()
        if kind < 0.5:
            request = Queued(
                rng.randint(0, 2), now, rng.randint(0, levels) or 1, rng.choice([A, A, A, B, None]), rng.choice("wxyz")
            )
            request.rows = min(request.rows, queue._max)
            if queue.add(request, now) is None:
                waiting[id(request)] = request
                lines.setdefault((request.client, request.priority), deque()).append(request)
            else:
                assert policy["max_queue_size"]
                assert not policy["drop_oldest"]
                level = queue._levels[request.priority - 1 if levels else 0]
                waits = Counter(each.client for each in level.line)
                assert max(waits.values(), default=0) <= waits[request.client] + 1, "others have more"
        elif kind < 0.8:
            batch = queue.take(now)
            assert len({request.signature for request in batch}) <= 1
            assert sum(request.rows or 1 for request in batch) <= queue._max
            for request in batch:
                if action == "REJECT" or not timed:
                    older = lines[request.client, request.priority]
                    gone = {id(r) for r in queue._dropped}
                    assert next(r for r in older if id(r) not in gone) is request
                leaves(request)
        elif kind < 0.9:
            for request, _ in queue.late(now):
                leaves(request)
        elif waiting:
            request = rng.choice(list(waiting.values()))
            assert queue.remove(request)
            assert not queue.remove(request)
            leaves(request)
        assert len(queue) == len(waiting)
    empty(queue, now + 1000 * US, leaves)
    assert not waiting
    assert len(queue) == 0
    assert queue.late_at == 0
