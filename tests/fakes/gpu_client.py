"""A client with memory on the GPUs it sees, run by `tests.fakes.cuda_children`: it asks models of a real broker."""

from __future__ import annotations

from typing import Any

import clientlib
from shm import messages
from shm.cuda import driver
from shm.cuda.descriptor import LEGACY, CudaMemory
from tests.fakes.cuda_roles import fill, first

ROW = 16  # bytes: four floats
SIZE = 1 << 16


class GpuClient:
    """Its regions: "0", "1" … one on each GPU; inputs lie at 0, outputs at 1024."""

    def __init__(self, directory: str) -> None:
        self.client = clientlib.connect(f"ipc://{directory}")
        self.devices = driver.devices("the test")
        driver.Context(0).__enter__()
        self.regions = {
            str(device.ordinal): self.client.alloc_cuda(str(device.ordinal), SIZE, device.uuid)
            for device in self.devices
        }

    def ask(self, model: str, gpu: int, value: float) -> dict[str, Any]:
        """One request of `model` on the memory of `gpu`, and where it could have gone."""
        region: Any = self.regions[str(gpu)]
        plan = self.client.prepare(
            model,
            {"INPUT0": region.tensor((1, 4), "FP32")},
            {"OUTPUT0": region.tensor((1, 4), "FP32", offset=1024)},
        )
        with plan, driver.Context(gpu):
            pointer = region.cuda_array((SIZE // 4,), "FP32").__cuda_array_interface__["data"][0]
            fill(pointer, value)
            plan.infer(timeout=30)
            prepared = plan.prepared
            assert prepared is not None
            return {
                "result": first(pointer + 1024),
                "worker": prepared.worker,
                "workers": list(prepared.workers),
            }

    def alloc(self, name: str, byte_size: int) -> None:
        self.regions[name] = self.client.alloc_cuda(name, byte_size, self.devices[0].uuid)

    def unregister(self, name: str) -> None:
        self.client.unregister(name)

    def register_nonsense(self, handle: bytes) -> None:
        memory = CudaMemory(
            kind=LEGACY,
            device=self.devices[0].uuid,
            allocation_size=1 << 21,
            offset=0,
            byte_size=4096,
            handle=handle,
        )
        message = messages.RegisterCuda(name="nonsense", memory=memory)
        self.client._run(lambda link: self.client.native.call(link, message, 0))

    def names(self) -> list[str]:
        return sorted(region.name for region in self.client.regions())

    def close(self) -> None:
        self.client.close()
