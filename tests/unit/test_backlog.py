"""What a worker says of how long it will be at what it has, and who is told."""

from __future__ import annotations

import random

import pytest

from broker.worker.backlog import SMALLEST_NS, Backlog, ahead_ns, coarse
from shm.layout import AHEAD, ASKS
from shm.recovery import bury, recover
from tests.fakes.channel import PLAN, Plan, Twin, submit, take
from tests.unit.test_scheduler import add, models, request, scheduler, turn
from tests.unit.test_scheduler_shares import ran

__all__ = ["models", "scheduler", "turn"]  # fixtures

MS = 1_000_000


@pytest.fixture
def twin():
    with Twin() as twin:
        yield twin


def test_only_the_size_is_told():
    chance = random.Random(1)
    for bits in range(1, 63):
        ns = chance.randrange(1 << bits, 2 << bits)
        told = coarse(ns)
        if ns < SMALLEST_NS:
            assert told == 0
        else:
            assert told <= ns < 2 * told
            assert told.bit_count() == 1


def test_what_waits_and_what_runs_counts_as_long_as_it_usually_takes(scheduler, models):
    model = models(count=1, batch=8)
    assert ahead_ns([model], 0) == 0
    ran(model, 1, 3 * MS)
    ran(model, 4, 8 * MS)
    add(scheduler, *(request(model) for _ in range(6)))
    each = 2 * MS  # a row, in the batches that take least
    assert ahead_ns([model], 0) == 6 * each
    batch = scheduler.due(2)
    batch.instance.begin(4, 1000)
    waiting = model.pending()
    assert ahead_ns([model], 2000) == 8 * MS + waiting * each
    batch.instance.end(4, 8 * MS)
    scheduler.done(batch)
    assert ahead_ns([model], 0) == waiting * each


def test_a_run_of_which_nothing_is_known_counts_for_as_long_as_it_has_taken(models):
    model = models(count=1, batch=8)
    model.instances[0].begin(1, 5000)
    assert ahead_ns([model], 5000) == 0
    assert ahead_ns([model], 5000 + 7 * MS) == 7 * MS
    model.instances[0].end(1, 8 * MS)
    assert ahead_ns([model], 5000 + 8 * MS) == 0


def test_instances_share_the_work(scheduler, models):
    one, two = models(count=1, batch=2), models(count=2, batch=2)
    for model in (one, two):
        ran(model, 1, 4 * MS)
        add(scheduler, *(request(model) for _ in range(4)))
    assert ahead_ns([one], 0) == 2 * ahead_ns([two], 0) == 16 * MS
    assert ahead_ns([one, two], 0) == 24 * MS


def test_who_does_not_ask_is_not_told(twin, scheduler, models):
    client, worker = twin.client(), twin.worker({})
    with Twin() as other:
        silent = other.worker({})
        model = models(count=1, batch=8)
        scheduler.serve([model])
        ran(model, 1, 3 * MS)
        add(scheduler, *(request(model) for _ in range(2)))
        backlog = Backlog(scheduler)
        backlog.look([worker, silent], 0)
        assert backlog.asked == ()
        assert client.ahead() == 0  # from now on it asks
        backlog.look([worker, silent], 0)
        assert backlog.asked == (worker,)
        assert client.ahead() == coarse(6 * MS)
        assert silent.words[AHEAD] == 0
        while batch := scheduler.due(2):
            scheduler.done(batch)
        backlog.tell(0)
        assert client.ahead() == 0
        backlog.look([silent], 0)
        assert backlog.asked == (), "its channel is gone"


def test_who_asks_later_is_told_although_nothing_has_changed(twin, scheduler, models):
    model = models(count=1, batch=8)
    scheduler.serve([model])
    ran(model, 1, 3 * MS)
    add(scheduler, request(model))
    backlog = Backlog(scheduler)
    with Twin() as other:
        first, second = twin.client(), other.client()
        channels = [twin.worker({}), other.worker({})]
        for client in (first, second):
            client.ahead()
            backlog.look(channels, 0)
            assert client.ahead() == coarse(3 * MS)


def test_what_a_client_writes_reaches_nobody_else(twin, scheduler, models):
    """Each reads the word in its own channel, and the worker none of them."""
    model = models(count=1, batch=8)
    scheduler.serve([model])
    ran(model, 1, 3 * MS)
    add(scheduler, request(model))
    with Twin() as hostile:
        words = hostile.worker({}).words
        backlog = Backlog(scheduler)
        for word in (1, 1 << 63, (1 << 64) - 1):
            words[ASKS] = words[AHEAD] = word
            client = twin.client()
            client.ahead()
            backlog.look([hostile.worker({}), twin.worker({})], 0)
            assert client.ahead() == coarse(3 * MS)


def test_a_replacement_has_nothing_ahead(twin):
    client, worker = twin.client(), twin.worker({})
    client.ahead()
    worker.words[AHEAD] = 1 << 40
    bury(twin.memory_fd, twin.ledger_fd, twin.pipe_write, twin.slots, lambda word: True, 1)
    recover(twin.worker({}), 1)
    assert client.ahead() == 0


def test_a_request_ran_as_long_as_it_did_without_what_it_waited(twin):
    client, worker = twin.client(), twin.worker({PLAN: Plan(output_positions=8)})
    assert client.ran == 0
    for at in range(2 * 2 * twin.slots + 1):  # twice around
        submit(client, at % 8)
        (taken,) = take(worker)
        taken.queue_ns, taken.input_ns, taken.infer_ns, taken.output_ns = 10**9, at, 100, 7
        worker.complete([taken])
        client.reap()
        assert client.ran == at + 107
