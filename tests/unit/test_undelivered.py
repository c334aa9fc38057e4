"""Results of sequences' steps that had too little room: kept for whoever asks again, and for nobody else."""

from __future__ import annotations

import numpy as np
import pytest

from broker.repository.scheduling import SequenceBatching
from broker.worker import undelivered
from broker.worker.sequence import Sequence
from broker.worker.sequences import Sequences
from broker.worker.strategies import DirectSequences
from broker.worker.undelivered import Kept, Undelivered, worth_keeping
from shm.errors import Code
from shm.layout import SEQUENCE_AGAIN, SEQUENCE_END, SEQUENCE_START
from tests.unit.test_sequence_endings import NATIVE, OTHER, request, sequences

START, END, AGAIN = SEQUENCE_START, SEQUENCE_END, SEQUENCE_AGAIN
KEY = (NATIVE, 5)


def kept(size: int = 1) -> Kept:
    return Kept(Sequence(5), {"y": np.zeros(size, np.uint8)}, {}, b"")


def lacks_room(queue: Sequences, flags: int, *behind: int) -> Kept:
    """A step runs, and its result does not fit. Steps with the flags `behind` were sent before that was known."""
    step = request(5, flags)
    assert queue.add(step, 1) is None
    rows = queue.take(1)
    for more in behind:
        assert queue.add(request(5, more), 1) is None
    result = step.sequence.kept = kept()
    queue.done(0, rows)
    assert step.sequence.kept is None
    return result


@pytest.mark.parametrize("flags", [START, START | END, 0, END])
@pytest.mark.parametrize("oldest", [False, True])
def test_a_step_is_asked_for_again_and_not_run_again(flags, oldest):
    queue = sequences(oldest)
    if not flags & START:
        queue.add(request(5, START), 1)
        queue.done(0, queue.take(1))
    result = lacks_room(queue, flags)
    again = request(5, flags | AGAIN)
    assert queue.add(again, 2) is None
    assert again.sequence is result
    assert (len(queue) - len(queue.endings), queue.wants(2)) == (1, True)
    assert queue.take(2) == [again]
    queue.done(0, [again])
    assert not queue.take(2)
    assert queue._live.keys() == (set() if flags & END else {KEY})
    once_more = request(5, flags | AGAIN)
    if flags & START:
        assert queue.add(once_more, 2) is None, "a START may begin anew"
    else:
        code, text = queue.add(once_more, 2)
        assert (code, "not kept any more: begin the sequence again" in text) == (Code.UNAVAILABLE, True)


def test_the_step_after_it_runs_as_ever():
    queue = sequences()
    lacks_room(queue, START)
    assert queue.add(request(5), 2) is None
    assert len(queue.take(2)) == 1
    assert not queue._undelivered
    assert queue.add(request(5, AGAIN), 2)[0] == Code.UNAVAILABLE, "too late"


def test_other_sequences_change_nothing():
    queue = sequences()
    result = lacks_room(queue, START)
    queue.add(request(6, START), 2)
    queue.add(request(5, START, owner=OTHER), 2)
    again = request(5, START | AGAIN)
    assert queue.add(again, 2) is None
    assert again.sequence is result
    assert again in queue.take(2)


def test_a_result_is_not_kept_where_later_steps_wait():
    """They may change what the sequence's states are before it is asked for."""
    queue = sequences()
    lacks_room(queue, START, 0)
    assert not queue._undelivered
    assert queue.add(request(5, AGAIN), 2)[0] == Code.UNAVAILABLE


@pytest.mark.parametrize("oldest", [False, True])
def test_the_step_after_it_waits_until_the_result_is_handed_over(oldest):
    """It begins with the states that are the sequence's from then on, also where both come in one take."""
    queue = sequences(oldest, idle=10)
    lacks_room(queue, START)
    again, behind, other = request(5, START | AGAIN), request(5), request(6, START)
    assert [queue.add(each, 2) for each in (again, behind, other)] == [None] * 3
    assert queue.take(2) == [again]
    rows = queue.take(2)
    assert (behind in rows, other in rows) == (False, True)
    assert queue.late(50) == [], "nor does it time out"
    queue.done(0, rows)
    assert not queue.take(3)
    queue.done(0, [again])
    assert behind in queue.take(3)
    assert len(queue) == 0


def test_nobody_waits_for_what_is_asked_for_any_more():
    queue = sequences()
    lacks_room(queue, START)
    late, behind = request(5, AGAIN), request(5)
    queue.add(late, 2)
    queue.add(behind, 2)
    assert queue.remove(late)
    assert not queue.remove(late)
    rows = queue.take(2)
    assert rows == [behind], "its deadline has passed: the sequence goes on"
    behind.sequence.kept = kept()
    queue.done(0, rows)
    cancelled, behind = request(5, AGAIN), request(5)
    queue.add(cancelled, 3)
    queue.add(behind, 3)
    cancelled.ended = Code.CANCELLED
    assert queue.remove(cancelled)
    assert [each for each, _ in queue.late(3)] == [behind], "a cancelled step ends it"
    assert (len(queue) - len(queue.endings), len(queue._undelivered), queue._live) == (0, 0, {})


@pytest.mark.parametrize("flags", [START, START | END])
@pytest.mark.parametrize("behind", [False, True])
def test_what_does_not_fit_again_is_kept_again(flags, behind):
    """Another output lacks room: workers name one at a time."""
    queue = sequences()
    result = lacks_room(queue, flags)
    for _ in range(2):
        again = request(5, flags | AGAIN)
        assert queue.add(again, 2) is None
        assert queue.take(2) == [again]
        again.code = Code.INVALID_ARG
        queue.done(0, [again])
    once_more = request(5, flags | AGAIN)
    queue.add(once_more, 3)
    assert once_more.sequence is result
    if behind and not flags & END:
        queue.add(request(5), 3)
        queue.take(3)
        once_more.code = Code.INVALID_ARG
        queue.done(0, [once_more])
        assert not queue._undelivered


@pytest.mark.parametrize("flags", [START, START | END])
def test_it_goes_with_its_client(flags):
    queue = sequences()
    lacks_room(queue, flags)
    queue.gone(OTHER)
    assert queue._undelivered
    queue.gone(NATIVE)
    assert (len(queue._undelivered), queue._undelivered._bytes) == (0, 0)


@pytest.mark.parametrize(("number", "ended"), [(5, Code.CANCELLED), (0, 0)])
def test_what_nobody_can_ask_for_is_not_kept(number, ended):
    queue = DirectSequences("m", SequenceBatching(iterative_sequence=not number), 1, 1)
    step = request(number, START)
    assert queue.add(step, 1) is None
    rows = queue.take(1)
    step.sequence.kept = kept()
    step.ended = ended
    queue.done(0, rows)
    assert not queue._undelivered


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(undelivered, "MAX_KEPT", 3)
    monkeypatch.setattr(undelivered, "MAX_BYTES", 100)
    assert [worth_keeping(sizes) for sizes in ((60, 40), (60, 41))] == [True, False]
    table = Undelivered()
    for number in range(5):
        table.keep((NATIVE, number), kept(), 1)
    assert [table.take((NATIVE, number)) is not None for number in range(5)] == [False, False, True, True, True]
    for number, size in enumerate((60, 60, 101, 40)):
        table.keep((NATIVE, number), kept(size), 1)
    assert [table.take((NATIVE, number)) is not None for number in range(4)] == [False, True, False, True]
    assert "the 100 bytes that a model may have kept" in table.why((NATIVE, 0))
    assert "more than 100 bytes" in table.why((NATIVE, 2))
    assert (len(table), table._bytes, table._of_client) == (0, 0, {})
    table.keep(KEY, kept(60), 1)
    table.keep(KEY, second := kept(70), 1)
    assert table.take(KEY) is second


def test_so_is_what_is_kept_for_one_client(monkeypatch):
    """Its own oldest go, however old those of others are; one result may be larger."""
    monkeypatch.setattr(undelivered, "MAX_OF_CLIENT", 50)
    table = Undelivered()
    table.keep((OTHER, 1), kept(40), 1)
    for number, size in enumerate((20, 30, 20, 60)):
        table.keep((NATIVE, number), kept(size), 2)
        assert len(table) == (2, 3, 3, 2)[number]
    assert "the 50 bytes that one may have kept" in table.why((NATIVE, 2))
    assert table.why((NATIVE, 2)) == "", "told once"
    assert table.take((NATIVE, 3)).byte_size == 60
    assert table.take((OTHER, 1)).byte_size == 40


@pytest.mark.parametrize("oldest", [False, True])
def test_nobody_asks_for_it_in_time(oldest):
    queue = sequences(oldest, idle=10**9)
    lacks_room(queue, START)
    until = 1 + undelivered.KEPT_S * 10**9
    assert queue.late_at == until
    assert queue.late(until - 1) == []
    assert queue._undelivered
    assert queue.late(until) == []
    assert not queue._undelivered
    assert queue._undelivered.until == 0
    code, text = queue.add(request(5, AGAIN), until + 1)
    assert (code, text.endswith("begin the sequence again (nobody asked for it within 30 s)")) == (
        Code.UNAVAILABLE,
        True,
    )


def test_why_an_earlier_one_went_is_not_told_of_a_later_one():
    queue = sequences(idle=10**9)
    lacks_room(queue, START)
    queue.late(1 + undelivered.KEPT_S * 10**9)
    lacks_room(queue, 0, 0)
    assert queue.add(request(5, AGAIN), 2)[1].endswith("begin the sequence again")


def test_what_is_known_of_those_that_went_is_bounded(monkeypatch):
    monkeypatch.setattr(undelivered, "MAX_KEPT", 0)
    table = Undelivered()
    for number in range(2 * undelivered.MAX_REASONS):
        table.keep((NATIVE, number), kept(), 1)
    assert len(table._reasons) == undelivered.MAX_REASONS
    assert table.why((NATIVE, 0)) == ""
    assert table.why((NATIVE, number))
