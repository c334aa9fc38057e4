"""A GPU's stream and memory that are the host's: what backends do with pointers, without a driver.

Stands in for `broker.worker.cuda.streams.Lane` and `broker.worker.cuda.staging.Scratch`. Copies happen at once.
"""

from __future__ import annotations

import ctypes
from collections import Counter

import numpy as np

from broker.worker.backends import OnGpu
from broker.worker.cuda.streams import address
from shm.cuda.driver import Device


class HostLane:
    def __init__(self) -> None:
        self.device = Device(0, "GPU-none", "the host", (0, 0), 0)
        self.stream = 0
        self.calls: list[str] = []
        self.moved: Counter[str] = Counter()

    def enter(self) -> None:
        pass

    def copy_in(self, to: int, source: np.ndarray) -> None:
        self.calls.append("in")
        ctypes.memmove(to, address(source), source.size)

    def copy_out(self, to: np.ndarray, source: int) -> None:
        self.calls.append("out")
        ctypes.memmove(address(to), source, to.size)

    def copy(self, to: int, source: int, byte_size: int) -> None:
        self.calls.append("within")
        ctypes.memmove(to, source, byte_size)

    def finish(self) -> None:
        self.calls.append("finish")

    def fetch(self, place: OnGpu) -> np.ndarray:
        return np.frombuffer(ctypes.string_at(place.pointer, place.size), np.uint8)

    def check(self) -> None:
        pass

    def close(self) -> None:
        self.calls.append("close")


class HostBuffer:
    def __init__(self, byte_size: int) -> None:
        raw = np.empty(byte_size + 256, np.uint8)
        start = -address(raw) % 256
        self.array = raw[start : start + max(byte_size, 1)]
        self.pointer, self.size = address(self.array), self.array.size


class HostScratch:
    lent = False

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], HostBuffer] = {}

    def get(self, side: str, tensor: str, byte_size: int) -> HostBuffer:
        found = self._buffers.get((side, tensor))
        if found is None or found.size < byte_size:
            found = self._buffers[side, tensor] = HostBuffer(byte_size)
        return found

    def close(self) -> None:
        self._buffers.clear()
