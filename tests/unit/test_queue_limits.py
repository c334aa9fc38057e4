"""The limits of a queue count what waits beyond what idle instances can take. On a clock of the test's own."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from broker.repository.scheduling import DynamicBatching, QueuePolicy
from broker.worker.batcher import DynamicBatcher, SingleQueue
from broker.worker.levels import FULL
from broker.worker.queue_bytes import ByteBound
from shm import statistics
from shm.admission import EXPIRED
from tests.unit.test_batcher import US, A, B, Queued
from tests.unit.test_fair_queues import of, policed
from tests.unit.test_queue_bytes import Sized
from tests.unit.test_queue_bytes import of as sized

MS = 1000 * US


def burst(queue, requests, free, now=1):
    """Several submissions in one sweep of the loop: nothing is taken in between. Returns those refused."""
    return [request for request in requests if queue.add(request, now, free) is not None]


def test_the_first_of_a_burst_starts_and_does_not_count():
    queue = policed(1, max_queue_size=1)
    requests = of("x", 4, arrival=1)
    assert burst(queue, requests, free=1) == requests[2:]
    assert queue.take(1) == requests[:1]
    assert queue.take(1) == requests[1:2]


def test_without_an_idle_instance_it_counts():
    queue = policed(1, max_queue_size=1)
    requests = of("x", 4, arrival=1)
    assert burst(queue, requests, free=0) == requests[1:]


def test_the_oldest_is_not_dropped_where_it_could_run():
    queue = policed(1, max_queue_size=1, drop_oldest=True)
    requests = of("x", 4, arrival=1)
    assert burst(queue, requests, free=1) == []
    assert [request for request, _ in queue.late(1)] == requests[1:3]
    assert [queue.take(1), queue.take(1)] == [requests[:1], requests[3:]]


def test_as_much_starts_as_fits_into_a_batch():
    queue = policed(8, max_queue_size=4)
    requests = of("x", 20, arrival=1)
    assert burst(queue, requests, free=1) == requests[12:]
    assert queue.take(1) == requests[:8]
    assert queue.closed_by == statistics.FULL
    assert queue.take(1) == requests[8:12]


def test_a_full_queue_waits_for_no_larger_batch():
    """Although the delay is not over: else the batch would cost the request that finds the queue full."""
    queue = policed(8, max_queue_size=3, delay=1000)
    requests = of("x", 4, arrival=1)
    assert burst(queue, requests[:3], free=1) == []
    assert queue.take(2) == [], "a queue that is just full still waits, as in Triton"
    assert burst(queue, requests[3:], free=1) == []
    assert queue.due() <= 2
    assert queue.take(2) == requests, "what has come since goes along"


def test_preferred_sizes_stay():
    queue = DynamicBatcher(
        8,
        DynamicBatching(
            preferred_batch_size=(4,),
            max_queue_delay_microseconds=1000,
            default_queue_policy=QueuePolicy(max_queue_size=6),
        ),
    )
    requests = of("x", 12, arrival=1)
    assert burst(queue, requests, free=1) == requests[10:]
    assert [len(queue.take(1)) for _ in range(3)] == [4, 4, 0]


def test_a_test_hook_of_triton_holds_what_is_queued():
    queue = policed(1, hold=4, max_queue_size=2)
    requests = of("x", 4, arrival=1)
    assert burst(queue, requests, free=1) == requests[2:]


def test_what_was_set_aside_can_be_cancelled_and_can_be_late():
    queue = policed(1, max_queue_size=1, default_timeout_microseconds=100)
    first, second = of("x", 2, arrival=US)
    assert burst(queue, [first, second], free=1, now=US) == []
    assert queue.remove(first)
    assert not queue.remove(first)
    assert len(queue) == 1
    (third,) = of("x", 1, arrival=US)
    assert burst(queue, [third], free=1, now=US) == []
    assert queue.late(101 * US) == [(second, EXPIRED), (third, EXPIRED)]
    assert len(queue) == 0


def test_bytes_are_counted_the_same_way():
    queue = ByteBound(SingleQueue(), 100)
    requests = [sized(60) for _ in range(4)]
    assert burst(queue, requests, free=2) == requests[3:]
    assert [queue.take(1) for _ in range(3)] == [[request] for request in requests[:3]]


@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_refused_or_dropped_that_could_run(seed):
    """A walk: requests come in bursts, instances take what they may, batches end. At each refusal and each drop every
    idle instance has a batch that takes no more, and exactly what may wait is left behind them.
    """
    rng = random.Random(seed)
    most, limit, delay = rng.choice([1, 3, 8]), rng.randint(1, 6), rng.choice([0, 0, 500])
    preferred = rng.choice([(), (2,), (most,)])
    policy = QueuePolicy(
        max_queue_size=limit,
        drop_oldest=rng.random() < 0.5,
        default_timeout_microseconds=rng.choice([0, 2000]),
        timeout_action=rng.choice(["REJECT", "DELAY"]),
    )
    queue = DynamicBatcher(
        most,
        DynamicBatching(
            preferred_batch_size=preferred, max_queue_delay_microseconds=delay, default_queue_policy=policy
        ),
    )
    instances, busy, now, endings = rng.randint(1, 3), 0, US, 0
    waiting: dict[Queued, int] = {}
    refused_beside_idle = 0
    for _ in range(400):
        now += rng.randrange(300) * US
        for request, verdict in queue.late(now):
            del waiting[request]
            endings += 1
            assert verdict == EXPIRED
        for _ in range(rng.randrange(8)):
            free = instances - busy
            request = Queued(rng.randint(1, most), now, signature=rng.choice([A, A, A, B]), client=rng.choice("xy"))
            verdict = queue.add(request, now, free)
            dropped = [each for each, why in queue.late(now) if why != EXPIRED]
            for each in dropped:
                del waiting[each]
            endings += len(dropped) + (verdict is not None)
            if verdict is None:
                waiting[request] = now
            if verdict == FULL or dropped:
                refused_beside_idle += free
                aside = [queue.take(now) for _ in range(free)]
                assert all(aside), "an idle instance has something to run"
                busy = instances
                for each in (row for batch in aside for row in batch):
                    del waiting[each]
                    endings += 1
                # What was dropped has made room: what stood behind it may fit into a batch that it did not fit.
                assert len(queue) == limit or (dropped and len(queue) < limit), "what is left fills the queue"
            assert len(queue) == len(waiting)
        while busy < instances and (batch := queue.take(now)):
            busy += 1
            assert sum(row.rows for row in batch) <= most
            for row in batch:
                del waiting[row]
                endings += 1
        assert busy == instances or not waiting or delay
        busy -= rng.randint(0, busy)
    assert refused_beside_idle or limit * most > 3, "else the walk says nothing"


@pytest.mark.parametrize("seed", range(20))
def test_bytes_never_refuse_what_could_run(seed):
    rng = random.Random(seed)
    inside = rng.choice([SingleQueue(), DynamicBatcher(4, DynamicBatching()), policed(4, max_queue_size=3)])
    queue = ByteBound(inside, 200)
    waiting: list[Sized] = []
    for now in range(1, 500):
        free = rng.randrange(3)
        for _ in range(rng.randrange(6)):
            request = sized(rng.choice([1, 30, 90, 300]), arrival=now, client=rng.choice("xy"))
            refusal = queue.add(request, now, free)
            if refusal is None:
                waiting.append(request)
            gone = [each for each, _ in queue.late(now)]
            waiting = [each for each in waiting if each not in gone]
            if refusal is not None or gone:
                for _ in range(free):
                    batch = queue.take(now)
                    assert batch, "an idle instance has something to run"
                    waiting = [each for each in waiting if each not in batch]
                free = 0
            assert len(queue) == len(waiting)
        for _ in range(rng.randrange(4)):
            batch = queue.take(now)
            waiting = [each for each in waiting if each not in batch]
    while batch := queue.take(1000):
        waiting = [each for each in waiting if each not in batch]
    assert not waiting
    assert queue._total == 0
    assert not queue._lines


NATIVE = SimpleNamespace(owner=7)


def test_native_clients_read_the_limit():
    queue = policed(2, max_queue_size=2)
    for _ in range(2):
        assert queue.add(Queued(), 0) is None
    assert queue.add(Queued(plan=NATIVE), 0) == (FULL[0], f"{FULL[1]}: 2 requests wait, max_queue_size is 2")
    assert queue.add(Queued(plan=SimpleNamespace(owner=0)), 0) == FULL, "of Triton's clients: Triton's text"


def test_the_pace_is_that_of_a_queue_that_stays_full():
    queue = policed(1, max_queue_size=3)
    for _ in range(3):
        assert queue.add(Queued(plan=NATIVE), 0) is None
    for at in range(1, 7):
        text = queue.add(Queued(plan=NATIVE), 10 * MS * at)[1]
        assert text.startswith(f"{FULL[1]}: 3 requests wait, max_queue_size is 3")
        assert text.endswith("; try again in 10 ms") == (at > 4), text
        assert len(queue.take(10 * MS * at)) == 1
        assert queue.add(Queued(plan=NATIVE), 10 * MS * at) is None
    gone = Queued(plan=NATIVE)  # what is cancelled and replaced says nothing about the pace
    queue.take(70 * MS)
    assert queue.add(gone, 70 * MS) is None
    assert queue.remove(gone)
    assert queue.add(Queued(plan=NATIVE), 70 * MS) is None
    assert queue.add(Queued(plan=NATIVE), 80 * MS)[1].endswith("; try again in 10 ms")


def test_native_clients_read_which_setting_let_them_wait_no_longer():
    queue = policed(1, default_timeout_microseconds=2000)
    own, of_triton = Queued(plan=NATIVE), Queued()
    for request in (own, of_triton):
        assert queue.add(request, 0) is None
    allowed = "it waited longer than default_timeout_microseconds (2000) of its model allows"
    assert queue.late(3 * MS) == [(own, (EXPIRED[0], f"{EXPIRED[1]}: {allowed}")), (of_triton, EXPIRED)]
