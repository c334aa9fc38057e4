"""`Client.infer` with numpy arrays against a small small_broker."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import clientlib.arena
import clientlib.automatic
from clientlib.pending import Pending
from shm.errors import InferError
from tests.fakes.small_broker import connect, doubling


class TestArrays:
    def test_numpy_in_numpy_out(self, client, small_broker):
        model = client.model("double")
        for k in range(5):
            x = np.full((2, 3), k, np.float32)
            np.testing.assert_array_equal(model({"x": x})["y"], 2 * x)
        assert small_broker.calls.count("Prepare") == 1
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

    def test_results_of_unknown_size(self, client, small_broker):
        np.testing.assert_array_equal(client.infer("nonzero", {"x": np.array([0, 1, 1], np.float32)})["i"], [[1, 2]])
        x = np.arange(3, dtype=np.float32)
        prepares = small_broker.calls.count("Prepare")
        assert client.infer("spread", {"x": x})["y"].shape == (120_000,)  # 480,000 bytes where 65,536 were reserved
        assert client.infer("spread", {"x": x})["y"].shape == (120_000,)
        assert small_broker.calls.count("Prepare") == prepares + 2
        region = client.create_region("r", 4096)
        plan = client.prepare("spread", {"x": region.tensor((3,), "FP32")})
        assert plan.infer()["y"].shape == (120_000,)
        with pytest.raises(InferError, match="at least 480000 bytes"):
            client.prepare("spread", {"x": region.tensor((3,), "FP32")}, {"y": region.tensor((9,), "FP32", 64)}).infer()

    def test_sizes_that_do_not_come_again_hold_no_memory(self, client, monkeypatch):
        monkeypatch.setattr(clientlib.arena, "FIRST_CHUNK", 4096)
        monkeypatch.setattr(clientlib.arena, "LARGEST_CHUNK", 4096)
        monkeypatch.setattr(clientlib.automatic, "MAX_BYTES", 0)  # one plan
        results = []
        for rows in range(1000, 9000, 1000):  # each a larger chunk than the one before
            x = np.full((rows, 2), rows, np.float32)
            results.append(client.infer("double", {"x": x})["y"])
        assert len(client.regions()) == 8  # results hold theirs
        assert [result[0, 0] for result in results] == [2 * rows for rows in range(1000, 9000, 1000)]
        kept = results.pop(0)
        results.clear()
        for rows in (200_000, 300_000, 400_000):
            assert client.infer("double", {"x": np.ones((rows, 2), np.float32)})["y"][-1, -1] == 2
        assert len(client.regions()) <= 4
        assert kept[0, 0] == 2000

    def test_a_plan_that_a_reload_closed_is_made_again(self, client, small_broker):
        _, plan = doubling(client)
        x = np.ones((1, 2), np.float32)
        for _ in range(2):
            client.infer("double", {"x": x})
            small_broker.reload()
        assert client.infer("double", {"x": x})["y"].tolist() == [[2, 2]]
        with pytest.raises(InferError, match="prepare the plan again") as caught:
            plan.infer()  # the application's own
        assert caught.value.code == "UNAVAILABLE"

    def test_many_threads_one_signature(self, small_broker):
        with connect(small_broker) as client:
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
            client.infer("double", {"x": x}, parameters={"temperature": [1]})
        assert caught.value.code == "INVALID_ARG"

    def test_places_held_by_pending_results_are_missed_in_words(self, client, small_broker):
        big = client.create_region("r", 1 << 20)
        plan = client.prepare("double", {"x": big.tensor((1, 1 << 17), "FP32")})
        held = [plan.submit(timeout=30) for _ in range(2)]
        with pytest.raises(InferError, match="all 2 places"):
            plan.submit(timeout=0.05)
        assert all(isinstance(each, Pending) and each.result()["y"].shape == (1, 1 << 17) for each in held)
        plan.infer(timeout=10)
