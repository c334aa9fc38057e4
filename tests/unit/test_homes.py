"""Which worker has a sequence, whatever plan its steps come by."""

from __future__ import annotations

from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any

import pytest

from clientlib import homes
from clientlib.binding import Binder
from clientlib.homes import Homes
from shm.errors import Code, InferError
from shm.messages import PrepareAt

A, B, C = "cpu/a", "cpu/b", "cpu/c"
ALL = (A, B, C)


def test_all_plans_of_a_client_find_a_sequence_at_one_worker() -> None:
    """Also those that prefer other workers, because of their memory."""
    known = Homes()
    begun = {number: known.begin("m", number, ALL, [A, B, C]) for number in range(1, 10)}
    assert set(begun.values()) == {A, B, C}
    assert {number: known.find("m", number, (B, C)) for number in begun} == begun
    assert {known.begin("m", number, (B, C), [B, C]) for number in range(20, 40)} == {B, C}, "new ones are near"
    assert known.find("m", 50, (B, C)) == B, "one that never began: any worker can say so"


def test_after_its_end_a_sequence_keeps_no_slot_and_is_still_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last step may have to be sent again, and a START that is sent again goes where the first one went."""
    monkeypatch.setattr(homes, "MAX_ENDED", 2)
    known = Homes()
    begun = []
    for number in range(1, 4):
        begun.append(known.begin("m", number, ALL, [A, B, C] if number == 1 else [C, B, A]))
        known.end("m", number)
        known.end("m", number)
    assert known._counts.total() == 0
    assert [known.find("m", number, ALL) for number in (2, 3)] == begun[1:]
    assert list(known._ended) == [("m", 2), ("m", 3)]
    assert known.begin("m", 3, ALL, [A, B, C]) == begun[2]
    assert known._counts.total() == 1


def test_where_steps_come_by_several_processes_the_id_decides_in_whatever_company() -> None:
    one, other = Homes(shared=True), Homes(shared=True)
    begun = {number: one.begin("m", number, ALL, [A]) for number in range(1, 200)}
    assert set(begun.values()) == {A, B, C}
    assert {number: other.find("m", number, (C, A, B)) for number in begun} == begun
    fewer = {number: other.find("m", number, (C, B)) for number in begun}
    assert all(fewer[number] == home for number, home in begun.items() if home != A)
    assert {number: one.find("m", number, (C, B)) for number in begun} == begun, "the first step has decided"


def test_the_only_gateway_begins_no_sequence_where_a_worker_is_being_replaced() -> None:
    only, next_one, one_of_two = Homes(shared=True, alone=True), Homes(shared=True, alone=True), Homes(shared=True)
    usual = {number: Homes(shared=True).find("m", number, ALL) for number in range(1, 100)}
    begun = {number: only.begin("m", number, ALL, [C, B]) for number in usual}
    assert set(begun.values()) == {B, C}
    assert {number: only.find("m", number, ALL) for number in begun} == begun, "its steps follow"
    assert {number: only.begin("m", number, ALL, [A, B, C]) for number in begun} == begun, "there its START ends it"
    known = {number for number, home in usual.items() if home != A}
    assert {number: next_one.find("m", number, ALL) for number in known} == {number: begun[number] for number in known}
    assert {number: one_of_two.begin("m", number, ALL, [C, B]) for number in usual} == usual, "others look there"


def test_the_next_gateway_looks_for_no_sequence_where_another_one_may_live_on() -> None:
    """A worker that has died has none; one that is not reached may be stopped, and then goes on with what it had."""
    usual = {number: Homes(shared=True).find("m", number, ALL) for number in range(1, 100)}
    only = Homes(shared=True, alone=True)
    begun = {number: only.begin("m", number, ALL, [B], [A]) for number in usual}  # C is being replaced
    assert all(begun[number] == home for number, home in usual.items() if home != C)
    assert {home for number, home in begun.items() if usual[number] == C} == {A, B}
    assert {number: only.find("m", number, ALL) for number in begun} == begun
    native = Homes()
    assert {native.begin("m", number, ALL, [B], [A]) for number in usual} == {B}, "it alone will look for them"


class Asked:
    """A procedure of the client, answered here: `refusals` by worker."""

    def __init__(self, refusals: dict[str, InferError], responds: Callable[[str], Any] = lambda worker: None) -> None:
        """`responds` is called with each worker that is asked and does not refuse."""
        self.refusals = refusals
        self.responds = responds
        self.workers: list[str] = []

    def run(self, procedure: Generator[Any, Any, Any]) -> Any:
        try:
            call = next(procedure)
            while True:
                assert isinstance(call.message, PrepareAt)
                self.workers.append(call.message.worker)
                refusal = self.refusals.get(call.message.worker)
                if refusal is None:
                    self.responds(call.message.worker)
                call = procedure.throw(refusal) if refusal else procedure.send((None, []))
        except StopIteration as stop:
            return stop.value


def test_a_plan_reaches_the_home_of_a_sequence_that_it_does_not_prefer() -> None:
    known = Homes()
    assert known.begin("m", 7, ALL, [A]) == A
    lanes = {worker: SimpleNamespace(worker=worker, channel=worker) for worker in ALL}
    link: Any = SimpleNamespace(homes=known, lanes=SimpleNamespace(mine=lanes.get))
    ranges = SimpleNamespace(live={})
    layout = SimpleNamespace(model="m", ranges=ranges, input_positions=1, output_positions=1)
    prepared = SimpleNamespace(
        link=link, index=1, generation=1, bound_at={B}, worker=B, layout=layout, word=1, events=False
    )
    spread: Any = SimpleNamespace(prepared=prepared, workers=(B, C), bounds={})
    binder: Binder[Any] = Binder(8, 0.0, lambda: None)
    asked = Asked({})
    assert asked.run(binder.bind_at(link, spread, A)).lane is lanes[A]
    assert asked.workers == [A]
    assert spread.bounds == {}, "other requests do not go there"
    prepared.bound_at.remove(A)
    gone = Asked({A: InferError(Code.NOT_FOUND, "worker 'cpu/a' does not serve model 'm'")})
    assert gone.run(binder.bind_at(link, spread, A)).lane is lanes[B]
    assert known.find("m", 7, (B, C)) == B, "what it had is lost, and this worker can say so"
    with pytest.raises(InferError, match="does not serve"):
        Asked({C: InferError(Code.NOT_FOUND, "it does not serve")}).run(binder.bind_at(link, spread, C))


def test_a_plan_is_bound_at_those_that_respond_and_waits_only_where_none_does() -> None:
    """Also the worker that it was prepared at: that may have been stopped since, and keep whoever opens a channel."""
    lanes = {worker: SimpleNamespace(worker=worker, channel=worker) for worker in ALL}
    here: dict[str, Any] = {}  # the lanes that the caller has already
    silent = InferError(Code.UNAVAILABLE, "it does not respond")

    def bind(refusals: dict[str, InferError]) -> tuple[list[str], set[str], str]:
        link: Any = SimpleNamespace(homes=Homes(), lanes=SimpleNamespace(mine=here.get))
        layout = SimpleNamespace(model="m", ranges=SimpleNamespace(live={}), input_positions=1, output_positions=1)
        prepared = SimpleNamespace(
            link=link, index=1, generation=1, bound_at={A}, worker=A, layout=layout, word=1, events=False
        )
        spread: Any = SimpleNamespace(prepared=prepared, workers=ALL, bounds={})
        spread.missing = lambda: [worker for worker in ALL if worker not in spread.bounds]
        asked = Asked(refusals, lambda worker: here.setdefault(worker, lanes[worker]))
        bound = asked.run(Binder(8, 0.0, lambda: None).bind_several(link, spread))
        assert bound.spread is spread
        return asked.workers, set(spread.bounds), bound.lane.worker

    here.update(lanes)
    assert bind({}) == ([B, C], {A, B, C}, A), "where it has a channel already, nobody need look"
    here.clear()
    assert bind({A: silent}) == ([A, B, C], {B, C}, B)
    here.clear()
    here[A] = lanes[A]
    assert bind({B: silent, C: silent}) == ([B, C], {A}, A)
