"""Clients' GPU memory as plans have it: a window that a request uses while it runs.

`broker.worker.regions` makes one for each region of kind "cuda"; `broker.worker.cuda.execute` uses it. What is open and
when it is closed is `broker.worker.cuda.regions`'.
"""

from __future__ import annotations

from typing import final

from broker.worker.cuda.regions import CudaRegion, CudaRegions
from broker.worker.cuda.streams import end_if_lost
from broker.worker.messages import AddRegion
from shm.cuda.driver import CudaError, devices, find_device
from shm.errors import Code, InferError


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


@final
class Window:
    """[pointer, pointer + byte_size) on GPU `ordinal` of this process."""

    __slots__ = ("_region", "_table", "ordinal")

    def __init__(self, table: CudaRegions, region: CudaRegion, ordinal: int) -> None:
        self._table, self._region, self.ordinal = table, region, ordinal

    @property
    def pointer(self) -> int:
        """Its address on the GPU."""
        return self._region.pointer

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

    def close(self) -> None:
        """No plan names it, nothing runs on it: close the memory, if it is the last of its allocation."""
        self._table.retire(self._region.key)
        self._table.close_idle()


@final
class Windows:
    """All of a worker's. `device`: of a worker on a GPU, its UUID; one on the CPU opens memory of every GPU it sees."""

    __slots__ = ("_device", "_ordinals", "_tables")

    def __init__(self, device: str) -> None:
        self._device = device
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
            self._tables[uuid] = CudaRegions(uuid), self._ordinal_of(uuid)
        table, ordinal = self._tables[uuid]
        key = info.region, info.generation
        try:
            region = table.add(key, info.name, info.owner, info.cuda, fd, writable=info.writable)
        except CudaError as error:
            end_if_lost(error, uuid)
            raise
        return Window(table, region, ordinal)

    def _ordinal_of(self, uuid: str) -> int:
        if uuid not in self._ordinals:
            self._ordinals[uuid] = find_device(uuid, "a worker").ordinal
        return self._ordinals[uuid]
