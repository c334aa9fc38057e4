"""Tensors written as JSON numbers and strings, both ways.

Used by `broker.gateway.http.codec` and `broker.gateway.http.generate`. BYTES are strings; FP16 and BF16 have no JSON
form in this protocol.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Final, final

import numpy as np

from broker.gateway.http.errors import RAISE_LIMIT, Misread, internal, invalid, too_deep
from broker.gateway.http.json import INT64_MAX, as_array, not_a
from broker.gateway.http.limits import MAX_DEPTH
from broker.gateway.kserve import Buffer
from shm.datatypes import BYTES, DATATYPES, decode_bytes, element_size, encode_bytes, numpy_dtype, shape_text
from shm.errors import Code, InferError

_NUMBERS: Final = {
    "f": ("double", frozenset((int, float))),
    "i": ("signed-integer", frozenset((int,))),
    "u": ("unsigned-integer", frozenset((int,))),
}
_NOT_IN_JSON: Final = ("FP16", "BF16")


@final
class _WrongElement(Exception):
    """An element of a tensor is of another kind than its datatype has. Told by whoever knows where it is."""

    def __init__(
        self, kind: str, elements: list[Any], fits: Callable[[Any], bool], prefix: str = "Unable to parse 'data': "
    ) -> None:
        super().__init__(kind)
        self.kind, self.prefix = kind, prefix
        self.index = next((index for index, element in enumerate(elements) if not fits(element)), 0)


def count_elements(name: str, shape: Sequence[int]) -> int:
    """Elements of a tensor as a request gives its shape (each dimension 0 or more). Raises InferError."""
    what = f"invalid shape for input '{name}': shape {shape_text(shape)}"
    if any(dim > INT64_MAX for dim in shape):
        raise invalid(f"{what} contains one or more invalid dimensions")
    count = math.prod(shape)
    if count > INT64_MAX:
        raise invalid(f"{what} causes total element count to exceed maximum size of {INT64_MAX}")
    return count


def read_data(data: Any, name: str, datatype: str, count: int, limit: int) -> bytes:
    """The bytes of input `name`, given as (nested) JSON arrays `data` of `count` elements in row-major order.

    At most `limit` bytes. Raises InferError.
    """
    if count == 0:
        return b""
    values = as_array(data, "Unable to parse 'data': ")
    if datatype != BYTES:
        _check_size(name, datatype, count, limit)
    elements, kinds = _flatten(values)
    try:
        if datatype == BYTES:
            return _read_strings(elements, kinds, name, limit)
        encoded = read_numbers(elements, kinds, name, datatype)
    except _WrongElement as wrong:
        raise not_a(wrong.kind, wrong.prefix, elements[wrong.index], "data" + _path(values, wrong.index)) from None
    if len(elements) != count:
        text = "Failed to parse 'data' field: shape does not match true shape"
        if len(elements) > count:
            text = "Unable to parse 'data': Shape does not match true shape of 'data' field"
        raise Misread(Code.INTERNAL, text, "data", f"expected {count} elements, as the shape says, got {len(elements)}")
    return encoded


def read_flat(values: list[Any], name: str, datatype: str, limit: int) -> bytes:
    """The same for a plain list, whose length says how many elements there are."""
    kinds = set(map(type, values))
    try:
        if datatype == BYTES:
            return _read_strings(values, kinds, name, limit)
        return read_numbers(values, kinds, name, datatype)
    except _WrongElement as wrong:
        raise not_a(wrong.kind, wrong.prefix, values[wrong.index], f"[{wrong.index}]") from None


def read_numbers(elements: list[Any], kinds: set[type], name: str, datatype: str) -> bytes:
    """`elements` in memory's order. Raises InferError for the wrong kind and for what does not fit."""
    if datatype in _NOT_IN_JSON:
        raise invalid(
            f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input {name}"
        )
    if datatype not in DATATYPES:
        raise invalid(f"invalid datatype for input {name}")
    dtype = numpy_dtype(datatype)
    if dtype.kind == "b":
        if kinds <= {bool} or (kinds <= {bool, int} and all(element in (0, 1) for element in elements)):
            return np.array(elements, dtype).tobytes()
        raise _WrongElement(
            "boolean", elements, lambda each: type(each) is bool or (type(each) is int and each in (0, 1))
        )
    kind, allowed = _NUMBERS[dtype.kind]
    if not kinds <= allowed or (dtype.kind == "u" and min(elements, default=0) < 0):
        least = 0 if dtype.kind == "u" else -math.inf
        raise _WrongElement(kind, elements, lambda each: type(each) in allowed and each >= least)
    try:
        with np.errstate(over="ignore"):  # 1e300 as FP32 is Infinity
            return np.array(elements, dtype).tobytes()
    except OverflowError:
        raise invalid(f"Unable to parse 'data': a value of input '{name}' does not fit in {datatype}") from None


def write_data(data: Buffer, name: str, datatype: str, shape: Sequence[int]) -> tuple[list[Any], bool]:
    """The elements of output `name` as JSON has them, and whether `http.json.dumps` can take them as `finite`."""
    count = math.prod(shape)
    if datatype in _NOT_IN_JSON:
        raise invalid(
            f"sending {datatype} data via JSON is not supported. Please use the binary data format for output"
        )
    if datatype == BYTES:
        return _write_strings(data, name, count)
    if len(memoryview(data).cast("B")) != count * element_size(datatype):
        raise internal(f"Failed to write 'data' field: output tensor shape does not match size of output for '{name}'")
    array = np.frombuffer(data, numpy_dtype(datatype))
    finite = array.dtype.kind != "f" or bool(np.isfinite(array).all())
    return array.tolist(), finite


def _check_size(name: str, datatype: str, count: int, limit: int) -> None:
    size = element_size(datatype) if datatype in DATATYPES else 1
    if size > 1 and count > INT64_MAX // size:
        raise invalid(
            f"byte size overflow for input '{name}': element count ({count}) * data type size ({size}) exceeds maximum "
            f"allowed size ({INT64_MAX})"
        )
    if count * size > limit:
        raise _exceeds(name, count * size, limit)


def _exceeds(name: str, size: int, limit: int) -> InferError:
    return invalid(
        f"JSON input '{name}' has a byte_size ({size} bytes) that exceeds the maximum allowed value of {limit} bytes. "
        f"{RAISE_LIMIT}"
    )


def _flatten(values: list[Any]) -> tuple[list[Any], set[type]]:
    """The scalars in order, and of which types they are; one level at a time."""
    for _ in range(MAX_DEPTH):
        kinds = set(map(type, values))
        if list not in kinds:
            return values, kinds
        if len(kinds) == 1:
            values = list(chain.from_iterable(values))
        else:  # Triton takes [1,[2,3]] too
            values = list(chain.from_iterable(value if type(value) is list else (value,) for value in values))
    raise too_deep()


def _path(values: list[Any], index: int) -> str:
    """Where the scalar with this number is in nested arrays: "[1][0]"."""
    open_arrays = [iter(enumerate(values))]
    at = [0]
    while open_arrays:
        for position, value in open_arrays[-1]:
            at[-1] = position
            if type(value) is list:
                open_arrays.append(iter(enumerate(value)))
                at.append(0)
                break
            if not index:
                return "".join(f"[{each}]" for each in at)
            index -= 1
        else:
            open_arrays.pop()
            at.pop()
    return ""


def _read_strings(elements: list[Any], kinds: set[type], name: str, limit: int) -> bytes:
    if not kinds <= {str}:
        raise _WrongElement("string", elements, lambda each: type(each) is str, "Unable to parse JSON bytes array: ")
    size = sum(map(len, elements)) + 4 * len(elements)
    if size > limit:
        raise _exceeds(name, size, limit)
    array = np.empty(len(elements), object)
    array[:] = elements
    return encode_bytes(array)


def _write_strings(data: Buffer, name: str, count: int) -> tuple[list[Any], bool]:
    strings = decode_bytes(data, count, f"output '{name}'").tolist()
    try:
        return [string.decode() for string in strings], True
    except UnicodeDecodeError:
        # Triton sends such bytes as they are, and its client says that the output should be asked for as binary.
        return [string.decode(errors="surrogateescape") for string in strings], False
