"""GPU memory of a worker's own, and what is copied because a tensor does not lie where its model wants it.

Used by the backends of models on a GPU (`Places`) and by `broker.worker.cuda.execute` (`Scratch`).
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Final, final

from broker.repository.config import ModelConfig
from broker.worker.backends import OnGpu, Operand
from broker.worker.cuda.streams import Bytes, Lane
from shm import datatypes
from shm.cuda.driver import OUT_OF_MEMORY, Context, CudaError, call, free_memory, make_current
from shm.errors import Code, InferError

KEPT: Final = 256 << 20  # bytes of one tensor: a GPU is everybody's, and one client may send what nobody else does
ALIGNMENT: Final = 256  # bytes: what runtimes expect of a tensor's address, and what the driver's allocations begin at


@final
class DeviceBuffer:
    """GPU memory that is freed with its last reference. Raises InferError UNAVAILABLE when there is none left."""

    __slots__ = ("_ordinal", "pointer", "size")

    def __init__(self, ordinal: int, byte_size: int) -> None:
        self.pointer = 0
        self._ordinal, self.size = ordinal, max(byte_size, 1)  # a tensor without elements has an address, too
        make_current(ordinal)
        try:
            self.pointer = int(call("cuMemAlloc", self.size))
        except CudaError as error:
            if error.number != OUT_OF_MEMORY:
                raise
            free, total = free_memory()
            raise InferError(
                Code.UNAVAILABLE,
                f"the GPU has no {self.size} bytes left for this request: {free} of {total} bytes are free",
            ) from None

    def __del__(self) -> None:
        if self.pointer:
            try:
                with Context(self._ordinal):  # on whatever thread
                    call("cuMemFree", self.pointer)
            except InferError:
                pass  # the context is lost, and the memory with it


def kept(config: ModelConfig) -> int:
    """How many bytes of a tensor an instance keeps: all, where the configuration says how large tensors are."""
    return KEPT if any(-1 in tensor.dims for tensor in (*config.input, *config.output)) else sys.maxsize


@final
class Scratch:
    """GPU memory for the run that is under way, by use: all bindings of an instance share it.

    It grows by doubling, so that what older bindings keep is at most as much again. A tensor of more than `most` bytes
    (see `kept`) gets memory that ends with its binding: `lent` says that there is one, which is not for keeping.
    """

    __slots__ = ("_buffers", "_ordinal", "lent", "most")

    def __init__(self, ordinal: int, most: int = KEPT) -> None:
        self._ordinal, self.most = ordinal, most
        self.lent = False
        self._buffers: dict[tuple[str, str], DeviceBuffer] = {}

    def get(self, side: str, tensor: str, byte_size: int) -> DeviceBuffer:
        """At least `byte_size` bytes. `side`: "input", "output", …"""
        if byte_size > self.most:
            self.lent = True
            return DeviceBuffer(self._ordinal, byte_size)
        found = self._buffers.get((side, tensor))
        if found is None or found.size < byte_size:
            found = DeviceBuffer(self._ordinal, 1 << (byte_size - 1).bit_length() if byte_size else 0)
            self._buffers[side, tensor] = found
        return found

    def close(self) -> None:
        """Nothing runs any more."""
        self._buffers.clear()


@final
class Places:
    """Where the operands of one binding lie on the GPU.

    Those of the GPU are used in place if they are aligned; others get a buffer, and `before` and `after` enqueue the
    copies. `copied`: bytes per run, by reason: "transfer" between host and GPU, "align" within the GPU,
    "peer" between two of them.
    """

    __slots__ = ("_after", "_before", "_kept", "_lane", "_moves_in", "_moves_out", "_scratch", "copied")

    def __init__(self, lane: Lane, scratch: Scratch) -> None:
        self._lane, self._scratch = lane, scratch
        self._kept: dict[tuple[str, str], DeviceBuffer] = {}
        self._before: list[tuple[int, Bytes]] = []
        self._after: list[tuple[Bytes, int]] = []
        self._moves_in: list[tuple[int, OnGpu]] = []
        self._moves_out: list[tuple[OnGpu, int]] = []
        self.copied: Counter[str] = Counter()

    def input(self, operand: Operand) -> int:
        """The pointer of an input."""
        if operand.gpu is not None:
            if operand.gpu.pointer % ALIGNMENT == 0:
                return operand.gpu.pointer
            pointer = self._buffer("input", operand.name, operand.gpu.size)
            self._moves_in.append((pointer, operand.gpu))
            self.copied["peer" if operand.gpu.far else "align"] += operand.gpu.size
            return pointer
        assert operand.memory is not None
        pointer = self._buffer("input", operand.name, operand.memory.size)
        if operand.memory.size:
            self._before.append((pointer, operand.memory))
            self.copied["transfer"] += operand.memory.size
        return pointer

    def output(self, operand: Operand) -> int:
        """The pointer of an output that has memory."""
        if operand.gpu is not None:
            if operand.gpu.pointer % ALIGNMENT == 0:
                return operand.gpu.pointer
            pointer = self._buffer("output", operand.name, operand.gpu.size)
            self._moves_out.append((operand.gpu, pointer))
            self.copied["peer" if operand.gpu.far else "align"] += operand.gpu.size
            return pointer
        assert operand.memory is not None
        pointer = self._buffer("output", operand.name, operand.memory.size)
        if operand.memory.size:
            self._after.append((operand.memory, pointer))
            self.copied["transfer"] += operand.memory.size
        return pointer

    def own(self, operand: Operand, byte_size: int) -> OnGpu:
        """Memory for an output that has none."""
        return OnGpu(self._buffer("output", operand.name, byte_size), byte_size)

    def before(self) -> None:
        """Enqueue what must happen before the run; all that it copies is counted now."""
        if self.copied:
            self._lane.moved.update(self.copied)
        for pointer, source in self._before:
            self._lane.copy_in(pointer, source)
        for pointer, place in self._moves_in:
            self._lane.copy(pointer, place.pointer, place.size)

    def after(self) -> None:
        """Enqueue what must happen after it."""
        for target, pointer in self._after:
            self._lane.copy_out(target, pointer)
        for place, pointer in self._moves_out:
            self._lane.copy(place.pointer, pointer, place.size)

    def _buffer(self, side: str, name: str, byte_size: int) -> int:
        buffer = self._kept[side, name] = self._scratch.get(side, name, byte_size)
        return buffer.pointer


def size_of(operand: Operand) -> int:
    """Bytes of an operand's memory, wherever it lies; of one without, what its shape takes."""
    if operand.gpu is not None:
        return operand.gpu.size
    return operand.memory.size if operand.memory is not None else datatypes.byte_size(operand.datatype, operand.shape)


def no_strings(operands: list[Operand], runtime: str) -> None:
    """Raises InferError UNSUPPORTED for string tensors, which no GPU runtime has."""
    for operand in operands:
        if operand.datatype == datatypes.BYTES:
            raise InferError(Code.UNSUPPORTED, f"{runtime} has no strings: tensor '{operand.name}' is BYTES")
