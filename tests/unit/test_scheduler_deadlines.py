"""Deadlines of queued requests, and how many are in flight."""

from __future__ import annotations

import os
import weakref

import pytest

from broker.worker.scheduler import Scheduler
from broker.worker.turn import Turn
from shm.admission import EXPIRED
from shm.recovery import Recovered
from tests.unit.test_scheduler import NEVER, Models, add, request


@pytest.fixture
def models():
    made = Models()
    yield made
    os.close(made.page.fd)


@pytest.fixture
def turn():
    return Turn()


@pytest.fixture
def scheduler(turn):
    return Scheduler(turn)


def test_expired_requests_are_taken_back_and_the_next_deadline_is_known(scheduler, models):
    one, two = models(), models(batch=4, delay=1000)
    requests = add(scheduler, request(one, 50), request(one, 30), request(one), request(two, 40), request(two, 60))
    assert scheduler.deadline == 30
    assert scheduler.expired(29) == []
    assert scheduler.expired(40) == [(requests[1], EXPIRED), (requests[3], EXPIRED)]
    assert scheduler.deadline == 50
    assert set(scheduler.expired(60)) == {(requests[0], EXPIRED), (requests[4], EXPIRED)}
    assert scheduler.deadline == 0
    assert scheduler.due(0).requests == [requests[2]]
    assert not scheduler.waiting()


def test_a_deadline_that_has_run_meanwhile_is_forgotten_at_the_next_look(scheduler, models):
    model = models()
    add(scheduler, request(model, 50), request(model, 90))
    scheduler.due(0)
    assert scheduler.deadline == 50
    assert scheduler.expired(50) == []
    assert scheduler.deadline == 90


def test_a_look_at_deadlines_costs_what_has_passed(scheduler, models):
    looked = []

    class Watched(int):
        def __le__(self, other):
            looked.append(self)
            return int(self) <= other

    model = models()
    requests = add(scheduler, *(request(model, Watched(100 + k)) for k in range(4096)))
    looked.clear()
    assert scheduler.expired(99) == []
    assert scheduler.expired(101) == [(requests[0], EXPIRED), (requests[1], EXPIRED)]
    assert scheduler.deadline == 102
    assert len(looked) < 100


def test_nothing_is_kept_of_requests_that_have_run_or_were_cancelled(scheduler, models):
    """A deadline may be years away; what refers to a request keeps its channel's memory."""
    model = models()
    waiting = request(model, NEVER)
    scheduler.adopt(Recovered([], [waiting]))
    others = []
    for number in range(1000):
        other = request(model, NEVER + number)
        others.append(weakref.ref(other.plan))
        add(scheduler, other)
        if number % 2:
            scheduler.remove(other)
        else:
            assert scheduler.remove(waiting)
            batch = scheduler.due(0)
            assert batch.requests == [other]
            scheduler.done(batch)
            add(scheduler, waiting)
        del other
    del batch
    assert not any(ref() for ref in others)
    assert len(scheduler._deadlines._heap) < 100
    assert scheduler.in_flight() == 1


def test_in_flight_is_what_is_queued_and_what_runs(scheduler, turn, models):
    model, batching = models(), models(batch=4)
    requests = add(scheduler, *(request(model, deadline) for deadline in (0, 0, 7, 9)))
    add(scheduler, *(request(batching) for _ in range(3)))
    assert scheduler.in_flight() == 7
    batches = [scheduler.due(0), scheduler.due(0)]
    assert scheduler.in_flight() == 7
    scheduler.remove(requests[1])
    scheduler.remove(requests[1])
    assert scheduler.expired(7) == [(requests[2], EXPIRED)]
    assert scheduler.in_flight() == 5
    for batch in batches:
        scheduler.done(batch)
    assert scheduler.in_flight() == 1
    scheduler.adopt(Recovered([request(batching)], [request(model)]))
    assert scheduler.in_flight() == 3
    for _ in range(3):
        scheduler.done(scheduler.due(0))
    assert scheduler.in_flight() == 0
    turn.take()
    turn.enter()
    assert scheduler.in_flight() == 1, "what the leader runs itself"
