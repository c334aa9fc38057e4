"""Steps of an ensemble in a member that has sequences: what is taken back there ends its sequence."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from broker.repository.scheduling import SequenceBatching, Step
from broker.worker.intake import take_in
from broker.worker.strategies import OldestSequences
from shm.admission import Request
from shm.layout import SEQUENCE_START
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
