"""Clients' GPU memory as plans have it: a window that a request uses while it runs.

`broker.worker.regions` makes one for each region of kind "cuda"; `broker.worker.cuda.execute` uses it. What is open and
when it is closed is `broker.worker.cuda.regions`'.
"""

from __future__ import annotations

import functools
from typing import final

from broker.worker.cuda.events import Events, Patience
from broker.worker.cuda.mirrors import Mirror, Mirrors
from broker.worker.cuda.pinned import pin
from broker.worker.cuda.regions import CudaRegion, CudaRegions
from broker.worker.cuda.streams import Bytes, address, end_if_lost
from broker.worker.messages import AddRegion
from shm.cuda.driver import Context, CudaError, call, devices, find_device, free_memory, has_context, make_current
from shm.errors import Code, InferError
from shm.statistics import GPU_CLOSES, GPU_EVICTIONS, GPU_OPEN_BYTES, GPU_OPENS, GPU_PEER_BYTES


def own_device(worker: str) -> str:
    """The UUID of the GPU that a worker of this key is for ("gpu0/default": the first that this process sees).

    "" on the CPU. Raises InferError when the driver does not show it.
    """
    name = worker.partition("/")[0]
    if not name.startswith("gpu"):
        return ""
    known = devices(f"worker '{worker}'")
    ordinal = int(name.removeprefix("gpu"))
    if ordinal >= len(known):
        raise InferError(
            Code.NOT_FOUND, f"worker '{worker}' is for GPU {ordinal}, this process sees {len(known)} of them"
        )
    return known[ordinal].uuid


@functools.cache
def _ordinal_of(device: str) -> int:
    return find_device(device, "a worker").ordinal


def used_memory(device: str) -> int:
    """Bytes of the GPU that are in use, by whatever process. 0: nothing of this one has come to use it, or it does not
    answer; asking makes no context.
    """
    ordinal = _ordinal_of(device)
    if not has_context(ordinal):
        return 0
    with Context(ordinal):
        free, total = free_memory()
    return total - free


@final
class Window:
    """[pointer, pointer + byte_size) on GPU `ordinal` of this process. `mirror`: the same on the host."""

    __slots__ = ("_all", "_region", "_table", "mirror", "ordinal")

    def __init__(self, windows: Windows, table: CudaRegions, region: CudaRegion, ordinal: int) -> None:
        self._all, self._table, self._region, self.ordinal = windows, table, region, ordinal
        self.mirror = Mirror(region.byte_size, lambda memory: pin(memory, ordinal, windows.words, writable=True))

    @property
    def pointer(self) -> int:
        """Its address on the GPU."""
        return self._region.pointer

    @property
    def far(self) -> bool:
        """Is it another GPU's memory than `ordinal`'s?"""
        return self._region.opened.far

    @property
    def mirrors(self) -> Mirrors:
        """All of the worker's."""
        return self._all.mirrors

    def begin(self) -> None:
        """A request uses it. Raises InferError NOT_FOUND if its memory is gone."""
        if not self._table.begin(self._region):
            raise InferError(
                Code.NOT_FOUND,
                f"Unable to find shared memory region: '{self._region.name}': its GPU memory was freed by its client, "
                "or unregistered; register it again",
            )

    def finish(self) -> None:
        """The request has ended, the GPU is done with it."""
        self._table.finish(self._region)

    def read(self, start: int, into: Bytes) -> None:
        """Copy from its bytes at `start`, complete. Raises InferError NOT_FOUND if its memory is gone."""
        self._copy("cuMemcpyDtoH", address(into), self.pointer + start, into.size)

    def write(self, start: int, source: Bytes) -> None:
        """Copy to its bytes at `start`, complete. Raises as `read`."""
        self._copy("cuMemcpyHtoD", self.pointer + start, address(source), source.size)

    def _copy(self, function: str, to: int, source: int, byte_size: int) -> None:
        self.begin()
        try:
            make_current(self.ordinal)
            if byte_size:
                call(function, to, source, byte_size)
        except CudaError as error:
            end_if_lost(error, "a copy for an ensemble")
            raise
        finally:
            self.finish()

    def close(self) -> None:
        """No plan names it, nothing runs on it: close the memory, if it is the last of its allocation."""
        self._table.retire(self._region.key)
        self._table.close_idle()
        self._all.mirrors.forget(self.mirror)
        self._all.count()


@final
class Windows:
    """All of a worker's. `device`: of a worker on a GPU, its UUID; one on the CPU opens memory of every GPU it sees.

    `words`: the worker's own, for the broker to read. `peers`: as of `CudaRegions`.
    """

    __slots__ = ("_before", "_device", "_ordinals", "_patience", "_peers", "_tables", "mirrors", "words")

    def __init__(self, device: str, words: memoryview, *, peers: bool = False) -> None:
        self._peers = peers
        self._device, self.words = device, words
        self._before = tuple(words[word] for word in (GPU_OPENS, GPU_CLOSES, GPU_EVICTIONS))  # of processes before us
        self.mirrors = Mirrors()
        self._patience = Patience()
        self._ordinals: dict[str, int] = {}
        self._tables: dict[str, tuple[CudaRegions, int]] = {}

    @property
    def ordinal(self) -> int:
        """Of the worker's own GPU."""
        return self._ordinal_of(self._device)

    def open(self, info: AddRegion, fd: int) -> Window:
        """Open it; the descriptor (of VMM memory) stays the caller's. Raises InferError with Triton's text."""
        assert info.cuda is not None
        uuid = self._device or info.cuda.device
        if uuid not in self._tables:
            self._tables[uuid] = CudaRegions(uuid, peers=self._peers), self._ordinal_of(uuid)
        table, ordinal = self._tables[uuid]
        key = info.region, info.generation
        try:
            region = table.add(key, info.name, info.owner, info.cuda, fd, writable=info.writable)
        except CudaError as error:
            end_if_lost(error, uuid)
            raise
        finally:
            self.count()
        return Window(self, table, region, ordinal)

    def open_events(self, info: AddRegion) -> Events:
        """Open a client's ring of events. Raises InferError INVALID_ARG for what is none of this GPU."""
        assert info.events is not None
        uuid = info.events.device
        if self._device not in ("", uuid) and not self._peers:
            raise InferError(
                Code.INVALID_ARG, f"failed to register '{info.name}': its events are of {uuid}, not {self._device}"
            )
        return Events(info.name, info.events, info.owner, self._ordinal_of(uuid), self.words, self._patience)

    def count(self) -> None:
        """Write into the worker's words what it has opened and closed."""
        tables = [table for table, _ in self._tables.values()]
        opens, closes, evictions = self._before
        self.words[GPU_OPENS] = opens + sum(table.opens for table in tables)
        self.words[GPU_CLOSES] = closes + sum(table.closes for table in tables)
        self.words[GPU_EVICTIONS] = evictions + sum(table.evictions for table in tables)
        self.words[GPU_OPEN_BYTES] = sum(table.open_bytes for table in tables)
        self.words[GPU_PEER_BYTES] = sum(table.peer_bytes for table in tables)

    def _ordinal_of(self, uuid: str) -> int:
        if uuid not in self._ordinals:
            self._ordinals[uuid] = find_device(uuid, "a worker").ordinal
        return self._ordinals[uuid]
