"""Runs of random ensembles, in every order of their steps' ends: each request ends once, with the right values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broker.repository.scheduling import Step
from broker.worker.ensembles import ensemble
from shm import statistics
from shm.admission import Request
from shm.errors import Code
from tests.fakes.ensembles import WIDTH, Workbench, ensemble_config, model_config, reference

ROWS = 2  # of an ensemble that does not batch, whose members may


@pytest.fixture
def bench() -> Iterator[Workbench]:
    bench = Workbench()
    yield bench
    bench.close()


class Flow:
    """A random ensemble E on a workbench, and what is known of its requests."""

    def __init__(self, bench: Workbench, data: st.DataObject) -> None:
        self.bench, self.data = bench, data
        self.batched = data.draw(st.booleans(), "batched")
        self.inputs = ["IN0", "IN1"][: data.draw(st.integers(1, 2), "inputs")]
        self.inner: dict[str, int] = {}
        self.steps: list[Step] = []
        tensors = list(self.inputs)
        for at in range(data.draw(st.integers(1, 6), "steps")):
            tensors += self._add_step(at, tensors)
        self.written = tensors[len(self.inputs) :]
        self.limit = data.draw(st.sampled_from([0, 0, 1, 2]), "max_inflight_requests")
        dims = (WIDTH,) if self.batched else (ROWS, WIDTH)
        batch = 4 if self.batched else 0
        config = ensemble_config("E", self.steps, self.inputs, self.written, batch, dims, self.limit)
        self.model = bench.load(config)
        self.asked: dict[int, tuple[Request, dict[str, np.ndarray]]] = {}
        self.failed: set[int] = set()
        self.given_up: set[int] = set()
        self.plans = [self._plan() for _ in range(2)]

    def _add_step(self, at: int, tensors: list[str]) -> list[str]:
        draw = self.data.draw
        name = f"m{at}"
        sources = draw(st.lists(st.sampled_from(tensors), min_size=1, max_size=2), "sources")
        count = draw(st.integers(1, 2), "outputs")
        if draw(st.integers(0, 4), "is an ensemble") == 4:
            sources, count = sources[:1], 1
            self._load_inner(name)
        else:
            batch, dims = draw(st.sampled_from(self._shapes()), "shape")
            xs, ys = [f"x{i}" for i in range(len(sources))], [f"y{i}" for i in range(count)]
            self.bench.load(model_config(name, xs, ys, batch, dims))
        written = [f"t{at}.{i}" for i in range(count)]
        inputs = {f"x{i}": source for i, source in enumerate(sources)}
        outputs = {f"y{i}": tensor for i, tensor in enumerate(written)}
        self.steps.append(Step(model_name=name, input_map=inputs, output_map=outputs))
        return written

    def _shapes(self) -> list[tuple[int, tuple[int, ...]]]:
        return [(4, (WIDTH,)), (4, (-1,)), (0, (-1, WIDTH)), (0, (-1, -1))]

    def _load_inner(self, name: str) -> None:
        count = self.inner[name] = self.data.draw(st.integers(1, 2), "inner steps")
        batch, dims = (4, (WIDTH,)) if self.batched else (0, (ROWS, WIDTH))
        names = ["x0", *(f"i{at}" for at in range(count - 1)), "y0"]
        steps = []
        for at in range(count):
            self.bench.load(
                model_config(f"{name}.{at}", ["x0"], ["y0"], *self.data.draw(st.sampled_from(self._shapes())))
            )
            steps.append(Step(model_name=f"{name}.{at}", input_map={"x0": names[at]}, output_map={"y0": names[at + 1]}))
        self.bench.load(ensemble_config(name, steps, ["x0"], ["y0"], batch, dims))

    def _plan(self) -> Any:
        wanted = self.data.draw(st.lists(st.sampled_from(self.written), min_size=1, unique=True), "wanted")
        shape = (4, WIDTH) if self.batched else (ROWS, WIDTH)
        return self.bench.plan(self.model, shape, wanted, is_open=self.data.draw(st.booleans(), "open"))

    # --- what may happen ----------------------------------------------------------------------------------------

    def ask(self) -> None:
        """Sometimes one that may run at once."""
        plan = self.data.draw(st.sampled_from(self.plans), "plan")
        free = [at for at in range(20) if not any(r.plan is plan and r.output_position == at for r in self.live())]
        position = self.data.draw(st.sampled_from(free), "position")
        rows = self.data.draw(st.integers(1, 4), "rows") if self.batched else 0
        number = len(self.asked) + 1
        shape = (rows or ROWS, WIDTH)
        arrays = {name: np.full(shape, 1000 * number + at, np.float32) for at, name in enumerate(self.inputs)}
        if not self.bench.queue and self.data.draw(st.booleans(), "alone"):
            broken = self.data.draw(st.integers(-9, len(self.steps) - 1), "raises")
            request, _ = self.bench.ask_alone(plan, position, arrays, rows, broken)
        else:
            request = self.bench.ask(plan, position, arrays, rows)
        self.asked[request.position] = request, arrays

    def live(self) -> list[Request]:
        return [request for request, _ in self.asked.values() if request not in self.bench.client.ended]

    def begin(self) -> None:
        self.bench.begin(self.data.draw(st.integers(0, len(self.bench.queue) - 1), "which begins"))

    def end(self) -> None:
        at = self.data.draw(st.integers(0, len(self.bench.running) - 1), "which ends")
        broken = self.data.draw(st.integers(0, 9), "fails") == 9
        owner = self.bench.running[at].position
        if broken:
            self.failed.add(owner)
        self.bench.end(at, "broken" if broken else "")

    def cancel(self) -> None:
        request = self.data.draw(st.sampled_from(self.live()), "cancelled")
        self.bench.cancel(request)
        self.given_up.add(request.position)

    def reload(self) -> None:
        name = self.data.draw(st.sampled_from([name for name in self.bench.models if name != "E"]), "reloaded")
        self.bench.load(self.bench.models[name].config)

    def play(self) -> None:
        for _ in range(self.data.draw(st.integers(5, 40), "events")):
            choices = [self.ask] if len(self.live()) < 6 else []
            choices += [self.begin] * 3 if self.bench.queue else []
            choices += [self.end] * 3 if self.bench.running else []
            choices += [self.cancel] if self.live() else []
            self.data.draw(st.sampled_from([*choices, self.reload]))()
            self.check()
        while self.bench.queue or self.bench.running:
            (self.end if self.bench.running else self.begin)()
            self.check()

    # --- what must hold -----------------------------------------------------------------------------------------

    def check(self) -> None:
        queued = {step.position for step in self.bench.queue}
        assert not queued & (self.failed | self.given_up), "a step waits whose request is over"
        if self.limit:
            under_way = Counter(step.plan.model_name for step in (*self.bench.queue, *self.bench.running))
            assert max(under_way.values(), default=0) <= self.limit

    def check_end(self) -> None:
        ended = Counter(request.position for request in self.bench.client.ended)
        assert ended == dict.fromkeys(self.asked, 1), "every request ends once"
        for request, arrays in self.asked.values():
            self._check_answer(request, arrays)
        for model in (*self.bench.models.values(), *self.bench.replaced):
            assert model.pins == 0
        for plan in self.plans:
            assert len(plan.bindings) <= ensemble.MAX_PREPARED
        self.model.flush()
        block = self.model.instances[0].block
        assert block[statistics.PENDING] == 0
        words = statistics.SUCCESS, statistics.FAIL, statistics.CANCELLED
        assert sum(block[word] for word in words) == len(self.asked)

    def _check_answer(self, request: Request, arrays: dict[str, np.ndarray]) -> None:
        assert request.sequence is None, "nothing of it is kept"
        if request.code == Code.CANCELLED:  # even if a step that ran meanwhile has failed
            assert request.position in self.given_up
            assert request.note == b"the request was cancelled"
        elif request.code:
            assert request.position in self.failed, request.note
            assert request.note.startswith(b"in ensemble 'E', ")
            assert b"broken (step " in request.note
        else:
            assert request.position not in self.failed
            wanted = [tensor.name for tensor in request.plan.outputs]
            expected, _ = reference(self.steps, arrays, wanted, self.inner)
            for name, found in self.bench.client.found[request].items():
                assert np.array_equal(found, expected[name]), name


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_flows_against_a_plain_evaluation(data):
    bench = Workbench()
    try:
        flow = Flow(bench, data)
        flow.play()
        flow.check_end()
    finally:
        bench.close()


# --- one thing at a time ------------------------------------------------------------------------------------------


def chain(bench: Workbench, length: int = 2, **more: Any) -> Any:
    """An ensemble of `length` members, each on what the one before wrote, and a plan for its last tensor."""
    names = ["IN", *(f"t{at}" for at in range(length - 1)), "OUT"]
    steps = []
    for at in range(length):
        bench.load(model_config(f"m{at}", ["x0"], ["y0"], 4, (-1,)))
        steps.append(Step(model_name=f"m{at}", input_map={"x0": names[at]}, output_map={"y0": names[at + 1]}))
    model = bench.load(ensemble_config("E", steps, ["IN"], ["OUT"], 4, (WIDTH,), **more))
    return bench.plan(model, (4, WIDTH), ["OUT"])


def ones(rows: int = 1) -> dict[str, np.ndarray]:
    return {"IN": np.ones((rows, WIDTH), np.float32)}


def test_a_plan_keeps_a_bounded_number_of_prepared_runs(bench):
    plan = chain(bench)
    for position in range(ensemble.MAX_PREPARED + 4):
        bench.ask(plan, position, ones(), 1)
        bench.drain()
    assert len(plan.bindings) == ensemble.MAX_PREPARED
    assert {key[1] for key in plan.bindings} == set(range(4, ensemble.MAX_PREPARED + 4))  # the oldest have gone


def test_a_plan_keeps_a_bounded_number_of_bytes(bench, monkeypatch):
    plan = chain(bench)
    bench.ask(plan, 0, ones(), 1)
    bench.drain()
    (kept,) = plan.bindings.values()
    assert kept.kept > 0
    monkeypatch.setattr(ensemble, "PREPARED_BYTES", 3 * kept.kept)
    for position in range(6):
        bench.ask(plan, position, ones(), 1)
        bench.drain()
    assert len(plan.bindings) == 3
    monkeypatch.setattr(ensemble, "PREPARED_BYTES", kept.kept - 1)
    bench.ask(plan, 5, ones(), 1)  # takes out what it had, and leaves nothing
    bench.drain()
    assert {key[1] for key in plan.bindings} == {3, 4}


def test_a_run_uses_what_the_one_before_has_prepared(bench):
    plan = chain(bench)
    steps = []
    for _ in range(2):
        bench.ask(plan, 0, ones(), 1)
        while bench.queue:
            steps.append(bench.queue[0].plan)
            bench.begin(0)
            bench.end(0)
    assert steps[:2] == steps[2:]


def test_what_was_prepared_goes_with_the_member_it_is_for(bench):
    plan = chain(bench)
    bench.ask(plan, 0, ones(), 1)
    bench.ask(plan, 1, ones(), 1)
    bench.begin(0)
    bench.end(0)
    bench.begin(1)
    bench.end(0)  # the first is over
    assert len(plan.bindings) == 1
    bench.load(bench.models["m0"].config)
    assert not plan.bindings
    bench.drain()
    assert not plan.bindings, "the second ran on the members that there were"


def test_a_member_is_not_closed_before_the_runs_that_are_going_to_use_it_are_over(bench):
    plan = chain(bench)
    member = bench.models["m1"]
    bench.ask(plan, 0, ones(), 1)
    bench.unload("m1")
    assert member.pins == 1
    bench.drain()
    assert member.pins == 0
    (request,) = bench.client.ended
    assert not request.code, request.note
    late = bench.ask(plan, 0, ones(), 1)
    assert (late.code, late.note) == (Code.UNAVAILABLE, b"in ensemble 'E', model 'm1' is not loaded")


def test_a_deadline_ends_a_run_between_two_steps(bench):
    plan = chain(bench)
    request = bench.ask(plan, 0, ones(), 1, deadline=1)
    assert bench.client.ended == [request]
    assert request.code == Code.UNAVAILABLE
    assert request.note == b"in ensemble 'E', Request timeout expired (step 0: model 'm0' on 'x0' = 'IN' [1,3])"
    block = plan.model.instances[0].block
    assert (block[statistics.EXPIRED], block[statistics.FAIL]) == (1, 0)


def test_a_failed_step_takes_the_others_back(bench):
    for name in ("m0", "m1"):
        bench.load(model_config(name, ["x0"], ["y0"], 4, (WIDTH,)))
    steps = [Step(model_name=f"m{at}", input_map={"x0": "IN"}, output_map={"y0": f"t{at}"}) for at in range(2)]
    plan = bench.plan(
        bench.load(ensemble_config("E", steps, ["IN"], ["t0", "t1"], 4, (WIDTH,))), (4, WIDTH), ["t0", "t1"]
    )
    request = bench.ask(plan, 0, ones(), 1)
    bench.begin(0)
    bench.end(0, "out of luck")
    assert bench.queue == []
    assert bench.client.ended == [request]
    assert request.note == b"in ensemble 'E', out of luck (step 0: model 'm0' on 'x0' = 'IN' [1,3])"


def test_inputs_of_a_member_must_have_as_many_rows_as_each_other(bench):
    bench.load(model_config("m0", ["x0", "x1"], ["y0"], 4, (WIDTH,)))
    steps = [Step(model_name="m0", input_map={"x0": "IN", "x1": "ONE"}, output_map={"y0": "OUT"})]
    model = bench.load(ensemble_config("E", steps, ["IN", "ONE"], ["OUT"], 0, (-1, WIDTH)))
    plan = bench.plan(model, (2, WIDTH), ["OUT"], shapes={"ONE": (3, WIDTH)})
    request = bench.ask(plan, 0, {"IN": np.ones((2, WIDTH), np.float32), "ONE": np.ones((3, WIDTH), np.float32)})
    assert request.code == Code.INVALID_ARG
    assert b"input 'x1' batch size does not match other inputs for 'm0': it has 3 rows, others 2" in request.note


def test_no_more_requests_at_a_step_than_allowed(bench):
    plan = chain(bench, limit=2)
    requests = [bench.ask(plan, at, ones(), 1) for at in range(5)]
    assert len(bench.queue) == 2
    bench.cancel(requests[2])  # it waits at the gate
    assert bench.client.ended == [requests[2]]
    bench.begin(0)
    bench.end(0)
    assert Counter(step.plan.model_name for step in bench.queue) == {"m0": 2, "m1": 1}
    bench.drain()
    assert Counter(request.code for request in bench.client.ended) == {Code.OK: 4, Code.CANCELLED: 1}


@pytest.mark.parametrize("limit", [0, 1])
def test_a_cancel_while_steps_are_being_queued(bench, limit):
    """Who cancels sees either the steps, or nothing: then whoever queues them sees the cancel."""
    plan = chain(bench, limit=limit)
    first = bench.ask(plan, 0, ones(), 1)
    second = bench.ask(plan, 1, ones(), 1)
    bench.begin(0)
    bench.meanwhile = lambda: bench.cancel(second if limit else first)
    bench.end(0)
    assert [step.position for step in bench.queue] == [(first if limit else second).position]
    bench.meanwhile = lambda: None
    bench.drain()
    assert {request: request.code for request in bench.client.ended} == {
        first: Code.OK if limit else Code.CANCELLED,
        second: Code.CANCELLED if limit else Code.OK,
    }


def test_a_run_that_was_given_up_leaves_nothing_that_has_grown(bench):
    bench.load(model_config("m0", ["x0"], ["y0"], 0, (-1,), backend="counts"))
    bench.load(model_config("m1", ["x0"], ["y0"], 0, (-1,)))
    steps = [
        Step(model_name="m0", input_map={"x0": "IN"}, output_map={"y0": "mid"}),
        Step(model_name="m1", input_map={"x0": "mid"}, output_map={"y0": "OUT"}),
    ]
    plan = bench.plan(bench.load(ensemble_config("E", steps, ["IN"], ["OUT"], 0, (-1,))), (1,), ["OUT"], is_open=True)
    for value in (2, 40, 2.5, 3):
        request = bench.ask(plan, 0, {"IN": np.full(1, value, np.float32)})
        bench.begin(0)
        if value == 40:
            bench.cancel(request)
        bench.drain()
        if value != 40:
            assert bench.client.found[request]["OUT"].tolist() == [value + 1] * int(value)  # 1: the step's number


def test_many_that_wait_and_fail_at_once(bench):
    """One after the other, not one inside the other."""
    plan = chain(bench, limit=1)
    others = [bench.plan(plan.model, (4, WIDTH), ["OUT"]) for _ in range(20)]
    requests = [bench.ask(each, at, ones(), 1) for each in others for at in range(30)]
    refused = bench.refuse = "queue is full"
    bench.begin(0)
    bench.end(0)
    assert len(bench.client.ended) == len(requests)
    assert all(refused.encode() in request.note for request in requests)


def test_cached_answers_are_for_what_the_members_have_read(bench):
    plan = chain(bench)
    bench.keep_answers(plan.model)
    first = bench.ask(plan, 0, ones(), 1)
    plan.inputs[0].memory(0)[:] = 0  # the client writes what it has given away
    bench.drain()
    assert (bench.client.found[first]["OUT"] == 2).all()
    again = bench.ask(plan, 1, ones(), 1)
    assert bench.queue == []
    assert (bench.client.found[again]["OUT"] == 2).all()
    other = bench.ask(plan, 2, {"IN": np.zeros((1, WIDTH), np.float32)}, 1)
    bench.drain()
    assert (bench.client.found[other]["OUT"] == 1).all()
    block = plan.model.instances[0].block
    assert (block[statistics.CACHE_HITS], block[statistics.CACHE_MISSES]) == (1, 2)
