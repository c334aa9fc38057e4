"""Whose requests ended workers, as a gateway sees it: one caller is refused, for one model, for a while."""

from __future__ import annotations

import pytest

from broker.gateway import offenders as module
from broker.gateway.kserve import Caller
from broker.gateway.offenders import WINDOW_NS, Offenders
from shm.admission import refused as refusal
from shm.errors import Code, InferError
from shm.message_values import Principal
from shm.recovery import ALONE, TWICE

ENDED = InferError(Code.UNAVAILABLE, TWICE)
US = Caller("http", Principal(uid=1, scope="kserve"))
ZMQ = Caller("zmq", Principal(uid=1, scope="zmq:a"))
NEAR, FAR = Caller("grpc", None, "10.0.0.1 is not this host"), Caller("grpc", None, "10.0.0.2 is not this host")


class Clock:
    now = 10**12

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def offenders(clock: Clock) -> Offenders:
    return Offenders(clock)


def refused(offenders: Offenders, caller: Caller, model: str = "m") -> bool:
    try:
        offenders.check(caller, model)
    except InferError as error:
        told = error
    else:
        return False
    assert (told.code, told.message) == ("UNAVAILABLE", refusal(model, WINDOW_NS)[1])
    return True


def test_a_refusal_tells_how_long_it_lasts(offenders, clock):
    for _ in range(2):
        offenders.ended(InferError(Code.UNAVAILABLE, f"{ALONE}, after its first response"), US, "m")
    clock.now += 17_600_000_000
    with pytest.raises(InferError, match="this client for model 'm' are refused for another 43 s: two of them ended"):
        offenders.check(US, "m")


@pytest.mark.parametrize("caller", [US, ZMQ, NEAR])
def test_only_who_ended_workers_is_refused_and_only_for_that_model(offenders, clock, caller):
    offenders.ended(ENDED, caller, "m")
    assert not refused(offenders, caller)
    offenders.ended(InferError(Code.UNAVAILABLE, f"in ensemble 'E', {TWICE}"), caller, "m")
    assert [who for who in (US, ZMQ, NEAR, FAR) if refused(offenders, who)] == [caller]
    assert not refused(offenders, caller, "other")
    clock.now += WINDOW_NS
    assert not refused(offenders, caller)


def test_endings_that_count_for_nothing(offenders, clock):
    for _ in range(3):
        offenders.ended(InferError(Code.UNAVAILABLE, "the worker died while it ran this request"), US, "m")
    offenders.ended(ENDED, US, "m")
    offenders.ended(ENDED, US, "other")
    offenders.ended(ENDED, FAR, "m")
    clock.now += WINDOW_NS + 1
    offenders.ended(ENDED, US, "m")
    assert not refused(offenders, US)


def test_who_asks_is_not_asked_while_nobody_is_refused(offenders):
    def ask():
        raise AssertionError("asked")

    offenders.check(Caller("http", ask=ask), "m")
    offenders.ended(InferError(Code.UNAVAILABLE, "Request timeout expired"), Caller("http", ask=ask), "m")


def test_what_is_kept_is_bounded(offenders, monkeypatch):
    monkeypatch.setattr(module, "KEPT", 5)
    for number in range(20):
        for _ in range(2):
            offenders.ended(ENDED, Caller("http", None, f"host {number}"), "m")
    for number in range(20):
        offenders.ended(ENDED, Caller("http", None, f"other {number}"), "m")
    assert (len(offenders._once), len(offenders._refused)) == (5, 5)
    assert refused(offenders, Caller("http", None, "host 19"))
    assert not refused(offenders, Caller("http", None, "host 0"))
