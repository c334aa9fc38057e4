"""The one bounds check: where the positions of a tensor lie in a region, and which of them share bytes.

`resolve` is called once per tensor of a plan, by the broker and again by the worker; `meets` and `touches` decide
whether two tensors in the same memory may be in use at once; `array` turns a place into a numpy view. Everything is
Python integers, which do not wrap. Nothing here opens, maps or reads memory.
"""

from __future__ import annotations

import operator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from shm.datatypes import BYTES, byte_size, element_count, shape_text
from shm.errors import Code, InferError, too_small
from shm.messages import MAX_POSITIONS, TensorSpec

_SIZE_MAX = 2**64 - 1


class Placement(msgspec.Struct, frozen=True, gc=False):
    """A tensor's place in its region, in bytes: position k is [offset + k*stride, offset + k*stride + byte_size).

    `end` is where the last position ends. For outputs of open shape `byte_size` is the room for the result.
    """

    offset: int
    stride: int
    byte_size: int
    positions: int
    end: int

    def shifted(self, by: int) -> Placement:
        """The same place counted from `by` bytes earlier: regions that are windows of one file compare so."""
        return Placement(self.offset + by, self.stride, self.byte_size, self.positions, self.end + by)


def resolve(spec: TensorSpec, region_byte_size: int, positions: int, *, output: bool, model: str = "") -> Placement:
    """Check `spec` against a region of `region_byte_size` bytes. Raises InferError with Triton's texts.

    `byte_size` follows from shape and datatype, except for BYTES and for outputs with a -1, which must state it.
    `stride` 0 is the same data at every position for an input, back to back positions for an output.
    """
    offset, stride, stated = (_whole(spec, field) for field in ("offset", "stride", "byte_size"))
    if not 1 <= positions <= MAX_POSITIONS:
        raise InferError(Code.INVALID_ARG, f"a plan has 1 to {MAX_POSITIONS} positions, got {positions}")
    tensor = f"{'output' if output else 'input'} '{spec.name}'" + (f" for model '{model}'" if model else "")
    exact = _exact_byte_size(spec, tensor, output=output)
    if exact is None and not stated:
        raise InferError(
            Code.INVALID_ARG,
            f"byte_size must be specified for {tensor}: it does not follow from {spec.datatype} "
            f"{shape_text(spec.shape)}",
        )
    size = stated or exact or 0
    if output:
        stride = stride or size
    if output and positions > 1 and stride < size:
        raise InferError(
            Code.INVALID_ARG,
            f"positions of {tensor} overlap: stride {stride} is less than the {size} bytes of one position",
        )
    span = (positions - 1) * stride + size
    _check_inside(spec, tensor, offset, span, region_byte_size, positions)
    if exact is not None and size != exact:
        raise _size_mismatch(tensor, exact, size, output=output)
    return Placement(offset, stride, size, positions, offset + span)


def meets(a: Placement, b: Placement) -> bool:
    """Whether some position of `a` shares a byte with some position of `b`, both in the same memory.

    Exact when the strides are equal or one of the two is at a single place; otherwise "no" is certain and "yes" says
    that the spans overlap.
    """
    if not a.byte_size or not b.byte_size:
        return False
    a_places = a.positions if a.stride else 1
    b_places = b.positions if b.stride else 1
    if (a_places > 1 and b_places > 1 and a.stride != b.stride) or a_places == b_places == 1:
        return a.offset < b.end and b.offset < a.end
    stride = a.stride if a_places > 1 else b.stride
    # Position i of a meets position j of b exactly when d = j - i has
    #     b.offset + d*stride < a.offset + a.byte_size   and   a.offset < b.offset + d*stride + b.byte_size,
    # and d can be anything from 1 - a_places to b_places - 1.
    lowest = (a.offset - b.offset - b.byte_size) // stride + 1
    highest = -((b.offset - a.offset - a.byte_size) // stride) - 1
    return max(lowest, 1 - a_places) <= min(highest, b_places - 1)


def touches(a: Placement, i: int, b: Placement, j: int) -> bool:
    """Whether position `i` of `a` shares a byte with position `j` of `b`, both in the same memory."""
    a_start = a.offset + i * a.stride
    b_start = b.offset + j * b.stride
    return a_start < b_start + b.byte_size and b_start < a_start + a.byte_size and a.byte_size > 0 and b.byte_size > 0


def array(memory: npt.NDArray[np.uint8], offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """A C-contiguous view of `memory` (1-D bytes), as writable as `memory` is; any offset, aligned or not.

    Raises InferError when it would leave `memory`, and for dtypes that hold Python objects.
    """
    if dtype.hasobject:
        raise InferError(Code.INVALID_ARG, "BYTES have no numpy view: read the elements with decode_bytes")
    size = element_count(shape) * dtype.itemsize
    if not 0 <= offset <= memory.nbytes - size:
        raise InferError(
            Code.INVALID_ARG,
            f"an array of {dtype} {shape_text(shape)} at offset {offset} ends outside the {memory.nbytes} bytes "
            "of its region",
        )
    try:
        return np.ndarray(shape, dtype, memory, offset)
    except ValueError as error:  # numpy's limit on the number of dimensions
        raise InferError(Code.INVALID_ARG, f"shape {shape_text(shape)}: {error}") from None


def _whole(spec: TensorSpec, field: str) -> int:
    try:
        # Plain integers from here on: numpy's would wrap.
        value = operator.index(getattr(spec, field))
    except TypeError:
        value = -1
    if value >= 0:
        return value
    if field == "offset":
        raise InferError(Code.INVALID_ARG, f"Invalid offset for shared memory region: '{spec.region}'")
    raise InferError(
        Code.INVALID_ARG, f"{field} of tensor '{spec.name}' must be a whole number of bytes, got {getattr(spec, field)}"
    )


def _exact_byte_size(spec: TensorSpec, tensor: str, *, output: bool) -> int | None:
    """What every position holds, or None where only the data tells."""
    is_open = -1 in spec.shape
    if is_open and not output:
        raise InferError(
            Code.INVALID_ARG,
            f"All input dimensions should be specified for {tensor}, got {shape_text(spec.shape)}",
        )
    closed = [1 if dim == -1 else dim for dim in spec.shape]
    elements = element_count(closed)
    if spec.datatype == BYTES:
        return None if elements else 0
    exact = byte_size(spec.datatype, closed)
    return None if is_open and elements else exact


def _check_inside(spec: TensorSpec, tensor: str, offset: int, span: int, region_byte_size: int, positions: int) -> None:
    where = f"{tensor} takes {span} bytes from offset {offset} with {positions} positions"
    if offset >= region_byte_size:
        raise InferError(
            Code.INVALID_ARG,
            f"Invalid offset for shared memory region: '{spec.region}': {where}, the region has {region_byte_size}",
        )
    if span > _SIZE_MAX - offset:
        raise InferError(
            Code.INVALID_ARG,
            f"Integer overflow detected: byte_size ({span}) + offset ({offset}) exceeds maximum value "
            f"({_SIZE_MAX}) for region '{spec.region}'",
        )
    if offset + span > region_byte_size:
        raise InferError(
            Code.INVALID_ARG,
            f"Invalid offset + byte size for shared memory region: '{spec.region}': {where}, "
            f"the region has {region_byte_size}",
        )


def _size_mismatch(tensor: str, exact: int, stated: int, *, output: bool) -> InferError:
    if output and stated < exact:
        return InferError(Code.INVALID_ARG, too_small(tensor, stated, exact))
    kind = "output" if output else "input"
    return InferError(Code.INVALID_ARG, f"{kind} byte size mismatch for {tensor}. Expected {exact}, got {stated}")
