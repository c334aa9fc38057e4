"""Ends of models beside the control thread: nobody waits for them, and what they raise changes nothing."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace

import pytest

from broker.worker.closing import Closing
from shm import statistics
from tests.unit.test_scheduler import models, scheduler, turn  # noqa: F401 (fixtures)


def test_an_end_that_never_comes_keeps_neither_the_caller_nor_other_ends_waiting():
    closing, let_go, other = Closing(), threading.Event(), threading.Event()
    closing.begin(let_go.wait)
    closing.begin(other.set)
    assert other.wait(60)
    assert closing
    done = threading.Event()
    let_go.set()
    closing.begin(done.set)
    assert done.wait(60)


def test_what_is_raised_is_logged_and_ends_it(caplog):
    closing = Closing()
    closing._threads = SimpleNamespace(run=lambda work: work())
    with caplog.at_level(logging.ERROR):
        closing.begin(lambda: 1 // 0)
    assert "a model could not be closed" in caplog.text
    assert not closing


def test_without_a_thread_it_is_done_here():
    def refuse(work):
        raise RuntimeError("can't start new thread")

    closing, done = Closing(), []
    closing._threads = SimpleNamespace(run=refuse)
    closing.begin(lambda: done.append(bool(closing)))
    assert done == [True]
    assert not closing


def test_that_a_model_is_being_closed_shows_before_that_begins_and_until_it_is_done(scheduler, models):
    model = models(count=2)
    blocks, seen, begun = [instance.block for instance in model.instances], [], []

    def close() -> None:
        seen.append([block[statistics.CLOSING] > 0 for block in blocks])

    for instance in model.instances:
        instance.runtime.close = close
    scheduler.retire(model)
    scheduler.close_retired(0, begun.append)
    assert [block[statistics.CLOSING] > 0 for block in blocks] == [True, False]
    scheduler.close_retired(0, begun.append)
    (work,) = begun
    work()
    assert seen == [[True, False], [False, True]], "each for as long as its own takes"
    assert not any(block[statistics.CLOSING] for block in blocks)


def test_each_model_ends_by_itself_whatever_becomes_of_the_others(scheduler, models):
    """One that is stuck keeps no other one loaded, and what is not being closed is not held against its worker."""
    two = [models(), models(count=2)]
    begun = []
    for model in two:
        scheduler.retire(model)
    scheduler.close_retired(0, begun.append)
    blocks = [instance.block for model in two for instance in model.instances]
    assert [block[statistics.CLOSING] > 0 for block in blocks] == [True, True, False]

    def fail(instance):
        raise RuntimeError("lost")

    two[1].runner = SimpleNamespace(forget=fail)
    with pytest.raises(RuntimeError, match="lost"):
        begun[1]()
    assert [block[statistics.CLOSING] > 0 for block in blocks] == [True, False, False]
    begun[0]()
    assert not any(block[statistics.CLOSING] for block in blocks)
