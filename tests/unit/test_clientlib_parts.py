"""What the client library decides without a broker: shapes, overlap, what the arguments mean."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from clientlib import shapes
from clientlib.arena import Bank
from clientlib.automatic import MAX_BYTES, WIDE, Automatic, Request
from clientlib.overlap import Ranges, Span
from clientlib.recipe import Budget, Recipe, recipe
from clientlib.region import MappedRegion
from shm import model_fit
from shm.errors import InferError
from shm.messages import ModelMetadata, TensorMetadata
from shm.regions import create_pool
from shm.views import Placement


def region(byte_size: int = 4096, name: str = "r") -> MappedRegion:
    return MappedRegion(name, create_pool(byte_size), 0, byte_size, True, kind="pool", key="")


def tensor(name, shape, symbols=(), datatype="FP32"):
    return TensorMetadata(name=name, datatype=datatype, shape=shape, symbols=symbols)


class TestShapes:
    def model(self, *inputs, batch=0):
        return ModelMetadata(name="m", version="1", inputs=inputs, max_batch_size=batch)

    def test_a_symbol_carries_its_size_to_the_output(self):
        model = self.model(tensor("x", (-1, -1), ("a", "b")), tensor("z", (-1,), ("c",)))
        sizes = model_fit.symbol_sizes(model, {"x": (3, 4), "z": (5,)})
        assert model_fit.output_shape(tensor("y", (-1, 7, -1), ("c", "", "a")), 0, sizes) == (5, 7, 3)

    def test_what_nobody_gives_stays_open(self):
        model = self.model(tensor("x", (-1,), ("?x:0",)))
        sizes = model_fit.symbol_sizes(model, {"x": (3,)})
        assert model_fit.output_shape(tensor("y", (-1, -1), ("?x:0", "q")), 0, sizes) == (-1, -1)

    def test_sizes_that_differ_decide_nothing(self):
        model = self.model(tensor("x", (-1,), ("n",)), tensor("z", (-1,), ("n",)))
        assert model_fit.symbol_sizes(model, {"x": (3,), "z": (4,)}) == {}

    def test_the_batch_is_the_inputs_first_dimension(self):
        model = self.model(tensor("x", (-1, 4), ("", "")), batch=8)
        rows = shapes.batch_rows(model, {"x": (6, 4)})
        assert model_fit.output_shape(tensor("y", (-1, 2), ("", "")), rows, {}) == (6, 2)

    def test_no_inputs_are_one_row(self):
        optional = [tensor(name, (-1, 4), ("", "")) for name in "xz"]
        assert shapes.batch_rows(self.model(*optional, batch=8), {}) == 1
        assert shapes.batch_rows(self.model(*optional), {}) == 0, "it has no batch dimension"

    def test_inputs_of_another_rank_are_left_to_the_broker(self):
        model = self.model(tensor("x", (-1, -1), ("a", "b")))
        assert model_fit.symbol_sizes(model, {"x": (3,), "unknown": (1,)}) == {"a": 3}


class Live:
    def __init__(self, input_slot, output_slot):
        self.input_slot, self.output_slot = input_slot, output_slot


def span(offset, size=64, positions=1, memory=(0, 1), name="t"):
    return Span(name, memory, Placement(offset, size, size, positions, offset + size * positions))


def ranges(inputs, outputs) -> Ranges:
    made = Ranges(inputs, outputs)
    made.enter()
    return made


class TestOverlap:
    def test_strangers_have_no_rivals(self):
        memory = (7, 1)
        a = ranges([span(0, memory=memory)], [span(64, memory=memory)])
        b = ranges([span(0, memory=memory)], [span(128, memory=memory)])
        assert a.rivals is None
        assert b.rivals is None

    def test_an_output_where_another_request_reads_or_writes_is_refused(self):
        memory = (7, 2)
        a = ranges([span(0, memory=memory)], [span(64, memory=memory)])
        over_input = ranges([span(512, memory=memory)], [span(0, memory=memory)])
        over_output = ranges([span(512, memory=memory)], [span(100, memory=memory)])
        first = Live(0, 0)
        assert a.claim(first) == ("", None)
        for rival in (over_input, over_output):
            text, holder = rival.claim(Live(0, 0))
            assert "overlaps" in text
            assert holder is first
        del a.live[0]
        assert over_input.claim(Live(0, 0)) == ("", None)

    def test_an_input_where_another_request_writes_is_refused(self):
        memory = (7, 3)
        writer = ranges([span(0, memory=memory)], [span(64, memory=memory)])
        reader = ranges([span(64, memory=memory)], [span(256, memory=memory)])
        writer.claim(Live(0, 0))
        assert "overlaps" in reader.claim(Live(0, 0))[0]

    def test_two_readers_of_one_range_get_along(self):
        memory = (7, 4)
        a = ranges([span(0, memory=memory)], [span(64, memory=memory)])
        b = ranges([span(0, memory=memory)], [span(128, memory=memory)])
        a.live[0] = Live(0, 0)
        assert b.rivals is None

    def test_positions_count(self):
        memory = (7, 5)
        ring = ranges([span(0, positions=4, memory=memory)], [span(1024, memory=memory)])
        other = ranges([span(2048, memory=memory)], [span(64, memory=memory)])  # where position 1 of the ring is
        ring.claim(Live(2, 0))
        assert other.claim(Live(0, 0)) == ("", None)
        other.live.clear()
        ring.live.clear()
        ring.claim(Live(1, 0))
        assert other.claim(Live(0, 0))[0].endswith(": wait for it, or give the requests memory of their own")

    def test_a_request_over_itself_is_refused(self):
        memory = (7, 6)
        plan = ranges([span(0, memory=memory, name="x")], [span(32, memory=memory, name="y")])
        text, holder = plan.claim(Live(0, 0))
        assert "'y' overlaps 'x' of the same request" in text
        assert holder is None

    def test_windows_of_one_object_compare_from_its_start(self):
        memory = (7, 7)
        a = ranges([], [span(4096, memory=memory)])
        b = ranges([], [Span("t", memory, Placement(0, 64, 64, 1, 64).shifted(4096))])
        a.claim(Live(0, 0))
        assert "overlaps" in b.claim(Live(0, 0))[0]

    def test_a_plan_that_is_gone_is_nobodys_rival(self):
        memory = (7, 8)
        a = ranges([], [span(0, memory=memory)])
        b = ranges([], [span(0, memory=memory)])
        assert set(a.rivals) == {b}
        del b
        gc.collect()
        assert set(a.rivals) == set()


class TestArguments:
    def test_slots(self):
        made = recipe("m", {}, None, (20, 4), "", Budget(8, 1024))
        assert (made.input_positions, made.output_positions) == (20, 4)
        for slots in (0, 65535, (1, 2, 3), "2", 1.5, (1, 0)):
            with pytest.raises(InferError, match="slots"):
                recipe("m", {}, None, slots, "", Budget(8, 1024))

    def test_inputs_and_outputs_of_the_wrong_kind(self):
        ref = region().tensor((1,), "FP32")
        for inputs, outputs in (
            ([ref], None),
            ({"x": np.zeros(1)}, None),
            ({"x": ref}, {"y": np.zeros(1)}),
            ({"x": ref}, "y"),
            ({"x": ref}, [ref]),
        ):
            with pytest.raises(InferError) as caught:
                recipe("m", inputs, outputs, 1, "", Budget(8, 1024))
            assert caught.value.code == "INVALID_ARG"

    def test_the_number_of_places_follows_the_budget(self):
        budget = Budget(places=64, byte_size=1 << 20)
        assert budget.places_for(1024, 2) == 64
        assert budget.places_for(1 << 18, 2) == 4
        assert budget.places_for(1 << 30, 2) == 2
        assert budget.places_for(0, 2) == 64

    def test_equal_arrays_make_equal_signatures(self):
        def key(value, outputs=None, version=""):
            return Request("m", version, {"x": value}, outputs).key

        x = np.zeros((2, 3), np.float32)
        assert key(x) == key(np.ones((2, 3), np.float32))
        others = [x.astype(np.float64), x.reshape(3, 2), np.array([b"a"], object), np.array([b"ab"], object)]
        keys = [key(other) for other in (x, *others)] + [key(x, ["y"]), key(x, version="2")]
        assert len(set(keys)) == len(keys)

    def test_lists_are_refused_with_the_way_out(self):
        with pytest.raises(InferError, match=r"'x' must be a numpy array.*got list.*asarray"):
            Request("m", "", {"x": [1, 2]}, None)

    def test_the_plan_used_longest_ago_is_forgotten(self):
        plans: Automatic[str] = Automatic()
        for key in range(64):
            plans.keep(key, f"plan {key}", 10)
        assert plans.find(0) == "plan 0"
        plans.keep("more", "plan", 10)
        assert plans.find(1) is None
        assert plans.find(0) == "plan 0"
        assert plans.keep(0, "another", 10) == "plan 0"

    def test_plans_with_much_memory_make_room_for_each_other(self):
        plans: Automatic[str] = Automatic()
        for key in range(4):
            plans.keep(key, f"plan {key}", 100 << 20)
        assert [plans.find(key) for key in range(4)] == [None, None, "plan 2", "plan 3"]
        assert plans.keep("huge", "plan", 1 << 30) == "plan"
        assert plans.find(3) is None
        plans.drop("huge", "another")
        assert plans.find("huge") == "plan"
        plans.drop("huge", "plan")
        plans.keep(5, "plan 5", 200 << 20)
        assert plans.keep(6, "plan 6", 50 << 20) == "plan 6"
        assert plans.find(5) == "plan 5"

    class Made:
        """A plan of places of 1 MiB each."""

        def __init__(self, recipe: Recipe) -> None:
            self.recipe = recipe
            self.places_byte_size = recipe.budget.places_for(1 << 20, 1) << 20

    def narrow(self) -> Made:
        return self.Made(Recipe("m", "", {}, None, 1, 1, Budget(2, 0), widens=True))

    def test_a_plan_without_a_free_place_gets_a_successor_with_more(self):
        plans: Automatic[TestArguments.Made] = Automatic()
        plan, bank = self.narrow(), Bank(None, 2, True)
        plans.keep(1, plan, plan.places_byte_size)
        assert bank.crowd()
        assert not bank.crowd(), "once"
        plans.widen(1, plan, bank, self.Made)
        wide = plans.find(1)
        assert wide.places_byte_size == 64 << 20
        assert (wide.recipe.budget, wide.recipe.widens) == (WIDE, False)
        assert bank.crowd(), "there are more elsewhere"
        plans.widen(1, plan, bank, None)
        assert plans.find(1) is wide

    def test_more_places_for_one_plan_are_not_taken_from_others(self):
        """Else plans that are used in turns would be made anew each time."""
        plans: Automatic[TestArguments.Made] = Automatic()
        made = [self.narrow() for _ in range(40)]
        for key, plan in enumerate(made):
            plans.keep(key, plan, plan.places_byte_size)
        for key, plan in enumerate(made):
            plans.widen(key, plan, Bank(None, 2, True), self.Made)
        sizes = [plans.find(key).places_byte_size >> 20 for key in range(40)]
        assert sizes == [64, 64] + [2] * 38
        assert sum(sizes) << 20 <= MAX_BYTES

    def test_a_plan_that_was_dropped_has_no_successor(self):
        plans: Automatic[TestArguments.Made] = Automatic()
        plan, bank = self.narrow(), Bank(None, 2, True)
        plans.widen(1, plan, bank, self.Made)
        assert plans.find(1) is None
        assert not bank.outgrown
