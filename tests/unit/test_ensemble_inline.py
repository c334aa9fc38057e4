"""Lone requests for ensembles of short steps run at once, and only where nothing is unusual."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from broker.repository.scheduling import Step
from broker.worker.batch import SHORT_NS
from shm import statistics
from tests.fakes.ensembles import WIDTH, Workbench, ensemble_config, model_config


@pytest.fixture
def bench() -> Iterator[Workbench]:
    bench = Workbench()
    yield bench
    bench.close()


def chain(bench: Workbench, length: int = 2, dim: int = WIDTH, **more: Any) -> Any:
    """An ensemble of `length` members, each on what the one before wrote, and a plan for its last tensor."""
    names = ["IN", *(f"t{at}" for at in range(length - 1)), "OUT"]
    steps = []
    for at in range(length):
        bench.load(model_config(f"m{at}", ["x0"], ["y0"], 4, (dim,)))
        steps.append(Step(model_name=f"m{at}", input_map={"x0": names[at]}, output_map={"y0": names[at + 1]}))
    model = bench.load(ensemble_config("E", steps, ["IN"], ["OUT"], 4, (WIDTH,), **more))
    return bench.plan(model, (4, WIDTH), ["OUT"])


def ones(rows: int = 1) -> dict[str, np.ndarray]:
    return {"IN": np.ones((rows, WIDTH), np.float32)}


def test_a_lone_request_runs_at_once_where_an_earlier_one_has_been(bench):
    plan = chain(bench, 3)
    _, at_once = bench.ask_alone(plan, 0, ones(2), 2)
    assert not at_once, "nothing is prepared"
    bench.drain()
    second, at_once = bench.ask_alone(plan, 0, {"IN": np.full((2, WIDTH), 7, np.float32)}, 2)
    assert at_once
    assert np.array_equal(bench.client.found[second]["OUT"], np.full((2, WIDTH), 10, np.float32))
    assert second.infer_ns > 0
    _, at_once = bench.ask_alone(plan, 0, ones(1), 1)
    assert not at_once, "of another number of rows"
    bench.drain()
    for model in bench.models.values():
        model.flush()
    counts = {name: model.instances[0].block[statistics.SUCCESS] for name, model in bench.models.items()}
    assert counts == {"E": 3, "m0": 1, "m1": 1, "m2": 1}, "those that the test ran itself are nobody's"


def test_a_member_at_work_is_waited_for_in_its_queue(bench):
    plan = chain(bench)
    bench.ask(plan, 0, ones(), 1)
    bench.drain()
    assert bench.ask_alone(plan, 0, ones(), 1)[1]
    busy = bench.models["m1"].free.pop()
    request, at_once = bench.ask_alone(plan, 0, ones(), 1)
    assert not at_once
    assert len(bench.models["m0"].free) == len(bench.models["E"].free) == 1, "what was claimed is free again"
    bench.drain()
    assert bench.client.ended[-1] is request
    bench.models["m1"].free.append(busy)
    assert bench.ask_alone(plan, 0, ones(), 1)[1]


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_step_that_raises_has_the_request_run_from_its_beginning(bench, broken):
    plan = chain(bench, 3)
    bench.ask(plan, 0, ones(), 1)
    bench.drain()
    request, at_once = bench.ask_alone(plan, 0, ones(), 1, broken)
    assert at_once
    assert request not in bench.client.ended
    assert [step.slot for step in bench.queue] == [0]
    assert all(len(model.free) == 1 for model in bench.models.values())
    bench.drain()
    assert not request.code
    assert [each for each in bench.client.ended if each is request] == [request]
    assert np.array_equal(bench.client.found[request]["OUT"], np.full((1, WIDTH), 4, np.float32))


def test_a_member_used_twice_is_claimed_once(bench):
    bench.load(model_config("m", ["x0"], ["y0"], 4, (WIDTH,)))
    steps = [
        Step(model_name="m", input_map={"x0": "IN"}, output_map={"y0": "t"}),
        Step(model_name="m", input_map={"x0": "t"}, output_map={"y0": "OUT"}),
    ]
    plan = bench.plan(bench.load(ensemble_config("E", steps, ["IN"], ["OUT"], 4, (WIDTH,))), (4, WIDTH), ["OUT"])
    bench.ask(plan, 0, ones(), 1)
    bench.drain()
    request, at_once = bench.ask_alone(plan, 0, ones(), 1)
    assert at_once
    assert np.array_equal(bench.client.found[request]["OUT"], np.full((1, WIDTH), 2, np.float32))
    assert len(bench.models["m"].free) == 1


@pytest.mark.parametrize("limit", [1, 4])
def test_gated_ensembles_do_not_run_at_once(bench, limit):
    plan = chain(bench, limit=limit)
    bench.ask(plan, 0, ones(), 1)
    bench.drain()
    assert not bench.ask_alone(plan, 0, ones(), 1)[1]
    bench.drain()


def test_nothing_runs_at_once_on_members_that_were_replaced(bench):
    plan = chain(bench)
    bench.ask(plan, 0, ones(), 1)
    bench.drain()
    assert bench.ask_alone(plan, 0, ones(), 1)[1]
    bench.load(bench.models["m0"].config)
    assert not bench.ask_alone(plan, 0, ones(), 1)[1]
    bench.drain()


def test_sizes_that_only_a_run_tells_are_left_to_the_queue(bench):
    plan = chain(bench, dim=-1)
    for _ in range(3):
        assert not bench.ask_alone(plan, 0, ones(), 1)[1]
        bench.drain()


def test_what_takes_long_is_left_to_the_queue(bench):
    plan = chain(bench)
    bench.ask(plan, 0, ones(), 1)
    bench.drain()
    bench.takes_ns = SHORT_NS
    assert not bench.ask_alone(plan, 0, ones(), 1)[1], "two of them are too much"
    bench.drain()
    bench.takes_ns = SHORT_NS // 3
    assert bench.ask_alone(plan, 0, ones(), 1)[1]
