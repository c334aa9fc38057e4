"""One application, every transport: plans, requests in flight and regions are the same. See `test_transports.py`."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import posix_ipc
import pytest

from shm.errors import InferError
from tests.fakes.blocking import share

pytestmark = pytest.mark.timeout(180)


def vector(*values):
    return np.array([values], np.float32)


def adding(client, places=1, size=4):
    """A region and a plan of add1: x at 0 and on, y in the second half."""
    region = client.create_region("r", 1 << 16)
    x, y = region.tensor((1, size), "FP32"), region.tensor((1, size), "FP32", offset=1 << 15)
    region.array((8, 1, size), np.float32)[:] = np.arange(8).reshape(8, 1, 1)
    return region, client.prepare("add1", {"x": x}, {"y": y}, slots=(8, places))


class TestPlans:
    def test_inputs_are_read_and_outputs_written_where_they_lie(self, client):
        region, plan = adding(client)
        y = region.array((1, 4), np.float32, 1 << 15)
        for k in range(8):
            result = plan.infer(timeout=30, input_slot=k)
            assert y.tolist() == [[k + 1] * 4]
            assert np.shares_memory(result["y"], y)

    def test_a_ring_of_frames_with_few_results(self, client):
        region = client.create_region("ring", 1 << 16)
        frames = region.tensor((1, 16), "FP32", stride=128)
        places = region.tensor((1, 16), "FP32", offset=1 << 15, stride=256)
        for k in range(20):
            frames.array(k)[:] = k
        plan = client.prepare("add1", {"x": frames}, {"y": places}, slots=(20, 4))
        for start in range(0, 20, 4):
            pending = [plan.submit(30, input_slot=start + k, output_slot=k) for k in range(4)]
            for k, each in enumerate(pending):
                assert (each.result()["y"] == start + k + 1).all()
                assert (places.array(k) == start + k + 1).all()
                assert each.done()
        plan.release()
        with pytest.raises(InferError, match="released"):
            plan.infer()

    def test_outputs_without_a_place_beside_placed_ones(self, client):
        region = client.create_region("mixed", 1 << 16)
        region.array((2, 1, 4), np.float32)[:] = [[[1] * 4], [[50] * 4]]
        region.array((1, 4), np.float32, 1024)[:] = 1
        a, b = region.tensor((1, 4), "FP32"), region.tensor((1, 4), "FP32", 1024, stride=0)
        plan = client.prepare("two_input", {"a": a, "b": b}, {"total": region.tensor((1, 4), "FP32", 4096)}, (2, 1))
        for k, value in enumerate((1, 50)):
            result = plan.infer(timeout=30, input_slot=k)
            assert {name: array.tolist() for name, array in result.items()} == {
                "total": [[value + 1] * 4],
                "difference": [[value - 1] * 4],
            }
            assert region.array((1, 4), np.float32, 4096).tolist() == [[value + 1] * 4]

    def test_nothing_placed(self, client):
        region = client.create_region("r", 4096)
        region.array((4,), np.float32)[:] = 3
        plan = client.prepare("add1", {"x": region.tensor((1, 4), "FP32")})
        pending = [plan.submit(timeout=30) for _ in range(8)]
        assert [each.result()["y"].tolist() for each in pending] == [[[4] * 4]] * 8
        with pytest.raises(InferError, match="output_slot is for outputs that the caller placed"):
            plan.infer(output_slot=0)

    def test_fewer_rows(self, client):
        region = client.create_region("rows", 4096)
        region.array((4, 4), np.float32)[:] = 1
        plan = client.prepare("add1", {"x": region.tensor((4, 4), "FP32")}, {"y": region.tensor((4, 4), "FP32", 1024)})
        assert plan.infer(rows=2)["y"].tolist() == [[2] * 4] * 2
        assert region.array((4, 4), np.float32, 1024)[2:].tolist() == [[0] * 4] * 2
        with pytest.raises(InferError, match="5 rows asked of a plan prepared for 4"):
            plan.infer(rows=5)

    def test_strings_in_regions(self, client):
        region = client.create_region("s", 4096)
        data = b"\1\0\0\0a\5\0\0\0\xc3\xbcber"
        region.memory.bytes[: len(data)] = np.frombuffer(data, np.uint8)
        x = region.tensor((1, 2), "BYTES", byte_size=len(data))
        y = region.tensor((1, 2), "BYTES", 1024, byte_size=64)
        result = client.prepare("identity_string", {"x": x}, {"y": y}).infer(timeout=30)
        assert result["y"].tolist() == [[b"a", "über".encode()]]
        assert region.memory.bytes[1024 : 1024 + len(data)].tobytes() == data
        assert client.infer("identity_string", {"x": x})["y"].tolist() == [[b"a", "über".encode()]]
        with pytest.raises(InferError, match="expected 3 string elements") as caught:
            client.infer("identity_string", {"x": region.tensor((1, 3), "BYTES", byte_size=len(data))})
        assert caught.value.code == "INVALID_ARG"

    def test_places_of_open_size(self, client):
        region = client.create_region("open", 4096)
        region.array((8,), np.float32)[:] = 1
        x = region.tensor((8,), "FP32")
        roomy = client.prepare("nonzero", {"x": x}, {"y": region.tensor((1, -1), "INT64", 1024, byte_size=512)})
        assert roomy.infer()["y"].tolist() == [list(range(8))]
        assert region.array((8,), np.int64, 1024).tolist() == list(range(8))
        tight = client.prepare("nonzero", {"x": x}, {"y": region.tensor((1, 2), "INT64", 2048)})
        with pytest.raises(InferError, match="at least 64 bytes") as caught:
            tight.infer()
        assert caught.value.code == "INVALID_ARG"
        assert not region.array((512,), np.uint8, 2048).any()

    def test_arguments_that_fit_no_request(self, client):
        _, plan = adding(client)
        for arguments in (
            {"input_slot": 8},
            {"output_slot": 1},
            {"input_slot": -1},
            {"rows": -1},
            {"priority": "high"},
        ):
            with pytest.raises(InferError) as caught:
                plan.infer(**arguments)
            assert caught.value.code == "INVALID_ARG"
        with pytest.raises(InferError, match="sequence_start and sequence_end need a sequence_id"):
            plan.submit(sequence_start=True)
        assert plan.infer(priority=1)["y"].tolist() == [[1] * 4]

    def test_regions_and_arrays_in_one_call(self, client):
        region = client.create_region("r", 4096)
        region.array((4,), np.float32)[:] = 3
        place = region.tensor((1, 4), "FP32", offset=1024 + 3)
        for _ in range(3):
            a, b = region.tensor((1, 4), "FP32"), vector(1, 2, 3, 4)
            result = client.infer("two_input", {"a": a, "b": b}, {"total": place})
            assert result["total"].tolist() == [[4, 5, 6, 7]]
            assert place.array().tolist() == [[4, 5, 6, 7]]
            assert result["difference"].tolist() == [[2, 1, 0, -1]]


class TestEnds:
    """The slow model runs for a third of a second and more, one request at a time."""

    def test_cancel(self, client):
        region, plan = slow(client)
        first, second = plan.submit(timeout=60, output_slot=0), plan.submit(timeout=60, output_slot=1)
        assert second.cancel()
        with pytest.raises(InferError, match="the request was cancelled") as caught:
            second.result()
        assert caught.value.code == "CANCELLED"
        assert second.done()
        assert not second.cancel()
        assert first.result()["y"].shape == (1,)
        assert not first.cancel()
        assert first.result() is first.result()
        assert not region.array((1,), np.float32, 1024 + 4).any()

    def test_deadline(self, client):
        client.infer("add1", {"x": vector(1)})
        _, plan = slow(client)
        pending = plan.submit(timeout=0.05)
        for attempt in (pending.result, lambda: plan.infer(timeout=0.05, output_slot=1)):
            with pytest.raises(InferError, match="Request timeout expired") as caught:
                attempt()
            assert caught.value.code == "UNAVAILABLE"
        with pytest.raises(InferError, match="Request timeout expired"):
            client.infer("add1", {"x": vector(1)}, timeout=1e-9)
        assert plan.infer(timeout=60, output_slot=2)["y"].shape == (1,)

    def test_waiting_is_not_the_deadline(self, client):
        _, plan = slow(client)
        pending = plan.submit(timeout=60)
        with pytest.raises(TimeoutError, match="the request goes on"):
            pending.result(timeout=0.01)
        with pytest.raises(InferError, match="overlaps that of a request that has not ended") as caught:
            plan.submit()
        assert caught.value.code == "INVALID_ARG"
        assert pending.result(timeout=60)["y"].shape == (1,)
        assert plan.infer(timeout=60)["y"].shape == (1,)

    def test_close_ends_what_is_in_flight(self, client):
        _, plan = slow(client)
        pending = plan.submit()
        client.close()
        for call in (pending.result, client.models, plan.infer, lambda: client.infer("add1", {"x": vector(1)})):
            with pytest.raises(InferError) as caught:
                call()
            assert caught.value.code == "UNAVAILABLE"
        client.close()

    def test_too_many(self, connect):
        client = connect(slots=2)
        _, plan = slow(client)
        pending = [plan.submit(output_slot=k) for k in range(2)]
        with pytest.raises(InferError) as caught:
            plan.infer(output_slot=2, timeout=0.05)
        assert caught.value.code == "UNAVAILABLE"
        assert [each.result()["y"].shape for each in pending] == [(1,), (1,)]


class TestRegions:
    def test_names_are_the_clients_own(self, connect):
        one, two = connect(), connect()
        for each in (one, two):
            each.create_region("input", 64)
        with pytest.raises(InferError, match="shared memory region 'input' already in manager") as caught:
            one.create_region("input", 64)
        assert caught.value.code == "ALREADY_EXISTS"
        two.unregister()
        (record,) = one.regions()
        assert (record.name, record.byte_size) == ("input", 64)
        assert two.regions() == []

    def test_unregister(self, client):
        region, plan = adding(client)
        y = plan.infer()["y"]
        client.unregister("nosuch")
        client.unregister("r")
        assert y.tolist() == [[1] * 4]
        for call in (plan.infer, lambda: client.infer("add1", {"x": region.tensor((1, 4), "FP32")})):
            with pytest.raises(InferError, match="Unable to find shared memory region: 'r'") as caught:
                call()
            assert caught.value.code == "NOT_FOUND"
        assert client.create_region("r", 4096).array((4,), np.float32).tolist() == [0] * 4

    def test_a_region_shared_with_another_client(self, connect):
        capture, detector = connect(), connect()
        frames = capture.create_region("cam0", 4096)
        frames.array((4,), np.float32)[:] = 5
        seen = detector.open_region(share(capture, frames))
        assert seen.array((4,), np.float32).tolist() == [5] * 4
        assert detector.infer("add1", {"x": seen.tensor((1, 4), "FP32")})["y"].tolist() == [[6] * 4]
        frames.array((4,), np.float32)[:] = 7
        assert seen.array((4,), np.float32).tolist() == [7] * 4
        token = share(capture, frames)
        capture.unregister("cam0")
        with pytest.raises(InferError, match="Unable to find shared memory region") as caught:
            detector.open_region(token, "late")
        assert caught.value.code == "NOT_FOUND"

    def test_shared_memory_that_somebody_else_made(self, client):
        key = f"/tb-test-{os.getpid()}"
        memory = posix_ipc.SharedMemory(key, posix_ipc.O_CREX, size=8192)
        try:
            memory.close_fd()
            region = client.register_system_shm("theirs", key, 4096, offset=100)
            assert (region.kind, region.key, region.offset) == ("system", key, 100)
            region.array((4,), np.float32)[:] = 2
            place = region.tensor((1, 4), "FP32", offset=1024)
            assert client.infer("add1", {"x": region.tensor((1, 4), "FP32")}, {"y": place})["y"].tolist() == [[3] * 4]
            content = Path(f"/dev/shm{key}").read_bytes()
            assert np.frombuffer(content, np.float32, 4, 100 + 1024).tolist() == [3] * 4
            with pytest.raises(InferError, match="invalid args"):
                client.register_system_shm("long", key, 8192, offset=1)
            client.unregister("theirs")
            assert Path(f"/dev/shm{key}").exists()
        finally:
            posix_ipc.unlink_shared_memory(key)
        with pytest.raises(InferError, match=key.strip("/")):
            client.register_system_shm("gone", key, 4096)

    def test_arrays_outlive_the_client(self, connect):
        client = connect()
        region = client.create_region("r", 4096)
        view = region.array((4,), np.float32)
        result = client.infer("add1", {"x": vector(1, 2)})["y"]
        client.close()
        del client, region
        gc.collect()
        view[:] = 3
        assert result.tolist() == [[2, 3]]
        assert view.tolist() == [3] * 4


def slow(client):
    """A region and a plan of the model that takes its time: x at 0, y from 1024 on, in four positions."""
    region = client.create_region("r", 4096)
    region.array((1,), np.float32)[:] = 1
    x, y = region.tensor((1,), "FP32", stride=0), region.tensor((1,), "FP32", 1024)
    return region, client.prepare("slow", {"x": x}, {"y": y}, slots=(1, 4))
