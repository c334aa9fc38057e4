"""Prepared requests of `Client` against a small broker: positions, overlap, waiting, deadlines, threads."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

from shm.errors import InferError
from tests.fakes.small_broker import connect, doubling


def ran(small_broker, submit):
    """Call `submit` and wait until the broker has run it; the client does not look."""
    before = small_broker.completed
    submit()
    while small_broker.completed == before:
        pass


class TestPlans:
    def test_outputs_lie_where_the_caller_put_them(self, client):
        region, plan = doubling(client)
        result = plan.infer(timeout=60)
        np.testing.assert_array_equal(result["y"], [[0, 2, 4, 6]])
        assert np.shares_memory(result["y"], region.memory.bytes)
        assert result.copied_bytes == 0
        assert result.timing.infer_ns == 1000
        assert (list(result), len(result), dict(result).keys()) == (["y"], 1, {"y"})
        with pytest.raises(KeyError, match=r"'z'.*'y'"):
            result["z"]

    def test_positions_of_a_ring(self, client):
        _, plan = doubling(client, slots=(8, 2))
        for k in range(8):
            np.testing.assert_array_equal(
                plan.infer(input_slot=k, output_slot=k % 2)["y"], [np.arange(4 * k, 4 * k + 4) * 2]
            )

    @pytest.mark.parametrize("slots", [(-1, 0), (0, 2), (2, 0), (0, -1), (65536, 0)])
    def test_positions_that_are_not_there(self, client, slots):
        _, plan = doubling(client, slots=2)
        with pytest.raises(InferError, match="2 input and 2 output positions"):
            plan.infer(input_slot=slots[0], output_slot=slots[1])

    @pytest.mark.parametrize(
        "options",
        [
            {"priority": -1},
            {"priority": 65536},
            {"sequence_id": 2**64},
            {"sequence_id": "a"},
            {"rows": -1},
            {"sequence_start": True},
            {"timeout": 0},
            {"timeout": -1},
            {"timeout": "1"},
            {"timeout": float("nan")},
        ],
    )
    def test_options_that_cannot_be_sent_cost_nothing(self, client, options):
        _, plan = doubling(client)
        with pytest.raises(InferError, match=next(iter(options)).partition("_")[0]):
            plan.infer(**options)
        assert plan.infer(priority=3, sequence_id=7, sequence_start=True)["y"].shape == (1, 4)

    def test_fewer_rows_than_prepared(self, client):
        region = client.create_region("r", 4096)
        region.array((8, 4), np.float32)[:] = 1
        plan = client.prepare("twice", {"x": region.tensor((8, 4), "FP32")}, {"y": region.tensor((8, 4), "FP32", 2048)})
        assert plan.infer(rows=3)["y"].shape == (3, 4)
        assert region.array((32,), np.float32, 2048).sum() == 24
        assert plan.infer()["y"].shape == (8, 4)

    def test_outputs_without_a_place_get_one(self, client):
        region = client.create_region("r", 4096)
        region.array((4,), np.float32)[:] = 1
        for outputs in (None, {}, {"y": None}, ["y"]):
            plan = client.prepare("double", {"x": region.tensor((1, 4), "FP32")}, outputs)
            np.testing.assert_array_equal(plan.infer()["y"], [[2, 2, 2, 2]])
            with pytest.raises(InferError, match="output_slot"):
                plan.infer(output_slot=0)

    def test_arrays_keep_their_values_while_the_plan_goes_on(self, client):
        region, _ = doubling(client)
        plan = client.prepare("double", {"x": region.tensor((1, 4), "FP32")})
        arrays, copied = [], 0
        for k in range(200):  # more than the plan has places: the last ones are copied
            region.array((4,), np.float32)[:] = k
            result = plan.infer()
            arrays.append(result["y"])
            copied += result.copied_bytes
        assert all((array == 2 * k).all() for k, array in enumerate(arrays))
        assert 0 < copied < 200 * 16
        arrays.clear()
        gc.collect()
        assert plan.infer().copied_bytes == 0

    def test_unknown_outputs_and_foreign_regions(self, client, small_broker):
        region, _ = doubling(client)
        with pytest.raises(InferError, match=r"unexpected inference output 'z' for model 'double'.*\['y'\]"):
            client.prepare("double", {"x": region.tensor((1, 4), "FP32")}, ["z"])
        with (
            connect(small_broker) as other,
            pytest.raises(InferError, match="Unable to find shared memory region: 'r'") as caught,
        ):
            other.prepare("double", {"x": region.tensor((1, 4), "FP32")})
        assert caught.value.code == "NOT_FOUND"

    def test_a_tensor_beyond_its_region(self, client):
        region, _ = doubling(client)
        with pytest.raises(InferError, match="Invalid offset"):
            client.prepare("double", {"x": region.tensor((1, 4), "FP32", offset=4090)})

    def test_plans_that_are_dropped_are_released(self, client, small_broker):
        region, plan = doubling(client)
        del plan
        gc.collect()
        client.prepare("double", {"x": region.tensor((1, 4), "FP32")})
        assert small_broker.calls.count("Release") == 1


class TestOverlap:
    def test_a_result_in_use_is_not_written_over(self, client, small_broker):
        region, plan = doubling(client, slots=(1, 2))
        x, y = region.tensor((1, 2), "FP32", 512), region.tensor((1, 2), "FP32", 2056)
        other = client.prepare("double", {"x": x}, {"y": y})
        small_broker.hold = True
        pending = plan.submit()
        for refused in (plan.submit, other.submit, lambda: other.infer(timeout=1)):
            with pytest.raises(InferError, match="overlaps") as caught:
                refused()
            assert caught.value.code == "INVALID_ARG"
        second = plan.submit(output_slot=1)
        small_broker.release()
        assert pending.result(60)["y"].shape == second.result(60)["y"].shape
        other.infer(timeout=60)

    def test_ended_is_not_in_use_though_nobody_looked(self, client, small_broker):
        region, plan = doubling(client)
        x, y = region.tensor((1, 4), "FP32"), region.tensor((1, 4), "FP32", 2048)
        again = client.prepare("double", {"x": x}, {"y": y})
        for submitted, other in ((plan, again), (again, plan), (plan, plan)):
            ran(small_broker, submitted.submit)
            assert other.infer(timeout=60)["y"].shape == (1, 4)


class TestWaiting:
    def test_result_stops_waiting_and_the_request_goes_on(self, client, small_broker):
        _, plan = doubling(client)
        small_broker.hold = True
        pending = plan.submit()
        with pytest.raises(TimeoutError):
            pending.result(timeout=0.01)
        assert not pending.done()
        small_broker.release()
        assert pending.result(60) is pending.result()
        assert pending.done()
        assert not pending.cancel()

    def test_the_deadline_ends_the_wait_and_keeps_the_memory(self, client, small_broker):
        _, plan = doubling(client)
        plan.infer()  # which opens the channel
        small_broker.hold = True
        with pytest.raises(InferError, match="timeout expired") as caught:
            plan.infer(timeout=0.05)
        assert caught.value.code == "UNAVAILABLE"
        with pytest.raises(InferError, match="overlaps"):
            plan.submit()
        ran(small_broker, small_broker.release)
        plan.infer(timeout=60)

    def test_a_submitted_deadline_is_the_results(self, client, small_broker):
        _, plan = doubling(client)
        plan.infer()  # which opens the channel
        small_broker.hold = True
        pending = plan.submit(timeout=0.05)
        with pytest.raises(InferError, match="timeout expired"):
            pending.result()
        with pytest.raises(InferError, match="timeout expired"):
            pending.result(timeout=60)

    def test_cancel(self, client, small_broker):
        _, plan = doubling(client)
        small_broker.hold = True
        pending = plan.submit()
        assert pending.cancel()
        with pytest.raises(InferError, match="cancelled") as caught:
            pending.result(60)
        assert caught.value.code == "CANCELLED"
        small_broker.release()
        plan.infer(timeout=60)

    def test_a_full_channel_says_how_many_slots_it_has(self, small_broker):
        with connect(small_broker, slots=2) as client:
            _, plan = doubling(client, slots=(1, 4))
            small_broker.hold = True
            pending = [plan.submit(output_slot=k) for k in range(2)]
            with pytest.raises(InferError, match="all 2 slots") as caught:
                plan.submit(output_slot=2, timeout=0.05)
            assert caught.value.code == "UNAVAILABLE"
            small_broker.release()
            plan.submit(output_slot=2, timeout=60).result()
            assert all(each.result(60) for each in pending)

    def test_any_thread_may_wait(self, client, small_broker):
        _, plan = doubling(client, slots=(1, 8))
        small_broker.hold = True
        pending = [plan.submit(output_slot=k) for k in range(8)]
        shapes = []
        threads = [
            threading.Thread(target=lambda each=each: shapes.append(each.result(60)["y"].shape))
            for each in pending
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        small_broker.release()
        for thread in threads:
            thread.join(60)
        assert shapes == [(1, 4)] * 16

    def test_threads_have_channels_of_their_own_and_leave_them(self, client, small_broker):
        _, plan = doubling(client, slots=(8, 8))
        wrong = []

        both = threading.Barrier(2)

        def work(k):
            for turn in range(50):
                if not (plan.infer(60, k, k)["y"] == np.arange(4 * k, 4 * k + 4) * 2).all():
                    wrong.append(k)
                if turn == 0:
                    both.wait(60)  # each has its channel by now

        for _ in range(3):
            threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
        assert not wrong
        # The broker gives two channels to a session; six threads came and went.
        assert small_broker.calls.count("OpenChannel") == 2

    def test_threads_share_channels_at_the_limit(self, client):
        _, plan = doubling(client, slots=(8, 8))
        plan.infer(60)  # whoever is refused has a channel to share, however late the others take up theirs
        wrong = []
        start = threading.Barrier(8)

        def work(k):
            start.wait(60)
            for _ in range(50):
                if not (plan.infer(60, k, k)["y"] == np.arange(4 * k, 4 * k + 4) * 2).all():
                    wrong.append(k)

        threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not wrong
        assert not any(thread.is_alive() for thread in threads)
