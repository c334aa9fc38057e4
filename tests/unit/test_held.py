"""Requests that wait for their producers' events outside of every queue: no driver is asked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from broker.worker.cuda import events
from broker.worker.held import Held
from broker.worker.loop import Loop
from broker.worker.retirement import needed
from shm.admission import Request
from shm.errors import Code, InferError
from shm.recovery import recover
from tests.fakes import models as made
from tests.fakes.broker import eventually
from tests.fakes.channel import NOW, PLAN, Pending, Twin
from tests.unit.test_execute_batches import load, rows_at
from tests.unit.test_scheduler import models, scheduler, turn

__all__ = ["load", "models", "scheduler", "turn"]  # fixtures


class Bench:
    """`ring`: the events of every request here. `queued`, `ended`: what has become of those that were held."""

    def __init__(self, models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(events, "LINGER_S", 0.0)
        self.happens: bool | InferError = False
        self.ring = SimpleNamespace(happened=self._happened, count=lambda ns: None)
        monkeypatch.setattr(events, "events_of", lambda request, plan: self.ring)
        self.queued: list[Request] = []
        self.ended: list[tuple[Request, Code, str]] = []
        self.taken_back: list[Request] = []
        end = lambda requests, *verdict: self.ended.append((requests[0], *verdict))  # noqa: E731
        self.held = Held(self.queued.extend, end, self.taken_back.extend)
        self.model = models(count=1, batch=8)
        self.plan: Any = SimpleNamespace(model=self.model, signature=None, rows=1)

    def _happened(self, number: int, *_: int) -> bool:
        assert number == 3
        if isinstance(self.happens, InferError):
            raise self.happens
        return self.happens

    def request(self) -> Request:
        entry = (1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 3, 0, 0)
        channel: Any = SimpleNamespace()
        return Request(channel, 0, entry, self.plan, 1)

    def hold(self) -> tuple[Request, bool]:
        request = self.request()
        return request, self.held.hold(request, self.plan, self.model)

    def settled(self) -> None:
        eventually(lambda: not self.model.held, "nothing is held any more")


@pytest.fixture
def bench(models: Any, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(models, monkeypatch)


def test_what_has_happened_is_not_waited_for_and_not_asked_for_again(bench: Bench) -> None:
    bench.happens = True
    request, held = bench.hold()
    assert (held, request.entry) == (False, (1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0))
    assert not bench.model.held


def test_one_that_waits_is_queued_when_its_event_has_happened(bench: Bench) -> None:
    request, held = bench.hold()
    assert held
    assert (bench.model.held, needed(bench.model, 0)) == (1, True), "an unloaded model is not closed before"
    assert not bench.queued
    bench.happens = True
    bench.settled()
    assert (bench.queued, request.wait_event, bench.ended, bench.taken_back) == ([request], 0, [], [])
    assert not needed(bench.model, 0)


@pytest.mark.parametrize("at_once", [True, False])
def test_what_goes_wrong_is_its_ending(bench: Bench, at_once: bool) -> None:
    failure = InferError(Code.NOT_FOUND, "the events of this request were unregistered")
    bench.happens = failure if at_once else False
    request, held = bench.hold()
    assert held
    bench.happens = failure
    bench.settled()
    assert (bench.ended, bench.queued) == ([(request, Code.NOT_FOUND, failure.message)], [])


def test_one_that_is_cancelled_ends_now(bench: Bench) -> None:
    request, _ = bench.hold()
    request.ended = Code.CANCELLED
    bench.settled()
    assert bench.ended == [(request, Code.CANCELLED, "the request was cancelled")]


def test_a_model_that_keeps_an_order_has_its_instance_wait(bench: Bench) -> None:
    bench.model.in_order = SimpleNamespace()
    request, held = bench.hold()
    assert (held, request.wait_event) == (False, 3)


def test_where_no_thread_is_to_be_had_the_instance_waits(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(events.threading.Thread, "start", refused)
        request, held = bench.hold()
    assert (held, request.wait_event, bench.model.held) == (False, 3, 0)
    request, held = bench.hold()
    assert held, "the next one finds a thread"
    bench.happens = True
    bench.settled()
    assert bench.queued == [request]


class Lab:
    """A loop that holds one request, and `Waiters` of its own. `happened`: to be called when the event has."""

    def __init__(self, load: Callable[..., Any], twin: Twin, watch: int) -> None:
        self.model = (loaded := load(made.add1())).model
        self.model.intake = True
        self.client = twin.client()
        self.channel = twin.worker({PLAN: rows_at(loaded, loaded.memory())})
        self.loop = Loop(memoryview(bytearray(4096)).cast("Q"), lambda channel: None, watch)
        self.loop.attach(self.channel, recover(self.channel, NOW))
        self.happened: Callable[[Exception | None], None]

    def add(self, request: Request, ring: object, then: Callable[[Exception | None], None]) -> None:
        """As `Waiters.add`."""
        self.happened = then

    def submit(self) -> None:
        self.pending = Pending()
        self.ident = self.client.submit(self.pending, PLAN, 0, 0, 0, 0, wait_event=3)
        self.sweep()
        assert self.model.held == 1

    def sweep(self) -> None:
        self.loop._take(self.channel, NOW, 64)

    def assert_never_runs(self) -> None:
        assert not self.loop.scheduler.queued
        self.client.reap()
        assert self.pending.code == Code.CANCELLED  # its only ending
        assert self.model.held == 0
        assert self.loop.finished()


@pytest.fixture
def lab(load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.setattr(events, "events_of", lambda request, plan: SimpleNamespace(happened=lambda *_: False))
    watch = os.eventfd(0, os.EFD_NONBLOCK)
    with Twin() as twin:
        lab = Lab(load, twin, watch)
        monkeypatch.setattr(events, "Waiters", lambda: lab)
        lab.submit()
        yield lab
        os.close(lab.loop.hot_set._wake)
    os.close(watch)


def test_one_that_is_wanted_is_queued_by_the_loop(lab: Lab) -> None:
    lab.happened(None)
    assert lab.loop.scheduler.queued == [lab.model]
    assert not lab.pending.entries


def test_one_that_is_cancelled_just_before_it_is_queued_never_runs(lab: Lab) -> None:
    """There was nothing to take back, and nobody looks at its event any more."""
    assert lab.client.cancel(lab.ident)
    lab.sweep()
    assert not lab.pending.entries
    lab.happened(None)
    lab.assert_never_runs()


@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_one_whose_client_goes_when_its_event_happens_never_runs(lab: Lab, when: str) -> None:
    scheduler = lab.loop.scheduler
    drop, turns = scheduler.drop, iter([lab.happened])

    def happens_meanwhile(channel: Any) -> list[Request]:
        dropped = drop(channel)
        for happened in turns:
            happened(None)
        return dropped

    if when == "before":
        lab.happened(None)
    elif when == "between":
        scheduler.drop = happens_meanwhile  # type: ignore[method-assign]
    lab.loop.detach(lab.channel)
    if when == "after":
        lab.happened(None)
    lab.assert_never_runs()
