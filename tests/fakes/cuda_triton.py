"""An unmodified user of `tritonclient.utils.cuda_shared_memory`, run by `tests.fakes.cuda_children`."""

from __future__ import annotations

import base64
import concurrent.futures
import importlib
import os
import queue
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

    def handle(self, name: str) -> bytes:
        """In base64, as the library gives it."""
        found: bytes = self.library.get_raw_handle(self.regions[name])
        return found

    def set(self, name: str, numbers: list[float]) -> None:
        self.library.set_shared_memory_region(self.regions[name], [np.array(numbers, np.float32)])

    def get(self, name: str, count: int) -> list[float]:
        found = self.library.get_contents_as_numpy(self.regions[name], np.float32, [count])
        return [float(number) for number in found]

    def destroy(self, name: str) -> int:
        self.library.destroy_shared_memory_region(self.regions.pop(name))
        return len(self.library.allocated_shared_memory_regions())

    def destroy_all(self) -> None:
        for name in list(self.regions):
            self.destroy(name)


class TritonCaller(TritonUser):
    """The same with tritonclient's client of one transport ("http" or "grpc"), which registers and infers."""

    def __init__(self, runtime: str, transport: str, address: str) -> None:
        super().__init__(runtime)
        self.tc: Any = importlib.import_module(f"tritonclient.{transport}")
        self.address = address
        self.client = self.tc.InferenceServerClient(address)
        self.kept: dict[str, Any] = {}

    def register(self, name: str, region: str, device: int, byte_size: int) -> str:
        """The memory of `region`, as `name`. What the server refused, or ""."""
        handle = self.library.get_raw_handle(self.regions[region])
        return self.register_handle(name, handle, device, byte_size)

    def register_handle(self, name: str, handle: bytes, device: int, byte_size: int) -> str:
        """`handle` in base64."""
        return self._said(self.client.register_cuda_shared_memory, name, handle, device, byte_size)

    def register_system(self, name: str, byte_size: int) -> str:
        from tritonclient.utils import shared_memory

        key = f"/tb-{os.getpid()}-{name}"
        self.kept[name] = shared_memory.create_shared_memory_region(name, key, byte_size)
        return self._said(self.client.register_system_shared_memory, name, key, byte_size)

    def set_system(self, name: str, numbers: list[float]) -> None:
        from tritonclient.utils import shared_memory

        shared_memory.set_shared_memory_region(self.kept[name], [np.array(numbers, np.float32)])

    def get_system(self, name: str, count: int) -> list[float]:
        from tritonclient.utils import shared_memory

        found = shared_memory.get_contents_as_numpy(self.kept[name], np.float32, [count])
        return [float(number) for number in found]

    def destroy_system(self, name: str) -> None:
        from tritonclient.utils import shared_memory

        shared_memory.destroy_shared_memory_region(self.kept.pop(name))

    def unregister(self, name: str) -> str:
        return self._said(self.client.unregister_cuda_shared_memory, name)

    def unregister_all(self) -> None:
        self.client.unregister_cuda_shared_memory()
        self.client.unregister_system_shared_memory()

    def status(self, name: str = "") -> Any:
        """(name, device, bytes) of each, or what the server said."""
        from tritonclient.utils import InferenceServerException

        try:
            found = self.client.get_cuda_shared_memory_status(name)
        except InferenceServerException as error:
            return str(error)
        rows = found if isinstance(found, list) else list(found.regions.values())
        if rows and not isinstance(rows[0], dict):
            return sorted((row.name, row.device_id, row.byte_size) for row in rows)
        return sorted((row["name"], row["device_id"], row["byte_size"]) for row in rows)

    def infer(self, model: str, inputs: dict[str, Any], outputs: dict[str, Any], shape: list[int]) -> Any:
        """Inputs: (region, offset) or a list of numbers. Outputs: (region, offset), a number of classes, or None.

        Those that came inline, by name, or what the server said.
        """
        return self._infer(self.client, model, inputs, outputs, shape)

    def _infer(self, client: Any, model: str, inputs: dict[str, Any], outputs: dict[str, Any], shape: list[int]) -> Any:
        from tritonclient.utils import InferenceServerException

        size = int(np.prod(shape)) * 4
        try:
            result = client.infer(model, self._inputs(inputs, shape, size), outputs=self._outputs(outputs, size))
        except InferenceServerException as error:
            return str(error)
        return self._inline(result, outputs)

    def stream(self, model: str, inputs: dict[str, Any], outputs: dict[str, Any], shape: list[int], count: int) -> Any:
        """`infer` `count` times on one gRPC stream: what came last."""
        answers: queue.Queue[Any] = queue.Queue()
        size = int(np.prod(shape)) * 4
        self.client.start_stream(callback=lambda result, error: answers.put(error or result))
        for _ in range(count):
            self.client.async_stream_infer(
                model, self._inputs(inputs, shape, size), outputs=self._outputs(outputs, size)
            )
        found = [answers.get(timeout=30) for _ in range(count)]
        self.client.stop_stream()
        return str(found[-1]) if isinstance(found[-1], Exception) else self._inline(found[-1], outputs)

    def infer_at_once(
        self, model: str, inputs: dict[str, Any], outputs: dict[str, Any], shape: list[int], count: int
    ) -> Any:
        """`infer` in `count` threads, each with a client of its own: what came that is not {}."""
        arguments = model, inputs, outputs, shape
        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            clients = [self.tc.InferenceServerClient(self.address) for _ in range(count)]
            said = list(pool.map(lambda client: self._infer(client, *arguments), clients))
        return [answer for answer in said if answer != {}]

    def _inputs(self, inputs: dict[str, Any], shape: list[int], size: int) -> list[Any]:
        made = []
        for name, value in inputs.items():
            made.append(self.tc.InferInput(name, shape, "FP32"))
            if isinstance(value[0], str):
                made[-1].set_shared_memory(value[0], size, value[1])
            else:
                made[-1].set_data_from_numpy(np.array(value, np.float32).reshape(shape))
        return made

    def _outputs(self, outputs: dict[str, Any], size: int) -> list[Any]:
        made = []
        for name, value in outputs.items():
            classes = value if isinstance(value, int) else 0
            made.append(self.tc.InferRequestedOutput(name, class_count=classes))
            if isinstance(value, list | tuple):
                made[-1].set_shared_memory(value[0], value[2] if len(value) > 2 else size, value[1])
        return made

    def _inline(self, result: Any, outputs: dict[str, Any]) -> dict[str, Any]:
        inline = [name for name, where in outputs.items() if where is None or isinstance(where, int)]
        found = {name: result.as_numpy(name).ravel() for name in inline}
        return {
            name: [x.decode() if isinstance(x, bytes) else float(x) for x in array] for name, array in found.items()
        }

    @staticmethod
    def _said(call: Any, *arguments: Any) -> str:
        from tritonclient.utils import InferenceServerException

        try:
            call(*arguments)
        except InferenceServerException as error:
            return str(error)
        return ""
