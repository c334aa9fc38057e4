"""Ragged batches, optional inputs and built-in backends of real brokers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import clientlib
from tests.fakes import models
from tests.fakes.broker import Broker

IDENTITY = """
backend: "identity"
max_batch_size: 4
input [
  { name: "INPUT0" data_type: TYPE_FP32 dims: [ 1 ] optional: true },
  { name: "INPUT1" data_type: TYPE_FP32 dims: [ 1 ] optional: true }
]
output [
  { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 1 ] },
  { name: "OUTPUT1" data_type: TYPE_FP32 dims: [ 1 ] }
]
"""
RAGGED = """
backend: "onnxruntime"
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }
output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "y" source_input: "x" }
dynamic_batching { max_queue_delay_microseconds: 100000 }
"""
DEFAULT = """
backend: "onnxruntime"
max_batch_size: 0
input [
  { name: "x" data_type: TYPE_FP32 dims: [ -1, -1 ] },
  { name: "one" data_type: TYPE_FP32 dims: [ 1 ] optional: true }
]
output { name: "y" data_type: TYPE_FP32 dims: [ -1, -1 ] }
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    models.write_repository(root, {"ragged": models.identity(dims=("n",))})
    (root / "ragged" / "config.pbtxt").write_text(RAGGED)
    default = models.add1()
    default.graph.input.append(models.tensor("one", [1]))
    models.write_model(root, "default", default, config=DEFAULT)
    (root / "identity" / "1").mkdir(parents=True)
    (root / "identity" / "config.pbtxt").write_text(IDENTITY)
    return root


@pytest.fixture
def client(broker: Broker) -> Iterator[clientlib.Client]:
    with clientlib.connect(f"ipc://{broker.directory}") as client:
        yield client


def test_identity_without_one_of_its_inputs(client):
    value = np.float32([[3]])
    assert client.infer("identity", {"INPUT1": value}, outputs=["OUTPUT1"])["OUTPUT1"].tolist() == [[3]]


def test_a_request_without_inputs_is_one_row(client):
    """As in Triton, where all inputs are optional."""
    answer = client.infer("identity", {})
    assert {name: value.shape for name, value in answer.items()} == {"OUTPUT0": (1, 1), "OUTPUT1": (1, 1)}


def test_an_input_with_a_default_in_the_model_file(client):
    value = np.float32([[3]])
    assert client.infer("default", {"x": value})["y"].tolist() == [[4]]
    assert client.infer("default", {"x": value, "one": np.float32([10])})["y"].tolist() == [[13]]


def test_ragged_requests_get_their_own_part_back(broker):
    values = [np.full((1, size), size, np.float32) for size in (2, 4, 1, 3)]

    async def ask():
        async with await clientlib.connect_async(f"ipc://{broker.directory}") as client:
            return await asyncio.gather(*(client.infer("ragged", {"x": value}) for value in values))

    for value, answer in zip(values, asyncio.run(ask()), strict=True):
        assert answer["y"].tolist() == value.tolist()
