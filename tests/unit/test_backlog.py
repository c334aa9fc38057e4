"""What a worker says of how long it will be at what it has, and who is told."""

from __future__ import annotations

import os
import random
from types import SimpleNamespace

import pytest

from broker.worker.backlog import SMALLEST_NS, Backlog, ahead_ns, coarse
from broker.worker.loop import Loop
from broker.worker.turn import Inline
from shm.errors import Code
from shm.layout import AHEAD, ASKS
from shm.recovery import bury, recover
from tests.fakes import models as made
from tests.fakes.channel import NOW, PLAN, Plan, Twin, submit, take
from tests.unit.test_execute_batches import load, rows_at
from tests.unit.test_scheduler import add, models, request, scheduler, turn
from tests.unit.test_scheduler_shares import ran

__all__ = ["load", "models", "scheduler", "turn"]  # fixtures

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


def test_what_waits_behind_a_run_of_which_nothing_is_known_takes_as_long_each(scheduler, models):
    model = models(count=1, batch=1)
    add(scheduler, *(request(model) for _ in range(4)))
    batch = scheduler.due(2)
    batch.instance.begin(1, 5000)
    assert model.pending() == 3
    assert ahead_ns([model], 5000) == 0
    assert ahead_ns([model], 5000 + 7 * MS) == (1 + 3) * 7 * MS
    batch.instance.end(1, 7 * MS)
    scheduler.done(batch)


def test_where_one_instance_hangs_from_its_first_run_the_other_tells_how_long_requests_take(scheduler, models):
    model = models(count=2, batch=1)
    hung, other = model.instances
    for _ in range(20):
        other.count_batch(1, 1, 0, 0, 2 * MS, 0)
    add(scheduler, *(request(model) for _ in range(6)))
    batches = [scheduler.due(2) for _ in range(2)]
    hung.begin(1, 5000)
    assert model.pending() == 4
    assert ahead_ns([model], 5000 + 50 * MS) == (50 * MS + 4 * 2 * MS) // 2
    hung.end(1, 50 * MS)
    for batch in batches:
        scheduler.done(batch)


def test_a_run_that_takes_longer_than_usual_counts_for_as_long_as_it_has_taken(models):
    model = models(count=1, batch=8)
    ran(model, 4, 8 * MS)
    model.instances[0].begin(4, 5000)
    for took, told in ((0, 8), (7, 8), (9, 9), (60_000, 60_000)):
        assert ahead_ns([model], 5000 + took * MS) == told * MS


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


def test_what_two_threads_told_at_once_is_put_right(twin, scheduler, models):
    """The one that counted first may write last."""
    model = models(count=1, batch=8)
    ran(model, 1, 3 * MS)
    client, worker = twin.client(), twin.worker({})
    client.ahead()
    backlog = Backlog(scheduler)
    add(scheduler, request(model))
    batch = scheduler.due(2)
    batch.instance.begin(1, 0)

    class Late:
        """As a channel whose word is written after another thread has told that the run is over."""

        def __setitem__(self, word, ahead):
            batch.instance.end(1, 3 * MS)
            scheduler.done(batch)
            backlog.asked = (worker,)
            backlog.tell(0)
            worker.words[word] = ahead

    backlog.asked = (SimpleNamespace(words=Late()),)
    backlog.tell(0)
    assert client.ahead() == coarse(3 * MS)
    backlog.look([worker], 0)
    assert client.ahead() == 0


def test_only_models_at_work_are_looked_at(twin, scheduler, models, monkeypatch):
    looked = []
    monkeypatch.setattr("broker.worker.backlog.ahead_ns", lambda models, now: looked.append(list(models)) or 0)
    served = [models(count=1, batch=8) for _ in range(20)]
    queued, running, streaming, inline = served[::5]
    scheduler.serve(served)
    client, worker = twin.client(), twin.worker({})
    client.ahead()
    backlog = Backlog(scheduler)
    backlog.look([worker], 0)
    backlog.tell(0)
    assert looked == [[], []]
    add(scheduler, request(running))
    batch = scheduler.due(2)
    add(scheduler, request(queued))
    streaming.streams = [1]  # requests that its model has not ended
    inline.instances[0].begin(1, 0)
    del looked[:]
    backlog.look([worker], 0, overdue=True)
    backlog.tell(0)
    assert looked == [[queued, running, streaming, inline]] * 2
    scheduler.done(batch)
    del looked[:]
    streaming.streams = []
    backlog.look([worker], 0)
    assert looked == [[queued]], "what a leader runs at once is over soon"


def test_lone_requests_that_run_at_once_are_told_to_nobody(twin, load, monkeypatch):
    loaded = load(made.add1())
    plan = rows_at(loaded, loaded.memory())
    key = loaded.model.instances[0].number, 0, 0, 1
    plan.bindings[key] = SimpleNamespace(
        typical_ns=1000, copies=0, opens=False, run=lambda: None, measured=lambda took: None
    )
    watch = os.eventfd(0, os.EFD_NONBLOCK)
    loop = Loop(memoryview(bytearray(4096)).cast("Q"), lambda channel: None, watch)
    loop.scheduler.serve([loaded.model])
    client, worker = twin.client(), twin.worker({PLAN: plan})
    loop.attach(worker, recover(worker, NOW))
    client.ahead()
    loop.watch(NOW)
    times = []
    tell = Backlog.tell
    monkeypatch.setattr(Backlog, "tell", lambda self, now: times.append(now) or tell(self, now))
    term = loop.turn.take()
    for _ in range(3):
        _, pending = submit(client)
        assert loop._run_inline(worker, NOW, term, 1) is Inline.DONE
        loop._flush()
        client.reap()
        assert pending.code == Code.OK
    assert times == []
    add(loop.scheduler, loaded.request(plan))
    loop._flush()
    assert len(times) == 1, "one waits"
    os.close(loop.hot_set._wake)
    os.close(watch)


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


def test_what_has_not_run_says_nothing_of_how_long_requests_run(twin):
    client, worker = twin.client(), twin.worker({PLAN: Plan(output_positions=8)})

    def end(code, infer_ns):
        submit(client)
        (taken,) = take(worker)
        taken.infer_ns = infer_ns
        if code:
            taken.fail(code, "no")
        worker.complete([taken])
        client.reap()

    end(Code.INTERNAL, 5)
    assert client.ran == 0
    end(Code.OK, 1000)
    for at in range(10 * twin.slots):  # many times around, looked at now and then
        end((Code.INTERNAL, Code.CANCELLED, Code.UNAVAILABLE)[at % 3], 3)
        assert at % 5 or client.ran == 1000
    end(Code.OK, 2000)
    end(Code.INTERNAL, 0)
    assert client.ran == 2000


def test_who_has_failed_and_never_ended_well_is_known(twin):
    client, worker = twin.client(), twin.worker({PLAN: Plan(output_positions=8)})

    def end(code):
        submit(client)
        (taken,) = take(worker)
        if code:
            taken.fail(code, "no")
        worker.complete([taken])
        client.reap()
        return client.ran, client.failed

    assert end(Code.INVALID_ARG) == (0, False), "the request's own fault"
    assert end(Code.CANCELLED) == (0, False)
    assert end(Code.UNAVAILABLE) == (0, True), "also where it was waited for in vain"
    assert end(Code.CANCELLED) == (0, True)
    assert end(Code.OK) == (1, False), "what took no time has ended well, too"
    assert end(Code.INTERNAL) == (1, False)
