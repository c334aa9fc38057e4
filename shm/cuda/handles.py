"""Moving GPU memory between processes: what an address is, and the two ways to export and import it.

    LEGACY  cuIpcGetMemHandle: 64 bytes for a whole allocation of cuMemAlloc or cudaMalloc. Opened once per context,
            counted by the driver; not in the process that exported it; the exporter may free it under the importer.
    VMM     cuMemCreate: a file descriptor that keeps the memory alive. Size and addresses in steps of 2 MiB.

All functions need a current context (`shm.cuda.driver.Context`). Used by `clientlib.cuda` to export and by workers to
import.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from dataclasses import dataclass
from typing import Any, Final, Literal, final

from shm.cuda.descriptor import HANDLE_SIZE
from shm.cuda.driver import attempt, bindings, call, pointer_attribute

LAZY_ENABLE_PEER_ACCESS: Final = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: the one flag that cuIpcOpenMemHandle accepts
DEVICE_MEMORY: Final = 2  # CU_MEMORYTYPE_DEVICE
POSIX_FD: Final = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

# What an address of a GPU belongs to. LEGACY and VMM can be exported; POOL (cudaMallocAsync) and OTHER cannot.
Origin = Literal["legacy", "vmm", "pool", "other"]


@final
@dataclass(frozen=True, slots=True)
class Place:
    """The allocation [base, base + size) that a pointer lies in, on GPU `ordinal` of this process."""

    base: int
    size: int
    ordinal: int
    origin: Origin


def handle_bytes(handle: Any) -> bytes:
    """The 64 bytes of an IPC handle. By its address: the bindings' attribute `reserved` is not in every version."""
    return ctypes.string_at(handle.getPtr(), HANDLE_SIZE)


def handle_of(kind: Literal["CUipcMemHandle", "CUipcEventHandle"], data: bytes) -> Any:
    """The bindings' object for 64 bytes."""
    handle = getattr(bindings(), kind)()
    assert len(data) == HANDLE_SIZE
    ctypes.memmove(handle.getPtr(), data, HANDLE_SIZE)
    return handle


def locate(pointer: int) -> Place | None:
    """What `pointer` belongs to; None when it is no memory of a GPU."""
    kind = pointer_attribute("MEMORY_TYPE", pointer)
    if kind is None or int(kind) != DEVICE_MEMORY:
        return None
    found = attempt("cuMemGetAddressRange", pointer)
    if found is None:
        return None
    base, size = found
    return Place(int(base), int(size), int(pointer_attribute("DEVICE_ORDINAL", pointer)), _origin(pointer))


def _origin(pointer: int) -> Origin:
    if pointer_attribute("IS_LEGACY_CUDA_IPC_CAPABLE", pointer):
        return "legacy"
    pool = pointer_attribute("MEMPOOL_HANDLE", pointer)
    if pool is not None and int(pool) != 0:
        return "pool"
    types = pointer_attribute("ALLOWED_HANDLE_TYPES", pointer)
    return "vmm" if types is not None and int(types) & POSIX_FD else "other"


# --- legacy handles -----------------------------------------------------------------------------------------------


def export_legacy(pointer: int) -> bytes:
    """The handle of the allocation that `pointer` lies in. Raises CudaError for memory that has none."""
    return handle_bytes(call("cuIpcGetMemHandle", pointer))


def open_legacy(handle: bytes) -> int:
    """Where the allocation of another process begins here. The driver counts: as many closes as opens."""
    return int(call("cuIpcOpenMemHandle", handle_of("CUipcMemHandle", handle), LAZY_ENABLE_PEER_ACCESS))


def close_legacy(pointer: int) -> None:
    """Undo one `open_legacy`. Waits for what the GPU does, so never on the way of a request."""
    call("cuIpcCloseMemHandle", pointer)


# --- VMM ----------------------------------------------------------------------------------------------------------


def granularity(ordinal: int) -> int:
    """In which steps VMM memory of a GPU is made: 2 MiB on those known."""
    option = bindings().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(call("cuMemGetAllocationGranularity", _properties(ordinal), option))


def export_vmm(pointer: int) -> int:
    """A new descriptor of the VMM memory mapped at `pointer`; the caller's to close."""
    handle = call("cuMemRetainAllocationHandle", pointer)
    try:
        fd = int(call("cuMemExportToShareableHandle", handle, _fd_type(), 0))
    finally:
        attempt("cuMemRelease", handle)
    os.set_inheritable(fd, False)
    return fd


def one_allocation(first: int, last: int) -> bool:
    """Is VMM memory the same physical allocation at both addresses? Several may be mapped one after the other."""
    retained = [call("cuMemRetainAllocationHandle", pointer) for pointer in (first, last)]
    for handle in retained:
        call("cuMemRelease", handle)
    return int(retained[0]) == int(retained[1])


@final
class Mapping:
    """VMM memory mapped into this process at `pointer`: `byte_size` bytes, a multiple of the granularity."""

    __slots__ = ("byte_size", "pointer")

    def __init__(self, pointer: int, byte_size: int) -> None:
        self.pointer = pointer
        self.byte_size = byte_size

    def close(self) -> None:
        """Unmap it; the memory goes with the last process that maps it or holds a descriptor of it."""
        pointer, self.pointer = self.pointer, 0
        if pointer:
            call("cuMemUnmap", pointer, self.byte_size)
            call("cuMemAddressFree", pointer, self.byte_size)


def create_vmm(ordinal: int, byte_size: int) -> Mapping:
    """New memory on a GPU of at least `byte_size` bytes that can be exported. Raises CudaError."""
    step = granularity(ordinal)
    size = (byte_size + step - 1) // step * step
    return _mapped(call("cuMemCreate", size, _properties(ordinal), 0), size, ordinal)


def import_vmm(fd: int, byte_size: int, ordinal: int) -> Mapping:
    """Map the memory of a descriptor, which stays the caller's. Raises CudaError, also when it is smaller."""
    return _mapped(call("cuMemImportFromShareableHandle", fd, _fd_type()), byte_size, ordinal)


def _mapped(handle: Any, size: int, ordinal: int) -> Mapping:
    """Map it for reading and writing; the mapping keeps it, the handle is given back in any case."""
    with contextlib.ExitStack() as undo:
        undo.callback(attempt, "cuMemRelease", handle)
        pointer = int(call("cuMemAddressReserve", size, 0, 0, 0))
        try:
            call("cuMemMap", pointer, size, 0, handle, 0)
            try:
                call("cuMemSetAccess", pointer, size, [_access(ordinal)], 1)
            except BaseException:
                attempt("cuMemUnmap", pointer, size)
                raise
        except BaseException:
            attempt("cuMemAddressFree", pointer, size)
            raise
        return Mapping(pointer, size)


def _fd_type() -> Any:
    return bindings().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _properties(ordinal: int) -> Any:
    driver = bindings()
    made = driver.CUmemAllocationProp()
    made.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    made.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    made.location.id = ordinal
    made.requestedHandleTypes = _fd_type()
    return made


def _access(ordinal: int) -> Any:
    driver = bindings()
    made = driver.CUmemAccessDesc()
    made.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    made.location.id = ordinal
    made.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return made
