"""`Client` against a small broker in this process: plans, results, waiting, deadlines, a broker that goes and comes."""

from __future__ import annotations

import gc
import os
import threading

import numpy as np
import pytest

import clientlib
from clientlib.pending import Pending
from shm import messages
from shm.errors import Code, InferError
from tests.fakes.small_broker import SmallBroker


@pytest.fixture
def broker(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    broker = SmallBroker(tmp_path)
    yield broker
    broker.release()
    broker.stop()
    if len(os.listdir("/proc/self/fd")) > before:
        gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before, "descriptors were left open"


def connect(broker, **options):
    return clientlib.connect(f"ipc://{broker.directory}", **options)


@pytest.fixture
def client(broker):
    with connect(broker) as client:
        yield client


def doubling(client, name="r", slots=1, positions=8):
    """A region and a plan of `double` on it: x (1, 4) at 0, y (1, 4) at 2048."""
    region = client.create_region(name, 4096)
    x, y = region.tensor((1, 4), "FP32"), region.tensor((1, 4), "FP32", offset=2048)
    region.array((positions, 4), np.float32)[:] = np.arange(positions * 4).reshape(positions, 4)
    return region, client.prepare("double", {"x": x}, {"y": y}, slots=slots)


def ran(broker, submit):
    """Call `submit` and wait until the broker has run it; the client does not look."""
    before = broker.completed
    submit()
    while broker.completed == before:
        pass


class TestPlans:
    def test_outputs_lie_where_the_caller_put_them(self, client):
        region, plan = doubling(client)
        result = plan.infer(timeout=10)
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

    def test_unknown_outputs_and_foreign_regions(self, client, broker):
        region, _ = doubling(client)
        with pytest.raises(InferError, match=r"unexpected inference output 'z' for model 'double'.*\['y'\]"):
            client.prepare("double", {"x": region.tensor((1, 4), "FP32")}, ["z"])
        with (
            connect(broker) as other,
            pytest.raises(InferError, match="Unable to find shared memory region: 'r'") as caught,
        ):
            other.prepare("double", {"x": region.tensor((1, 4), "FP32")})
        assert caught.value.code == "NOT_FOUND"

    def test_a_tensor_beyond_its_region(self, client):
        region, _ = doubling(client)
        with pytest.raises(InferError, match="Invalid offset"):
            client.prepare("double", {"x": region.tensor((1, 4), "FP32", offset=4090)})

    def test_plans_that_are_dropped_are_released(self, client, broker):
        region, plan = doubling(client)
        del plan
        gc.collect()
        client.prepare("double", {"x": region.tensor((1, 4), "FP32")})
        assert broker.calls.count("Release") == 1


class TestOverlap:
    def test_a_result_in_use_is_not_written_over(self, client, broker):
        region, plan = doubling(client, slots=(1, 2))
        x, y = region.tensor((1, 2), "FP32", 512), region.tensor((1, 2), "FP32", 2056)
        other = client.prepare("double", {"x": x}, {"y": y})
        broker.hold = True
        pending = plan.submit()
        for refused in (plan.submit, other.submit, lambda: other.infer(timeout=1)):
            with pytest.raises(InferError, match="overlaps") as caught:
                refused()
            assert caught.value.code == "INVALID_ARG"
        second = plan.submit(output_slot=1)
        broker.release()
        assert pending.result(10)["y"].shape == second.result(10)["y"].shape
        other.infer(timeout=10)

    def test_ended_is_not_in_use_though_nobody_looked(self, client, broker):
        region, plan = doubling(client)
        x, y = region.tensor((1, 4), "FP32"), region.tensor((1, 4), "FP32", 2048)
        again = client.prepare("double", {"x": x}, {"y": y})
        for submitted, other in ((plan, again), (again, plan), (plan, plan)):
            ran(broker, submitted.submit)
            assert other.infer(timeout=10)["y"].shape == (1, 4)


class TestWaiting:
    def test_result_stops_waiting_and_the_request_goes_on(self, client, broker):
        _, plan = doubling(client)
        broker.hold = True
        pending = plan.submit()
        with pytest.raises(TimeoutError):
            pending.result(timeout=0.01)
        assert not pending.done()
        broker.release()
        assert pending.result(10) is pending.result()
        assert pending.done()
        assert not pending.cancel()

    def test_the_deadline_ends_the_wait_and_keeps_the_memory(self, client, broker):
        _, plan = doubling(client)
        broker.hold = True
        with pytest.raises(InferError, match="timeout expired") as caught:
            plan.infer(timeout=0.05)
        assert caught.value.code == "UNAVAILABLE"
        with pytest.raises(InferError, match="overlaps"):
            plan.submit()
        ran(broker, broker.release)
        plan.infer(timeout=10)

    def test_a_submitted_deadline_is_the_results(self, client, broker):
        _, plan = doubling(client)
        broker.hold = True
        pending = plan.submit(timeout=0.05)
        with pytest.raises(InferError, match="timeout expired"):
            pending.result()
        with pytest.raises(InferError, match="timeout expired"):
            pending.result(timeout=60)

    def test_cancel(self, client, broker):
        _, plan = doubling(client)
        broker.hold = True
        pending = plan.submit()
        assert pending.cancel()
        with pytest.raises(InferError, match="cancelled") as caught:
            pending.result(10)
        assert caught.value.code == "CANCELLED"
        broker.release()
        plan.infer(timeout=10)

    def test_a_full_channel_says_how_many_slots_it_has(self, broker):
        with connect(broker, slots=2) as client:
            _, plan = doubling(client, slots=(1, 4))
            broker.hold = True
            pending = [plan.submit(output_slot=k) for k in range(2)]
            with pytest.raises(InferError, match="all 2 slots") as caught:
                plan.submit(output_slot=2, timeout=0.05)
            assert caught.value.code == "UNAVAILABLE"
            broker.release()
            plan.submit(output_slot=2, timeout=10).result()
            assert all(each.result(10) for each in pending)

    def test_any_thread_may_wait(self, client, broker):
        _, plan = doubling(client, slots=(1, 8))
        broker.hold = True
        pending = [plan.submit(output_slot=k) for k in range(8)]
        shapes = []
        threads = [
            threading.Thread(target=lambda each=each: shapes.append(each.result(20)["y"].shape))
            for each in pending
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        broker.release()
        for thread in threads:
            thread.join(20)
        assert shapes == [(1, 4)] * 16

    def test_threads_have_channels_of_their_own_and_leave_them(self, client, broker):
        _, plan = doubling(client, slots=(8, 8))
        wrong = []

        def work(k):
            for _ in range(50):
                if not (plan.infer(10, k, k)["y"] == np.arange(4 * k, 4 * k + 4) * 2).all():
                    wrong.append(k)

        for _ in range(3):
            threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
        assert not wrong
        # The broker gives two channels to a session; six threads came and went.
        assert broker.calls.count("OpenChannel") == 2

    def test_threads_share_channels_at_the_limit(self, client):
        _, plan = doubling(client, slots=(8, 8))
        wrong = []
        start = threading.Barrier(8)

        def work(k):
            start.wait(20)
            for _ in range(50):
                if not (plan.infer(10, k, k)["y"] == np.arange(4 * k, 4 * k + 4) * 2).all():
                    wrong.append(k)

        threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not wrong
        assert not any(thread.is_alive() for thread in threads)


class TestArrays:
    def test_numpy_in_numpy_out(self, client, broker):
        model = client.model("double")
        for k in range(5):
            x = np.full((2, 3), k, np.float32)
            np.testing.assert_array_equal(model({"x": x})["y"], 2 * x)
        assert broker.calls.count("Prepare") == 1
        np.testing.assert_array_equal(model({"x": np.ones((6, 4), np.float32)[::2, ::-1]})["y"], np.full((3, 4), 2.0))
        np.testing.assert_array_equal(model({"x": np.ones((1, 2), ">f4")})["y"], [[2, 2]])
        assert model.infer({"x": np.zeros((0, 4), np.float32)})["y"].shape == (0, 4)

    def test_what_is_copied_is_counted(self, client):
        assert client.infer("double", {"x": np.zeros((2, 3), np.float32)}).copied_bytes == 24

    def test_tensors_and_places_mix_with_arrays(self, client):
        region = client.create_region("r", 4096)
        region.array((2,), np.float32)[:] = 3
        place = region.tensor((1, 2), "FP32", offset=64)
        result = client.infer("double", {"x": region.tensor((1, 2), "FP32")}, outputs={"y": place})
        assert result.copied_bytes == 0
        np.testing.assert_array_equal(place.array(), [[6, 6]])
        result = client.infer("double", {"x": np.ones((1, 2), np.float32)}, outputs={"y": place})
        np.testing.assert_array_equal(place.array(), [[2, 2]])
        assert np.shares_memory(result["y"], place.array())

    def test_strings(self, client):
        values = np.array([b"", b"a\0\0", "ümlaut", b"\xff\xfe"], object)
        expected = [b"", b"a\0\0", "ümlaut".encode(), b"\xff\xfe"]
        assert client.infer("echo", {"x": values})["y"].tolist() == expected
        assert client.infer("echo", {"x": np.array([], object)})["y"].shape == (0,)

    def test_results_of_unknown_size(self, client, broker):
        np.testing.assert_array_equal(client.infer("nonzero", {"x": np.array([0, 1, 1], np.float32)})["i"], [[1, 2]])
        x = np.arange(3, dtype=np.float32)
        prepares = broker.calls.count("Prepare")
        assert client.infer("spread", {"x": x})["y"].shape == (120_000,)  # 480,000 bytes where 65,536 were reserved
        assert client.infer("spread", {"x": x})["y"].shape == (120_000,)
        assert broker.calls.count("Prepare") == prepares + 2
        region = client.create_region("r", 4096)
        plan = client.prepare("spread", {"x": region.tensor((3,), "FP32")})
        assert plan.infer()["y"].shape == (120_000,)
        with pytest.raises(InferError, match="at least 480000 bytes"):
            client.prepare("spread", {"x": region.tensor((3,), "FP32")}, {"y": region.tensor((9,), "FP32", 64)}).infer()

    def test_many_threads_one_signature(self, broker):
        with connect(broker) as client:
            big = np.ones((1, 1 << 16), np.float32)  # two places only
            wrong = []

            def work(k):
                for _ in range(10):
                    if not (client.infer("double", {"x": big * k}, timeout=60)["y"] == 2 * k).all():
                        wrong.append(k)

            threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert not wrong

    def test_mistakes_are_named(self, client):
        x = np.zeros((1, 2), np.float32)
        for arguments, text in (
            (("double", {"x": [[1.0]]}), "got list"),
            (("double", x), "inputs must map names"),
            (("double", {"x": x.astype(np.float64)}), "'FP64', but model 'double' expects 'FP32'"),
            (("double", {"x": x.astype(np.complex64)}), "complex64"),
            (("nosuch", {"x": x}), "'nosuch' is not found"),
            (("double", {"x": x}, "y"), "outputs must"),
        ):
            with pytest.raises(InferError, match=text):
                client.infer(*arguments)
        with pytest.raises(InferError, match="'temperature'") as caught:
            client.infer("double", {"x": x}, parameters={"temperature": 1})
        assert caught.value.code == "UNSUPPORTED"

    def test_places_held_by_pending_results_are_missed_in_words(self, client, broker):
        big = client.create_region("r", 1 << 20)
        plan = client.prepare("double", {"x": big.tensor((1, 1 << 17), "FP32")})
        held = [plan.submit(timeout=30) for _ in range(2)]
        with pytest.raises(InferError, match="all 2 places"):
            plan.submit(timeout=0.05)
        assert all(isinstance(each, Pending) and each.result()["y"].shape == (1, 1 << 17) for each in held)
        plan.infer(timeout=10)


class TestBroker:
    def test_verbs(self, client):
        region = client.create_region("a", 64)
        assert set(client.models()) >= {"double", "echo"}
        model = client.model("double")
        assert (model.name, model.inputs[0].name, model.outputs[0].datatype, model.max_batch_size, model.zero_copy) == (
            "double", "x", "FP32", 0, True,
        )  # fmt: skip
        assert region.share() == "token"
        opened = client.open_region("token", name="b")
        assert opened.array((4,), np.int32).tolist() == [0] * 4
        assert {record.name for record in client.regions()} == {"a", "b"}
        assert client.statistics("double") == [{"name": "double"}]
        client.load("double")
        client.unload("double")
        with pytest.raises(InferError, match="already in manager") as caught:
            client.create_region("a", 64)
        assert caught.value.code == "ALREADY_EXISTS"
        with pytest.raises(InferError, match="CUDA") as caught:
            client.register_cuda_shm("gpu", object())
        assert caught.value.code == "UNSUPPORTED"

    def test_unregister(self, client):
        region, plan = doubling(client)
        array = plan.infer()["y"]
        client.unregister("nosuch")
        client.unregister("r")
        assert array.tolist() == [[0, 2, 4, 6]]
        with pytest.raises(InferError, match="'r': it was unregistered") as caught:
            client.prepare("double", {"x": region.tensor((1, 4), "FP32")})
        assert caught.value.code == "NOT_FOUND"
        client.create_region("r", 64)
        client.infer("double", {"x": np.ones((1, 1), np.float32)})
        client.unregister()
        client.infer("double", {"x": np.ones((1, 1), np.float32)})  # the client's own memory is not the application's

    def test_nobody_there(self, tmp_path):
        with pytest.raises(InferError, match=r"no broker at .*broker\.sock.*tensorbroker serve") as caught:
            clientlib.connect(f"ipc://{tmp_path}")
        assert caught.value.code == "UNAVAILABLE"

    def test_still_starting(self, broker):
        broker.starting = True
        with pytest.raises(InferError, match="starting: 3 of 7 models"):
            connect(broker, timeout=0.05)

    def test_a_reply_that_never_comes(self, client, broker):
        broker.answers["LoadModel"] = lambda asked: None
        with pytest.raises(InferError, match="no answer to LoadModel"):
            client.load("double", timeout=0.05)
        client.models()

    def test_one_error_at_most_when_the_broker_goes_and_comes(self, client, broker):
        region, plan = doubling(client)
        client.infer("double", {"x": np.ones((1, 1), np.float32)})
        view = region.array((4,), np.float32)
        broker.hold = True
        pending = plan.submit()
        broker.stop()
        with pytest.raises(InferError, match="broker went away") as caught:
            pending.result(10)
        assert caught.value.code == "UNAVAILABLE"
        broker.hold = False
        broker.start()
        view[:] = 9
        assert plan.infer(timeout=20)["y"].tolist() == [[18] * 4]
        assert client.infer("double", {"x": np.ones((1, 1), np.float32)})["y"].tolist() == [[2]]
        client.create_region("new", 64)

    def test_a_call_finds_the_new_broker_by_itself(self, client, broker):
        broker.stop()
        broker.start()
        assert "double" in client.models()

    def test_a_broker_that_stays_away(self, client, broker):
        _, plan = doubling(client)
        broker.stop()
        with pytest.raises(InferError, match=r"went away|no broker at"):
            plan.infer(timeout=0.05)
        with pytest.raises(InferError, match=r"went away|no broker at") as caught:
            plan.infer(timeout=0.05)
        assert caught.value.code == "UNAVAILABLE"
        broker.start()

    def test_a_region_the_new_broker_refuses(self, client, broker):
        region, _ = doubling(client)
        broker.stop()

        def refuse(asked: messages.RegisterPool):
            raise InferError(Code.UNAVAILABLE, "no memory quota")

        broker.answers["RegisterPool"] = refuse
        broker.start()
        client.models()
        with pytest.raises(InferError, match=r"'r': it was lost.*no memory quota"):
            client.prepare("double", {"x": region.tensor((1, 4), "FP32")})


class TestClosing:
    def test_arrays_outlive_the_client(self, broker):
        client = connect(broker)
        region, plan = doubling(client)
        own = client.infer("double", {"x": np.ones((1, 2), np.float32)})["y"]
        placed = plan.infer()["y"]
        client.close()
        client.close()
        del client, plan, region
        gc.collect()
        assert own.tolist() == [[2, 2]]
        assert placed.tolist() == [[0, 2, 4, 6]]

    def test_everything_says_so_afterwards(self, broker):
        client = connect(broker)
        region, plan = doubling(client, slots=(1, 2))
        plan.infer()
        broker.hold = True
        pending = plan.submit(output_slot=1)
        client.close()
        for call in (plan.infer, client.models, region.share, pending.result, lambda: client.create_region("x", 64)):
            with pytest.raises(InferError, match="closed") as caught:
                call()
            assert caught.value.code == "UNAVAILABLE"

    def test_a_client_that_is_only_dropped(self, broker):
        client = connect(broker)
        _, plan = doubling(client)
        plan.infer()
        client.infer("double", {"x": np.ones((1, 2), np.float32)})
        del client, plan
        gc.collect()  # the fixture counts descriptors, and warnings of unclosed sockets are errors

    def test_closing_wakes_who_waits(self, broker):
        client = connect(broker)
        _, plan = doubling(client)
        broker.hold = True
        pending = plan.submit()
        errors = []

        def wait():
            try:
                pending.result(60)
            except InferError as error:
                errors.append(error.message)

        threads = [threading.Thread(target=wait) for _ in range(3)]
        for thread in threads:
            thread.start()
        client.close()
        for thread in threads:
            thread.join(20)
        assert len(errors) == 3
        assert all("closed" in message for message in errors)
