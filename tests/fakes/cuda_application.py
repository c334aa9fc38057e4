"""An application of `clientlib` with GPU memory, run by `tests.fakes.cuda_children`."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import weakref
from typing import Any

import numpy as np

import clientlib
from shm.cuda import driver, handles
from tests.fakes.cuda_roles import fill, first
from tests.unit.test_cuda_sources import Packed

BLOCK = 4 << 20
ZERO = "GPU-00000000-0000-0000-0000-000000000000"


class Array:
    """What a library of arrays gives: `__cuda_array_interface__`."""

    def __init__(self, pointer: int, shape: list[int], strides: tuple[int, ...] | None = None) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(shape),
            "typestr": "<f4",
            "data": (pointer, False),
            "version": 3,
            "strides": strides,
        }


class Application:
    """One block of an allocator, whose float at byte 256 k is 256 k; and a client of the broker in `directory`."""

    def __init__(self, directory: str, cuda: str = "yes") -> None:
        self.directory = directory
        self.client = clientlib.connect(f"ipc://{directory}")
        self.regions: dict[str, Any] = {}
        if cuda == "yes":
            driver.devices("the test")
            driver.Context(0).__enter__()
            self.block = int(driver.call("cuMemAlloc", BLOCK))
            for offset in range(0, 4096, 256):
                fill(self.block + offset, offset)
        self.descriptors = self._descriptors()

    def reset(self) -> None:
        """As at the start."""
        self.client.unregister()
        self.regions.clear()
        self.kept = None
        assert self.descriptors_leaked() == 0

    def _descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def descriptors_leaked(self) -> int:
        gc.collect()
        return self._descriptors() - self.descriptors

    def _keep(self, name: str, region: Any) -> dict[str, Any]:
        self.regions[name] = region
        return {"kind": region.kind, "byte_size": region.byte_size, "offset": region.offset, "device": region.device}

    # --- registering -------------------------------------------------------------------------------------------------

    def register_interface(self, name: str, offset: int, shape: list[int]) -> dict[str, Any]:
        return self._keep(name, self.client.register_cuda_shm(name, Array(self.block + offset, shape)))

    def register_dlpack(self, name: str, offset: int, shape: list[int]) -> dict[str, Any]:
        array = Packed(tuple(shape), None, bits=32)
        array.tensor.data, array.tensor.device_id, array.tensor.byte_offset = self.block, 0, offset
        return self._keep(name, self.client.register_cuda_shm(name, array))

    def register_pointer(self, name: str, offset: int, byte_size: int) -> dict[str, Any]:
        device = driver.devices("the test")[0].uuid
        pointer = self.block + offset
        return self._keep(
            name, self.client.register_cuda_shm(name, pointer=pointer, byte_size=byte_size, device=device)
        )

    def register_held(self, name: str) -> None:
        array = Array(self.block, [4])
        self.watched = weakref.ref(array)
        self._keep(name, self.client.register_cuda_shm(name, array))

    def held(self) -> bool:
        gc.collect()
        return self.watched() is not None

    def register_mapped(self, name: str) -> None:
        mapping = handles.create_vmm(0, 1)
        try:
            self._keep(name, self.client.register_cuda_shm(name, Array(mapping.pointer + 4096, [8])))
        finally:
            mapping.close()

    def alloc_cuda(self, name: str, byte_size: int) -> dict[str, Any]:
        return self._keep(name, self.client.alloc_cuda(name, byte_size))

    def alloc_on(self, name: str, device: str) -> dict[str, Any]:
        return self._keep(name, self.client.alloc_cuda(name, BLOCK, device))

    def alloc_cuda_async(self, name: str, byte_size: int) -> None:
        async def run() -> None:
            client = await clientlib.connect_async(f"ipc://{self.directory}")
            try:
                await client.alloc_cuda(name, byte_size)
            finally:
                await client.close()

        asyncio.run(run())

    # --- what is refused ---------------------------------------------------------------------------------------------

    def register_pool_memory(self) -> None:
        pointer = int(driver.call("cuMemAllocAsync", 4096, 0))
        try:
            self.client.register_cuda_shm("r", Array(pointer, [8]))
        finally:
            driver.call("cuMemFreeAsync", pointer, 0)
            driver.call("cuStreamSynchronize", 0)

    def register_host_memory(self) -> None:
        self.numbers = np.zeros(16, np.float32)
        self.client.register_cuda_shm("r", pointer=self.numbers.ctypes.data, byte_size=64)

    def register_too_much(self) -> None:
        self.client.register_cuda_shm("r", pointer=self.block + 16, byte_size=BLOCK)

    def register_wrong_device(self) -> None:
        self.client.register_cuda_shm("r", Array(self.block, [8]), device=ZERO)

    def register_a_number_as_device(self) -> None:
        self.client.register_cuda_shm("r", Array(self.block, [8]), device=0)  # type: ignore[arg-type]

    def register_gaps(self) -> None:
        self.client.register_cuda_shm("r", Array(self.block, [8, 8], (64, 4)))

    def register_freed(self) -> None:
        pointer = int(driver.call("cuMemAlloc", 4096))
        driver.call("cuMemFree", pointer)
        self.client.register_cuda_shm("r", Array(pointer, [8]))

    # --- using and letting go ----------------------------------------------------------------------------------------

    def write_array(self, name: str, value: float) -> dict[str, Any]:
        array = self.regions[name].cuda_array((250,), "FP32")
        interface = dict(array.__cuda_array_interface__)
        fill(interface["data"][0], value, 250)
        return {key: interface[key] for key in ("shape", "typestr", "version")}

    def read_array(self, name: str) -> float:
        return first(self.regions[name].cuda_array((1,), np.float32).__cuda_array_interface__["data"][0])

    def keep_array(self, name: str) -> None:
        self.kept: Any = self.regions[name].cuda_array((4,), "FP32")

    def read_kept(self) -> float:
        return first(self.kept.__cuda_array_interface__["data"][0])

    def host_array(self, name: str) -> None:
        self.regions[name].array((4,), "FP32")

    def large_array(self, name: str) -> None:
        self.regions[name].cuda_array((500,), "FP32")

    def unregister(self, name: str) -> None:
        self.client.unregister(name)
        del self.regions[name]
        gc.collect()

    def close(self) -> None:
        self.client.close()
        self.regions.clear()
        gc.collect()

    def free_bytes(self) -> int:
        gc.collect()
        return int(driver.call("cuMemGetInfo")[0])

    def models(self) -> int:
        return len(self.client.models())

    def infer_on_host(self) -> None:
        x = np.arange(6, dtype=np.float32).reshape(2, 3)
        assert (self.client.infer("double", {"x": x})["y"] == 2 * x).all()

    def cuda_is_imported(self) -> bool:
        return any(name.split(".")[0] == "cuda" for name in sys.modules)
