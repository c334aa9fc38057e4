"""Regions as an application holds them: numpy views of the memory, and tensors that name places in it.

Made by the clients' `create_region`, `open_region` and `register_system_shm`. Views keep the memory alive whatever
happens to the region, the client or the broker.
"""

from __future__ import annotations

import operator
import os
import weakref
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, final

import numpy as np
import numpy.typing as npt

from clientlib import process
from clientlib.arguments import MOST, shown, whole
from shm import datatypes, views
from shm.datatypes import BYTES
from shm.errors import Code, InferError
from shm.regions import MappedMemory, Memory

C = TypeVar("C")
MAX_RANK = 64


class MappedRegion(process.StaysHere):
    """A named range of memory that this session registered or opened. Attributes are read-only facts.

    `name`, `kind` ("pool", "system", or "local": a remote client's), `byte_size`, `key` (POSIX name, system only),
    `offset` in the object.
    """

    __slots__ = (
        "__weakref__",
        "_made_in",
        "byte_size",
        "identity",
        "key",
        "kind",
        "memory",
        "name",
        "offset",
        "retired",
    )
    elsewhere = "send the token that region.share() gives; open_region(token) of a client there opens the same memory"

    def __init__(self, name: str, fd: int, offset: int, byte_size: int, writable: bool, *, kind: str, key: str) -> None:
        """Owns `fd`: pools keep it, to be registered again after a restart of the broker."""
        try:
            status = os.fstat(fd)
            keep = kind in ("pool", "local")  # to be passed on by its descriptor
            self.memory: Memory = MappedMemory(fd, offset, byte_size, writable, kind=kind, keep_fd=keep)
        except BaseException:
            os.close(fd)
            raise
        if not keep:
            os.close(fd)
        self.name = name
        self.kind = kind
        self.key = key
        self.offset = offset
        self.byte_size = byte_size
        self.identity = (status.st_dev, status.st_ino)
        self.retired = ""  # why no new plan may use it
        self._made_in = process.generation

    def array(self, shape: Sequence[int], dtype: npt.DTypeLike, offset: int = 0) -> npt.NDArray[Any]:
        """A C-contiguous view of the region's memory at `offset` bytes; `dtype` is numpy's or a KServe name."""
        self.check_process()
        kind = (
            datatypes.numpy_dtype(dtype) if isinstance(dtype, str) and dtype in datatypes.DATATYPES else _dtype(dtype)
        )
        return views.array(self.memory.bytes, whole(offset, "offset"), _shape(shape), kind)

    def tensor(
        self,
        shape: Sequence[int],
        datatype: npt.DTypeLike,
        offset: int = 0,
        stride: int | None = None,
        byte_size: int | None = None,
    ) -> TensorRef:
        """A tensor in this region, for `prepare` and `infer`: position k lies at `offset + k * stride` bytes.

        `datatype` is a KServe name ("FP32") or a numpy dtype. `stride` defaults to the tensor's size; 0 means the same
        bytes each time (inputs). `byte_size` is needed for BYTES, and is the room for outputs of open shape.
        """
        self.check_process()
        known = isinstance(datatype, str) and datatype in datatypes.DATATYPES
        name = str(datatype) if known else datatypes.datatype_of(_dtype(datatype))
        dims = _shape(shape)
        if byte_size is None:
            if name == BYTES:
                raise InferError(
                    Code.INVALID_ARG,
                    f"a BYTES tensor in region '{self.name}' needs byte_size: the bytes of all elements",
                )
            byte_size = datatypes.byte_size(name, dims) if -1 not in dims else 0
        size = whole(byte_size, "byte_size")
        step = size if stride is None else whole(stride, "stride")
        return TensorRef(self, name, dims, whole(offset, "offset"), step, size)

    def check_process(self) -> None:
        """Raises ForkedError in a child of the process that made the region."""
        process.check(self._made_in)

    def release_fd(self) -> None:
        """Close the descriptor: the region will not be registered again. The memory stays as long as it is used."""
        fd, self.memory.fd = self.memory.fd, None
        if fd is not None:
            os.close(fd)

    def __del__(self) -> None:
        if hasattr(self, "memory"):
            self.release_fd()

    def __repr__(self) -> str:
        state = f", {self.retired}" if self.retired else ""
        return f"<{self.kind} region {self.name!r}, {self.byte_size} bytes{state}>"


class Shares(Protocol):
    """A client for threads, as far as a region needs it."""

    def share(self, region: MappedRegion) -> str:
        """As `Client.share`."""


class SharesAsync(Protocol):
    """A client for an event loop, as far as a region needs it."""

    def share(self, region: MappedRegion) -> Coroutine[Any, Any, str]:
        """As `AsyncClient.share`."""


@final
class Region(MappedRegion):
    """A region of a client for threads."""

    __slots__ = ("_client",)

    def bind(self, client: Shares) -> Region:
        """Whom to ask for a token; weakly, because the client holds its regions."""
        self._client = weakref.ref(client)
        return self

    def share(self) -> str:
        """A token with which another session of the same uid opens this region; it ends with the region."""
        self.check_process()
        return _alive(self._client()).share(self)


@final
class AsyncRegion(MappedRegion):
    """A region of a client for an event loop."""

    __slots__ = ("_client",)

    def bind(self, client: SharesAsync) -> AsyncRegion:
        """Whom to ask for a token; weakly, because the client holds its regions."""
        self._client = weakref.ref(client)
        return self

    def share(self) -> Coroutine[Any, Any, str]:
        """Await it for a token with which another session of the same uid opens this region."""
        self.check_process()
        return _alive(self._client()).share(self)


@final
class NamedRegion(MappedRegion):
    """A region that this process names in plans and never maps: its owner could end whoever reads or writes there."""

    __slots__ = ()

    def __init__(self, name: str, byte_size: int, offset: int, identity: tuple[int, int], *, kind: str) -> None:
        self.memory = _Elsewhere(kind, byte_size)
        self.name, self.kind, self.key = name, kind, ""
        self.offset, self.byte_size = offset, byte_size
        self.identity = identity
        self.retired = ""
        self._made_in = process.generation


@final
class _Elsewhere:
    """The memory of a region that is not mapped here."""

    __slots__ = ("byte_size", "fd", "kind", "writable")

    def __init__(self, kind: str, byte_size: int) -> None:
        self.kind, self.byte_size, self.writable = kind, byte_size, False
        self.fd: int | None = None

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        raise InferError(Code.UNSUPPORTED, "this region is not mapped here")

    def close(self) -> None:
        pass


@final
@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor in a region, made by `Region.tensor`. Sizes and offsets in bytes."""

    region: MappedRegion
    datatype: str
    shape: tuple[int, ...]
    offset: int
    stride: int
    byte_size: int

    def array(self, position: int = 0) -> npt.NDArray[Any]:
        """A numpy view of one position. Raises InferError for BYTES and outside the region."""
        dtype = datatypes.numpy_dtype(self.datatype)
        start = self.offset + whole(position, "position") * self.stride
        return views.array(self.region.memory.bytes, start, self.shape, dtype)


def _dtype(value: npt.DTypeLike) -> np.dtype[Any]:
    try:
        if value is not None:  # which numpy takes for float64
            return np.dtype(value)
    except Exception:  # numpy raises half a dozen kinds, by what the value looks like
        pass
    raise InferError(
        Code.INVALID_ARG,
        f"unknown datatype {shown(value)}: expected a numpy dtype or one of {', '.join(datatypes.DATATYPES)}",
    )


def _shape(shape: Sequence[int]) -> tuple[int, ...]:
    try:
        dims = tuple(operator.index(dim) for dim in shape)
    except TypeError:
        raise InferError(Code.INVALID_ARG, f"a shape is a sequence of integers, got {shown(shape)}") from None
    if len(dims) > MAX_RANK or any(not -1 <= dim <= MOST for dim in dims):
        raise InferError(
            Code.INVALID_ARG,
            f"a shape has up to {MAX_RANK} dimensions of 0 or more, or -1 where the model decides, got {shown(shape)}",
        )
    return dims


def _alive(client: C | None) -> C:
    if client is None:
        raise InferError(Code.UNAVAILABLE, "the client of this region is gone")
    return client
