"""Which worker a step elsewhere goes to, where its plan is bound, and how many plans there may be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from broker.repository.scheduling import Step
from broker.worker.ensembles.remote import homes, pool
from broker.worker.ensembles.remote.homes import StepHomes
from broker.worker.ensembles.remote.plans import AGAIN_NS, Bound, least_of
from shm import messages
from shm.costs import Seen
from shm.errors import Code, InferError
from tests.fakes.elsewhere import SpreadBench
from tests.fakes.ensembles import WIDTH, ensemble_config, model_config

A, B, C = "cpu/a", "cpu/b", "cpu/c"
WORD = 5 | 1 << 32


class Lane:
    """What a choice sees of a lane: `cost` None is a worker that is being replaced."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.cost: int | None = 1000
        self.silent = False

    @property
    def replaced(self) -> bool:
        return self.cost is None and not self.silent

    def seen(self, now: int) -> Seen | None:
        return None if self.cost is None else Seen(0, self.cost, False, 0, 0, 0)


class Session:
    """Calls wait for `answer`."""

    def __init__(self) -> None:
        self.lanes = {worker: Lane(worker) for worker in (A, B, C)}
        self.calls: list[tuple[Any, Callable[..., None]]] = []
        self.let_go: list[int] = []
        self.plans = 1
        self.homes = StepHomes()

    def lane(self, worker: str, streams: bool = False) -> Lane:
        return self.lanes[worker]

    def call(self, message: Any, then: Any = None, fds: Any = ()) -> None:
        if isinstance(message, messages.Release):
            self.let_go.append(message.index)
        else:
            self.calls.append((message, then))

    def less(self) -> None:
        self.plans -= 1

    def answer(self, reply: Any = None) -> str:
        """The oldest call gets its answer; returns the worker that it was for."""
        message, then = self.calls.pop(0)
        if isinstance(message, messages.PrepareStep):
            then(reply or messages.Prepared(index=5, generation=1, worker=A, model_version="1", rows=0), [])
            return message.plan.worker
        then(reply or messages.Done(), [])
        return str(message.worker)


@pytest.fixture
def session() -> Session:
    return Session()


def bound(session: Any, *workers: str) -> Bound:
    plan: Any = SimpleNamespace(inputs=(), outputs=())
    memory: Any = SimpleNamespace(refusal=lambda names: None)
    message = messages.PrepareStep(plan=messages.Prepare(model="m", worker=workers[0], inputs=(), outputs=()))
    return Bound(session, memory, session, plan, message, workers, None)


def chosen(plan: Bound, now: int = 1, count: int = 12) -> set[str]:
    return {plan.choose(now, turn).worker for turn in range(count)}


def test_until_the_broker_has_answered_it_is_the_first(session):
    plan = bound(session, A, B)
    assert chosen(plan) == {A}
    assert plan.word(A) == plan.word(B) == 0
    session.answer()
    assert (plan.word(A), plan.word(B)) == (WORD, 0)


def test_it_is_bound_at_the_others_and_the_least_busy_is_chosen(session):
    plan = bound(session, A, B, C)
    session.answer()
    assert chosen(plan, AGAIN_NS + 1) == {A}
    assert {session.answer(), session.answer()} == {B, C}
    assert chosen(plan) == {A, B, C}, "of equals all"
    session.lanes[A].cost = session.lanes[C].cost = 5000
    assert chosen(plan) == {B}
    assert plan.word(B) == WORD
    assert session.calls == [], "it is bound once"


def test_a_worker_that_is_being_replaced_is_left_out_unless_all_are(session):
    plan = bound(session, A, B)
    session.answer()
    chosen(plan, AGAIN_NS + 1)
    session.answer()
    session.lanes[A].cost = None
    assert chosen(plan) == {B}
    session.lanes[B].cost = None
    assert chosen(plan) == {A, B}


def test_where_it_was_refused_it_is_tried_again_a_second_later(session):
    plan = bound(session, A, B)
    session.answer()
    now = AGAIN_NS + 1
    chosen(plan, now)
    session.answer(InferError(Code.UNAVAILABLE, "worker 'cpu/b' is starting"))
    assert chosen(plan, now + AGAIN_NS) == {A}
    assert session.calls == []
    assert chosen(plan, now + AGAIN_NS + 1) == {A}
    assert session.answer() == B
    assert chosen(plan) == {A, B}


def test_while_its_only_worker_is_being_replaced_another_is_asked_and_waited_for(session):
    plan = bound(session, A, B)
    session.answer()
    session.lanes[A].cost = None
    assert chosen(plan) == {B}
    assert plan.word(B) == 0
    (call,) = session.calls
    assert call[0].wait
    session.answer(InferError(Code.NOT_FOUND, "it does not serve it"))
    with pytest.raises(InferError, match="does not serve"):
        plan.word(B)


def test_steps_of_a_sequence_have_one_home(session):
    plan = bound(session, A, B, C)
    homes = {number: plan.home(number, True, 1, number).worker for number in range(9)}
    assert set(homes.values()) == {A, B, C}
    session.answer()
    assert {session.answer(), session.answer()} == {B, C}
    session.lanes[A].cost = 10**9
    assert {number: plan.home(number, False, 1, number).worker for number in range(9)} == homes
    assert plan.word(A) == plan.word(B) == plan.word(C) == WORD


def test_a_sequence_does_not_begin_at_a_worker_that_is_being_replaced(session, monkeypatch):
    monkeypatch.setattr(homes, "MAX_STRAYS", 3)
    plan, later = bound(session, A, B, C), bound(session, A, B, C)
    session.lanes[B].cost = None
    assert {plan.home(number, True, 1, turn).worker for turn, number in enumerate((1, 4, 7))} == {A, C}
    begun = {number: plan.home(number, False, 1, number).worker for number in range(9)}
    assert set(begun.values()) == {A, C}
    session.lanes[B].cost = 1000
    assert {number: later.home(number, False, 1, 0).worker for number in range(9)} == begun, "by other plans, too"
    assert later.home(4, True, 1, 0).worker == begun[4], "there its START ends what it had before"
    assert later.home(10, True, 1, 0).worker == B
    session.lanes[A].cost = session.lanes[B].cost = None
    assert (plan.home(13, True, 1, 0).worker, plan.home(13, False, 1, 0).worker) == (C, C)
    assert plan.home(1, False, 1, 0).worker == B, "those that began first are forgotten first"
    session.lanes[C].cost = None
    assert plan.home(16, True, 1, 0).worker == B, "where none is up, any is waited for"


def test_a_sequence_begins_where_one_of_its_number_may_live_on(session):
    """At a worker that does not respond, to which no other step goes."""
    plan = bound(session, A, B, C)
    session.lanes[B].cost, session.lanes[B].silent = None, True
    assert [plan.home(number, True, 1, 0).worker for number in (1, 2, 4)] == [B, C, B]


def test_a_step_that_can_go_nowhere_else_waits_although_that_worker_was_just_asked_whether_it_is_up(session):
    plan = bound(session, A, B)
    session.answer()
    assert chosen(plan, AGAIN_NS + 1) == {A}
    assert plan.home(1, False, 1, 0).worker == B
    ((message, _),) = session.calls
    assert not message.wait
    session.answer(InferError(Code.UNAVAILABLE, "worker 'cpu/b' does not respond"))
    ((message, _),) = session.calls
    assert (message.worker, message.wait, plan.word(B)) == (B, True, 0)
    session.answer()
    assert plan.word(B) == WORD


def test_what_is_let_go_is_let_go_once(session):
    plan = bound(session, A, B)
    plan.release()
    plan.release()
    assert (session.plans, session.let_go) == (0, [])
    session.answer()
    assert session.let_go == [5]
    chosen(plan, AGAIN_NS + 1)
    assert session.calls == [], "and bound nowhere else"


def test_of_no_lane_that_is_up_none_is_the_least_busy(session):
    session.lanes[A].cost = None
    lanes: list[Any] = [session.lanes[A]]
    assert least_of(lanes, 1, 7) is None


# --- how many there may be ------------------------------------------------------------------------------------------


@pytest.fixture
def bench() -> Iterator[SpreadBench]:
    bench = SpreadBench()
    yield bench
    assert bench.leftovers()[0] == 0
    bench.close()


def chain(bench: SpreadBench, name: str) -> Any:
    for member in ("m0", "m1"):
        bench.load(model_config(member, ["x0"], ["y0"], 64, (WIDTH,)))
    steps = [
        Step(model_name="m0", input_map={"x0": "IN"}, output_map={"y0": "t"}),
        Step(model_name="m1", input_map={"x0": "t"}, output_map={"y0": "OUT"}),
    ]
    return bench.load(bench.spread(ensemble_config(name, steps, ["IN"], ["OUT"], 64, (WIDTH,)), {0, 1}))


def asked(bench: SpreadBench, plan: Any, rows: int, position: int = 0) -> Any:
    return bench.ask(plan, position, {"IN": np.ones((rows, WIDTH), np.float32)}, rows=rows)


def test_more_shapes_than_plans_evict_those_not_used_for_longest(bench, monkeypatch):
    monkeypatch.setattr(pool, "MAX_PLANS", 8)
    plans = [bench.plan(chain(bench, name), (16, WIDTH), ["OUT"]) for name in ("E", "F")]
    for turn in range(40):
        for plan in plans:
            request = asked(bench, plan, 1 + turn % 16)
            bench.drain()
            assert request.code == Code.OK
            assert len(bench.session.plans) <= 8
    shapes = sorted(each.plan.inputs[0].shape[0] for each in bench.session.plans.values())
    assert shapes == [7, 7, 7, 7, 8, 8, 8, 8], "two steps of two ensembles, the two shapes used last"
    known = set(bench.session.plans)
    for plan in plans:
        asked(bench, plan, 7)
        bench.drain()
    assert set(bench.session.plans) == known, "they are used again"


def test_requests_under_way_keep_theirs_and_one_too_many_is_told(bench, monkeypatch):
    monkeypatch.setattr(pool, "MAX_PLANS", 3)
    plan = bench.plan(chain(bench, "E"), (16, WIDTH), ["OUT"])
    requests = [asked(bench, plan, rows, rows) for rows in (1, 2, 3)]
    refused = asked(bench, plan, 4, 4)
    assert refused.code == Code.UNAVAILABLE
    assert b"requests under way have 3 plans in other workers" in refused.note
    bench.drain()
    assert [request.code for request in requests] == [Code.UNAVAILABLE, Code.OK, Code.UNAVAILABLE]
    again = asked(bench, plan, 4, 4)
    bench.drain()
    assert again.code == Code.OK
