"""Plans of all clients of a worker: who is in whose way, and what a request may write."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from broker.worker import overlap
from broker.worker.overlap import MAX_COMPARED, Crowds, scan
from shm.views import Placement

conflict = overlap._conflict


class Tensor:
    def __init__(self, name, offset, byte_size=64, positions=1, memory=(1, 1), stride=0):
        stride = stride or byte_size
        end = offset + (positions - 1) * stride + byte_size
        self.name = name
        self._span = memory, Placement(offset, stride, byte_size, positions, end)

    def span(self):
        return self._span


class Plan:
    def __init__(self, inputs, outputs):
        self.inputs, self.outputs = inputs, outputs
        self.crowded = False
        self.told = 0

    def simplify(self):
        self.told += 1


def request(plan, input_position=0, output_position=0):
    return SimpleNamespace(plan=plan, input_position=input_position, output_position=output_position, started=True)


def test_strangers_are_not_crowded():
    crowds = Crowds()
    a = Plan([Tensor("x", 0)], [Tensor("y", 64)])
    b = Plan([Tensor("x", 128)], [Tensor("y", 192)])
    c = Plan([Tensor("x", 0, memory=(1, 2))], [Tensor("y", 64, memory=(1, 2))])
    for plan in (a, b, c):
        crowds.enter(plan)
    assert not any(plan.crowded for plan in (a, b, c))


def test_two_readers_of_one_range_are_no_rivals():
    crowds = Crowds()
    a = Plan([Tensor("x", 0)], [Tensor("y", 64)])
    b = Plan([Tensor("x", 0)], [Tensor("y", 128)])
    crowds.enter(a)
    crowds.enter(b)
    assert not a.crowded
    assert not b.crowded


def test_a_writer_over_anothers_input_crowds_both_until_it_leaves():
    crowds = Crowds()
    a = Plan([Tensor("x", 0)], [Tensor("y", 64)])
    b = Plan([Tensor("x", 128)], [Tensor("y", 0)])
    crowds.enter(a)
    crowds.enter(b)
    assert a.crowded
    assert b.crowded
    crowds.leave(b)
    assert not a.crowded


def test_the_one_who_stays_crowded_by_a_third_stays_crowded():
    crowds = Crowds()
    a, b, c = (Plan([Tensor("x", 256 + 64 * k)], [Tensor("y", 0)]) for k in range(3))
    for plan in (a, b, c):
        crowds.enter(plan)
    crowds.leave(c)
    assert a.crowded
    assert b.crowded
    crowds.leave(b)
    assert not a.crowded


def test_an_output_over_its_own_input_is_refused_without_any_neighbour():
    plan = Plan([Tensor("x", 0, positions=4)], [Tensor("y", 128, positions=4)])
    Crowds().enter(plan)
    assert plan.crowded
    assert "'y'" in scan(plan, 2, 0, [])  # both at 128
    assert scan(plan, 0, 0, []) == ""


def test_live_requests_of_rivals_are_in_the_way_and_others_are_not():
    crowds = Crowds()
    a = Plan([Tensor("x", 0, positions=4)], [Tensor("y", 1024, positions=4)])
    b = Plan([Tensor("x", 4096)], [Tensor("y", 64)])  # writes where a's input position 1 lies
    for plan in (a, b):
        crowds.enter(plan)
    assert scan(b, 0, 0, [request(a, 1)]) != ""
    assert scan(b, 0, 0, [request(a, 2)]) == ""
    assert scan(a, 1, 0, [request(b)]) != ""
    assert scan(a, 0, 0, [request(b)]) == ""


def test_what_has_not_been_admitted_is_in_nobodys_way():
    plan = Plan([Tensor("x", 0)], [Tensor("y", 0)])
    other = Plan([Tensor("x", 640)], [Tensor("y", 128)])
    other.crowded = True
    waiting = request(plan)
    plan.crowded = True
    waiting.started = False
    assert scan(other, 0, 0, [waiting]) == ""


def test_a_client_with_too_much_in_one_place_is_refused_rather_than_compared():
    far = Plan([Tensor("x", 1 << 20)], [Tensor("y", 1 << 21)])
    far.crowded = True
    plan = Plan([Tensor("x", 0)], [Tensor("y", 64)])
    assert scan(plan, 0, 0, [request(far)] * MAX_COMPARED) == ""
    assert "in flight" in scan(plan, 0, 0, [request(far)] * (MAX_COMPARED + 1))


def test_thousands_of_plans_on_one_range_enter_and_leave_without_comparing_all_with_all():
    crowds = Crowds()
    plans = [Plan([Tensor("x", 64)], [Tensor("y", 0)]) for _ in range(4096)]
    for plan in plans:
        crowds.enter(plan)
    assert all(plan.crowded for plan in plans)
    assert sum(plan.told for plan in plans) <= 2 * len(plans)
    for plan in plans:
        crowds.leave(plan)
    assert not crowds._spans


def test_thousands_of_plans_apart_enter_without_comparing_all_with_all(monkeypatch):
    compared = []
    monkeypatch.setattr(overlap, "_conflict", lambda a, b: compared.append(1))
    crowds = Crowds()
    plans = [Plan([Tensor("x", 128 * k)], [Tensor("y", 128 * k + 64)]) for k in range(4096)]
    plans.insert(2048, Plan([Tensor("x", 1 << 20, 1 << 19)], [Tensor("y", 3 << 19, 1 << 19)]))  # a large one among them
    for plan in plans:
        crowds.enter(plan)
    assert not any(plan.crowded for plan in plans)
    for plan in plans:
        crowds.leave(plan)
    assert not compared
    assert not crowds._spans


def test_plans_woven_into_each_other_are_compared_exactly_only_while_they_are_few(monkeypatch):
    compared = []
    monkeypatch.setattr(overlap, "_conflict", lambda a, b: compared.append(1) or conflict(a, b))

    def woven(k):
        return Plan([Tensor("x", 0, memory=(1, 2))], [Tensor("y", 64 * k, positions=8, stride=64 * 4096)])

    few, many = [woven(k) for k in range(overlap.LOOK)], [woven(k) for k in range(1024)]
    for plans in (few, many):
        crowds = Crowds()
        for plan in plans:
            crowds.enter(plan)
    assert not any(plan.crowded for plan in few)
    assert many[-1].crowded, "or so it is said: what may run is decided by position"
    assert len(compared) <= 2 * overlap.LOOK * (len(few) + len(many))


def test_a_plan_stays_crowded_by_one_that_the_leaving_plan_does_not_know():
    crowds = Crowds()
    here, there = (1, 1), (1, 2)
    both = Plan([Tensor("x", 0, memory=here)], [Tensor("y", 0, memory=there)])
    leaving = Plan([Tensor("x", 512, memory=here)], [Tensor("y", 0, memory=here)])
    third = Plan([Tensor("x", 0, memory=there)], [Tensor("y", 512, memory=there)])
    for plan in (both, leaving, third):
        crowds.enter(plan)
    crowds.leave(leaving)
    assert both.crowded
    assert third.crowded


ranges = st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(1, 2))


@settings(deadline=None, max_examples=200)
@given(st.lists(ranges, min_size=2, max_size=5))
def test_crowded_is_exactly_sharing_a_written_byte(places):
    def used(tensor):
        place = tensor.span()[1]
        return set(range(place.offset, place.end))

    plans = [Plan([Tensor("x", i * 32, 64 * n)], [Tensor("y", k * 32, 64)]) for i, k, n in places]
    crowds = Crowds()
    for plan in plans:
        crowds.enter(plan)
    for index, plan in enumerate(plans):
        reads, writes = used(plan.inputs[0]), used(plan.outputs[0])
        expected = bool(reads & writes)
        for other in plans[:index] + plans[index + 1 :]:
            theirs = used(other.outputs[0])
            expected |= bool(writes & (used(other.inputs[0]) | theirs) or reads & theirs)
        assert plan.crowded == expected
