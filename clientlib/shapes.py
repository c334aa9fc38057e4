"""Which shapes do a model's outputs have for these inputs? Pure functions of metadata.

Decides, with `shm.model_fit.output_shape`, how large an output's place must be before the model has run. Whether the
inputs fit the model is for the broker to say: what cannot be followed here is left open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shm.datatypes import BYTES
from shm.messages import ModelMetadata

Shape = tuple[int, ...]
MIN_ROOM = 64 << 10  # bytes for a result whose size only running the model tells
ROOM_FACTOR = 4  # … or this many times the inputs


def batch_rows(model: ModelMetadata, inputs: Mapping[str, Sequence[int]]) -> int:
    """The batch dimension of one position; 0 for models without one. Without inputs, all optional, it is one row."""
    if not model.max_batch_size:
        return 0
    return next((shape[0] for shape in inputs.values() if shape), 1)


def is_open(datatype: str, shape: Sequence[int]) -> bool:
    """Does the worker report this output's shape with every result? Its bytes do not follow from the plan."""
    return datatype == BYTES or -1 in shape


def reported(datatype: str, planned: Shape, rows: int, words: list[int]) -> Shape:
    """The shape of a result: of an open output, the next one in the completion's `words`, which are taken off."""
    if is_open(datatype, planned):
        rank = words[0]
        shape = tuple(words[1 : 1 + rank])
        del words[: 1 + rank]
        return shape
    return (rows, *planned[1:]) if rows else planned


def first_room(input_bytes: int) -> int:
    """Bytes to reserve for an open output before any result was seen."""
    return max(MIN_ROOM, ROOM_FACTOR * input_bytes)
