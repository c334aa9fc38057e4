"""Memory that the client makes for itself: places for arrays that the application did not place.

    Store ── Chunk (a pool region) ── Block (one plan's places) ── Bank ── Lease (one place) ── arrays

Each holds what is left of it, so that an array keeps its place, its chunk and the mapping alive, and gives the place
back when it is collected. That can happen in any thread at any time, within other code of this module too, so giving
back takes no lock.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any, final

import numpy as np
import numpy.typing as npt

from clientlib.region import MappedRegion
from shm.arena import Arena
from shm.memory import pages

FIRST_CHUNK, LARGEST_CHUNK = 1 << 20, 16 << 20  # bytes; a block that needs more gets more
ALIGNMENT = 64


def aligned(byte_size: int) -> int:
    """`byte_size` rounded up to whole cache lines, at least one."""
    return max(-(-byte_size // ALIGNMENT), 1) * ALIGNMENT


@final
class Chunk:
    """A pool region that is cut into blocks."""

    __slots__ = ("arena", "region")

    def __init__(self, region: MappedRegion) -> None:
        self.region = region
        self.arena = Arena(region.byte_size)


@final
class Block:
    """A range of a chunk, given back when nobody holds it any more."""

    __slots__ = ("chunk", "offset")

    def __init__(self, chunk: Chunk, offset: int) -> None:
        self.chunk = chunk
        self.offset = offset

    def __del__(self) -> None:
        self.chunk.arena.free(self.offset)


@final
class Store:
    """All chunks of one client."""

    __slots__ = ("_chunks",)

    def __init__(self) -> None:
        self._chunks: list[Chunk] = []

    def allocate(self, byte_size: int) -> Block | None:
        """A block in an existing chunk, or None: the caller makes a region and adds it."""
        for chunk in tuple(self._chunks):
            if not chunk.region.retired and (offset := chunk.arena.allocate(byte_size)) is not None:
                return Block(chunk, offset)
        return None

    def add(self, region: MappedRegion) -> None:
        """A new chunk."""
        # Step by step, each of them atomic: other threads add too.
        for chunk in tuple(self._chunks):
            if chunk.region.retired:
                with contextlib.suppress(ValueError):
                    self._chunks.remove(chunk)
        self._chunks.append(Chunk(region))

    def retire_idle(self) -> list[MappedRegion]:
        """Regions of chunks that were made for one large block and hold none, no longer of this store: the caller
        unregisters them. Else requests of ever new sizes would keep the memory of all sizes that ever were.
        """
        idle = []
        for chunk in tuple(self._chunks):
            if chunk.arena.byte_size > LARGEST_CHUNK and not chunk.region.retired and chunk.arena.close_if_unused():
                with contextlib.suppress(ValueError):  # another thread was first
                    self._chunks.remove(chunk)
                    idle.append(chunk.region)
        return idle

    def next_chunk(self, byte_size: int) -> int:
        """Bytes of the chunk to make for a block of `byte_size`: as much as there is already, within bounds."""
        held = sum(region.byte_size for region in self.regions())
        return max(min(max(held, FIRST_CHUNK), LARGEST_CHUNK), pages(byte_size))

    def regions(self) -> list[MappedRegion]:
        """The regions of all chunks, to be registered again after a restart of the broker."""
        return [chunk.region for chunk in self._chunks if not chunk.region.retired]


@final
class Turn:
    """Who waits for a place. `lease`: the one that it was given; then `call` is called, in any thread."""

    __slots__ = ("__weakref__", "call", "lease")

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call
        self.lease: Lease | None = None


@final
class Bank:
    """The places of one plan in its block.

    `waiters`: those who wait, and those who were given a place and have not gone on: until the last of them has, nobody
    who comes later gets one, so that requests are sent in the order in which they were made.
    """

    __slots__ = ("_block", "_free", "_line", "_widens", "outgrown", "places", "waiters")

    def __init__(self, block: Block, places: int, widens: bool = False) -> None:
        """`widens`: whoever finds no place free is to have more of them made elsewhere, once; see `crowd`."""
        self._block = block
        self._widens = widens
        self.outgrown = False  # there are more places elsewhere now
        self._free = deque(range(places))
        self._line: deque[Turn] = deque()  # those of the waiters who have no place
        self.places = places
        self.waiters: set[Turn] = set()

    def take(self) -> Lease | None:
        """A place, unless others have waited longer; the longest unused one, so that requests made in a row are
        neighbours in memory and can run as one batch.
        """
        if self.waiters:
            return None
        try:
            return Lease(self, self._free.popleft())
        except IndexError:
            return None

    def crowd(self) -> bool:
        """Somebody would have to wait. True: there are more places elsewhere, or it is to have them made."""
        widens, self._widens = self._widens, False
        return widens or self.outgrown

    def wait(self, call: Callable[[], None]) -> Turn:
        """Wait in line. Whoever does must `leave`."""
        turn = Turn(call)
        self.waiters.add(turn)
        self._line.append(turn)
        self._serve()
        return turn

    def leave(self, turn: Turn) -> Lease | None:
        """Go on, with the place that one was given, or wait no longer."""
        with contextlib.suppress(ValueError):
            self._line.remove(turn)
        self.waiters.discard(turn)
        lease, turn.lease = turn.lease, None
        return lease

    def can_spare(self) -> bool:
        """May arrays keep a place? A quarter of them always goes on serving requests."""
        return len(self._free) > self.places // 4

    def give_back(self, place: int) -> None:
        """Any thread, any time."""
        self._free.append(place)
        if self._line:
            self._serve()

    def _serve(self) -> None:
        """Free places go to those who wait longest. A place that finds nobody any more goes back with its lease."""
        with contextlib.suppress(IndexError):
            while self._line:
                lease = Lease(self, self._free.popleft())
                turn = self._line.popleft()
                turn.lease = lease
                turn.call()


@final
class Lease:
    """One place of a bank, given back when nobody holds it any more: neither a request nor an array."""

    __slots__ = ("_bank", "place")

    def __init__(self, bank: Bank, place: int) -> None:
        self._bank = bank
        self.place = place

    def __del__(self) -> None:
        self._bank.give_back(self.place)


@final
class _Owner:
    # numpy keeps the object it got the interface from as the array's base: the array then owns the lease.
    __slots__ = ("__array_interface__", "lease")

    def __init__(self, interface: dict[str, Any], lease: Lease) -> None:
        self.__array_interface__ = interface
        self.lease = lease


def owning(view: npt.NDArray[Any], lease: Lease) -> npt.NDArray[Any]:
    """An array on the memory of `view` that holds `lease`."""
    array = np.asarray(_Owner(view.__array_interface__, lease))
    return array if array.dtype == view.dtype else array.view(view.dtype)
