"""Signal handlers that call the client in the middle of one of its calls: told so, or served; none waits for ever."""

from __future__ import annotations

import contextlib
import signal
import threading

import numpy as np
import pytest

import clientlib
from clientlib.interrupted import Interrupted, Turn, is_below
from shm.errors import InferError
from tests.fakes.broker import eventually
from tests.fakes.remote import FakeTransport, client_on, doubled
from tests.fakes.small_broker import SmallBroker, doubling

X = {"x": np.ones((1, 2), np.float32)}
INTERRUPTED = "called by a signal handler, or a destructor, that interrupted a call of the same thread"


@contextlib.contextmanager
def handling(handler):
    before = signal.signal(signal.SIGUSR1, lambda number, frame: handler())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def outcome(call):
    try:
        return call()
    except InferError as error:
        return error.code, error.message


def test_a_handler_that_would_wait_for_what_it_interrupted(client: clientlib.Client, small_broker: SmallBroker):
    _, plan = doubling(client)
    plan.infer()
    client.infer("double", X)
    (lane,) = client.native.link.lanes.all()
    came = []

    def handler():
        came.extend(
            outcome(call) for call in (lambda: client.infer("double", X), lambda: next(client.stream("double", X)))
        )
        came.append(sorted(client.models()) != [])  # the broker is asked while nothing else of this thread asks it
        small_broker.release()

    def interrupt():
        eventually(lambda: lane.channel._sleeps >= before + 2)  # from the second one on it reaps without a pause
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    small_broker.hold = True
    before = lane.channel._sleeps
    other = threading.Thread(target=interrupt)
    with handling(handler):
        other.start()
        assert plan.infer()["y"].tolist() == [[0, 2, 4, 6]]
        other.join(60)
    assert [(code, INTERRUPTED in text) for code, text in came[:2]] == [("UNSUPPORTED", True)] * 2
    assert came[2:] == [True]
    assert client.infer("double", X)["y"].tolist() == [[2, 2]]  # nothing of it stays


def test_what_a_call_interrupts_is_told_by_its_frames():
    lane = object()
    name = {"__name__": "clientlib.waiting"}
    exec("def waits(lane, handler): return handler()", name)  # a function of the library that works on a lane
    asks = {"__name__": "clientlib.plans", "is_below": is_below}
    exec("def asks(lane): return is_below(lane)", asks)
    assert not asks["asks"](lane)
    assert name["waits"](lane, lambda: asks["asks"](lane))
    assert not name["waits"](object(), lambda: asks["asks"](lane))


def test_one_call_of_a_thread_at_a_time():
    turn = Turn()
    with pytest.raises(Interrupted, match=INTERRUPTED):
        turn.run(lambda: turn.run(lambda: 1))
    found = []

    def beside():
        other = threading.Thread(target=lambda: found.append(turn.run(lambda: 2)))
        other.start()
        other.join(60)

    turn.run(beside)
    assert (found, turn.run(lambda: 3)) == ([2], 3)


@pytest.mark.parametrize("started", [False, True])
def test_over_a_wire(started):
    came = []
    fake = FakeTransport()

    def answers(request):
        fake.answers = doubled
        came.extend(outcome(call) for call in (lambda: client.infer("double", X), client.models))
        return doubled(request)

    with client_on(fake) as client:
        fake.answers = answers
        if started:
            result = (
                client.prepare("double", {"x": client.create_region("r", 64).tensor((1, 4), "FP32")}).submit().result()
            )
        else:
            result = client.infer("double", X)
        assert "y" in result
        assert [(code, INTERRUPTED in text) for code, text in came] == [("UNSUPPORTED", True)] * 2
        assert client.infer("double", X)["y"].tolist() == [[2, 2]]
