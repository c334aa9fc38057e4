"""Memory that an ensemble's worker shares with the workers of its other members: pool regions of its own session.

Used by `broker.worker.ensembles.remote.elsewhere`. Clients never get this memory, and the other workers get none of a
client's: what a client can write to, truncate or unregister is read and written in the ensemble's worker only.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple, final

from broker.worker.ensembles.remote.session import StepSession
from broker.worker.messages import AddRegion
from broker.worker.regions import Region
from shm.arena import Arena
from shm.errors import InferError
from shm.messages import RegisterPool, Reply, Unregister
from shm.regions import create_pool
from shm.sockets import close_all

SLAB = 4 << 20  # bytes of the smallest region


class Block(NamedTuple):
    """A place in shared memory, until `SharedMemory.free`."""

    region: Region
    offset: int
    byte_size: int


@final
class _Slab:
    """One region. `refused`: why the broker did not take it."""

    __slots__ = ("arena", "refused", "region")

    def __init__(self, region: Region, byte_size: int) -> None:
        self.region = region
        self.arena = Arena(byte_size)
        self.refused: InferError | None = None


@final
class SharedMemory:
    """From any thread. Regions are registered in the order of the session's calls: before the plans that name them."""

    def __init__(self, session: StepSession) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._slabs: dict[str, _Slab] = {}  # by the name of the region
        self._made = 0

    def allocate(self, byte_size: int) -> Block:
        """A block of at least this size. Raises InferError UNAVAILABLE when there is not that much memory."""
        with self._lock:
            for slab in self._slabs.values():
                offset = None if slab.refused else slab.arena.allocate(byte_size)
                if offset is not None:
                    return Block(slab.region, offset, byte_size)
            slab = self._make(max(SLAB, 1 << (byte_size - 1).bit_length()))
            offset = slab.arena.allocate(byte_size)
            assert offset is not None, "it is empty, and large enough"
            return Block(slab.region, offset, byte_size)

    def free(self, blocks: list[Block]) -> None:
        """Nobody reads or writes there any more, no plan names it. What is empty then is given back, but for one."""
        with self._lock:
            for block in blocks:
                self._slabs[block.region.info.name].arena.free(block.offset)
            for name, slab in list(self._slabs.items()):
                if (len(self._slabs) > 1 or slab.refused) and slab.arena.close_if_unused():
                    del self._slabs[name]
                    if slab.refused is None:
                        self._session.call(Unregister(name=name))

    def refusal(self, names: Iterable[str]) -> InferError | None:
        """Why one of these regions is none that the broker knows."""
        with self._lock:
            found = (self._slabs[name].refused for name in names if name in self._slabs)
            return next((refused for refused in found if refused is not None), None)

    def _make(self, byte_size: int) -> _Slab:
        fd = create_pool(byte_size)
        self._made += 1
        name = f"steps.{self._made}"
        info = AddRegion(
            region=self._made, generation=0, name=name, kind="pool", byte_size=byte_size, offset=0,
            file_size=byte_size, device=0, inode=self._made, writable=True,
        )  # fmt: skip
        slab = self._slabs[name] = _Slab(Region(info, fd), byte_size)

        def registered(reply: Reply | InferError, fds: list[int]) -> None:
            close_all(fds)
            if isinstance(reply, InferError):
                slab.refused = reply

        self._session.call(RegisterPool(name=name, byte_size=byte_size), registered, (fd,))
        return slab
