"""What the processes of CUDA tests do: an application with GPU memory, and a worker that has opened it.

Run by `tests.fakes.cuda_children`, never in pytest's own process.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from broker.worker.cuda.regions import CudaRegions
from clientlib import cuda_export
from shm.cuda import driver, handles
from shm.cuda.descriptor import CudaMemory


def fill(pointer: int, value: float, count: int = 4) -> None:
    numbers = np.full(count, value, np.float32)
    driver.call("cuMemcpyHtoD", pointer, numbers.ctypes.data, numbers.nbytes)


def first(pointer: int) -> float:
    numbers = np.zeros(1, np.float32)
    driver.call("cuMemcpyDtoH", numbers.ctypes.data, pointer, numbers.nbytes)
    return float(numbers[0])


class Application:
    """Allocates on GPU `ordinal` and exports. Memory is named by the order in which it was made."""

    def __init__(self, ordinal: str = "0") -> None:
        self.device = driver.devices("the test")[int(ordinal)]
        self.context = driver.Context(self.device.ordinal)
        self.context.__enter__()
        self.pointers: list[int] = []
        self.exported: list[cuda_export.Exported] = []

    def reset(self) -> None:
        """As at the start."""
        for pointer in self.pointers:
            driver.attempt("cuMemFree", pointer)
        for exported in self.exported:
            exported.close()
        self.pointers, self.exported = [], []

    def allocate(self, byte_size: int) -> int:
        """As a caching allocator does: one block. The value in it is its number, from 1 on."""
        self.pointers.append(int(driver.call("cuMemAlloc", byte_size)))
        fill(self.pointers[-1], len(self.pointers))
        return len(self.pointers) - 1

    def export(self, number: int, offset: int, byte_size: int) -> CudaMemory:
        pointer = self.pointers[number] + offset
        return cuda_export.export("r", None, pointer, byte_size, None).memory

    def alloc_cuda(self, byte_size: int) -> tuple[CudaMemory, list[int]]:
        made = cuda_export.allocate("r", byte_size, None)
        self.exported.append(made)
        fill(made.pointer, 100 + len(self.exported))
        return made.memory, [made.fd] if made.fd >= 0 else []

    def let_go(self) -> None:
        self.exported.pop().close()

    def read(self, number: int, offset: int = 0) -> float:
        return first(self.pointers[number] + offset)

    def write(self, number: int, offset: int, value: float) -> None:
        fill(self.pointers[number] + offset, value, 1)

    def free(self, number: int) -> None:
        driver.call("cuMemFree", self.pointers[number])

    def own_handle(self, number: int) -> bytes:
        return handles.export_legacy(self.pointers[number])

    def free_bytes(self) -> int:
        return int(driver.call("cuMemGetInfo")[0])


class Worker:
    """`CudaRegions` of GPU `ordinal`, by remote control. Keys are (number, 1), owners are numbers."""

    def __init__(self, ordinal: str = "0", peers: str = "") -> None:
        self.device = driver.devices("the test")[int(ordinal)]
        self.regions = CudaRegions(self.device.uuid, peers=bool(peers))

    def reset(self) -> None:
        """As at the start; what is still open then was leaked."""
        self.regions.close()
        self.regions.close_idle()
        assert self.regions.opens == self.regions.closes
        self.regions = CudaRegions(self.device.uuid)

    def add(self, number: int, owner: int, memory: dict[str, Any], fd: int = -1) -> dict[str, Any]:
        described = msgspec.convert(memory, CudaMemory, builtin_types=(bytes,))
        region = self.regions.add((number, 1), f"r{number}", owner, described, fd)
        return {"byte_size": region.byte_size, "aligned": region.aligned}

    def _region(self, number: int) -> Any:
        region = self.regions.get((number, 1))
        assert region is not None
        return region

    def begin(self, number: int) -> bool:
        self.running = self._region(number)
        return self.regions.begin(self.running)

    def finish(self) -> bool:
        return self.regions.finish(self.running)

    def retire(self, number: int) -> bool:
        return self.regions.retire((number, 1))

    def end_owner(self, owner: int) -> bool:
        return self.regions.end_owner(owner)

    def close_idle(self) -> list[int]:
        return [number for number, _ in self.regions.close_idle()]

    def pointer(self, number: int) -> int:
        return int(self._region(number).pointer)

    def lost(self, number: int) -> bool:
        return bool(self._region(number).lost)

    def read(self, number: int) -> float:
        with driver.Context(self.device.ordinal):
            return first(self._region(number).pointer)

    def write(self, number: int, value: float) -> None:
        with driver.Context(self.device.ordinal):
            fill(self._region(number).pointer, value, 1)

    def counts(self) -> dict[str, int]:
        table = self.regions
        return {
            "opens": table.opens,
            "closes": table.closes,
            "evictions": table.evictions,
            "regions": len(table),
            "open_bytes": table.open_bytes,
        }
