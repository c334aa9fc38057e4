"""Tensors whose shape at the client is not the model's: `reshape`, written or chosen by auto-completion."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

import clientlib
from clientlib.client import Client
from tests.fakes import models
from tests.fakes.broker import Broker, eventually

pytestmark = pytest.mark.timeout(180)

SQUARE = """
input {{ name: "x" data_type: TYPE_FP32 dims: 4 reshape {{ shape: [ 2, 2 ] }} }}
output {{ name: "y" data_type: TYPE_FP32 dims: 4 reshape {{ shape: [ 2, 2 ] }} }}
max_batch_size: {}
"""
COUNT = """
max_batch_size: 0
input { name: "x" data_type: TYPE_FP32 dims: -1 }
output { name: "y" data_type: TYPE_FP32 dims: [ 1, -1 ] reshape { shape: -1 } }
"""
PAIRS = """
max_batch_size: 0
input { name: "x" data_type: TYPE_FP32 dims: [ 1, -1, 2, -1 ] reshape { shape: [ -1, 2, -1 ] } }
output { name: "y" data_type: TYPE_FP32 dims: [ -1, 2, -1, 1 ] reshape { shape: [ -1, 2, -1 ] } }
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("repository")


@pytest.fixture(scope="module")
def broker(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    models.write_model(root, "rank1", models.identity(dims=("N",)))
    models.write_model(root, "rank1_text", models.identity(TensorProto.STRING, ("N",)))
    models.write_model(root, "scalar", models.identity(dims=()))
    models.write_model(root, "square", models.identity(dims=(2, 2)), config=SQUARE.format(0))
    models.write_model(root, "square_batch", models.identity(dims=("batch", 2, 2)), config=SQUARE.format(8))
    together = SQUARE.format(8) + "dynamic_batching { max_queue_delay_microseconds: 60000000 preferred_batch_size: 4 }"
    models.write_model(root, "square_together", models.identity(dims=("batch", 2, 2)), config=together)
    models.write_model(root, "pairs", models.identity(dims=("a", 2, "b")), config=PAIRS)
    models.write_model(root, "distinct", models.unique(), config=models.NONZERO_CONFIG)
    models.write_model(root, "distinct_row", models.unique(), config=COUNT)
    models.write_model(root, "reloaded", models.identity(dims=(2, 2)), config=SQUARE.format(0))
    flags = ("--model-control-mode=explicit", "--load-model=*")
    with Broker(root, tmp_path_factory.mktemp("run"), *flags) as broker:
        yield broker.ready()


@pytest.fixture
def client(broker: Broker) -> Iterator[Client]:
    with clientlib.connect(f"ipc://{broker.directory}") as client:
        yield client


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        ("rank1", (1, 1)),
        ("rank1", (4, 1)),
        ("scalar", (1,)),
        ("square", (4,)),
        ("square_batch", (1, 4)),
        ("square_batch", (8, 4)),
        ("pairs", (1, 3, 2, 5)),
    ],
)
def test_the_client_sees_its_own_shape_and_the_model_another(client, model, shape):
    x = np.random.default_rng(1).random(shape, np.float32)
    y = client.infer(model, {"x": x})["y"]
    assert y.shape == ((3, 2, 5, 1) if model == "pairs" else shape)
    np.testing.assert_array_equal(y.reshape(shape), x)


def test_strings_of_rank_one(client):
    x = np.array([[b"one"], [b""], [b"three"]], object)
    y = client.infer("rank1_text", {"x": x})["y"]
    assert y.shape == (3, 1)
    assert [str(item, "utf-8") if isinstance(item, bytes) else item for item in y.ravel()] == ["one", "", "three"]


def test_outputs_whose_size_the_data_decides(client):
    x = np.array([3, 1, 3, 2, 1], np.float32)
    np.testing.assert_array_equal(client.infer("distinct", {"x": x})["y"], [1, 2, 3])
    np.testing.assert_array_equal(client.infer("distinct_row", {"x": x})["y"], [[1, 2, 3]])


def test_requests_that_run_as_one_batch(client):
    region = client.create_region("rows", 1 << 16)
    x, y = region.tensor((1, 4), "FP32", stride=64), region.tensor((1, 4), "FP32", offset=1 << 15, stride=64)
    plan = client.prepare("square_together", {"x": x}, {"y": y}, slots=(4, 4))
    pending = []
    for position in range(4):
        x.array(position)[:] = position
        pending.append(plan.submit(input_slot=position, output_slot=position))
    for position, request in enumerate(pending):
        np.testing.assert_array_equal(request.result(timeout=30)["y"], np.full((1, 4), position, np.float32))
    eventually(lambda: client.statistics("square_together")[0]["inference_count"] == 4, "all are counted")
    assert client.statistics("square_together")[0]["execution_count"] == 1


def test_a_plan_follows_a_reload_with_another_reshape(client, root):
    x = np.arange(4, dtype=np.float32)
    plan = client.prepare("reloaded", {"x": (region := client.create_region("r", 4096)).tensor((4,), "FP32")})
    region.array((4,), np.float32)[:] = x
    np.testing.assert_array_equal(plan.infer()["y"], x)
    row = SQUARE.format(0).replace("[ 2, 2 ]", "[ 1, 4 ]")
    models.write_model(root, "reloaded", models.identity(dims=(1, 4)), config=row)
    client.load("reloaded")
    np.testing.assert_array_equal(plan.infer()["y"], x)
