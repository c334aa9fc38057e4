"""Memory that an ensemble's worker shares with the workers of its other members: pool regions of its own session.

Used by `broker.worker.ensemble_remote`. Clients never get this memory, and the other workers get none of a client's:
what a client can write to, truncate or unregister is read and written in the ensemble's worker only.
"""

from __future__ import annotations

import threading
from typing import NamedTuple, final

from broker.worker.ensemble_remote_session import StepSession
from broker.worker.messages import AddRegion
from broker.worker.regions import Region
from shm.arena import Arena
from shm.messages import RegisterPool, Unregister
from shm.regions import create_pool

SLAB = 4 << 20  # bytes of the smallest region


class Block(NamedTuple):
    """A place in shared memory, until `SharedMemory.free`."""

    region: Region
    offset: int
    byte_size: int


@final
class SharedMemory:
    """From any thread. Regions are registered in the order of the session's calls: before the plans that name them."""

    def __init__(self, session: StepSession) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._slabs: list[tuple[Region, Arena]] = []
        self._made = 0

    def allocate(self, byte_size: int) -> Block:
        """A block of at least this size. Raises InferError UNAVAILABLE when there is not that much memory."""
        with self._lock:
            for region, arena in self._slabs:
                offset = arena.allocate(byte_size)
                if offset is not None:
                    return Block(region, offset, byte_size)
            size = max(SLAB, 1 << (byte_size - 1).bit_length())
            fd = create_pool(size)
            self._made += 1
            info = AddRegion(
                region=self._made, generation=0, name=f"steps.{self._made}", kind="pool", byte_size=size, offset=0,
                file_size=size, device=0, inode=self._made, writable=True,
            )  # fmt: skip
            region, arena = Region(info, fd), Arena(size)
            self._session.call(RegisterPool(name=info.name, byte_size=size), fds=(fd,))
            self._slabs.append((region, arena))
            offset = arena.allocate(byte_size)
            assert offset is not None, "it is empty, and large enough"
            return Block(region, offset, byte_size)

    def free(self, blocks: list[Block]) -> None:
        """Nobody reads or writes there any more, no plan names it. What is empty then is given back, but for one."""
        with self._lock:
            arenas = {id(region): arena for region, arena in self._slabs}
            for block in blocks:
                arenas[id(block.region)].free(block.offset)
            for slab in list(self._slabs):
                if len(self._slabs) > 1 and slab[1].close_if_unused():
                    self._slabs.remove(slab)
                    self._session.call(Unregister(name=slab[0].info.name))
