"""KServe's datatypes: what "FP32" means in bytes and in numpy, how large a tensor is, and how BYTES are stored.

Used by everyone who turns a shape into a size, memory into an array, or strings into bytes. Knows nothing of
regions, plans or models: `what` names the tensor in an error's text, e.g. "inference input 'X' for model 'm'".
"""

from __future__ import annotations

import functools
import math
import operator
import struct
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shm.errors import Code, InferError

BYTES: Final = "BYTES"

# No process can address more. Below it, neither a size nor an end of range comes near a 64-bit wrap.
MAX_BYTE_SIZE: Final = 2**48

# The walk over string lengths costs a quarter of a microsecond an element and holds the GIL.
MAX_STRING_ELEMENTS: Final = 2**20

_FIXED: Final[dict[str, np.dtype[Any]]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BF16": np.dtype("<u2"),
}
DATATYPES: Final = (*_FIXED, BYTES)
_BY_KIND: Final = {(dtype.kind, dtype.itemsize): name for name, dtype in _FIXED.items() if name != "BF16"}
_LENGTH: Final = struct.Struct("<I")


def element_size(datatype: str) -> int:
    """Bytes of one element. Raises InferError for BYTES, whose elements have no fixed size."""
    return _fixed(datatype).itemsize


def numpy_dtype(datatype: str) -> np.dtype[Any]:
    """The dtype of arrays of `datatype`: little-endian; object for BYTES; BF16 see `bfloat16`."""
    if datatype == BYTES:
        return np.dtype(object)
    return bfloat16() if datatype == "BF16" else _fixed(datatype)


@functools.cache
def bfloat16() -> np.dtype[Any]:
    """`ml_dtypes.bfloat16` where that package is installed, else uint16 holding the same bits."""
    try:
        import ml_dtypes
    except ImportError:
        return _FIXED["BF16"]
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def datatype_of(dtype: np.dtype[Any]) -> str:
    """The datatype of arrays of `dtype`, in either byte order. Raises InferError when KServe has none for it."""
    datatype = _datatype_or_none(dtype)
    if datatype is None:
        raise InferError(
            Code.INVALID_ARG, f"no datatype for numpy dtype {dtype}: convert the array to one of {', '.join(DATATYPES)}"
        )
    return datatype


def shape_text(shape: Iterable[int]) -> str:
    """A shape as Triton prints it: [1,3,640,640]."""
    return f"[{','.join(map(str, shape))}]"


def element_count(shape: Iterable[int]) -> int:
    """Number of elements. Raises InferError for negative dimensions and for more than any memory holds."""
    try:
        dims = [operator.index(dim) for dim in shape]
    except TypeError:
        raise InferError(Code.INVALID_ARG, f"a shape is a list of integers, got {shape!r}") from None
    if any(dim < 0 for dim in dims):
        raise InferError(Code.INVALID_ARG, f"every dimension must be 0 or more, got {shape_text(dims)}")
    # Without its zeros, because [0,2**60] has no bytes but makes numpy and runtimes overflow all the same.
    if math.prod(dim or 1 for dim in dims) > MAX_BYTE_SIZE:
        raise InferError(Code.INVALID_ARG, f"shape {shape_text(dims)} has more elements than any memory holds")
    return math.prod(dims)


def byte_size(datatype: str, shape: Iterable[int]) -> int:
    """Bytes of a tensor. Raises InferError for unknown datatypes, negative or absurd dimensions, and BYTES."""
    size = element_size(datatype)
    dims = tuple(shape)
    total = size * element_count(dims)
    if total > MAX_BYTE_SIZE:
        raise InferError(Code.INVALID_ARG, f"shape {shape_text(dims)} of {datatype} is more than any memory holds")
    return total


def from_numpy(value: npt.ArrayLike, datatype: str, what: str) -> npt.NDArray[Any]:
    """`value` as an array that can be copied into memory of `numpy_dtype(datatype)`; no bytes are copied.

    BF16 takes bfloat16 arrays and uint16 arrays of the same bits; BYTES takes str and bytes elements (`encode_bytes`).
    Raises InferError, with the conversion to write, when the dtype is another one: values are never converted.
    """
    try:
        # Strings as objects, because numpy's own string dtype drops the NULs at the end of an element.
        as_objects = datatype == BYTES and not isinstance(value, np.ndarray)
        array = np.asarray(value, dtype=object if as_objects else None)
    except (ValueError, TypeError) as error:
        raise InferError(Code.INVALID_ARG, f"{what} is not an array: {error}") from None
    given = _datatype_or_none(array.dtype)
    if datatype == "BF16" and given == "UINT16":
        return array.astype("<u2", copy=False).view(bfloat16())
    if given != datatype:
        wanted = numpy_dtype(datatype)
        fix = "pass str or bytes elements" if datatype == BYTES else f"use array.astype({wanted.name!r})"
        raise InferError(Code.INVALID_ARG, f"{what} is {datatype}, but the array given has dtype {array.dtype}: {fix}")
    return array


def encode_bytes(array: npt.NDArray[Any]) -> bytes:
    """A string tensor as stored in memory: `<uint32 little-endian length><bytes>` per element, row-major.

    Elements are bytes or str (as UTF-8); NULs at the end are kept, except by numpy's S and U dtypes themselves.
    """
    _check_string_count(array.size, "this array")
    parts: list[bytes] = []
    for index, element in enumerate(array.ravel().tolist()):
        if isinstance(element, str):
            try:
                element = element.encode()
            except UnicodeEncodeError as error:
                raise InferError(Code.INVALID_ARG, f"element {index} is not UTF-8 text: {error}") from None
        elif not isinstance(element, bytes):
            raise InferError(
                Code.INVALID_ARG, f"elements of BYTES are str or bytes, element {index} is {type(element).__name__}"
            )
        if len(element) > 0xFFFF_FFFF:
            raise InferError(Code.INVALID_ARG, f"element {index} has {len(element)} bytes: its length takes 32 bits")
        parts += (_LENGTH.pack(len(element)), element)
    return b"".join(parts)


def decode_bytes(
    buffer: bytes | bytearray | memoryview | npt.NDArray[np.uint8], count: int, what: str
) -> npt.NDArray[np.object_]:
    """The `count` elements stored in `buffer`, as a 1-D object array of bytes. `buffer` must hold nothing else.

    Raises InferError naming the element, with Triton's texts, for anything that is not exactly `count` elements.
    """
    _check_string_count(count, what)
    # A copy that nobody else can write (bytes are taken as they are): each length is checked, then followed.
    data = bytes(buffer)
    end = len(data)
    elements: list[bytes] = []
    position = 0
    while position < end:
        index = len(elements)
        if index == count:
            raise InferError(
                Code.INVALID_ARG, f"unexpected number of string elements {index + 1} for {what}, expecting {count}"
            )
        remaining = end - position - _LENGTH.size
        if remaining < 0:
            raise InferError(
                Code.INVALID_ARG,
                f"incomplete string length indicator for {what}, expecting {_LENGTH.size} bytes for element {index}, "
                f"but only {end - position} bytes available",
            )
        (length,) = _LENGTH.unpack_from(data, position)
        if length > remaining:
            raise InferError(
                Code.INVALID_ARG,
                f"incomplete string data for {what}, expecting string of length {length} for element {index}, "
                f"but only {remaining} bytes available",
            )
        position += _LENGTH.size
        elements.append(data[position : position + length])
        position += length
    if len(elements) != count:
        raise InferError(Code.INVALID_ARG, f"expected {count} string elements for {what}, got {len(elements)}")
    array = np.empty(count, object)
    array[:] = elements
    return array


def _datatype_or_none(dtype: np.dtype[Any]) -> str | None:
    if dtype.kind in "OSU":
        return BYTES
    if dtype.name == "bfloat16":
        return "BF16"
    return _BY_KIND.get((dtype.kind, dtype.itemsize))


def _fixed(datatype: str) -> np.dtype[Any]:
    dtype = _FIXED.get(datatype)
    if dtype is None:
        if datatype == BYTES:
            raise InferError(
                Code.INVALID_ARG, "the size of BYTES does not follow from the shape: give the tensor's byte_size"
            )
        raise InferError(Code.INVALID_ARG, f"unknown datatype {datatype!r}: expected one of {', '.join(DATATYPES)}")
    return dtype


def _check_string_count(count: int, what: str) -> None:
    if count > MAX_STRING_ELEMENTS:
        raise InferError(
            Code.INVALID_ARG, f"{what} has {count} string elements, more than the limit of {MAX_STRING_ELEMENTS}"
        )
