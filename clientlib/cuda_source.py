"""GPU memory as applications have it: anything with `__cuda_array_interface__` or DLPack, or an address and a size.

Called by `clientlib.cuda_export`. Knows no driver: it only reads what an object says of itself, and trusts none of it.
"""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np

from clientlib.arguments import shown, whole
from shm.errors import Code, InferError

KDL_CUDA, KDL_CUDA_HOST, KDL_CUDA_MANAGED = 2, 3, 13  # DLDeviceType (dlpack.h)
NO_SYNC: Final = -1  # of __dlpack__(stream=…): the memory is only named here, its content is not read
MAX_RANK: Final = 64


@final
@dataclass(frozen=True, slots=True)
class Source:
    """[pointer, pointer + byte_size) of some GPU. `ordinal`: which, as far as the object says it.

    `keep`: what the memory lives by; held until the region that is made of it has ended.
    """

    pointer: int
    byte_size: int
    writable: bool
    ordinal: int | None
    keep: object


def source_of(name: str, tensor: object, pointer: object, byte_size: object) -> Source:
    """What the arguments of `register_cuda_shm` name. Raises InferError INVALID_ARG; `name` is the region's."""
    if (tensor is None) == (pointer is None):
        raise _wrong(name, "pass either an array of a GPU, or pointer= and byte_size=")
    if tensor is None:
        if byte_size is None:
            raise _wrong(name, "pointer= needs byte_size=")
        return Source(whole(pointer, "pointer", 1), whole(byte_size, "byte_size", 1), True, None, None)  # type: ignore[arg-type]
    found = _by_interface(name, tensor) or _by_dlpack(name, tensor)
    if found is None:
        raise _wrong(
            name,
            f"{shown(type(tensor).__name__)} has neither __cuda_array_interface__ nor DLPack of a GPU; arrays of "
            "torch, cupy, numba, jax and cuda.core on a GPU have. For memory of the host use register_system_shm or "
            "create_region",
        )
    if found.byte_size == 0:
        raise _wrong(name, "the array is empty")
    if byte_size is not None and whole(byte_size, "byte_size", 1) != found.byte_size:  # type: ignore[arg-type]
        raise _wrong(name, f"the array has {found.byte_size} bytes, byte_size={byte_size} was given; leave it out")
    return found


def _wrong(name: str, why: str) -> InferError:
    return InferError(Code.INVALID_ARG, f"cannot register '{name}': {why}")


def _not_contiguous(name: str, shape: Sequence[int], strides: Sequence[int]) -> InferError:
    return _wrong(
        name,
        f"the array is not C-contiguous (shape {tuple(shape)}, strides {tuple(strides)}): models read tensors without "
        "gaps; register x.contiguous() (torch) or ascontiguousarray(x), or the array that this is a view of",
    )


def contiguous(shape: Sequence[int], strides: Sequence[int], step: int) -> bool:
    """Do elements of `step` (in the unit of `strides`) lie one after the other, the last axis fastest?"""
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


# --- __cuda_array_interface__ (numba's document, version 3) ---------------------------------------------------------


def _by_interface(name: str, tensor: object) -> Source | None:
    try:
        found = getattr(tensor, "__cuda_array_interface__", None)
    except Exception:  # torch raises for bfloat16, which it has no type text for; DLPack has one
        return None
    if found is None:
        return None
    try:
        return _parsed(name, tensor, found)
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise _wrong(name, f"a __cuda_array_interface__ that cannot be read: {error!r:.200}") from None


def _parsed(name: str, tensor: object, found: Mapping[str, Any]) -> Source:
    shape = [operator.index(size) for size in found["shape"]]
    item = np.dtype(found["typestr"]).itemsize
    pointer, read_only = found["data"]
    if found.get("mask") is not None:
        raise _wrong(name, "masked arrays cannot be shared: register the data without its mask")
    if len(shape) > MAX_RANK or min(shape, default=1) < 0:
        raise ValueError(f"shape {shape}")
    strides = found.get("strides")
    if strides is not None:
        steps = [operator.index(stride) for stride in strides]
        if math.prod(shape) and not contiguous(shape, steps, item):
            raise _not_contiguous(name, shape, steps)
    address = operator.index(pointer) if pointer is not None else 0
    return Source(address, math.prod(shape) * item, not read_only, None, tensor)


# --- DLPack ---------------------------------------------------------------------------------------------------------


class _Tensor(ctypes.Structure):
    """DLTensor of dlpack.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


def _by_dlpack(name: str, tensor: object) -> Source | None:
    if not (hasattr(tensor, "__dlpack__") and hasattr(tensor, "__dlpack_device__")):
        return None
    try:
        kind, _ = tensor.__dlpack_device__()
        if int(kind) not in (KDL_CUDA, KDL_CUDA_MANAGED):
            return None
        capsule = tensor.__dlpack__(stream=NO_SYNC)
        address = _capsule_pointer(capsule)
    except Exception as error:  # whatever the producer raises: torch does for a tensor that requires a gradient
        raise _wrong(name, f"its DLPack export failed: {error!r:.300}") from None
    # The capsule stays unconsumed: when it is collected with `keep`, its own destructor tells the producer.
    view = _Tensor.from_address(address)
    rank = view.ndim
    if not 0 <= rank <= MAX_RANK or view.bits * view.lanes % 8:
        raise _wrong(name, f"an array of {rank} dimensions with elements of {view.bits * view.lanes} bits")
    shape = [view.shape[axis] for axis in range(rank)]
    if view.strides and math.prod(shape):
        strides = [view.strides[axis] for axis in range(rank)]
        if not contiguous(shape, strides, 1):
            raise _not_contiguous(name, shape, strides)
    size = math.prod(shape) * (view.bits * view.lanes // 8)
    return Source((view.data or 0) + view.byte_offset, size, True, view.device_id, (tensor, capsule))


def _capsule_pointer(capsule: object) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return int(get(capsule, b"dltensor"))
