"""An unmodified user of `tritonclient.utils.cuda_shared_memory`, run by `tests.fakes.cuda_children`."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np


class TritonUser:
    """`runtime`: "simulated" where the CUDA runtime cannot come up (see tests/fakes/cudart_on_driver.py)."""

    def __init__(self, runtime: str) -> None:
        if runtime == "simulated":
            from tests.fakes import cudart_on_driver

            cudart_on_driver.install()
        from tritonclient.utils import cuda_shared_memory

        self.library = cuda_shared_memory
        self.regions: dict[str, Any] = {}

    def create(self, name: str, byte_size: int, device: int) -> bytes:
        """The 64 bytes of the handle, as a server gets them decoded."""
        region = self.regions[name] = self.library.create_shared_memory_region(name, byte_size, device)
        return base64.b64decode(self.library.get_raw_handle(region))

    def set(self, name: str, numbers: list[float]) -> None:
        self.library.set_shared_memory_region(self.regions[name], [np.array(numbers, np.float32)])

    def get(self, name: str, count: int) -> list[float]:
        found = self.library.get_contents_as_numpy(self.regions[name], np.float32, [count])
        return [float(number) for number in found]

    def destroy(self, name: str) -> int:
        self.library.destroy_shared_memory_region(self.regions.pop(name))
        return len(self.library.allocated_shared_memory_regions())
