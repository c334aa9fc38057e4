"""Tensors written as JSON numbers and strings, both ways.

Used by `broker.gateway.http.codec` and `broker.gateway.http.generate`. BYTES are strings; FP16 and BF16 have no JSON
form in this protocol.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from itertools import accumulate, chain, islice
from typing import Any, Final, final

import numpy as np

from broker.gateway.http.errors import RAISE_LIMIT, internal, invalid, too_deep
from broker.gateway.http.json import INT64_MAX, as_array, not_a, shown
from broker.gateway.http.limits import MAX_DEPTH
from broker.gateway.kserve import Buffer
from broker.gateway.placed import Placed, one_of, refused
from shm.datatypes import BYTES, DATATYPES, decode_bytes, element_size, encode_bytes, numpy_dtype, shape_text
from shm.errors import Code

_NUMBERS: Final = {
    "f": ("double", frozenset((int, float))),
    "i": ("signed-integer", frozenset((int,))),
    "u": ("unsigned-integer", frozenset((int,))),
}
_NOT_IN_JSON: Final = ("FP16", "BF16")


_ZERO_OR_ONE: Final = (0, 1).__contains__
_NEGATIVE: Final = (0).__gt__  # both are mapped over many integers, where a function of Python's would take too long


@final
class _WrongElement(Exception):
    """An element of a tensor is none of its datatype. `error` makes the answer, for whoever knows where it is."""

    def __init__(self, index: int, error: Callable[[str], Placed]) -> None:
        super().__init__(index)
        self.index, self.error = index, error


def _not_a(kind: str, elements: list[Any], index: int, prefix: str = "Unable to parse 'data': ") -> _WrongElement:
    return _WrongElement(index, partial(not_a, kind, prefix, elements[index]))


def count_elements(name: str, shape: Sequence[int]) -> int:
    """Elements of a tensor as a request gives its shape (each dimension 0 or more). Raises InferError."""
    what = f"invalid shape for input '{name}': shape {shape_text(shape)}"
    if any(dim > INT64_MAX for dim in shape):
        raise refused(f"{what} contains one or more invalid dimensions", "shape", _too_many(max(shape)))
    count = math.prod(shape)
    if count > INT64_MAX:
        raise refused(
            f"{what} causes total element count to exceed maximum size of {INT64_MAX}", "shape", _too_many(count)
        )
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
        check_datatype(name, datatype, "datatype")
        encoded = read_numbers(elements, kinds, name, datatype)
    except _WrongElement as wrong:
        at = [wrong.index] if elements is values else _path(values, wrong.index)
        raise wrong.error("data" + "".join(f"[{each}]" for each in at)) from None
    if len(elements) != count:
        text = "Failed to parse 'data' field: shape does not match true shape"
        if len(elements) > count:
            text = "Unable to parse 'data': Shape does not match true shape of 'data' field"
        raise Placed(Code.INTERNAL, text, "data", f"expected {count} elements, as the shape says, got {len(elements)}")
    return encoded


def read_flat(value: Any, name: str, datatype: str, limit: int) -> tuple[bytes, int]:
    """The same for a plain list, whose length says how many elements there are, or one element. Returns that, too."""
    values = value if type(value) is list else [value]
    kinds = set(map(type, values))
    try:
        if datatype == BYTES:
            return _read_strings(values, kinds, name, limit, place=""), len(values)
        check_datatype(name, datatype, "")
        return read_numbers(values, kinds, name, datatype), len(values)
    except _WrongElement as wrong:
        raise wrong.error(f"[{wrong.index}]" if values is value else "") from None


def check_datatype(name: str, datatype: str, place: str) -> None:
    """Raises InferError for one that JSON has no form for, or that there is not. `place`: what says it."""
    if datatype in _NOT_IN_JSON:
        raise refused(
            f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input {name}",
            place,
            f"expected another datatype, or binary data ('binary_data_size'), got {datatype}",
        )
    if datatype not in DATATYPES:
        known = one_of(sorted(DATATYPES))
        raise refused(f"invalid datatype for input {name}", place, f"expected {known}, got {shown(datatype)}")


def read_numbers(elements: list[Any], kinds: set[type], name: str, datatype: str) -> bytes:
    """`elements` in memory's order. Raises InferError for the wrong kind and for what does not fit."""
    dtype = numpy_dtype(datatype)
    if dtype.kind == "b":
        if kinds <= {bool} or (kinds <= {bool, int} and all(map(_ZERO_OR_ONE, elements))):
            return np.array(elements, dtype).tobytes()
        head = elements[: _first_of_others(elements, kinds, {bool, int})]
        fit = list(map(_ZERO_OR_ONE, head))
        raise _not_a("boolean", elements, fit.index(False) if False in fit else len(head))
    kind, allowed = _NUMBERS[dtype.kind]
    if not kinds <= allowed or (dtype.kind == "u" and min(elements, default=0) < 0):
        index = _first_of_others(elements, kinds, allowed)
        negative = list(map(_NEGATIVE, elements[:index])) if dtype.kind == "u" else []
        raise _not_a(kind, elements, negative.index(True) if True in negative else index)
    try:
        with np.errstate(over="ignore"):  # 1e300 as FP32 is Infinity
            return np.array(elements, dtype).tobytes()
    except OverflowError:
        low, high = _range_of(dtype)
        index = next((at for at, each in enumerate(elements) if type(each) is int and not low <= each <= high), 0)
        raise _WrongElement(index, partial(_does_not_fit, name, datatype, elements[index])) from None


def _range_of(dtype: np.dtype[Any]) -> tuple[float, float]:
    """The numbers that numpy takes for `dtype`: of a float, what becomes Infinity is among them."""
    if dtype.kind == "f":
        return -sys.float_info.max, sys.float_info.max
    return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)


def _does_not_fit(name: str, datatype: str, value: Any, place: str) -> Placed:
    low, high = _range_of(numpy_dtype(datatype))
    expected = f"from {low} to {high}" if type(low) is int else "below 1.8e308"
    return refused(
        f"Unable to parse 'data': a value of input '{name}' does not fit in {datatype}",
        place,
        f"expected a number {expected} ({datatype}), got {shown(value)}",
    )


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
        raise refused(
            f"byte size overflow for input '{name}': element count ({count}) * data type size ({size}) exceeds maximum "
            f"allowed size ({INT64_MAX})",
            "shape",
            f"expected at most {INT64_MAX} bytes in all, got {count * size}",
        )
    if count * size > limit:
        raise _exceeds(name, count * size, limit, "shape")


def _too_many(count: int) -> str:
    return f"expected at most {INT64_MAX} elements in all, got {count}"


def _exceeds(name: str, size: int, limit: int, place: str) -> Placed:
    return refused(
        f"JSON input '{name}' has a byte_size ({size} bytes) that exceeds the maximum allowed value of {limit} bytes. "
        f"{RAISE_LIMIT}",
        place,
        f"expected at most {limit} bytes, got {size}",
    )


def _first_of_others(elements: list[Any], kinds: set[type], allowed: Set[type]) -> int:
    """Where the first element of a type that is not allowed is; behind the last one if there is none.

    A loop of Python's over a tensor's elements would hold up the gateway's other requests.
    """
    types = list(map(type, elements))
    return min(map(types.index, kinds - allowed), default=len(elements))


def _flatten(values: list[Any]) -> tuple[list[Any], set[type]]:
    """The scalars in order, and of which types they are; one level at a time."""
    for depth in range(MAX_DEPTH):
        kinds = set(map(type, values))
        if list not in kinds:
            return values, kinds
        if len(kinds) > 1:  # Triton takes [1,[2,3]] too
            # Each once: levels would look at a scalar as often as arrays beside it are deep.
            scalars = [value for _, value in _walk(values, MAX_DEPTH - depth)]
            return scalars, set(map(type, scalars))
        values = list(chain.from_iterable(values))
    raise too_deep()


def _walk(values: list[Any], max_depth: int) -> Iterator[tuple[list[int], Any]]:
    """The scalars of nested arrays in order; the list, the same for all, has the indexes that lead to each."""
    open_arrays = [iter(values)]
    at = [-1]
    while open_arrays:
        for value in open_arrays[-1]:
            at[-1] += 1
            if type(value) is list:
                if len(at) == max_depth:
                    raise too_deep()
                open_arrays.append(iter(value))
                at.append(-1)
                break
            yield at, value
        else:
            open_arrays.pop()
            at.pop()


def _path(values: list[Any], index: int) -> list[int]:
    """The indexes that lead to the scalar with this number in nested arrays."""
    levels = []
    while (kinds := set(map(type, values))) == {list}:
        levels.append(values)
        values = list(chain.from_iterable(values))
    at = [index]
    if list in kinds:
        at, _ = next(islice(_walk(values, MAX_DEPTH), index, None))
    for level in reversed(levels):
        ends = list(accumulate(map(len, level)))
        array = bisect_right(ends, at[0])
        at = [array, at[0] - (ends[array - 1] if array else 0), *at[1:]]
    return at


def _read_strings(elements: list[Any], kinds: set[type], name: str, limit: int, place: str = "data") -> bytes:
    if not kinds <= {str}:
        index = _first_of_others(elements, kinds, {str})
        raise _not_a("string", elements, index, "Unable to parse JSON bytes array: ")
    size = sum(map(len, elements)) + 4 * len(elements)
    if size > limit:
        raise _exceeds(name, size, limit, place)
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
