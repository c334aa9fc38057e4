"""Ensembles with members elsewhere: random ones in every order of their steps' ends, and one thing at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broker.repository.scheduling import Step
from broker.worker.ensembles.remote import elsewhere, memory, pool, prepared, run
from shm.errors import Code, InferError, too_small
from shm.layout import SEQUENCE_AGAIN, SEQUENCE_START
from shm.recovery import TWICE
from tests.fakes.elsewhere import SpreadBench
from tests.fakes.ensembles import WIDTH, ensemble_config, model_config
from tests.unit.test_ensemble_runs import Flow


@pytest.fixture
def bench() -> Iterator[SpreadBench]:
    bench = SpreadBench()
    yield bench
    plans, regions = bench.leftovers()
    assert plans == 0
    assert regions <= 1
    bench.close()


class SpreadFlow(Flow):
    """Some steps of E are elsewhere."""

    def __init__(self, bench: SpreadBench, data: st.DataObject) -> None:
        super().__init__(bench, data)
        plain = [at for at, step in enumerate(self.steps) if step.model_name not in self.inner]
        chosen = data.draw(st.sets(st.sampled_from(plain), min_size=1), "elsewhere") if plain else set()
        self.model = bench.load(bench.spread(self.model.config, chosen))
        self.plans = [self._plan() for _ in range(2)]


@given(st.data(), st.sampled_from([8, 4096]))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_flows_against_a_plain_evaluation(data, room):
    known, prepared.ROOM = prepared.ROOM, room
    bench = SpreadBench()
    try:
        flow = SpreadFlow(bench, data)
        flow.play()
        flow.check_end()
        assert bench.leftovers()[0] == 0
    finally:
        prepared.ROOM = known
        bench.close()


# --- one thing at a time ------------------------------------------------------------------------------------------


def chain(bench: SpreadBench, at: set[int], length: int = 3, dims: tuple[int, ...] = (WIDTH,), **more: Any) -> Any:
    """E, whose steps `at` are elsewhere."""
    steps = []
    for number in range(length):
        bench.load(model_config(f"m{number}", ["x0"], ["y0"], 4, dims))
        source, target = f"t{number - 1}" if number else "IN", f"t{number}" if number < length - 1 else "OUT"
        steps.append(Step(model_name=f"m{number}", input_map={"x0": source}, output_map={"y0": target}))
    return bench.load(bench.spread(ensemble_config("E", steps, ["IN"], ["OUT"], 4, (WIDTH,)), at, **more))


def ones(rows: int = 1) -> dict[str, np.ndarray]:
    return {"IN": np.ones((rows, WIDTH), np.float32)}


def answer(bench: SpreadBench, request) -> float:
    return float(bench.client.found[request]["OUT"].flat[0])


def test_plans_elsewhere_serve_the_requests_of_any_client(bench):
    model = chain(bench, {0, 1})
    for plan in [bench.plan(model, (4, WIDTH), ["OUT"]) for _ in range(3)]:
        request = bench.ask(plan, 0, ones(), rows=1)
        bench.drain()
        assert answer(bench, request) == 1 + 0 + 1 + 2
    assert len(bench.session.plans) == 2
    bench.ask(plan, 0, ones(4), rows=4)
    bench.drain()
    assert len(bench.session.plans) == 4, "other shapes have plans of their own"


def test_sequences_of_two_clients_have_plans_of_their_own(bench):
    model = chain(bench, {1}, sequences=True)
    plans = [bench.plan(model, (4, WIDTH), ["OUT"]) for _ in range(2)]
    for plan, owner in zip(plans, (7, 8), strict=True):
        plan.owner = owner
        bench.ask(plan, 0, ones(), rows=1)
        bench.drain()
    assert sorted(each.owner for each in bench.session.plans.values()) == [7, 8]


def test_steps_of_sequences_here_are_their_clients_although_another_step_is_elsewhere(bench):
    model = chain(bench, {1})
    owners, plans = [], []
    for owner, number in ((7, 5), (8, 5), (7, 0), (8, 0)):
        plan = bench.plan(model, (4, WIDTH), ["OUT"])
        plan.owner = owner
        bench.ask(plan, 0, ones(), rows=1, sequence=(number, SEQUENCE_START if number else 0))
        owners.append({step.plan.owner for step in bench.queue})
        plans.append({step.plan for step in bench.queue})
        bench.drain()
    assert owners == [{7}, {8}, {7}, {8}]
    assert plans[2] == plans[3], "what is of no sequence serves any client"
    assert not plans[0] & plans[1]


def test_what_was_prepared_goes_with_the_ensemble(bench):
    model = chain(bench, {1})
    plan = bench.plan(model, (4, WIDTH), ["OUT"])
    bench.ask(plan, 0, ones(), rows=1)
    bench.drain()
    request = bench.ask(plan, 1, ones(), rows=1)  # it has what the first one left
    model.ensemble.close()
    assert len(bench.session.plans) == 1
    bench.drain()
    assert answer(bench, request) == 4
    assert bench.session.plans == {}


def test_a_bounded_number_of_what_was_prepared_is_kept(bench, monkeypatch):
    monkeypatch.setattr(pool, "MAX_POOLED", 2)
    model = chain(bench, {1})
    plan = bench.plan(model, (4, WIDTH), ["OUT"])
    for rows in (1, 2, 3, 4, 4):
        bench.ask(plan, 0, ones(rows), rows=rows)
        bench.drain()
    assert len(bench.session.plans) == 2
    assert {each.plan.inputs[0].shape[0] for each in bench.session.plans.values()} == {3, 4}


def test_a_bounded_number_of_bytes_is_kept(bench, monkeypatch):
    monkeypatch.setattr(pool, "PREPARED_BYTES", 10)
    model = chain(bench, {1})
    bench.ask(bench.plan(model, (4, WIDTH), ["OUT"]), 0, ones(), rows=1)
    bench.drain()
    assert bench.session.plans == {}


def test_too_many_requests_at_a_time_are_refused(bench, monkeypatch):
    monkeypatch.setattr(elsewhere, "MAX_RUNS", 2)
    model = chain(bench, {1})
    plan = bench.plan(model, (4, WIDTH), ["OUT"])
    requests = [bench.ask(plan, position, ones(), rows=1) for position in range(3)]
    assert requests[2].code == Code.UNAVAILABLE
    assert b"2 requests for it are under way" in requests[2].note
    bench.drain()
    assert [request.code for request in requests[:2]] == [Code.OK, Code.OK]


def test_an_output_larger_than_its_room_runs_again_with_more(bench, monkeypatch):
    monkeypatch.setattr(prepared, "ROOM", 4)
    model = chain(bench, {1}, dims=(-1,))
    plan = bench.plan(model, (4, WIDTH), ["OUT"])
    request = bench.ask(plan, 0, ones(4), rows=4)
    bench.drain()
    assert answer(bench, request) == 4
    assert [each.plan.outputs[0].byte_size for each in bench.session.plans.values()] == [64]
    request = bench.ask(plan, 0, ones(4), rows=4)
    bench.drain()
    assert answer(bench, request) == 4
    assert len(bench.session.plans) == 1


def in_the_second_step(bench: SpreadBench, plan: Any) -> Any:
    """A request whose step elsewhere, the second of three, is under way."""
    request = bench.ask(plan, 0, ones(4), rows=4)
    bench.begin(0)
    bench.end(0)
    return request


def tell_too_small(bench: SpreadBench, byte_size: int) -> None:
    """The one step elsewhere that is under way is said to need so many bytes."""
    sends = bench.sends.pop(bench.queue.pop())
    bench.finish(sends, (Code.INVALID_ARG, too_small("output 'y0'", 64, byte_size)))


def room_elsewhere(bench: SpreadBench) -> set[int]:
    return {each.plan.outputs[0].byte_size for each in bench.session.plans.values()}


@pytest.mark.parametrize("retry", [True, False])
def test_an_output_for_which_there_is_no_memory_costs_no_later_request_its_room(bench, monkeypatch, retry):
    create = memory.create_pool

    def create_small(byte_size: int) -> int:
        if byte_size > 1 << 30:
            raise InferError(Code.UNAVAILABLE, f"no memory for {byte_size} bytes")
        return create(byte_size)

    monkeypatch.setattr(memory, "create_pool", create_small)
    plan = bench.plan(chain(bench, {1}, dims=(-1,), retry=retry), (4, WIDTH), ["OUT"])
    request = in_the_second_step(bench, plan)
    tell_too_small(bench, 20 << 30)
    assert b"should be at least 21474836480 bytes" in request.note
    for _ in range(3):
        request = bench.ask(plan, 0, ones(4), rows=4)
        bench.drain()
        assert answer(bench, request) == 4
    assert room_elsewhere(bench) == {prepared.ROOM}


def test_a_room_that_the_broker_refuses_is_not_asked_for_for_ever(bench):
    """The host has the memory, and the quota of this worker has not."""
    plan = bench.plan(chain(bench, {1}, dims=(-1,)), (4, WIDTH), ["OUT"])
    request = in_the_second_step(bench, plan)
    bench.session.full = "the regions of uid 0 have too many bytes"
    tell_too_small(bench, memory.SLAB + 1)
    assert request.note.startswith(b"in ensemble 'E', the regions of uid 0 have too many bytes")
    bench.session.full = ""
    request = bench.ask(plan, 0, ones(4), rows=4)
    bench.drain()
    assert answer(bench, request) == 4
    assert room_elsewhere(bench) == {prepared.ROOM}


def test_only_so_much_is_remembered_of_how_large_an_output_was(bench, monkeypatch):
    monkeypatch.setattr(run, "LARGEST", 32)
    monkeypatch.setattr(prepared, "ROOM", 4)
    model = chain(bench, {1}, dims=(-1,))
    request = bench.ask(bench.plan(model, (4, WIDTH), ["OUT"]), 0, ones(4), rows=4)
    bench.drain()
    assert answer(bench, request) == 4, "it has its room all the same"
    assert room_elsewhere(bench) == {64}
    assert model.ensemble.rooms == {}


def test_memory_for_more_room_is_made_by_the_session_s_thread(bench, monkeypatch):
    """Who settles a step may be the leader of the worker's loop."""
    monkeypatch.setattr(prepared, "ROOM", 4)
    model = chain(bench, {1}, dims=(-1,))
    request = in_the_second_step(bench, bench.plan(model, (4, WIDTH), ["OUT"]))
    bench.session.holds = True
    tell_too_small(bench, 48)
    assert model.ensemble.rooms == {}
    assert not bench.queue
    bench.session.holds = False
    bench.session.later.pop()()
    bench.drain()
    assert answer(bench, request) == 4


def test_a_cancel_comes_between_too_little_room_and_more(bench, monkeypatch):
    monkeypatch.setattr(prepared, "ROOM", 4)
    model = chain(bench, {1}, dims=(-1,))
    request = in_the_second_step(bench, bench.plan(model, (4, WIDTH), ["OUT"]))
    bench.session.holds = True
    tell_too_small(bench, 48)
    request.ended = Code.CANCELLED
    request.sequence.withdraw()
    bench.session.holds = False
    bench.session.later.pop()()
    assert not bench.queue
    assert request.code == Code.CANCELLED


def test_the_leader_looks_only_for_steps_after_which_nothing_large_can_follow(bench, monkeypatch):
    """That shows when a run of the kind has made all that it needs, tensors of later steps included."""
    model = chain(bench, {0})
    plan = bench.plan(model, (4, WIDTH), ["OUT"])
    seen = []
    for limit in (prepared.LIGHT, prepared.LIGHT, 100):
        monkeypatch.setattr(prepared, "LIGHT", limit)
        bench.ask(plan, 0, ones(4), rows=4)
        seen += [sends.light for sends in bench.sends.values()]
        bench.drain()
    assert seen == [False, True, False]


def test_what_may_not_run_twice_fails_once_for_want_of_room(bench, monkeypatch):
    monkeypatch.setattr(prepared, "ROOM", 4)
    model = chain(bench, {1}, dims=(-1,), retry=False)
    plan = bench.plan(model, (4, WIDTH), ["OUT"])
    request = bench.ask(plan, 0, ones(4), rows=4)
    bench.drain()
    assert b"should be at least 48 bytes" in request.note
    assert b"step 1: model 'm1'" in request.note
    request = bench.ask(plan, 0, ones(4), rows=4)  # there is room now
    bench.drain()
    assert answer(bench, request) == 4


def test_what_a_sequence_s_step_gave_is_asked_for_again_and_the_step_not_run_again(bench, monkeypatch):
    monkeypatch.setattr(prepared, "ROOM", 4)
    model = chain(bench, {1}, dims=(-1,), retry=False, sequences=True)
    plan = bench.plan(model, (4, WIDTH), ["OUT"])
    request = bench.ask(plan, 0, ones(4), rows=4, sequence=(7, SEQUENCE_START))
    flags = []
    while bench.queue:
        flags.append((bench.queue[0].slot, bench.queue[0].flags))
        bench.begin(0)
        bench.end(0)
    assert flags == [
        (0, SEQUENCE_START),
        (1, SEQUENCE_START),
        (1, SEQUENCE_START | SEQUENCE_AGAIN),
        (2, SEQUENCE_START),
    ]
    assert answer(bench, request) == 4


def test_a_plan_that_cannot_be_had_fails_its_request(bench):
    model = chain(bench, {1})
    bench.session.refuse = "there are too many"
    plan = bench.plan(model, (4, WIDTH), ["OUT"])
    request = bench.ask(plan, 0, ones(), rows=1)
    bench.drain()
    assert request.code == Code.UNAVAILABLE
    assert request.note.startswith(b"in ensemble 'E', there are too many (step 1: model 'm1' on 'x0' = 't0'")


def test_answers_are_kept_for_what_the_members_elsewhere_have_read(bench):
    model = chain(bench, {0, 1, 2})
    bench.keep_answers(model)
    plan = bench.plan(model, (4, WIDTH), ["OUT"])
    first = bench.ask(plan, 0, ones(), rows=1)
    plan.inputs[0].memory(0)[:] = 0  # by its client, while the request is under way
    bench.drain()
    again = bench.ask(plan, 1, ones(), rows=1)
    assert not bench.queue
    assert answer(bench, first) == answer(bench, again) == 4


def test_memory_that_cannot_be_had_is_said_to_be_the_reason_and_asked_for_again(bench):
    model = chain(bench, {1})
    plan = bench.plan(model, (4, WIDTH), ["OUT"])
    bench.session.full = "the regions of uid 0 have too many bytes"
    request = bench.ask(plan, 0, ones(), rows=1)
    bench.drain()
    assert request.note.startswith(b"in ensemble 'E', the regions of uid 0 have too many bytes (step 1: model 'm1'")
    bench.session.full = ""
    request = bench.ask(plan, 0, ones(), rows=1)
    bench.drain()
    assert answer(bench, request) == 4


def test_who_ends_a_worker_twice_is_named(bench):
    model = chain(bench, {1})
    plan = bench.plan(model, (4, WIDTH), ["OUT"])
    request = bench.ask(plan, 0, ones(), rows=1)
    bench.begin(0)
    bench.end(0)
    bench.finish(bench.sends[bench.queue.pop()], (Code.UNAVAILABLE, TWICE))
    assert bench.blamed == [(plan.session, "E")]
    assert TWICE.encode() in request.note


def test_a_run_alone_waits_for_its_steps_elsewhere(bench):
    model = chain(bench, {0, 1, 2})
    plan = bench.plan(model, (4, WIDTH), ["OUT"])
    bench.answers_at_once = True
    request = bench.ask(plan, 0, ones(), rows=1)
    request.code = Code.OK
    model.ensemble.run_alone(request)
    assert request.output_position == 0
    assert answer(bench, request) == 4


def test_a_tensor_of_another_size_is_asked_for_anew(bench):
    model = chain(bench, {1, 2})
    plan = bench.plan(model, (4, WIDTH), ["OUT"])
    for rows in (1, 2, 1, 2):
        request = bench.ask(plan, 0, ones(rows), rows=rows)
        bench.drain()
        assert answer(bench, request) == 4
    assert len(bench.session.plans) == 4
