from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from broker.worker.turn import Turn

LIMIT_S = 30.0
LIMIT_NS = 10


def elsewhere(what: Callable[[], object]) -> object:
    """Do `what` in another thread, to its end."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(what).result(LIMIT_S)


class Follower:
    """A thread that waits for its turn."""

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self.leads = threading.Event()
        self.term = 0
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.term = self.turn.take()
        self.leads.set()

    def leading(self) -> int:
        assert self.leads.wait(LIMIT_S)
        self.thread.join(LIMIT_S)
        return self.term


def test_one_leads_at_a_time():
    turn = Turn()
    first = turn.take()
    follower = Follower(turn)
    assert not follower.leads.is_set()
    turn.step_down(first)
    second = follower.leading()
    assert second != first
    turn.step_down(first)  # no longer one's own to give away
    third = Follower(turn)
    assert not third.leads.is_set()
    turn.step_down(second)
    third.leading()


def test_a_short_batch_is_entered_and_left():
    turn = Turn()
    term = turn.take()
    assert not turn.inside()
    turn.enter()
    turn.commit(100)
    assert turn.inside()
    assert turn.leave(term)
    assert not turn.inside()
    assert not turn.depose(1 << 62, LIMIT_NS)
    turn.step_down(term)


@pytest.mark.parametrize(("now", "deposed"), [(100, False), (110, False), (111, True)])
def test_only_a_leader_that_is_late_is_deposed(now, deposed):
    turn = Turn()
    turn.take()
    assert not turn.depose(now, LIMIT_NS), "not inside a batch"
    turn.enter()
    turn.commit(100)
    assert elsewhere(lambda: turn.depose(now, LIMIT_NS)) is deposed
    assert not turn.depose(now, LIMIT_NS), "once"


def test_a_deposed_leader_finds_out_when_its_batch_is_over():
    turn = Turn()
    old = turn.take()
    follower = Follower(turn)
    turn.enter()
    turn.commit(100)
    assert turn.depose(200, LIMIT_NS)
    new = follower.leading()
    assert turn.inside(), "its batch still runs"
    turn.enter()
    turn.commit(300)
    assert not turn.leave(old)
    assert turn.inside(), "the new leader's"
    turn.step_down(old)
    waiting = Follower(turn)
    assert not waiting.leads.is_set(), "a deposed leader has nothing to step down from"
    assert turn.leave(new)
    assert not turn.inside()
    turn.step_down(new)
    waiting.leading()


def test_several_may_be_deposed_one_after_the_other():
    turn = Turn()
    terms = []
    for _ in range(3):
        terms.append(turn.take())
        turn.enter()
        turn.commit(100)
        assert turn.depose(200, LIMIT_NS)
    for term in terms:
        assert turn.inside()
        assert not turn.leave(term)
    assert not turn.inside()
    turn.step_down(turn.take())


def test_deposing_races_with_leaving():
    """Whichever comes first: one thread leads afterwards, and it knows."""
    turn = Turn()
    with ThreadPoolExecutor(1) as pool:
        for _ in range(300):
            term = turn.take()
            turn.enter()
            turn.commit(100)
            answer = pool.submit(turn.depose, 200, LIMIT_NS)
            stayed = turn.leave(term)
            assert answer.result(LIMIT_S) is not stayed
            turn.step_down(term)
            assert not turn.inside()
    turn.step_down(turn.take())


def test_the_lead_is_handed_on_between_threads():
    turn = Turn()
    leading = 0
    seen = []

    def lead_often() -> None:
        nonlocal leading
        for _ in range(100):
            term = turn.take()
            leading += 1
            seen.append((term, leading))
            leading -= 1
            turn.step_down(term)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(lead_often) for _ in range(4)]:
            done.result(LIMIT_S)
    assert {count for _, count in seen} == {1}
    assert len({term for term, _ in seen}) == 400


def test_a_leader_that_has_entered_but_not_begun_keeps_the_lead():
    turn = Turn()
    term = turn.take()
    turn.enter()
    assert turn.inside()
    assert not turn.depose(1 << 62, 0)
    turn.commit(100)
    assert turn.depose(200, 50)
    assert turn.inside()  # the deposed one's batch
    assert not turn.leave(term)
    assert not turn.inside()
