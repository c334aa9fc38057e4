"""The regions this worker has mapped, by (region, generation).

A region is dropped from the table when it is retired; its mapping goes with the last plan, binding or running batch
that still refers to it, so memory in use cannot be unmapped and nothing has to be counted. GPU memory is not mapped:
it is closed when no plan names it any more (`Region.close`). CUDA is imported with the first region that needs it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, final

import msgspec
import numpy as np
import numpy.typing as npt

from broker.worker.messages import AddRegion
from shm.errors import InferError
from shm.regions import MappedMemory, shrunk
from shm.statistics import GPU_USED

if TYPE_CHECKING:
    from broker.worker.cuda.events import Events
    from broker.worker.cuda.windows import Window, Windows


@final
class Region:
    """One mapped region. `bytes` is exactly the registered window, whatever its offset in the file.

    `used`: a request ran on it since the broker last asked; kept for system regions only. `gpu`: it is memory of a GPU;
    `bytes` is then the host's, a mirror for models that run there (`broker.worker.cuda.mirrors`). `events`: it is no
    memory, but a ring of a client's events.
    """

    __slots__ = ("_fd", "_unpin", "bytes", "events", "file_size", "gpu", "info", "retired", "used")

    def __init__(self, info: AddRegion, fd: int) -> None:
        self._fd = -1
        self._unpin: Callable[[], None] | None = None
        self.gpu: Window | None = None
        self.events: Events | None = None
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
        info = AddRegion(
            id=0, region=0, generation=0, name="", kind="private", byte_size=byte_size, offset=0, file_size=byte_size,
            device=0, inode=0, writable=True,
        )  # fmt: skip
        return cls._made(info, np.empty(byte_size, np.uint8), None)

    @classmethod
    def on_gpu(cls, info: AddRegion, window: Window) -> Region:
        """Memory of a GPU."""
        return cls._made(info, window.mirror.bytes, window)

    @classmethod
    def of_events(cls, info: AddRegion, events: Events) -> Region:
        """No memory: a client's events."""
        region = cls._made(info, np.empty(0, np.uint8), None)
        region.events = events
        return region

    @classmethod
    def _made(cls, info: AddRegion, memory: npt.NDArray[np.uint8], window: Window | None) -> Region:
        region = cls.__new__(cls)
        region._fd, region._unpin, region.gpu, region.events = -1, None, window, None
        region.info, region.bytes, region.file_size = info, memory, info.file_size
        region.retired = region.used = False
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

    def pin(self, ordinal: int, words: memoryview) -> None:
        """Let a GPU copy to and from it by itself, if it can be pinned. `words`: the worker's own, to count it."""
        from broker.worker.cuda.pinned import pin

        self._unpin = pin(self.bytes, ordinal, words, writable=self.info.writable)

    def close(self) -> None:
        """No plan names it any more, no request runs on it: what is a GPU's is closed, other memory goes by itself."""
        if self.gpu is not None:
            self.gpu.close()
        if self.events is not None:
            self.events.close()

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        if self._unpin is not None:
            self._unpin()


@final
class RegionTable:
    """Every region that may be named by a new plan.

    `device`: the UUID of the worker's GPU, "" on the CPU. `words`: the worker's own, for what it opens on GPUs.
    `peers`: may it open memory of other GPUs than its own?
    """

    __slots__ = ("_device", "_peers", "_regions", "_windows", "_words")

    def __init__(self, device: str = "", words: memoryview | None = None, *, peers: bool = False) -> None:
        self._peers = peers
        self._regions: dict[tuple[int, int], Region] = {}
        self._device = device
        self._words = words
        self._windows: Windows | None = None

    def __len__(self) -> int:
        return len(self._regions)

    def add(self, info: AddRegion, fd: int) -> None:
        """Map it, or open it on its GPU; the descriptor stays the caller's. A second time does nothing."""
        key = info.region, info.generation
        if key in self._regions:
            return
        if info.cuda is None and info.events is None and not self._device:
            self._regions[key] = Region(info, fd)
            return
        from broker.worker.cuda.windows import Windows

        assert self._words is not None
        self._windows = self._windows or Windows(self._device, self._words, peers=self._peers)
        if info.events is not None:
            self._regions[key] = Region.of_events(info, self._windows.open_events(info))
        elif info.cuda is not None:
            self._regions[key] = Region.on_gpu(info, self._windows.open(info, fd))
        else:
            self._regions[key] = Region(info, fd)
            self._regions[key].pin(self._windows.ordinal, self._words)

    def hold(self, number: int, region: Region) -> None:
        """Name a region that is mapped already, for a step of an ensemble."""
        self._regions[number, 0] = region

    def retire(self, region: int, generation: int) -> None:
        """No new plan may name it, and plans that do are closed by who asks this."""
        found = self._regions.pop((region, generation), None)
        if found is not None:
            found.retired = True
            if found.events is not None:
                found.events.end()

    def measure(self) -> None:
        """Write into the worker's words how much of its GPU is in use, as far as it uses that and the driver says."""
        if self._device and self._words is not None:
            from broker.worker.cuda.windows import used_memory

            with contextlib.suppress(InferError):  # a lost context ends the worker where a request meets it
                self._words[GPU_USED] = used_memory(self._device)

    def get(self, region: int, generation: int) -> Region | None:
        """None: never added, or retired."""
        return self._regions.get((region, generation))
