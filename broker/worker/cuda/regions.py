"""Clients' GPU memory as a worker of that GPU has it open: once per allocation, closed when nothing uses it.

Used by the worker's control thread (`add`, `retire`, `end_owner`, `close_idle`: everything that calls the driver) and
by the threads that run models (`begin`, `finish`: a lock and a number). So a request opens and closes nothing.

    (region, generation) → CudaRegion ──▶ Opened ◀── by the handle's 64 bytes; VMM memory: by its file
                            window         allocation    (else one per region)

    added ── retire ──▶ retired ── the last request on it ends ──▶ idle ── close_idle ──▶ closed

An allocation that a client frees and whose address it gets again has another handle, which the driver refuses while the
old one is open (CUDA_ERROR_ALREADY_MAPPED): what that client has open and nothing uses is closed then, and its regions
are `lost`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from typing import Final, final

from shm.cuda import handles
from shm.cuda.descriptor import LEGACY, CudaMemory, allocation_of
from shm.cuda.driver import (
    ALREADY_MAPPED,
    OUT_OF_MEMORY,
    Context,
    CudaError,
    call,
    find_device,
    free_memory,
    pointer_attribute,
)
from shm.errors import Code, InferError

ALIGNMENT: Final = 256  # bytes; what runtimes expect of a tensor's address, and what every allocation starts at
_log = logging.getLogger(__name__)

Key = tuple[int, int]  # (region, generation), as the broker counts them


@final
class Opened:
    """One allocation of another process, mapped at [pointer, pointer + size) here, and the regions in it.

    `known_as`: what finds it again; None: nothing does. `legacy`: its owner may free it meanwhile. `far`: another GPU
    has it, and this one reaches it over the bus.
    """

    __slots__ = ("close", "far", "known_as", "legacy", "pointer", "regions", "size")

    def __init__(
        self, pointer: int, size: int, known_as: Hashable | None, legacy: bool, close: Callable[[], None]
    ) -> None:
        self.pointer, self.size, self.known_as, self.legacy, self.close = pointer, size, known_as, legacy, close
        self.far = False
        self.regions: set[CudaRegion] = set()


@final
class CudaRegion:
    """A client's window [pointer, pointer + byte_size) on this worker's GPU.

    `aligned`: may a runtime be given its start as a tensor's address; otherwise it is copied on the GPU first. `lost`:
    its memory was taken from under it; requests on it fail.
    """

    __slots__ = ("_opened", "byte_size", "key", "lost", "name", "owner", "pointer", "retired", "running", "writable")

    def __init__(
        self, key: Key, name: str, owner: Hashable, memory: CudaMemory, opened: Opened, writable: bool
    ) -> None:
        self.key, self.name, self.owner = key, name, owner
        self._opened = opened
        self.pointer = opened.pointer + memory.offset
        self.byte_size = memory.byte_size
        self.writable = writable
        self.running = 0  # requests
        self.retired = self.lost = False

    @property
    def aligned(self) -> bool:
        """Is its start where a runtime expects a tensor's?"""
        return self.pointer % ALIGNMENT == 0

    @property
    def opened(self) -> Opened:
        """The allocation it is a window of."""
        return self._opened


@final
class CudaRegions:
    """All of them. `device`: the UUID of this worker's GPU; `peers`: may it reach memory of others over the bus?

    `opens`, `closes`, `evictions` count calls of the driver.
    """

    def __init__(self, device: str, *, peers: bool = False) -> None:
        self._device = find_device(device, "a worker")
        self._peers = peers
        self._lock = threading.Lock()
        self._regions: dict[Key, CudaRegion] = {}
        self._known: dict[Hashable, Opened] = {}
        self._idle: list[Opened] = []  # of no region any more, still open
        self._busy: set[CudaRegion] = set()  # retired, with requests that run
        self.opens = self.closes = self.evictions = 0

    def __len__(self) -> int:
        return len(self._regions)

    @property
    def open_bytes(self) -> int:
        """Of other processes' memory, mapped here."""
        return sum(opened.size for opened in self._open_now())

    @property
    def peer_bytes(self) -> int:
        """Of those, on other GPUs."""
        return sum(opened.size for opened in self._open_now() if opened.far)

    def _open_now(self) -> set[Opened]:
        with self._lock:
            return {region.opened for region in (*self._regions.values(), *self._busy) if not region.lost}

    # --- the control thread ------------------------------------------------------------------------------------------

    def add(
        self, key: Key, name: str, owner: Hashable, memory: CudaMemory, fd: int = -1, *, writable: bool = True
    ) -> CudaRegion:
        """Open it, or find it open. `fd` (of VMM memory) stays the caller's. A second time returns the first's.

        Raises InferError with Triton's text for what cannot be opened; a CudaError that is `sticky` ends the worker.
        """
        known = self._regions.get(key)
        if known is not None:
            return known
        memory.check(name)
        self._check_device(name, memory)
        with Context(self._device.ordinal):
            self._close_idle()
            opened = self._known.get(_name_of(memory, fd))
            if opened is None:
                opened = self._open(name, owner, memory, fd)
            elif memory.offset + memory.byte_size > opened.size:
                raise _invalid(name, f"the allocation has {opened.size} bytes")
        region = CudaRegion(key, name, owner, memory, opened, writable)
        with self._lock:
            opened.regions.add(region)
            self._regions[key] = region
        return region

    def get(self, key: Key) -> CudaRegion | None:
        """None: never added, or retired."""
        return self._regions.get(key)

    def retire(self, key: Key) -> bool:
        """No new request may use it. True: it is closed; False: requests still run on it (`close_idle` follows)."""
        with self._lock:
            region = self._regions.pop(key, None)
            if region is None:
                return True
            region.retired = True
            if region.running:
                self._busy.add(region)
                return False
            self._leave(region)
        self.close_idle()
        return True

    def end_owner(self, owner: Hashable) -> bool:
        """A client has ended: all its regions are retired. True: nothing of it runs any more."""
        return all(
            [self.retire(key) for key in [key for key, region in self._regions.items() if region.owner == owner]]
        )

    def close_idle(self) -> list[Key]:
        """Close what no request uses any more; the retired regions that this is the end of."""
        with self._lock:
            ended = [region for region in self._busy if not region.running]
            for region in ended:
                self._busy.discard(region)
                self._leave(region)
            waiting = bool(self._idle)
        if waiting:
            with Context(self._device.ordinal):
                self._close_idle()
        return [region.key for region in ended]

    def close(self) -> None:
        """Close everything that nothing uses."""
        for key in list(self._regions):
            self.retire(key)

    # --- threads that run models -------------------------------------------------------------------------------------

    def begin(self, region: CudaRegion) -> bool:
        """A request uses it from here on. False: it may not, for the region was retired or lost."""
        with self._lock:
            if region.retired or region.lost:
                return False
            region.running += 1
            return True

    def finish(self, region: CudaRegion) -> bool:
        """The request has ended, the GPU is done with it. True: it was the last on a retired region: `close_idle`."""
        with self._lock:
            region.running -= 1
            return region.retired and not region.running

    # --- inside ------------------------------------------------------------------------------------------------------

    def _check_device(self, name: str, memory: CudaMemory) -> None:
        if memory.device == self._device.uuid:
            return
        other = find_device(memory.device, f"shared memory region '{name}'")
        if not call("cuDeviceCanAccessPeer", self._device.ordinal, other.ordinal):
            why = "which cannot reach that one: use memory of its own GPU, or of the host"
        elif self._peers:
            return
        else:
            why = "which may be allowed to reach it: --cuda-peer-access=true of the broker"
        raise _invalid(name, f"it is memory of {memory.device}, this worker runs on {self._device.uuid}, {why}")

    def _open(self, name: str, owner: Hashable, memory: CudaMemory, fd: int) -> Opened:
        try:
            opened = self._map(memory, fd)
        except CudaError as error:
            if error.sticky:
                raise
            if error.number != ALREADY_MAPPED or not self._evict(owner):
                raise _invalid(name, self._told(error)) from None
            try:
                opened = self._map(memory, fd)
            except CudaError as again:
                raise _invalid(name, self._told(again)) from None
        self.opens += 1
        opened.far = memory.device != self._device.uuid
        try:
            self._check_size(name, memory, opened)
        except BaseException:
            opened.close()
            self.closes += 1
            raise
        if opened.known_as is not None:
            self._known[opened.known_as] = opened
        return opened

    def _told(self, error: CudaError) -> str:
        if error.number != OUT_OF_MEMORY:
            return error.message
        free, total = free_memory()
        return f"{error.message}: of {self._device.uuid} {free} of {total} bytes are free"

    def _map(self, memory: CudaMemory, fd: int) -> Opened:
        if memory.kind == LEGACY:
            pointer = handles.open_legacy(memory.handle)
            found = call("cuMemGetAddressRange", pointer)
            # The driver's word on the size, never the client's.
            return Opened(pointer, int(found[1]), memory.handle, True, lambda: handles.close_legacy(pointer))
        mapping = handles.import_vmm(fd, memory.allocation_size, self._device.ordinal)
        return Opened(mapping.pointer, mapping.byte_size, _name_of(memory, fd), False, mapping.close)

    def _check_size(self, name: str, memory: CudaMemory, opened: Opened) -> None:
        if memory.offset + memory.byte_size > opened.size:
            raise _invalid(name, f"the allocation has {opened.size} bytes")
        ordinal = pointer_attribute("DEVICE_ORDINAL", opened.pointer)
        if ordinal != self._device.ordinal and not self._peers:
            raise _invalid(name, f"the driver says that it is memory of another GPU than {self._device.uuid}")

    def _evict(self, owner: Hashable) -> bool:
        """Close what `owner` alone has open and no request uses: some of it the client has freed. True: something."""
        with self._lock:
            stale = [
                opened
                for opened in self._known.values()
                if opened.legacy and all(region.owner == owner and not region.running for region in opened.regions)
            ]
            for opened in stale:
                for region in list(opened.regions):
                    region.lost = True
                    self._leave(region)
        self.evictions += len(stale)
        self._close_idle()
        return bool(stale)

    def _leave(self, region: CudaRegion) -> None:
        """With the lock held: `region` refers to its allocation no more."""
        opened = region.opened
        if region not in opened.regions:
            return  # it was lost before
        opened.regions.remove(region)
        if not opened.regions:
            self._known.pop(opened.known_as, None)
            self._idle.append(opened)

    def _close_idle(self) -> None:
        """In the GPU's context: waits for what the GPU does."""
        with self._lock:
            idle, self._idle = self._idle, []
        for opened in idle:
            self.closes += 1
            try:
                opened.close()
            except CudaError as error:
                if error.sticky:
                    raise
                _log.warning("memory of another process is not closed: %s", error.message)


def _name_of(memory: CudaMemory, fd: int) -> Hashable | None:
    """What is equal for registrations of one allocation; None where nothing tells."""
    if memory.kind == LEGACY:
        return memory.handle
    file = allocation_of(fd)
    return None if file is None else (*file, memory.allocation_size)


def _invalid(name: str, why: str) -> InferError:
    return InferError(Code.INVALID_ARG, f"failed to register shared memory region '{name}': invalid args: {why}")
