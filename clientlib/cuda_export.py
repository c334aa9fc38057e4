"""Finding an application's GPU memory and making it exportable, or saying why it is not and what to do instead.

Called by `clientlib.client` and `clientlib.async_client` for `register_cuda_shm` and `alloc_cuda`. No context is ever
created for memory that exists: it has one.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from clientlib.arguments import whole
from clientlib.cuda_source import Source, source_of
from shm.cuda import driver, handles
from shm.cuda.descriptor import LEGACY, VMM, CudaMemory, uuid_of
from shm.cuda.driver import Context, CudaError, Device
from shm.errors import Code, InferError

ALLOC: Final = "client.alloc_cuda(name, byte_size), which any GPU library can use as its memory"
# By origin: whose memory it is, and how to get memory that can be shared.
REMEDIES: Final = {
    "pool": "memory of a stream-ordered pool (cudaMallocAsync: torch's backend:cudaMallocAsync, cupy's and RMM's "
    f"asynchronous pools, jax's cuda_async allocator) has no handle for another process. Use {ALLOC}, or an allocator "
    "over cudaMalloc (torch: PYTORCH_CUDA_ALLOC_CONF=backend:native, cupy: its default pool, jax: "
    "XLA_PYTHON_CLIENT_ALLOCATOR=platform)",
    "other": "it is managed memory, or mapped without a handle that can be exported (torch's expandable_segments of "
    f"some versions do that). Use {ALLOC}, or PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False",
}
SEVERAL: Final = (
    "it lies in a row of allocations that are mapped one after the other (torch's expandable_segments), of which a "
    f"descriptor names one. Use {ALLOC}, or PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
)
WSL: Final = "under WSL2 there is no CUDA IPC: GPU memory cannot be shared between processes; use create_region()"
TEGRA: Final = (
    "this GPU shares the host's memory (Jetson) and has no CUDA IPC of ordinary allocations; use create_region(), "
    "whose memory costs no copy over a bus there"
)


@final
@dataclass(slots=True)
class Exported:
    """Memory ready to be registered: `fd` of VMM memory is ours until `close`; `keep` is what it lives by."""

    memory: CudaMemory
    pointer: int
    writable: bool
    base: int  # address of the allocation
    keep: object
    fd: int = -1

    def close(self) -> None:
        """Close the descriptor and let the memory go."""
        fd, self.fd = self.fd, -1
        self.keep = None
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            self.close()


def export(name: str, tensor: object, pointer: object, byte_size: object, device: object) -> Exported:
    """Export what an application has. Raises InferError: no CUDA, no such memory, or none that can be shared."""
    known = driver.devices(f"cannot register '{name}'")
    source = source_of(name, tensor, pointer, byte_size)
    wanted = None if device is None else uuid_of(device)
    place = _find(name, source, known)
    found = known[place.ordinal]
    if wanted is not None and wanted != found.uuid:
        raise _refused(name, f"it is memory of GPU {found.uuid}, not of {wanted} as given")
    offset = source.pointer - place.base
    if offset + source.byte_size > place.size:
        raise _refused(
            name, f"{source.byte_size} bytes were given, of which {place.size - offset} lie in the allocation"
        )
    with Context(place.ordinal):
        handle, fd = _handle(name, source, place)
    memory = CudaMemory(
        kind=VMM if fd >= 0 else LEGACY,
        device=found.uuid,
        allocation_size=place.size,
        offset=offset,
        byte_size=source.byte_size,
        handle=handle,
    )
    return Exported(memory, source.pointer, source.writable, place.base, source.keep, fd)


def allocate(name: str, byte_size: object, device: object) -> Exported:
    """New memory on a GPU: the first that this process sees, or `device` by its UUID. Raises InferError.

    VMM memory, in steps of 2 MiB, which lives as long as anybody uses it; where a GPU has no VMM, of cuMemAlloc.
    """
    size = whole(byte_size, "byte_size", 1)  # type: ignore[arg-type]
    what = f"cannot allocate '{name}'"
    chosen = driver.devices(what)[0] if device is None else driver.find_device(uuid_of(device), what)
    try:
        with Context(chosen.ordinal):
            return _allocate(name, size, chosen)
    except CudaError as error:
        if error.number != driver.OUT_OF_MEMORY:
            raise
        raise _full(what, size, chosen) from None


# --- inside ---------------------------------------------------------------------------------------------------------


def _allocate(name: str, size: int, device: Device) -> Exported:
    try:
        return _allocate_vmm(size, device)
    except CudaError as error:
        if error.number != driver.NOT_SUPPORTED:
            raise
    _check_platform(name, device.ordinal)
    return _allocate_legacy(size, device)


def _full(what: str, size: int, device: Device) -> InferError:
    left = "not even a context of this process fits"
    with contextlib.suppress(InferError), Context(device.ordinal):
        free, total = driver.free_memory()
        left = f"{free} of {total} bytes are free"
    return InferError(
        Code.UNAVAILABLE,
        f"{what}: {device.name}, {device.uuid}, has no {size} bytes left: {left}. Unregister regions that are not used "
        "any more, see by `nvidia-smi` who has the rest, ask for less, or name another GPU (device=)",
    )


def _allocate_vmm(size: int, device: Device) -> Exported:
    mapping = handles.create_vmm(device.ordinal, size)
    try:
        fd = handles.export_vmm(mapping.pointer)
    except BaseException:
        mapping.close()
        raise
    memory = CudaMemory(kind=VMM, device=device.uuid, allocation_size=mapping.byte_size, offset=0, byte_size=size)
    return Exported(
        memory, mapping.pointer, True, mapping.pointer, _Owned(mapping.pointer, device.ordinal, mapping), fd
    )


def _allocate_legacy(size: int, device: Device) -> Exported:
    # Whole steps of 2 MiB: smaller allocations share one, and a handle opens all of it to the other process.
    step = 2 << 20
    rounded = (size + step - 1) // step * step
    pointer = int(driver.call("cuMemAlloc", rounded))
    keep = _Owned(pointer, device.ordinal, None)
    memory = CudaMemory(
        kind=LEGACY,
        device=device.uuid,
        allocation_size=rounded,
        offset=0,
        byte_size=size,
        handle=handles.export_legacy(pointer),
    )
    return Exported(memory, pointer, True, pointer, keep)


@final
class _Owned:
    """Memory that `allocate` made: freed with the last reference to it."""

    __slots__ = ("_made_in", "_mapping", "_ordinal", "_pointer")

    def __init__(self, pointer: int, ordinal: int, mapping: handles.Mapping | None) -> None:
        self._pointer, self._ordinal, self._mapping = pointer, ordinal, mapping
        self._made_in = os.getpid()

    def __del__(self) -> None:
        if self._made_in != os.getpid():
            return  # a forked child, which has nothing of CUDA
        try:
            with Context(self._ordinal):
                if self._mapping is not None:
                    self._mapping.close()
                else:
                    driver.call("cuMemFree", self._pointer)
        except InferError:
            pass  # the context is lost, and the memory with it


def _find(name: str, source: Source, known: tuple[Device, ...]) -> handles.Place:
    """The allocation of a pointer, asked in a context that exists: without one the pointer is nobody's."""
    ordinals = [device.ordinal for device in known if driver.has_context(device.ordinal)]
    if source.ordinal is not None:
        ordinals = [ordinal for ordinal in ordinals if ordinal == source.ordinal]
    for ordinal in ordinals:
        with Context(ordinal):
            place = handles.locate(source.pointer)
        if place is not None:
            return place
    raise _refused(
        name,
        "its address is no memory of a GPU in this process; for memory of the host use register_system_shm or "
        "create_region",
    )


def _handle(name: str, source: Source, place: handles.Place) -> tuple[bytes, int]:
    """(handle, -1) or (b"", descriptor)."""
    if place.origin in REMEDIES:
        raise _refused(name, REMEDIES[place.origin], Code.UNSUPPORTED)
    try:
        if place.origin == "vmm":
            if not handles.one_allocation(place.base, source.pointer + source.byte_size - 1):
                raise _refused(name, SEVERAL, Code.UNSUPPORTED)
            return b"", handles.export_vmm(source.pointer)
        _check_platform(name, place.ordinal)
        return handles.export_legacy(source.pointer), -1
    except CudaError as error:
        raise _refused(name, f"the driver does not export it: {error.message}. Use {ALLOC}", Code.UNSUPPORTED) from None


def _check_platform(name: str, ordinal: int) -> None:
    """Legacy handles do not exist everywhere, and some drivers say so only to the one who opens them."""
    if under_wsl():
        raise _refused(name, WSL, Code.UNSUPPORTED)
    if driver.integrated(ordinal):
        raise _refused(name, TEGRA, Code.UNSUPPORTED)


def under_wsl(version: Path = Path("/proc/version")) -> bool:
    """Is this Linux one of Windows's? Its kernel says so."""
    try:
        return "microsoft" in version.read_text().lower()
    except OSError:
        return False


def _refused(name: str, why: str, code: Code = Code.INVALID_ARG) -> InferError:
    return InferError(code, f"cannot register '{name}': {why}")
