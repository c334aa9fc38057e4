"""Plans of all clients of a worker: who is in whose way, and what a request may write."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from broker.worker import overlap
from broker.worker.overlap import MAX_COMPARED, Crowds
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
        self.busy = bytearray(2048)
        self.reads = {}
        self.told = 0

    def simplify(self):
        self.told += 1


def crowds_of(live=()):
    return Crowds(lambda: live)


def request(plan, input_position=0, output_position=0, started=True):
    """A request that was admitted before anything else was known of its plan."""
    plan.busy[output_position] = started
    return SimpleNamespace(plan=plan, input_position=input_position, output_position=output_position, started=started)


def test_strangers_are_not_crowded():
    crowds = crowds_of()
    a = Plan([Tensor("x", 0)], [Tensor("y", 64)])
    b = Plan([Tensor("x", 128)], [Tensor("y", 192)])
    c = Plan([Tensor("x", 0, memory=(1, 2))], [Tensor("y", 64, memory=(1, 2))])
    for plan in (a, b, c):
        crowds.enter(plan)
    assert not any(plan.crowded for plan in (a, b, c))


def test_two_readers_of_one_range_are_no_rivals():
    crowds = crowds_of()
    a = Plan([Tensor("x", 0)], [Tensor("y", 64)])
    b = Plan([Tensor("x", 0)], [Tensor("y", 128)])
    crowds.enter(a)
    crowds.enter(b)
    assert not a.crowded
    assert not b.crowded


def test_a_writer_over_anothers_input_crowds_both_until_it_leaves():
    crowds = crowds_of()
    a = Plan([Tensor("x", 0)], [Tensor("y", 64)])
    b = Plan([Tensor("x", 128)], [Tensor("y", 0)])
    crowds.enter(a)
    crowds.enter(b)
    assert a.crowded
    assert b.crowded
    crowds.leave(b)
    assert not a.crowded


def test_the_one_who_stays_crowded_by_a_third_stays_crowded():
    crowds = crowds_of()
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
    crowds = crowds_of()
    crowds.enter(plan)
    assert plan.crowded
    assert "'y'" in crowds.claim(plan, 2, 0)  # both at 128
    assert not plan.busy[0]
    assert crowds.claim(plan, 0, 0) == ""
    assert plan.busy[0], "nobody else gets it before the request is listed"
    assert "'y'" in crowds.claim(plan, 2, 1), "position 0 is being written"
    plan.busy[0] = 0
    assert crowds.claim(plan, 2, 1) == ""


def rivals():
    a = Plan([Tensor("x", 0, positions=4)], [Tensor("y", 1024, positions=4)])
    b = Plan([Tensor("x", 4096)], [Tensor("y", 64)])  # writes where a's input position 1 lies
    return a, b


def test_live_requests_of_rivals_are_in_the_way_and_others_are_not():
    a, b = rivals()
    crowds = crowds_of()
    crowds.enter(a)
    crowds.enter(b)
    assert crowds.claim(a, 1, 0) == ""
    assert crowds.claim(b, 0, 0) != ""
    assert crowds.claim(a, 2, 1) == ""
    a.busy[0] = 0
    assert crowds.claim(b, 0, 0) == ""
    assert crowds.claim(a, 1, 2) != ""
    assert crowds.claim(a, 0, 2) == ""


def test_a_position_is_read_where_its_last_request_reads():
    a, b = rivals()
    crowds = crowds_of()
    crowds.enter(a)
    crowds.enter(b)
    assert crowds.claim(a, 1, 0) == ""
    a.busy[0] = 0
    assert crowds.claim(a, 2, 0) == ""
    assert crowds.claim(b, 0, 0) == ""


def test_what_was_admitted_before_its_plan_was_crowded_is_in_the_way_where_it_is():
    a, b = rivals()
    live = []
    crowds = crowds_of(live)
    crowds.enter(a)
    live.extend((request(a, 2, 0), request(a, 1, 1)))
    crowds.enter(b)
    assert crowds.claim(b, 0, 0) != ""
    live.pop()
    a.busy[1] = 0
    assert crowds.claim(b, 0, 0) == ""


def test_what_has_not_been_admitted_is_in_nobodys_way():
    a, b = rivals()
    live = [request(a, 1, started=False), request(a, 2)]  # both for output position 0
    crowds = crowds_of(live)
    crowds.enter(a)
    crowds.enter(b)
    assert crowds.claim(b, 0, 0) == ""


def test_who_was_crowded_and_is_again_is_compared_as_before():
    a, b = rivals()
    live = [request(a, 1)]
    crowds = crowds_of(live)
    crowds.enter(a)
    crowds.enter(b)
    crowds.leave(b)
    assert crowds.claim(a, 3, 1) == "", "not crowded any more"
    assert not a.busy[1], "what does not need the claim is the channel's to take"
    crowds.enter(b)
    assert crowds.claim(b, 0, 0) != ""


def test_only_live_requests_of_the_same_memory_are_looked_at(monkeypatch):
    """A pipeline in place, beside thousands of requests elsewhere and thousands of plans that do nothing."""
    looked = []
    monkeypatch.setattr(overlap, "_conflict", lambda a, b: looked.append(1) or conflict(a, b))

    def unexpected():
        raise AssertionError("every request is looked at")

    crowds = Crowds(unexpected)
    here, there = (1, 1), (1, 2)
    busy = Plan([Tensor("x", 0, memory=there)], [Tensor("y", 64, positions=2048, memory=there)])
    reader = Plan([Tensor("x", 64 + 64 * 2047, memory=there)], [Tensor("y", 1 << 20, memory=there)])
    first = Plan([Tensor("x", 0, memory=here)], [Tensor("y", 64, memory=here)])
    second = Plan([Tensor("x", 64, memory=here)], [Tensor("y", 128, memory=here)])
    idle = [Plan([Tensor("x", 64, memory=here)], [Tensor("y", 128, memory=here)]) for _ in range(2048)]
    for plan in (busy, reader, first, second, *idle):
        crowds.enter(plan)
    for position in range(2048):
        assert crowds.claim(busy, 0, position) == ""
    looked.clear()
    for _ in range(10):
        for plan in (first, second):
            assert crowds.claim(plan, 0, 0) == ""
            assert crowds.claim(idle[0], 0, 0) != ""
            plan.busy[0] = 0
    assert len(looked) <= 40
    assert "more than" in crowds.claim(reader, 0, 0), "the one with too much in one place waits"


def test_a_client_with_too_much_in_one_place_is_refused_rather_than_compared():
    busy = Plan([Tensor("x", 1 << 20)], [Tensor("y", 64, positions=2048)])
    rival = Plan([Tensor("x", 2 << 20)], [Tensor("y", 64 + 64 * 2000)])
    crowds = crowds_of()
    crowds.enter(busy)
    crowds.enter(rival)
    for position in range(MAX_COMPARED):
        assert crowds.claim(busy, 0, position) == ""
    assert crowds.claim(rival, 0, 0) == ""
    rival.busy[0] = 0
    assert crowds.claim(busy, 0, MAX_COMPARED) == "", "its own positions lie apart"
    assert "more than" in crowds.claim(rival, 0, 0)


def test_thousands_of_plans_on_one_range_enter_and_leave_without_comparing_all_with_all():
    crowds = crowds_of()
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
    crowds = crowds_of()
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
        crowds = crowds_of()
        for plan in plans:
            crowds.enter(plan)
    assert not any(plan.crowded for plan in few)
    assert many[-1].crowded, "or so it is said: what may run is decided by position"
    assert len(compared) <= 2 * overlap.LOOK * (len(few) + len(many))


def test_a_plan_stays_crowded_by_one_that_the_leaving_plan_does_not_know():
    crowds = crowds_of()
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
    crowds = crowds_of()
    for plan in plans:
        crowds.enter(plan)
    for index, plan in enumerate(plans):
        reads, writes = used(plan.inputs[0]), used(plan.outputs[0])
        expected = bool(reads & writes)
        for other in plans[:index] + plans[index + 1 :]:
            theirs = used(other.outputs[0])
            expected |= bool(writes & (used(other.inputs[0]) | theirs) or reads & theirs)
        assert plan.crowded == expected
