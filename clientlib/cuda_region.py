"""GPU memory as a region that an application holds: named in plans like any other, never mapped into the host.

Made by the clients' `register_cuda_shm` and `alloc_cuda`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, final

import numpy as np
import numpy.typing as npt

from clientlib import process
from clientlib.arguments import whole
from clientlib.cuda_export import Exported
from clientlib.region import MappedRegion
from clientlib.session import Call, Procedure
from shm import datatypes, messages
from shm.cuda.descriptor import VMM
from shm.errors import Code, InferError


@final
class CudaRegion(MappedRegion):
    """A registered window of GPU memory. `device` is the GPU's UUID, `pointer` the window's address in this process.

    The memory, or the tensor it was registered from, is held until `unregister` has returned: the broker answers that
    when no worker reads or writes there any more and all have closed it.
    """

    __slots__ = ("device", "exported", "pointer")

    def __init__(self, name: str, exported: Exported) -> None:
        memory = exported.memory
        self.memory = _OnDevice(memory.byte_size, exported.writable)
        self.name, self.kind, self.key = name, "cuda", ""
        self.offset, self.byte_size = memory.offset, memory.byte_size
        # No file's: a device number below 0. Windows of one allocation have one identity, so overlaps are seen.
        self.identity = (-1, exported.base)
        self.retired = ""
        self.device = memory.device
        self.pointer = exported.pointer
        self.exported: Exported = exported
        self._made_in = process.generation

    def array(self, shape: Sequence[int], dtype: npt.DTypeLike, offset: int = 0) -> NoReturn:
        """There is none: the host cannot read this memory."""
        raise InferError(
            Code.UNSUPPORTED,
            f"region '{self.name}' is memory of a GPU, which numpy cannot read: use the tensor that was registered, or "
            "region.cuda_array(shape, dtype)",
        )

    def cuda_array(self, shape: Sequence[int], dtype: npt.DTypeLike, offset: int = 0) -> CudaArray:
        """The region's memory for torch.as_tensor, cupy.asarray or numba: C-contiguous, at `offset` bytes."""
        self.check_process()
        known = isinstance(dtype, str) and dtype in datatypes.DATATYPES
        kind = datatypes.numpy_dtype(str(dtype)) if known else np.dtype(dtype)
        dims = tuple(whole(size, "a dimension") for size in shape)
        start, size = whole(offset, "offset"), int(np.prod(dims, dtype=object)) * kind.itemsize
        if start + size > self.byte_size:
            raise InferError(
                Code.INVALID_ARG,
                f"shape {dims} of {kind} at offset {start} needs {start + size} bytes, region '{self.name}' has "
                f"{self.byte_size}",
            )
        if self.exported.keep is None and self.retired:
            raise InferError(Code.NOT_FOUND, f"region '{self.name}' was {self.retired}")
        return CudaArray(self.pointer + start, dims, kind, self.memory.writable, self.exported.keep)

    def release_fd(self) -> None:
        """The region will not be registered again: descriptor and memory are let go."""
        self.exported.close()

    def __del__(self) -> None:
        if hasattr(self, "exported"):
            self.release_fd()

    def registration(self) -> Call:
        """How it is registered, on a new session once more."""
        return registration(self.name, self.exported)


def registration(name: str, exported: Exported) -> Call:
    """The request that registers `exported`; the descriptor of VMM memory goes with it."""
    asked = messages.RegisterCuda(name=name, memory=exported.memory, writable=exported.writable)
    return Call(asked, (exported.fd,) if exported.memory.kind == VMM else ())


def register(regions: dict[str, MappedRegion], name: str, exported: Exported) -> Procedure[CudaRegion]:
    """Register it with the broker and enter it in the client's `regions`."""
    yield registration(name, exported)
    made = regions[name] = CudaRegion(name, exported)
    return made


@final
class CudaArray:
    """An array on a GPU for whoever knows `__cuda_array_interface__`; keeps its memory alive."""

    __slots__ = ("__cuda_array_interface__", "_keep", "dtype", "shape")

    def __init__(
        self, pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any], writable: bool, keep: object
    ) -> None:
        self._keep = keep
        self.dtype, self.shape = dtype, shape
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": dtype.str,
            "data": (pointer, not writable),
            "version": 3,
            "strides": None,
            "stream": None,  # nothing to wait for: whoever wrote last says when it is done
        }


@final
class _OnDevice:
    """The memory of a region as `MappedRegion` has it, without bytes that the host could touch."""

    __slots__ = ("byte_size", "fd", "kind", "writable")

    def __init__(self, byte_size: int, writable: bool) -> None:
        self.kind, self.byte_size, self.writable = "cuda", byte_size, writable
        self.fd: int | None = None

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        raise InferError(Code.UNSUPPORTED, "memory of a GPU has no bytes for the host")

    def close(self) -> None:
        pass
