"""Tensors given as `InferTensorContents`, one protobuf field per kind of number, turned into KServe's bytes.

Used by `broker.gateway.grpc_codec`. FP16 and BF16 have no such field.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import numpy as np

from shm.datatypes import DATATYPES
from shm.errors import Code, InferError

# In one request. An element costs some 50 ns in which nothing else runs: 0.2 s for this many.
MAX_TYPED_ELEMENTS: Final = 2**22

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
        return b"".join(part for value in values for part in (_LENGTH.pack(len(value)), value))
    narrow = np.dtype(dtype)
    wide = np.dtype(f"<{narrow.kind}4") if narrow.kind in "iu" and narrow.itemsize < 4 else narrow
    return np.fromiter(values, wide, len(values)).astype(narrow, copy=False).tobytes()
