"""Shapes at the client and at the model, both ways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.repository.config import ModelConfig, TensorConfig
from broker.worker.reshape import Reshape, reshapes
from shm.errors import InferError


def config(max_batch_size, *tensors):
    return ModelConfig(
        name="m",
        platform="",
        backend="onnxruntime",
        directory="",
        versions={},
        default_model_filename="",
        max_batch_size=max_batch_size,
        input=tensors,
        output=(),
        instance_group=(),
    )


def test_only_tensors_with_two_shapes_have_one():
    tensors = (
        TensorConfig(name="plain", datatype="FP32", dims=(4,)),
        TensorConfig(name="same", datatype="FP32", dims=(4,), reshape=(4,)),
        TensorConfig(name="scalar", datatype="FP32", dims=(1,), reshape=()),
    )
    assert reshapes(config(0, *tensors)) == {"scalar": Reshape((1,), ())}
    assert reshapes(config(4, *tensors)) == {"scalar": Reshape((-1, 1), (-1,))}


def test_variable_dimensions_are_filled_in_order():
    reshape = Reshape((-1, 2, -1, 1, -1), (-1, -1, 2, -1))
    assert reshape.to_model((8, 2, 5, 1, 7)) == (8, 5, 2, 7)
    assert reshape.to_client("y", (8, 5, 2, 7)) == (8, 2, 5, 1, 7)
    assert reshape.to_model((8, 2, -1, 1, 7)) == (8, -1, 2, 7), "what only the run tells stays open"


@given(st.lists(st.integers(0, 9), min_size=3, max_size=3))
def test_there_and_back(sizes):
    reshape = Reshape((-1, 6, -1, -1), (-1, 2, 3, -1, 1, -1))
    shape = (sizes[0], 6, sizes[1], sizes[2])
    assert reshape.to_client("y", reshape.to_model(shape)) == shape


@pytest.mark.parametrize("shape", [(3,), (3, 2, 1), (3, 4)])
def test_a_model_that_breaks_its_promise_is_named(shape):
    with pytest.raises(InferError, match=r"output 'y' came out as .* the configuration says \[-1,2\]") as refusal:
        Reshape((-1, 1, 2), (-1, 2)).to_client("y", shape)
    assert refusal.value.code == "INTERNAL"
