"""Block allocator inside one region, for results and inputs whose place the user did not choose.

Owned by one process: the client library asks it for an offset per result and gives the offset back when the array
that lies there dies. It hands out numbers and touches no memory.
"""

from __future__ import annotations

import bisect
import threading
from collections import deque
from typing import Final, final

ALIGNMENT: Final = 64  # a cache line, and what vector loads and device copies want


@final
class Arena:
    """Hands out disjoint, 64-byte aligned ranges of a region of `byte_size` bytes.

    A block that was freed serves the next allocation of its size as it is: the steady state of repeated inference,
    at the cost of a dictionary lookup. Only when no block and no untouched space fits are neighbours merged.
    """

    __slots__ = ("_closed", "_free", "_free_bytes", "_freed", "_fresh", "_live", "_lock", "_merged", "byte_size")

    def __init__(self, byte_size: int) -> None:
        self.byte_size: Final = byte_size // ALIGNMENT * ALIGNMENT
        self._lock = threading.Lock()
        self._live: dict[int, int] = {}  # offset → size of allocated blocks
        self._freed: deque[tuple[int, int]] = deque()  # (offset, size) given back and not yet looked at
        self._free: dict[int, list[int]] = {}  # size → offsets of free blocks
        self._fresh = 0  # where the space that was never handed out begins
        self._merged = True  # no two free blocks are neighbours
        self._free_bytes = self.byte_size
        self._closed = False

    def allocate(self, byte_size: int) -> int | None:
        """Offset of a block of at least `byte_size` bytes, or None when no gap is that large. Thread-safe."""
        size = max(ALIGNMENT, -(-byte_size // ALIGNMENT) * ALIGNMENT)
        with self._lock:
            if self._closed:
                return None
            self._take_back()
            offset = self._find(size)
            if offset is not None:
                self._live[offset] = size
                self._free_bytes -= size
            return offset

    def free(self, offset: int) -> None:
        """Give back the block at `offset`. Raises ValueError when none is allocated there. Thread-safe.

        Takes no lock: it runs when an array is collected, which may be in the middle of `allocate` in this thread.
        """
        size = self._live.pop(offset, None)
        if size is None:
            raise ValueError(f"no block is allocated at offset {offset}")
        self._freed.append((offset, size))

    def close_if_unused(self) -> bool:
        """Whether no block is allocated; then none will be any more. Thread-safe."""
        with self._lock:
            self._closed = self._closed or not self._live
            return self._closed

    @property
    def free_bytes(self) -> int:
        """Bytes not handed out. They need not be in one piece."""
        with self._lock:
            self._take_back()
            return self._free_bytes

    def _take_back(self) -> None:
        while self._freed:
            offset, size = self._freed.popleft()
            self._free.setdefault(size, []).append(offset)
            self._free_bytes += size
            self._merged = False

    def _find(self, size: int) -> int | None:
        if size > self._free_bytes:
            return None
        if same := self._free.get(size):
            return same.pop()
        if size <= self.byte_size - self._fresh:
            self._fresh += size
            return self._fresh - size
        if not self._merged:
            self._merge()
            if size <= self.byte_size - self._fresh:
                self._fresh += size
                return self._fresh - size
        return self._split(size)

    def _merge(self) -> None:
        """Join neighbouring free blocks, and those before the fresh space with it."""
        blocks = sorted((offset, size) for size, offsets in self._free.items() for offset in offsets)
        self._free.clear()
        self._merged = True
        joined: list[tuple[int, int]] = []
        for offset, size in blocks:
            if joined and sum(joined[-1]) == offset:
                start, before = joined.pop()
                offset, size = start, before + size
            joined.append((offset, size))
        if joined and sum(joined[-1]) == self._fresh:
            self._fresh = joined.pop()[0]
        for offset, size in joined:
            self._free.setdefault(size, []).append(offset)

    def _split(self, size: int) -> int | None:
        """Cut from the smallest free block that is large enough, so that large ones stay whole."""
        sizes = sorted(block for block, offsets in self._free.items() if offsets)
        index = bisect.bisect_left(sizes, size)
        if index == len(sizes):
            return None
        offset = self._free[sizes[index]].pop()
        if rest := sizes[index] - size:
            self._free.setdefault(rest, []).append(offset + size)
        return offset
