"""With which edit the shape of a tensor in a configuration becomes that of the model file. Used by `complete`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from tritonclient.grpc import model_config_pb2

from shm.mismatch import dims_text

TensorText: TypeAlias = model_config_pb2.ModelInput | model_config_pb2.ModelOutput


def shape_edit(config: model_config_pb2.ModelConfig, text: TensorText, file_shape: tuple[int, ...]) -> str:
    """`file_shape`: all dimensions that the file has, the batch dimension among them."""
    inner = tuple(text.reshape.shape if text.HasField("reshape") else text.dims)
    if config.max_batch_size > 0:
        if not file_shape[1:]:
            return "dims: [ 1 ] and reshape { shape: [ ] }"
        edit = dims_edit(text, file_shape[1:])
        counts_batch = _fit(inner[1:], file_shape[1:])
        return f"leave the batch dimension out (max_batch_size > 0 adds it): {edit}" if counts_batch else edit
    if file_shape[:1] == (-1,) and _fit(inner, file_shape[1:]):
        return f"max_batch_size: 1 or more, or count the first dimension as well: {dims_edit(text, file_shape)}"
    return dims_edit(text, file_shape) if file_shape else "dims: [ 1 ]"


def dims_edit(text: TensorText, shape: tuple[int, ...]) -> str:
    """So that the model gets `shape`; what clients see stays where it can be reshaped to that."""
    if not text.HasField("reshape"):
        return f"dims: {dims_text(shape)}"
    if tuple(text.dims) == shape:
        return "leave 'reshape' out"
    if products(text.dims) == products(shape):
        return f"reshape {{ shape: {dims_text(shape)} }}"
    return f"dims: {dims_text(shape)}, and leave 'reshape' out"


def _fit(sizes: Sequence[int], file_sizes: Sequence[int]) -> bool:
    return len(sizes) == len(file_sizes) and all(
        there in (-1, here) for here, there in zip(sizes, file_sizes, strict=True)
    )


def products(shape: Sequence[int]) -> list[int]:
    """Those of the fixed sizes before, between and behind variable ones, which keep their order in a reshape: equal
    for shapes that can be reshaped to each other.
    """
    found = [1]
    for dim in shape:
        if dim == -1:
            found.append(1)
        else:
            found[-1] *= dim
    return found
