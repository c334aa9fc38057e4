"""The client library against a real broker: the same cases over `Client` and `AsyncClient`."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import posix_ipc
import pytest

import clientlib
from shm.errors import InferError
from tests.fakes import models
from tests.fakes.blocking import Blocking, share
from tests.fakes.broker import Broker

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_samples(tmp_path_factory.mktemp("repository"))


@pytest.fixture(scope="module")
def broker(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    flags = ("--model-control-mode=explicit", "--load-model=*")
    with Broker(repository, tmp_path_factory.mktemp("run"), *flags) as broker:
        yield broker.ready()


@pytest.fixture(params=["threads", "loop"])
def connect(request, broker):
    """`connect()` makes a client of either kind that blocks; all are closed at the end."""
    made = []
    runner = asyncio.Runner()

    def connect(url=f"ipc://{broker.directory}", **options):
        if request.param == "threads":
            client = clientlib.connect(url, **options)
        else:
            client = Blocking(runner.run(clientlib.connect_async(url, **options)), runner)
        made.append(client)
        return client

    with runner:
        yield connect
        for client in made:
            client.close()


@pytest.fixture
def client(connect):
    return connect()


def vector(*values):
    return np.array([values], np.float32)


class TestArrays:
    def test_numpy_in_numpy_out(self, client):
        for shape in ((1, 3), (2, 300), (4, 1), (1, 70_000)):
            x = np.random.default_rng(1).random(shape, np.float32)
            result = client.infer("add1", {"x": x})
            np.testing.assert_array_equal(result["y"], x + 1)
            assert result.timing.infer_ns > 0

    def test_a_model_is_called(self, client):
        model = client.model("two_input")
        assert [tensor.name for tensor in model.inputs] == ["a", "b"]
        assert model.max_batch_size == 4
        out = model({"a": vector(1, 2), "b": vector(3, 4)})
        assert {name: array.tolist() for name, array in out.items()} == {"total": [[4, 6]], "difference": [[-2, -2]]}
        assert list(model({"a": vector(1), "b": vector(2)}, outputs=["difference"])) == ["difference"]

    def test_views_that_are_not_contiguous(self, client):
        x = np.arange(32, dtype=np.float32).reshape(4, 8)
        for view in (x[::2, ::2], x.T[:4, :3], x[:, ::-1], np.asfortranarray(x), x.astype(">f4")):
            np.testing.assert_array_equal(client.infer("add1", {"x": view})["y"], view + 1)

    @pytest.mark.parametrize(("model", "dtype"), [("identity_fp16", np.float16), ("identity_bf16", None)])
    def test_other_datatypes(self, client, model, dtype):
        if dtype is None:
            dtype = pytest.importorskip("ml_dtypes").bfloat16
        x = np.array([[0, -1.5, np.inf, 3]], np.float32).astype(dtype)
        y = client.infer(model, {"x": x})["y"]
        assert y.dtype == x.dtype
        assert y.tobytes() == x.tobytes()

    def test_strings(self, client):
        values = np.array([[b"", b"a\0\0", "ümlaut", b"\xc3\xa4" * 500]], object)
        y = client.infer("identity_string", {"x": values})["y"]
        assert y.tolist() == [[b"", b"a\0\0", "ümlaut".encode(), b"\xc3\xa4" * 500]]

    def test_results_whose_shape_only_the_run_tells(self, client):
        for x in ([0, 1, 1, 0, 0, 0, 0, 1], [1] * 8, [0] * 8):
            array = np.array(x, np.float32)
            np.testing.assert_array_equal(client.infer("nonzero", {"x": array})["y"], np.stack(np.nonzero(array)))

    def test_no_elements(self, client):
        assert client.infer("add1", {"x": np.zeros((2, 0), np.float32)})["y"].shape == (2, 0)

    def test_results_are_kept_while_others_are_made(self, client):
        kept = [client.infer("add1", {"x": vector(k, k)})["y"] for k in range(400)]
        assert all((array == k + 1).all() for k, array in enumerate(kept))

    @pytest.mark.parametrize(
        ("model", "inputs", "fragments"),
        [
            ("nosuch", {"x": vector(1)}, ["nosuch", "not found"]),
            ("add1", {"x": vector(1).astype(np.float64)}, ["'FP64'", "'FP32'"]),
            ("matmul", {"x": vector(1, 2, 3, 4, 5)}, ["[-1,4]", "[1,5]"]),
            ("matmul", {"x": np.zeros(4, np.float32)}, ["'x'", "[4]"]),
            ("add1", {"x": np.zeros((5, 2), np.float32)}, ["batch-size must be <= 4"]),
            ("add1", {"x": np.zeros((0, 2), np.float32)}, ["batch-size must be >= 1"]),
            ("add1", {}, ["expected 1 inputs but got 0", "'x'"]),
            ("add1", {"x": vector(1), "z": vector(1)}, ["expected 1 inputs but got 2"]),
            ("two_input", {"a": vector(1), "c": vector(1)}, ["'c'"]),
            ("add1", {"x": [1.0]}, ["got list"]),
        ],
    )
    def test_mistakes_are_named(self, client, model, inputs, fragments):
        with pytest.raises(InferError) as caught:
            client.infer(model, inputs)
        assert caught.value.code in ("INVALID_ARG", "NOT_FOUND")
        for fragment in fragments:
            assert fragment in caught.value.message
        assert client.infer("add1", {"x": vector(1)})["y"].tolist() == [[2]]


class TestRegions:
    def test_a_prepared_request_copies_nothing(self, client):
        region = client.create_region("frames", 1 << 16)
        x, y = region.array((4, 1024), np.float32), region.array((4, 1024), np.float32, offset=1 << 15)
        plan = client.prepare(
            "add1", {"x": region.tensor((4, 1024), "FP32")}, {"y": region.tensor((4, 1024), "FP32", 1 << 15)}
        )
        for k in range(50):
            x[:] = k
            result = plan.infer(timeout=30)
            assert (y == k + 1).all()
            assert np.shares_memory(result["y"], y)
            assert result.copied_bytes == 0

    def test_a_ring_of_frames_with_few_results(self, client):
        region = client.create_region("ring", 1 << 16)
        frames = region.tensor((1, 16), "FP32", stride=128)
        places = region.tensor((1, 16), "FP32", offset=1 << 15)
        for k in range(20):
            frames.array(k)[:] = k
        plan = client.prepare("add1", {"x": frames}, {"y": places}, slots=(20, 4))
        for k in range(20):
            assert (plan.infer(30, input_slot=k, output_slot=k % 4)["y"] == k + 1).all()
        pending = [plan.submit(30, input_slot=k, output_slot=k) for k in range(4)]
        for k, each in enumerate(pending):
            assert (each.result()["y"] == k + 1).all()

    def test_outputs_without_a_place_beside_placed_ones(self, client):
        region = client.create_region("mixed", 1 << 16)
        region.array((2, 1, 4), np.float32)[:] = [[[1] * 4], [[50] * 4]]
        region.array((1, 4), np.float32, 1024)[:] = 1
        a, b = region.tensor((1, 4), "FP32"), region.tensor((1, 4), "FP32", 1024, stride=0)
        plan = client.prepare("two_input", {"a": a, "b": b}, {"total": region.tensor((1, 4), "FP32", 4096)}, (2, 1))
        submitted = []
        for k in range(2):
            pending = plan.submit(input_slot=k)
            while not pending.done():
                pass
            submitted.append(pending)
        first, second = (pending.result() for pending in submitted)
        assert (first["difference"].tolist(), second["difference"].tolist()) == ([[0] * 4], [[49] * 4])
        assert first["total"].tolist() == second["total"].tolist() == [[51] * 4]  # the caller's place, used twice
        assert first.copied_bytes == 16

    def test_fewer_rows(self, client):
        region = client.create_region("rows", 4096)
        region.array((4, 4), np.float32)[:] = 1
        plan = client.prepare("add1", {"x": region.tensor((4, 4), "FP32")}, {"y": region.tensor((4, 4), "FP32", 1024)})
        assert plan.infer(rows=2)["y"].tolist() == [[2] * 4] * 2
        assert region.array((4, 4), np.float32, 1024)[2:].tolist() == [[0] * 4] * 2
        with pytest.raises(InferError, match="5 rows"):
            plan.infer(rows=5)

    @pytest.mark.parametrize("offset", [1, 3])
    def test_any_offset(self, client, offset):
        region = client.create_region("odd", 4096)
        region.tensor((1, 5), "FP32", offset=offset).array()[:] = 7
        place = region.tensor((1, 5), "FP32", offset=1024 + offset)
        result = client.infer("add1", {"x": region.tensor((1, 5), "FP32", offset=offset)}, outputs={"y": place})
        assert result["y"].tolist() == [[8] * 5]

    def test_places_of_open_size(self, client):
        region = client.create_region("open", 4096)
        region.array((8,), np.float32)[:] = 1
        x = region.tensor((8,), "FP32")
        roomy = client.prepare("nonzero", {"x": x}, {"y": region.tensor((1, -1), "INT64", 1024, byte_size=512)})
        assert roomy.infer()["y"].tolist() == [list(range(8))]
        tight = client.prepare("nonzero", {"x": x}, {"y": region.tensor((1, 2), "INT64", 2048)})
        with pytest.raises(InferError, match="at least 64 bytes"):
            tight.infer()
        assert not region.array((512,), np.uint8, 2048).any()

    @pytest.mark.parametrize(
        ("x", "y", "text"),
        [
            ({"offset": 4096}, {"offset": 64}, "Invalid offset"),
            ({"offset": 4093}, {"offset": 64}, "Invalid offset [+] byte size"),
            ({}, {}, "overlap"),
            ({}, {"offset": 1}, "overlap"),
            ({}, {"offset": 15}, "overlap"),
            ({"byte_size": 8}, {"offset": 64}, "Expected 16, got 8"),
            ({"byte_size": 32}, {"offset": 64}, "Expected 16, got 32"),
            ({}, {"offset": 64, "byte_size": 12}, "at least 16"),
        ],
    )
    def test_places_that_cannot_be(self, client, x, y, text):
        region = client.create_region("r", 4096)
        with pytest.raises(InferError, match=text) as caught:
            client.prepare("add1", {"x": region.tensor((1, 4), "FP32", **x)}, {"y": region.tensor((1, 4), "FP32", **y)})
        assert caught.value.code == "INVALID_ARG"

    @pytest.mark.parametrize(
        ("data", "text"),
        [
            (b"\1\0\0\0a\2\0\0", "incomplete string length"),
            (b"\1\0\0\0a\3\0\0\0bc", "incomplete string data"),
            (b"\1\0\0\0a\xff\xff\xff\xffbc", "incomplete string data"),
            (b"\1\0\0\0a", "expected 2 string elements"),
            (b"\0\0\0\0\0\0\0\0\0\0\0\0", "unexpected number of string elements 3"),
        ],
    )
    def test_strings_that_lie(self, client, data, text):
        region = client.create_region("s", 4096)
        region.memory.bytes[: len(data)] = np.frombuffer(data, np.uint8)
        ref = region.tensor((1, 2), "BYTES", byte_size=len(data))
        with pytest.raises(InferError, match=text):
            client.infer("identity_string", {"x": ref})

    def test_a_region_shared_with_another_session(self, connect):
        capture, detector = connect(), connect()
        frames = capture.create_region("cam0", 4096)
        frames.array((4,), np.float32)[:] = 5
        seen = detector.open_region(share(capture, frames))
        assert seen.array((4,), np.float32).tolist() == [5] * 4
        assert detector.infer("add1", {"x": seen.tensor((1, 4), "FP32")})["y"].tolist() == [[6] * 4]
        capture.unregister("cam0")
        with pytest.raises(InferError):
            detector.prepare("add1", {"x": seen.tensor((1, 2), "FP32")})
        assert seen.array((4,), np.float32).tolist() == [5] * 4

    def test_shared_memory_that_somebody_else_made(self, client):
        key = f"/tb-test-{os.getpid()}"
        memory = posix_ipc.SharedMemory(key, posix_ipc.O_CREX, size=8192)
        try:
            memory.close_fd()
            region = client.register_system_shm("theirs", key, 4096, offset=100)
            region.array((4,), np.float32)[:] = 2
            place = region.tensor((1, 4), "FP32", offset=1024)
            assert client.infer("add1", {"x": region.tensor((1, 4), "FP32")}, {"y": place})["y"].tolist() == [[3] * 4]
            client.unregister("theirs")
            assert Path(f"/dev/shm{key}").exists()
        finally:
            posix_ipc.unlink_shared_memory(key)
        with pytest.raises(InferError, match=key.strip("/")):
            client.register_system_shm("gone", key, 4096)

    def test_names_are_the_sessions_own(self, connect):
        one, two = connect(), connect()
        for each in (one, two):
            each.create_region("input", 64)
        with pytest.raises(InferError, match="already in manager"):
            one.create_region("input", 64)
        two.unregister()
        assert [record.name for record in one.regions()] == ["input"]
        assert two.regions() == []

    def test_unregister_keeps_what_runs_and_what_is_seen(self, client):
        region = client.create_region("r", 4096)
        region.array((4,), np.float32)[:] = 1
        plan = client.prepare("add1", {"x": region.tensor((1, 4), "FP32")}, {"y": region.tensor((1, 4), "FP32", 64)})
        y = plan.infer()["y"]
        client.unregister("r")
        assert y.tolist() == [[2] * 4]
        with pytest.raises(InferError):
            plan.infer(timeout=30)
        assert client.create_region("r", 4096).array((4,), np.float32).tolist() == [0] * 4


class TestLife:
    def test_verbs(self, client):
        assert set(client.models()) >= {"add1", "matmul"}
        client.infer("add1", {"x": vector(1)})
        (statistics,) = client.statistics("add1")
        assert statistics["name"] == "add1"
        client.load("add1")
        assert client.infer("add1", {"x": vector(1)})["y"].tolist() == [[2]]
        with pytest.raises(InferError):
            client.load("nosuch")

    def test_a_reload_with_another_signature(self, client, repository):
        models.write_repository(repository, {"reloaded": models.add1()})
        for size in (8, 4, 2):
            (repository / "reloaded" / "config.pbtxt").write_text(f"max_batch_size: {size}\n")
            client.load("reloaded")
            assert client.infer("reloaded", {"x": vector(1)})["y"].tolist() == [[2]]

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

    def test_a_deadline_that_has_no_time(self, client):
        client.infer("add1", {"x": vector(1)})
        with pytest.raises(InferError, match="timeout expired") as caught:
            client.infer("add1", {"x": vector(1)}, timeout=1e-9)
        assert caught.value.code == "UNAVAILABLE"
        assert client.infer("add1", {"x": vector(1)}, timeout=30)["y"].tolist() == [[2]]
