"""A `broker.gateway.kserve.Service` without a broker: a model `add1` (FP32 [-1, 4]: y = x + 1), a decoupled one `many`
that answers what a test wrote into `script`, regions in a dict.

For unit tests of the front ends: what a codec decoded is in `asked`, what the service answers can be replaced.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from broker.gateway.kserve import (
    Caller,
    InferRequest,
    InferResponse,
    OutputTensor,
    Responses,
    Tracer,
    one_answer_only,
)
from broker.gateway.options import TraceTable
from broker.gateway.streaming import OneResponse
from broker.gateway.tracing import Traces
from shm.errors import Code, InferError, fresh
from shm.message_values import IndexEntry, ModelMetadata, RegionRecord, TensorMetadata

METADATA = ModelMetadata(
    name="add1",
    version="1",
    versions=("1",),
    platform="onnxruntime_onnx",
    max_batch_size=8,
    inputs=(TensorMetadata(name="x", datatype="FP32", shape=(-1, 4)),),
    outputs=(TensorMetadata(name="y", datatype="FP32", shape=(-1, 4)),),
)

MANY = ModelMetadata(
    name="many",
    version="1",
    versions=("1",),
    inputs=(TensorMetadata(name="x", datatype="FP32", shape=(-1,)),),
    outputs=(TensorMetadata(name="y", datatype="FP32", shape=(-1,)),),
    decoupled=True,
)


class Scripted:
    """The responses to one request of `many`: each number is one, "end" is final, an error is one; else the end."""

    decoupled = True

    def __init__(self, service: FakeService, request: InferRequest) -> None:
        self._service = service
        self._request = request
        self._script = list(service.script)
        self.ended = self.closed = False

    def __aiter__(self) -> Scripted:
        return self

    async def __anext__(self) -> InferResponse:
        if self._service.gate is not None:
            try:
                await self._service.gate.wait()
            except asyncio.CancelledError:
                self._service.cancelled += 1
                raise
        if self._service.turns is not None:
            await self._service.turns.acquire()
        self._service.begun.append(self._request.id)
        if not self._script:
            self.ended = True
            raise StopAsyncIteration
        item = self._script.pop(0)
        final = bool(self._script) and self._script[0] == "end"
        if final:
            self._script.clear()
        response = InferResponse("many", "1", self._request.id, [], final=final)
        if isinstance(item, RuntimeError):
            raise item
        if isinstance(item, InferError):
            response.error = item
        else:
            data = np.full(self._service.size, item, np.float32).tobytes()
            response.outputs = [OutputTensor("y", "FP32", (self._service.size,), data)]
        self.ended = final
        return response

    async def aclose(self) -> None:
        if not self.closed and not self.ended:
            self._service.abandoned += 1
        self.closed = True


class FakeService:
    """`fails`: raised by every verb. `gate`: an event that `infer`, and every response of `many`, waits for.

    Of `many`: `script`, see `Scripted`; `turns`, one for each response; `begun`, the ids of the requests whose
    responses were asked for; `size`, elements of each; `abandoned`, how many were closed before their end.
    """

    def __init__(self) -> None:
        self.server_name, self.server_version = "triton", "2.73.0"
        self.extensions = ("classification", "binary_tensor_data")
        self.exiting = False
        self.traces: Tracer = Traces(TraceTable())
        self.asked: list[InferRequest] = []
        self.callers: list[Caller] = []
        self.fails: InferError | None = None
        self.gate: asyncio.Event | None = None
        self.cancelled = 0
        self.script: list[float | str | Exception] = []
        self.turns: asyncio.Semaphore | None = None
        self.begun: list[str] = []
        self.size = 1
        self.abandoned = 0
        self.copies: Counter[str] = Counter()
        self.held: dict[str, RegionRecord] = {}
        self.loads: list[tuple[str, dict[str, Any]]] = []
        self.log: dict[str, Any] = {
            "log_file": "",
            "log_info": True,
            "log_warning": True,
            "log_error": True,
            "log_verbose_level": 0,
            "log_format": "default",
        }
        self.trace: dict[str, Any] = {"trace_level": ["OFF"], "trace_rate": "1000", "trace_count": "-1"}

    def check(self, category: str, caller: Caller) -> None:
        self.callers.append(caller)

    def _model(self, model: str) -> ModelMetadata:
        if self.fails is not None:
            raise fresh(self.fails)
        if model == "many":
            return MANY
        if model != "add1":
            raise InferError(Code.INVALID_ARG, f"Request for unknown model: '{model}' is not found")
        return METADATA

    async def live(self) -> bool:
        return True

    async def ready(self) -> bool:
        return True

    async def model_ready(self, model: str, version: str) -> bool:
        return bool(self._model(model))

    async def metadata(self, model: str, version: str) -> ModelMetadata:
        return self._model(model)

    async def config(self, model: str, version: str) -> dict[str, Any]:
        self._model(model)
        return {"name": "add1", "platform": "onnxruntime_onnx", "max_batch_size": 8}

    async def statistics(self, model: str, version: str) -> list[dict[str, Any]]:
        duration = {"count": 1, "ns": 2}
        names = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit")
        return [
            {
                "name": "add1",
                "version": "1",
                "last_inference": 3,
                "inference_count": 4,
                "execution_count": 5,
                "inference_stats": {name: duration for name in (*names, "cache_miss")},
                "batch_stats": [],
                "memory_usage": [],
            }
        ]

    async def metrics(self) -> dict[str, Any]:
        return {}

    async def index(self, ready: bool) -> list[IndexEntry]:
        entries = [IndexEntry(name="add1", version="1", state="READY"), IndexEntry(name="never")]
        return [entry for entry in entries if entry.state == "READY" or not ready]

    async def load(self, model: str, parameters: Mapping[str, str | bytes]) -> None:
        self._model(model)
        self.loads.append((model, dict(parameters)))

    async def unload(self, model: str, unload_dependents: bool) -> None:
        self.loads.append((model, {"unload_dependents": unload_dependents}))

    async def infer(self, request: InferRequest, caller: Caller) -> InferResponse:
        self.asked.append(replace(request))  # whose inputs nobody lets go
        self.callers.append(caller)
        if self._model(request.model).decoupled:
            raise one_answer_only(caller.transport)
        if self.gate is not None:
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        tensor = request.inputs[0]
        data = None
        if tensor.data is not None:
            data = (np.frombuffer(tensor.data, np.float32) + 1).tobytes()
        return InferResponse("add1", "1", request.id, [OutputTensor("y", "FP32", tensor.shape, data)])

    async def stream(self, request: InferRequest, caller: Caller) -> Responses:
        if request.model != "many":
            return OneResponse(request, partial(self.infer, request, caller))
        self.asked.append(replace(request))  # whose inputs nobody lets go
        return Scripted(self, request)

    def copied(self, reason: str, byte_size: int) -> None:
        self.copies[reason] += byte_size

    async def register_system(self, caller: Caller, name: str, key: str, byte_size: int, offset: int) -> None:
        if name in self.held:
            raise InferError(Code.ALREADY_EXISTS, f"shared memory region '{name}' already in manager")
        self.held[name] = RegionRecord(name=name, kind="system", key=key, byte_size=byte_size, offset=offset)

    async def register_cuda(self, caller: Caller, name: str, handle: bytes, device: int, byte_size: int) -> None:
        raise InferError(Code.INVALID_ARG, "failed to register shared memory region: invalid args")

    async def unregister(self, caller: Caller, kind: str, name: str) -> None:
        for each in [name] if name else list(self.held):
            self.held.pop(each, None)

    async def regions(self, caller: Caller, kind: str, name: str) -> list[RegionRecord]:
        if name and name not in self.held:
            raise InferError(Code.NOT_FOUND, f"Unable to find {kind} shared memory region: '{name}'")
        return [self.held[each] for each in sorted(self.held) if not name or each == name]

    async def log_settings(self, update: Mapping[str, bool | int | str]) -> dict[str, Any]:
        self.log.update(update)
        return self.log

    async def trace_settings(self, model: str, update: Mapping[str, Any]) -> dict[str, Any]:
        if model not in ("", "add1", "many"):
            raise InferError(Code.INVALID_ARG, f"Request for unknown model : {model}")
        self.trace.update(update)
        return self.trace
