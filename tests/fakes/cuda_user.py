"""An application that uses a real broker with GPU memory of its own. Run by `tests.fakes.cuda_children`.

`User(url)`: tensors lie in regions, one after the other, 1024 bytes apart; "gpu" regions are the GPU's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import clientlib
from shm.cuda import driver

APART = 1024


class User:
    def __init__(self, url: str) -> None:
        driver.devices("the test")
        self.client = clientlib.connect(url)
        self.regions: dict[str, Any] = {}
        self.plan: Any = None

    def allocate(self, name: str, kind: str, device: str | None = None) -> str:
        """`kind`: "gpu" (VMM memory), "legacy" (an allocation of cuMemAlloc) or "host". The GPU's UUID."""
        if kind == "host":
            self.regions[name] = self.client.create_region(name, 8 * APART)
            return ""
        if kind == "gpu":
            made = self.client.alloc_cuda(name, 8 * APART, device)
        else:
            with driver.Context(0):
                pointer = int(driver.call("cuMemAlloc", 8 * APART))
            made = self.client.register_cuda_shm(name, pointer=pointer, byte_size=8 * APART)
        self.regions[name] = made
        return str(made.device)

    def prepare(
        self, model: str, inputs: dict[str, str], outputs: dict[str, str], dims: list[int], slots: int = 1
    ) -> None:
        """Tensor → region. The nth of all lies at the nth place. `slots`: output positions, one after the other."""
        self.places = {
            name: (region, at * APART) for at, (name, region) in enumerate([*inputs.items(), *outputs.items()])
        }
        self.dims = tuple(dims)

        def tensors(names: dict[str, str]) -> dict[str, Any]:
            return {
                name: self.regions[region].tensor(self.dims, "FP32", offset=self.places[name][1])
                for name, region in names.items()
            }

        self.plan = self.client.prepare(model, tensors(inputs), tensors(outputs), slots=(1, slots))

    def infer(self, values: dict[str, float], wanted: str) -> list[float]:
        """[bytes copied, the output's elements…]."""
        for name, value in values.items():
            self._write(name, value)
        copied = self.plan.infer(timeout=30).copied_bytes
        return [copied, *self._read(wanted).ravel().tolist()]

    def run_again(self) -> None:
        self.plan.infer(timeout=30)

    def unregister(self, name: str) -> None:
        self.client.unregister(name)

    def _array(self, name: str) -> Any:
        region, offset = self.places[name]
        return self.regions[region].array(self.dims, np.float32, offset)

    def _on_gpu(self, name: str) -> int:
        region, offset = self.places[name]
        return int(getattr(self.regions[region], "pointer", 0)) and int(self.regions[region].pointer) + offset

    def _write(self, name: str, value: float) -> None:
        data = np.full(self.dims, value, np.float32)
        pointer = self._on_gpu(name)
        if pointer:
            with driver.Context(0):
                driver.call("cuMemcpyHtoD", pointer, data.ctypes.data, data.nbytes)
        else:
            self._array(name)[:] = data

    def _read(self, name: str) -> np.ndarray:
        pointer = self._on_gpu(name)
        if not pointer:
            return np.array(self._array(name))
        data = np.zeros(self.dims, np.float32)
        with driver.Context(0):
            driver.call("cuMemcpyDtoH", data.ctypes.data, pointer, data.nbytes)
        return data
