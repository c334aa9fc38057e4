"""How long a worker waits for clients' events, and what becomes of requests that wait: no driver is asked."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from broker.worker.cuda import events
from broker.worker.cuda.events import IMPATIENCE_NS, PATIENCE_NS, RECOVERY, Events, Patience, Waiters
from broker.worker.cuda.streams import STICKY_EXIT
from shm.cuda.descriptor import CudaEvents
from shm.cuda.driver import CudaError
from shm.errors import Code, InferError

S = 1_000_000_000
ALICE, BOB = 1, 2


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Events]:
    """A ring of an owner, of whose two events only the first has happened."""
    monkeypatch.setattr(events, "Context", contextlib.nullcontext)
    monkeypatch.setattr(events, "make_current", lambda ordinal: None)
    monkeypatch.setattr(events, "OpenedRing", lambda handles: SimpleNamespace(happened=lambda index: index == 0))

    def make(owner: int, patience: Patience) -> Events:
        told = CudaEvents(device="GPU-00000000-0000-0000-0000-000000000001", handles=bytes(128))
        return Events("e", told, owner, 0, memoryview(bytearray(1024)).cast("Q"), patience)

    return make


def waited(ring: Events, now: int, number: int = 2) -> int:
    """How long a request is held that comes at `now`, in steps of 10 ms."""
    since, until = now, now + PATIENCE_NS
    while True:
        try:
            if ring.happened(number, since, now, until, 0):
                return now - since
        except InferError:
            return now - since
        now += S // 100


def test_a_client_is_waited_for_less_long_after_a_wait_in_vain_whatever_happens_meanwhile(
    ring: Callable[..., Events],
) -> None:
    patience = Patience()
    one, other = ring(ALICE, patience), ring(BOB, patience)
    assert waited(one, 0) == PATIENCE_NS
    assert waited(one, S, 1) == 0, "an event that happened"
    assert waited(one, S) == IMPATIENCE_NS
    assert waited(ring(ALICE, patience), 2 * S) == IMPATIENCE_NS, "a new ring is no new client"
    assert waited(other, 2 * S) == PATIENCE_NS


def test_time_makes_it_patient_again(ring: Callable[..., Events]) -> None:
    patience = Patience()
    one = ring(ALICE, patience)
    assert waited(one, 0) == PATIENCE_NS
    later = 6 * PATIENCE_NS
    assert waited(one, later) == 5 * PATIENCE_NS // RECOVERY
    later += 6 * PATIENCE_NS
    assert waited(one, later) > IMPATIENCE_NS
    assert waited(one, later + PATIENCE_NS) == IMPATIENCE_NS
    assert waited(one, later + 20 * PATIENCE_NS) == PATIENCE_NS


def test_whoever_comes_after_the_time_of_its_batch_is_not_to_blame(ring: Callable[..., Events]) -> None:
    patience = Patience()
    with pytest.raises(InferError, match=r"\[UNAVAILABLE\] the event of this request did not happen within"):
        ring(ALICE, patience).happened(2, S, S, S, 0)
    assert patience.with_client(ALICE, S) == PATIENCE_NS


def test_what_is_kept_of_clients_is_what_counts_yet() -> None:
    patience = Patience()
    for owner in range(100):
        patience.was_in_vain(owner, owner * S)
    assert len(patience._in_vain) <= RECOVERY * PATIENCE_NS // S


class Ended(BaseException):
    pass


@pytest.fixture
def status(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the process would have ended with, one after the other."""
    found: list[int] = []

    def leave(status: int) -> None:
        found.append(status)
        if status == STICKY_EXIT:
            raise Ended

    monkeypatch.setattr(os, "_exit", leave)
    return found


def look(monkeypatch: pytest.MonkeyPatch, happened: Callable[[], bool], then: Callable[[Any], None]) -> None:
    """Have a request wait; returns when the thread that looks has ended."""
    of_request: Any = SimpleNamespace(happened=lambda *_: happened(), count=lambda ns: None)
    monkeypatch.setattr(events, "LINGER_S", 0.0)
    request = SimpleNamespace(wait_event=1, deadline=0, ended=Code.OK)
    before = set(threading.enumerate())
    Waiters().add(request, of_request, then)  # type: ignore[arg-type]
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
        assert not thread.is_alive()


def test_a_request_begins_when_its_event_has_happened(monkeypatch: pytest.MonkeyPatch, status: list[int]) -> None:
    looks = iter((False, False, True))
    told: list[Any] = []
    look(monkeypatch, lambda: next(looks), told.append)
    assert (told, status) == ([None], [])


def test_one_that_waits_holds_up_no_other(monkeypatch: pytest.MonkeyPatch, status: list[int]) -> None:
    """Whoever comes later may begin sooner; one that nobody wants any more ends."""
    monkeypatch.setattr(events, "LINGER_S", 0.0)
    late, told = [False], [threading.Event() for _ in range(3)]
    errors: list[Any] = [None] * 3

    def then(at: int, error: Any) -> None:
        errors[at] = error
        told[at].set()

    waiters = Waiters()
    requests: list[Any] = [SimpleNamespace(wait_event=1, deadline=0, ended=Code.OK) for _ in range(3)]
    for at, happened in enumerate((lambda: late[0], lambda: True, lambda: False)):
        of_request: Any = SimpleNamespace(happened=lambda *_, happened=happened: happened(), count=lambda ns: None)
        waiters.add(requests[at], of_request, functools.partial(then, at))
    assert told[1].wait(30)
    assert not told[0].is_set()
    requests[2].ended = Code.CANCELLED
    assert told[2].wait(30)
    assert not told[0].is_set()
    late[0] = True
    assert told[0].wait(30)
    assert errors[:2] == [None, None]
    assert (errors[2].code, errors[2].message) == ("CANCELLED", "the request was cancelled")
    assert not status


def test_a_worker_whose_waiting_requests_nobody_looks_at_ends(
    monkeypatch: pytest.MonkeyPatch, status: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(error: Any) -> None:
        raise OSError("what nobody expects")

    look(monkeypatch, lambda: True, broken)
    assert status == [70]
    assert "what nobody expects" in capsys.readouterr().err


def test_a_lost_context_ends_the_worker(monkeypatch: pytest.MonkeyPatch, status: list[int]) -> None:
    told: list[Any] = []

    def lost() -> bool:
        raise CudaError("cuEventQuery", "CUDA_ERROR_ILLEGAL_ADDRESS", 700)

    look(monkeypatch, lost, told.append)
    assert status[0] == STICKY_EXIT
    assert not told


@pytest.mark.parametrize("count", [events.FEW, events.FEW + 1])
@pytest.mark.parametrize("first", [False, True])
def test_many_that_wait_are_looked_at_for_a_fifth_of_the_time(
    monkeypatch: pytest.MonkeyPatch, count: int, first: bool
) -> None:
    """However young the last one is, and although some may begin: looking at all of them takes the GIL for long."""
    now, pauses = [0], []
    own = threading.get_ident()  # threads of earlier tests may still be about to end

    def pause(seconds: float = 0.0) -> None:
        if threading.get_ident() == own:
            pauses.append(seconds)

    monkeypatch.setattr(events, "_now", lambda: now[0])
    monkeypatch.setattr(events, "time", SimpleNamespace(sleep=pause))
    monkeypatch.setattr(events, "os", SimpleNamespace(sched_yield=pause))

    def happened(*_: int) -> bool:
        now[0] += 15_000
        return first and now[0] == 15_000

    waiters = Waiters()
    waiters._at_work = True  # this thread is the one that looks
    for _ in range(count):
        request: Any = SimpleNamespace(wait_event=1, deadline=0, ended=Code.OK)
        of_request: Any = SimpleNamespace(happened=happened, count=lambda ns: None)
        waiters.add(request, of_request, lambda error: None)
    waiters._look()
    assert pauses == [0.0 if count == events.FEW else pytest.approx(events.LOOKS * 15e-6 * count)]
