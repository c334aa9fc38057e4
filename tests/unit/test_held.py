"""Requests that wait for their producers' events outside of every queue: no driver is asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from broker.worker.cuda import events
from broker.worker.held import Held
from broker.worker.retirement import needed
from shm.admission import Request
from shm.errors import Code, InferError
from tests.fakes.broker import eventually
from tests.unit.test_scheduler import models, scheduler, turn

__all__ = ["models", "scheduler", "turn"]  # fixtures


class Bench:
    """`ring`: the events of every request here. `queued`, `ended`: what has become of those that were held."""

    def __init__(self, models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(events, "LINGER_S", 0.0)
        self.happens: bool | InferError = False
        self.ring = SimpleNamespace(happened=self._happened, count=lambda ns: None)
        monkeypatch.setattr(events, "events_of", lambda request, plan: self.ring)
        self.queued: list[Request] = []
        self.ended: list[tuple[Request, Code, str]] = []
        self.held = Held(self.queued.extend, lambda requests, *verdict: self.ended.append((requests[0], *verdict)))
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
    assert (bench.queued, request.wait_event, bench.ended) == ([request], 0, [])
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
