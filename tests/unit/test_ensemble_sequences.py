"""Sequences through ensembles: what is taken back ends its sequence, what had no room is not run again."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from broker.repository.scheduling import SequenceBatching, Step
from broker.worker import undelivered
from broker.worker.ensembles.memory import Outputs
from broker.worker.intake import take_in
from broker.worker.scheduler import Scheduler
from broker.worker.strategies import OldestSequences
from broker.worker.turn import Turn
from shm.admission import Request
from shm.errors import Code
from shm.layout import SEQUENCE_AGAIN, SEQUENCE_END, SEQUENCE_START
from tests.fakes import ensembles
from tests.fakes.ensembles import WIDTH, Workbench, ensemble_config, model_config


@pytest.fixture
def bench() -> Iterator[Workbench]:
    bench = Workbench()
    yield bench
    bench.close()


def test_a_step_that_is_taken_back_ends_its_sequence(bench):
    bench.load(model_config("m", ["x0"], ["y0"], 4, (-1,)))
    steps = [Step(model_name="m", input_map={"x0": "IN"}, output_map={"y0": "OUT"})]
    plan = bench.plan(bench.load(ensemble_config("E", steps, ["IN"], ["OUT"], 4, (WIDTH,))), (1, WIDTH), ["OUT"])
    queue = OldestSequences("s", SequenceBatching(oldest=True, max_candidate_sequences=2), 1, 2)
    plan.model.ensemble._take_back = lambda steps: [queue.remove(each) for each in steps]

    def step_of(number: int, flags: int) -> tuple[Request, Request]:
        entry = (number, plan.key, 0, 0, number, number, 1, 7, flags, 0, 0, 0, 0)
        request = Request(bench.client, 0, entry, plan, number)
        take_in([request])
        return request, bench.queue.pop()

    _, first = step_of(1, SEQUENCE_START)
    assert queue.add(first, 1) is None
    assert queue.take(1) == [first]
    queue.done(0, [first])
    cancelled, waits = step_of(2, 0)
    assert queue.add(waits, 2) is None
    bench.cancel(cancelled)
    _, follower = step_of(3, 0)
    verdict = queue.add(follower, 3)
    assert verdict is not None
    assert "must specify the START flag" in verdict[1]


class Growing:
    """Ensemble E, whose member gives as many numbers as it is told; a client's plans have room for 64, or for 1024."""

    def __init__(self, bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bench = bench
        bench.load(model_config("m", ["x0"], ["y0"], 0, (-1,), backend="counts"))
        steps = [Step(model_name="m", input_map={"x0": "IN"}, output_map={"y0": "OUT"})]
        model = bench.load(ensemble_config("E", steps, ["IN"], ["OUT"], 0, (-1,)))
        self.plans = []
        for room in (256, 4096):
            monkeypatch.setattr(ensembles, "ROOM", room)
            self.plans.append(bench.plan(model, (1,), ["OUT"], is_open=True))
            self.plans[-1].owner = 3
        self.ran = 0

    def ask(self, count: int, flags: int, number: int = 7, wide: bool = False) -> Request:
        given = {"IN": np.array([count], np.float32)}
        request = self.bench.ask(self.plans[wide], 0, given, sequence=(number, flags))
        self.ran += len(self.bench.queue)
        self.bench.drain()
        return request

    def count(self, request: Request) -> int:
        return int(self.bench.client.found[request]["OUT"].size)


@pytest.fixture
def growing(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> Growing:
    return Growing(bench, monkeypatch)


@pytest.mark.parametrize("flags", [0, SEQUENCE_START, SEQUENCE_END])
def test_a_step_whose_answer_had_no_room_is_asked_for_again_and_not_run_again(growing, flags):
    assert b"output 'OUT' (256 bytes) should be at least 400 bytes" in growing.ask(100, flags).note
    again = growing.ask(1, flags | SEQUENCE_AGAIN, wide=True)
    assert (growing.ran, growing.count(again)) == (1, 100)
    assert growing.count(growing.ask(5, 0)) == 5
    assert growing.ran == 2


def test_where_answers_are_kept_what_is_asked_for_again_is_delivered_and_not_kept(growing):
    model = growing.plans[0].model
    growing.bench.keep_answers(model)
    growing.ask(100, SEQUENCE_START)
    assert growing.count(growing.ask(100, SEQUENCE_START | SEQUENCE_AGAIN, wide=True)) == 100
    assert growing.count(growing.ask(100, SEQUENCE_START, wide=True)) == 100
    assert growing.ran == 2, "the run that it came of has read other memory than this request names"
    assert growing.count(growing.ask(100, SEQUENCE_START, wide=True)) == 100
    assert growing.ran == 2


def test_it_goes_with_its_client(growing):
    ensemble = growing.plans[0].model.ensemble
    growing.ask(100, SEQUENCE_START)
    ensemble.gone(4)
    assert len(ensemble._undelivered) == 1
    ensemble.gone(3)
    assert len(ensemble._undelivered) == 0


def test_it_goes_when_its_time_is_over_whatever_else_comes(growing):
    scheduler = Scheduler(Turn())
    model = growing.plans[0].model
    scheduler.serve([growing.bench.models["m"], model])
    assert not scheduler.look_at_models(0)
    growing.ask(100, SEQUENCE_START)
    assert growing.bench.looks == 1, "there may be no traffic"
    until = model.ensemble._undelivered.until
    assert scheduler.look_at_models(until - 1), "to be looked at again"
    assert len(model.ensemble._undelivered) == 1
    assert not scheduler.look_at_models(until)
    assert len(model.ensemble._undelivered) == 0
    again = growing.ask(1, SEQUENCE_AGAIN, wide=True)
    assert b"begin the sequence again (nobody asked for it within 30 s)" in again.note


def test_what_is_too_large_to_keep_is_not_copied(growing, monkeypatch):
    monkeypatch.setattr(undelivered, "MAX_BYTES", 399)
    monkeypatch.setattr(Outputs, "copied", None)
    growing.ask(100, SEQUENCE_START)
    assert b"is not kept any more" in growing.ask(100, SEQUENCE_AGAIN, wide=True).note


def test_it_is_that_of_the_sequence_and_of_its_latest_step(growing):
    growing.ask(100, SEQUENCE_START)
    other = growing.ask(1, SEQUENCE_AGAIN, number=8, wide=True)
    assert b"has run, and its result did not fit and is not kept any more" in other.note
    growing.ask(200, 0)
    assert growing.count(growing.ask(1, SEQUENCE_AGAIN, wide=True)) == 200
    growing.ask(100, 0)
    assert growing.count(growing.ask(9, 0)) == 9
    assert growing.ask(1, SEQUENCE_AGAIN, wide=True).code == Code.UNAVAILABLE, "others came behind it"
    assert growing.ran == 4


def test_a_start_of_which_nothing_is_kept_runs(growing):
    assert growing.count(growing.ask(9, SEQUENCE_START | SEQUENCE_AGAIN, wide=True)) == 9
    assert growing.ran == 1


def test_what_does_not_fit_again_is_kept_again(growing):
    growing.ask(100, SEQUENCE_START)
    assert b"should be at least 400 bytes" in growing.ask(1, SEQUENCE_AGAIN).note
    assert growing.count(growing.ask(1, SEQUENCE_AGAIN, wide=True)) == 100
    assert growing.ran == 1
