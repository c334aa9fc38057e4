"""Triton's classification extension: the highest values of an output, as "<value>:<index>[:<label>]" strings.

Called by `broker.gateway.inference` for outputs that ask for classes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shm import datatypes
from shm.errors import Code, InferError

MAX_ELEMENTS = 1_000_000
_TYPES = frozenset(
    ("UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP32", "FP64")
)  # those that the extension is defined for


def classify(
    data: npt.NDArray[np.uint8],
    datatype: str,
    shape: tuple[int, ...],
    classes: int,
    *,
    batched: bool,
    labels: Sequence[bytes] = (),
) -> tuple[bytes, tuple[int, ...]]:
    """The `classes` highest values of every row of an output, highest first: BYTES in KServe's encoding, and shape.

    `batched`: the first dimension is the batch's, and each of its rows is ranked by itself; else all elements are one
    row. A row with fewer elements gives as many as it has. Of equal values the one with the lower index comes first.
    `labels`: by index; one that is missing or empty leaves no colon behind.
    Raises InferError for datatypes without classes and for more than a million elements.
    """
    if datatype not in _TYPES:
        raise InferError(
            Code.INVALID_ARG, f"class result not available for output due to unsupported type '{datatype}'"
        )
    count = math.prod(shape)
    if count > MAX_ELEMENTS:
        raise InferError(Code.INVALID_ARG, "classification output tensor too large")
    rows = shape[0] if batched and shape else 1
    each = count // rows if rows else 0
    kept = min(classes, each)
    values = data.view(datatypes.numpy_dtype(datatype)).reshape(rows, each)
    parts: list[bytes] = []
    for row in values:
        for index in _highest(row, kept).tolist():
            text = f"{_text(row[index])}:{index}".encode()
            if index < len(labels) and labels[index]:
                text += b":" + labels[index]
            parts += (struct.pack("<I", len(text)), text)
    return b"".join(parts), (rows, kept) if batched and shape else (kept,)


def _highest(row: npt.NDArray[Any], count: int) -> npt.NDArray[np.intp]:
    """Indexes of the highest values, in order. NaN counts as the lowest."""
    if row.dtype.kind == "f":
        row = np.where(np.isnan(row), -np.inf, row)
    # Sorted backwards from the end, because unsigned numbers have no negative to sort by.
    backwards = np.argsort(row[::-1], kind="stable")[::-1][:count]
    return row.size - 1 - backwards


def _text(value: Any) -> str:
    """As C++'s std::to_string: six decimals, integers as they are."""
    return f"{float(value):f}" if value.dtype.kind == "f" else str(int(value))
