"""The regions this worker has mapped, by (region, generation).

A region is dropped from the table when it is retired; its mapping goes with the last plan, binding or running batch
that still refers to it, so memory in use cannot be unmapped and nothing has to be counted.
"""

from __future__ import annotations

import os
from typing import final

import msgspec
import numpy as np
import numpy.typing as npt

from broker.worker.messages import AddRegion
from shm.regions import MappedMemory, shrunk


@final
class Region:
    """One mapped region. `bytes` is exactly the registered window, whatever its offset in the file.

    `used`: a request ran on it since the broker last asked; kept for system regions only.
    """

    __slots__ = ("_fd", "bytes", "file_size", "info", "retired", "used")

    def __init__(self, info: AddRegion, fd: int) -> None:
        self._fd = -1
        self.info = info
        memory = MappedMemory(fd, info.offset, info.byte_size, info.writable)
        self.bytes: npt.NDArray[np.uint8] = memory.bytes
        self.retired = False
        self.used = False
        self.file_size = info.file_size
        # A POSIX object can be truncated by anyone who may open it: its size is looked at before every use. Sealed
        # pool memory cannot, and needs no descriptor any more.
        if info.kind == "system":
            self._fd = os.dup(fd)

    @classmethod
    def private(cls, byte_size: int) -> Region:
        """Memory of this process alone, for what goes from one step of an ensemble to the next."""
        region = cls.__new__(cls)
        region._fd = -1
        region.info = AddRegion(
            id=0, region=0, generation=0, name="", kind="private", byte_size=byte_size, offset=0, file_size=byte_size,
            device=0, inode=0, writable=True,
        )  # fmt: skip
        region.retired = region.used = False
        region.file_size = byte_size
        region.bytes = np.empty(byte_size, np.uint8)
        return region

    def grow(self, byte_size: int) -> None:
        """Private memory of at least this size; what was in it is lost when it has to grow."""
        if byte_size > self.bytes.size:
            size = 1 << (byte_size - 1).bit_length()
            self.bytes = np.empty(size, np.uint8)
            self.info = msgspec.structs.replace(self.info, byte_size=size, file_size=size)

    @property
    def identity(self) -> tuple[int, int]:
        """Equal for regions that are the same memory, whoever registered them."""
        return self.info.device, self.info.inode

    def changed_size(self) -> bool:
        """Was the object behind a system region made smaller? Asked before every use."""
        self.used = True
        return self._fd >= 0 and shrunk(self._fd, self.file_size)

    def snapshot(self, start: int, size: int) -> bytes | memoryview:
        """The bytes from `start` on as they are now: less than `size` of a file that was truncated.

        Of shared files a copy: reading their mapping would end this process if it happened meanwhile.
        """
        if self._fd < 0:
            return self.bytes[start : start + size].data
        return os.pread(self._fd, size, self.info.offset + start)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


@final
class RegionTable:
    """Every region that may be named by a new plan."""

    __slots__ = ("_regions",)

    def __init__(self) -> None:
        self._regions: dict[tuple[int, int], Region] = {}

    def __len__(self) -> int:
        return len(self._regions)

    def add(self, info: AddRegion, fd: int) -> None:
        """Map it; the descriptor stays the caller's. A second time does nothing."""
        key = info.region, info.generation
        if key not in self._regions:
            self._regions[key] = Region(info, fd)

    def hold(self, number: int, region: Region) -> None:
        """Name a region that is mapped already, for a step of an ensemble."""
        self._regions[number, 0] = region

    def retire(self, region: int, generation: int) -> None:
        """No new plan may name it, and plans that do are closed by who asks this."""
        found = self._regions.pop((region, generation), None)
        if found is not None:
            found.retired = True

    def get(self, region: int, generation: int) -> Region | None:
        """None: never added, or retired."""
        return self._regions.get((region, generation))
