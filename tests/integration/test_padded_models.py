"""`pad_to` and `max_queue_bytes` in a real broker: an ONNX model with a mask, native clients and tritonclient."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from onnx import helper
from tritonclient.utils import InferenceServerException

import clientlib
from shm.errors import InferError
from tests.fakes import models
from tests.fakes.broker import eventually
from tests.fakes.gateways import Gateway, url_of
from tests.unit.test_loader_own import parameter


def centre() -> onnx.ModelProto:
    """y = x minus its mean, where `mask` is 1. FP32 [batch, n]."""
    return models.build(
        [
            helper.make_node("Mul", ["x", "mask"], ["own"]),
            helper.make_node("ReduceSum", ["own", "axes"], ["sum"], keepdims=1),
            helper.make_node("ReduceSum", ["mask", "axes"], ["count"], keepdims=1),
            helper.make_node("Div", ["sum", "count"], ["mean"]),
            helper.make_node("Sub", ["x", "mean"], ["y"]),
        ],
        [models.tensor("x", ["batch", "n"]), models.tensor("mask", ["batch", "n"])],
        [models.tensor("y", ["batch", "n"]), models.tensor("mean", ["batch", 1])],
        {"axes": np.array([1], np.int64)},
    )


PADDED = (
    "max_batch_size: 8\ndynamic_batching { max_queue_delay_microseconds: 20000 }\n"
    + parameter("pad_to", "4,16,64")
    + parameter("pad_value", "1e9")
    + parameter("mask_input", "mask")
)
TWICE = """
platform: "ensemble"
max_batch_size: 8
input { name: "in" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "out" data_type: TYPE_FP32 dims: [ -1 ] }
ensemble_scheduling {
  step { model_name: "centre" model_version: -1 input_map { key: "x" value: "in" } output_map { key: "y" value: "a" } }
  step { model_name: "centre" model_version: -1 input_map { key: "x" value: "a" } output_map { key: "y" value: "out" } }
}
"""
SLOW = """
backend: "slow"
max_batch_size: 1
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }
""" + parameter("max_queue_bytes", "1000")
BACKEND = """
import os
import time


def load(context):
    return Model(os.path.join(context.config.directory, "go"))


class Model:
    def __init__(self, path):
        self.path = path

    def bind(self, inputs, outputs):
        return Run(self.path, inputs[0], outputs[0])

    def close(self):
        pass


class Run:
    def __init__(self, path, x, y):
        self.path, self.x, self.y = path, x, y

    def run(self):
        open(self.path + "es", "w").close()
        until = time.monotonic() + 20
        while not os.path.exists(self.path) and time.monotonic() < until:
            time.sleep(0.002)
        self.y.memory[:] = self.x.memory[:4]

    def results(self):
        return []
"""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    root = tmp_path_factory.mktemp("padded")
    models.write_model(root / "models", "centre", centre(), config=PADDED)
    (root / "models" / "twice" / "1").mkdir(parents=True)
    (root / "models" / "twice" / "config.pbtxt").write_text(TWICE)
    (root / "models" / "slow" / "1").mkdir(parents=True)
    (root / "models" / "slow" / "config.pbtxt").write_text(SLOW)
    (root / "models" / "slow" / "backend.py").write_text(BACKEND)
    (root / "run").mkdir(mode=0o700)
    with Gateway(root / "models", root / "run") as broker:
        yield broker.ready()


def vector(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-9, 9, (1, length)).astype(np.float32)


def test_requests_of_many_lengths_get_what_they_would_get_alone(broker: Gateway) -> None:
    with clientlib.connect(broker.directory) as client:
        model = client.model("centre")
        assert [tensor.name for tensor in model.inputs] == ["x"], "the mask is the broker's"
        inputs = [vector(1 + 7 * seed % 64, seed) for seed in range(64)]
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(lambda x: client.infer("centre", {"x": x}, timeout=30), inputs))
        for x, result in zip(inputs, results, strict=True):
            np.testing.assert_allclose(result["y"], x - x.mean(), rtol=1e-4, atol=1e-4)
        eventually(lambda: client.statistics("centre")[0]["inference_count"] == len(inputs), "all are counted")
        stats = client.statistics("centre")[0]
        assert sum(stats["closed_batches"].values()) == stats["execution_count"]
        assert stats["closed_batches"]["delay"] or stats["closed_batches"]["full"]
        assert stats["execution_count"] < stats["inference_count"], "different lengths have shared batches"
        line = 'tensorbroker_closed_batches_total{model="centre",reason="delay",version="1"} '
        _, metrics = broker.get("/metrics", "metrics")
        assert f"{line}{stats['closed_batches']['delay']}\n" in metrics.decode()
        with pytest.raises(
            InferError, match="has 65 elements in its variable dimension, the largest size in pad_to is"
        ):
            client.infer("centre", {"x": vector(65, 1)}, timeout=30)


def test_as_a_member_of_an_ensemble(broker: Gateway) -> None:
    inputs = [vector(1 + 5 * seed, seed) for seed in range(12)]
    with clientlib.connect(broker.directory) as client, ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda x: client.infer("twice", {"in": x}, timeout=30), inputs))
    for x, result in zip(inputs, results, strict=True):
        np.testing.assert_allclose(result["out"], x - x.mean(), rtol=1e-4, atol=1e-4)


def test_clients_of_triton(broker: Gateway) -> None:
    with triton.InferenceServerClient(url_of(broker, "grpc").split("//")[1]) as client:
        assert [each.name for each in client.get_model_metadata("centre").inputs] == ["x"]
        x = vector(5, 1)
        given = triton.InferInput("x", x.shape, "FP32")
        given.set_data_from_numpy(x)
        y = client.infer("centre", [given]).as_numpy("y")
        np.testing.assert_allclose(y, x - x.mean(), rtol=1e-4, atol=1e-4)
        mask = triton.InferInput("mask", x.shape, "FP32")
        mask.set_data_from_numpy(np.ones_like(x))
        with pytest.raises(InferenceServerException, match="expected 1 inputs but got 2 inputs for model 'centre'"):
            client.infer("centre", [given, mask])


def test_what_waits_has_so_many_bytes_at_most(broker: Gateway) -> None:
    x = np.ones((1, 100), np.float32)
    go = Path(broker.directory).parent / "models" / "slow" / "go"
    with contextlib.ExitStack() as stack:  # of clients that have as much in the queue as each other
        clients = [stack.enter_context(clientlib.connect(broker.directory)) for _ in range(3)]
        client, answers = clients[0], list[Any]()

        def ask(client: clientlib.Client) -> None:
            answers.append(client.infer("slow", {"x": x}, timeout=30)["y"][0, 0])

        threads = [threading.Thread(target=ask, args=(each,), daemon=True) for each in clients]
        threads[0].start()
        eventually(lambda: go.with_name("goes").exists())
        for thread in threads[1:]:
            thread.start()
        eventually(lambda: client.statistics("slow")[0]["pending"] == 2)
        with pytest.raises(
            InferError, match="Exceeds maximum queue size: the inputs that wait have 800 bytes, these 400"
        ):
            client.infer("slow", {"x": x}, timeout=30)
        given = triton.InferInput("x", x.shape, "FP32")
        given.set_data_from_numpy(x)
        url = url_of(broker, "grpc").split("//")[1]
        with triton.InferenceServerClient(url) as other, pytest.raises(InferenceServerException) as refused:
            other.infer("slow", [given])
        assert refused.value.message() == "[request id: <id_unknown>] Exceeds maximum queue size", "as Triton says it"
        go.touch()
        for thread in threads:
            thread.join(30)
        assert answers == [1, 1, 1]
