"""Tensors given as `InferTensorContents`, one protobuf field per kind of number, turned into KServe's bytes.

Used by `broker.gateway.grpc.codec`. FP16 and BF16 have no such field.
"""

from __future__ import annotations

import struct
from itertools import chain
from typing import Any, Final

import numpy as np

from shm.datatypes import DATATYPES
from shm.errors import Code, InferError

# In one request. An element costs some 50 ns of time that others wait for, a string four times as much.
MAX_TYPED_ELEMENTS: Final = 2**24

# Field → the datatypes it holds with the dtype to store them as; the first is named when the datatype is another one.
# Narrow integers travel as 32 bits, of which the low ones count.
_FIELDS: Final[dict[str, dict[str, str]]] = {
    "bool_contents": {"BOOL": "?"},
    "int_contents": {"INT32": "<i4", "INT8": "i1", "INT16": "<i2"},
    "int64_contents": {"INT64": "<i8"},
    "uint_contents": {"UINT32": "<u4", "UINT8": "u1", "UINT16": "<u2"},
    "uint64_contents": {"UINT64": "<u8"},
    "fp32_contents": {"FP32": "<f4"},
    "fp64_contents": {"FP64": "<f8"},
    "bytes_contents": {"BYTES": ""},
}
_LENGTH = struct.Struct("<I")
_BLOCK = 1 << 16  # strings joined at once: protobuf makes a Python object of each, which is larger than most


def typed_contents(tensor: Any, model: str, room: int) -> tuple[bytes, int]:
    """The bytes of an InferInputTensor with `contents`, and their number of elements, at most `room`.

    Raises InferError for a field that does not go with the datatype, and for more than one field.
    """
    found: tuple[bytes, int] | None = None
    for field, datatypes in _FIELDS.items():
        values = getattr(tensor.contents, field)
        if not values:
            continue
        what = f"unexpected explicit tensor data for input tensor '{tensor.name}' for model '{model}'"
        if found is not None:
            raise InferError(Code.INVALID_ARG, f"{what}, binary data was already supplied.")
        dtype = datatypes.get(tensor.datatype)
        if dtype is None:
            expected = tensor.datatype if tensor.datatype in DATATYPES else "<invalid>"
            raise InferError(
                Code.INVALID_ARG, f"{what} of type '{next(iter(datatypes))}', expected datatype '{expected}'"
            )
        if len(values) > room:
            raise InferError(
                Code.INVALID_ARG,
                f"{what}: a request may hold {MAX_TYPED_ELEMENTS} such elements, send tensors as raw_input_contents",
            )
        found = _stored(values, dtype), len(values)
    return (b"", 0) if found is None else found


def _stored(values: Any, dtype: str) -> bytes:
    if not dtype:
        return _strings(values)
    narrow = np.dtype(dtype)
    wide = np.dtype(f"<{narrow.kind}4") if narrow.kind in "iu" and narrow.itemsize < 4 else narrow
    return np.fromiter(values, wide, len(values)).astype(narrow, copy=False).tobytes()


def _strings(values: Any) -> bytes:
    blocks = []
    for start in range(0, len(values), _BLOCK):
        block = values[start : start + _BLOCK]
        lengths = map(_LENGTH.pack, map(len, block))
        blocks.append(b"".join(chain.from_iterable(zip(lengths, block, strict=True))))
    return b"".join(blocks)
