"""The gateway's core: what the front ends ask for, on the broker's session and channels.

Implements `broker.gateway.kserve.Service` for one gateway process, on one event loop. Inference is in
`broker.gateway.inference`, shared memory in `broker.gateway.regions`; everything else is a question to the broker.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, final

from msgspec.structs import replace

from broker.gateway.inference import Inference
from broker.gateway.kserve import Caller, Category, InferRequest, InferResponse, Transport
from broker.gateway.options import EXTENSIONS, SERVER_VERSION, GatewayOptions
from broker.gateway.regions import RegionCache
from broker.gateway.streaming import ResponseStream
from broker.gateway.tracing import Traces
from clientlib.async_client import AsyncClient
from clientlib.session import Answer
from shm.errors import Code, InferError, shortened
from shm.gateway_messages import (
    Config,
    GetConfig,
    GetIndex,
    GetMetrics,
    GetServer,
    Index,
    LogSettings,
    Metrics,
    ServerState,
    Settings,
    TraceSettings,
)
from shm.load_parameters import pack, split
from shm.message_values import IndexEntry, ModelMetadata, RegionRecord
from shm.messages import GetStatistics, LoadModel, Statistics, UnloadModel
from shm.sockets import close_all

LOAD_S = 3600.0  # how long a model may take to load
LOADS = 16  # loads and unloads at a time: the session takes 64 calls, and those of others must not wait for a model
NOT_READY = "is not at ready state"


class Policy(Protocol):
    """Who may ask for what (`broker.gateway.access.Access`)."""

    def check(self, category: Category, caller: Caller) -> None:
        """Raises Restricted."""


@final
class GatewayService:
    """Implements `broker.gateway.kserve.Service`. Made by the gateway's process on its adopted session."""

    def __init__(self, client: AsyncClient, options: GatewayOptions, access: Policy) -> None:
        self.server_name = options.server_name
        self.server_version = SERVER_VERSION
        self.extensions = EXTENSIONS
        self.exiting = False
        self.traces = Traces(options.trace, options.index)
        self.on_ended: Callable[[str, int, bool], None] | None = None  # told transport, ns and "failed" of each request
        self.on_copied: Callable[[str, int], None] | None = None  # told why, and bytes
        self._running = 0  # requests
        self._loads: set[asyncio.Task[Answer]] = set()
        self._may_load = asyncio.Semaphore(LOADS)
        self._idle = asyncio.Event()
        self._idle.set()
        self._client = client
        self._access = access
        self.shared = RegionCache(client, allowed=options.allow_client_shm)
        self.inference = Inference(client, self.shared, self.copied)

    def check(self, category: Category, caller: Caller) -> None:
        """The one access policy. Raises Restricted."""
        self._access.check(category, caller)

    # --- server ----------------------------------------------------------------------------------------------------

    async def live(self) -> bool:
        """Is the broker up?"""
        return (await self._state()).live

    async def ready(self) -> bool:
        """As --strict-readiness says."""
        return (await self._state()).ready

    async def _state(self) -> ServerState:
        try:
            reply, _ = await self._client.call(GetServer())
        except InferError:
            return ServerState(live=False, ready=False)
        assert isinstance(reply, ServerState)
        return reply

    async def metrics(self) -> dict[str, Any]:
        """The numbers behind /metrics (see `broker.metrics`)."""
        reply, _ = await self._client.call(GetMetrics())
        assert isinstance(reply, Metrics)
        return reply.metrics

    async def log_settings(self, update: Mapping[str, bool | int | str]) -> dict[str, Any]:
        """Triton's log settings after `update`."""
        reply, _ = await self._client.call(LogSettings(update=dict(update)))
        assert isinstance(reply, Settings)
        return reply.settings

    async def trace_settings(
        self, model: str, update: Mapping[str, str | list[str] | None]
    ) -> dict[str, str | list[str]]:
        """Triton's trace settings of a model, "" for the global ones, after `update`."""
        reply, _ = await self._client.call(TraceSettings(model=model, update=dict(update)))
        assert isinstance(reply, Settings)
        if (left := self.traces.left(model)) is not None:
            reply.settings["trace_count"] = str(left)  # as in Triton: of those that this gateway has yet to trace
        return reply.settings

    # --- models ----------------------------------------------------------------------------------------------------

    async def model_ready(self, model: str, version: str) -> bool:
        """Can it be asked? Raises InferError with the lookup texts for a model that is not known at all."""
        try:
            return (await self.inference.metadata(model, version)).state == "READY"
        except InferError as error:
            if error.code == Code.NOT_FOUND.name or NOT_READY in error.message:  # a version, as in Triton
                return False
            raise

    async def metadata(self, model: str, version: str) -> ModelMetadata:
        """One model version; "" is the latest ready. `versions` are those that are ready, or the one asked for."""
        found = await self.inference.metadata(model, version)
        return replace(found, versions=(found.version,)) if version else found

    async def config(self, model: str, version: str) -> dict[str, Any]:
        """The completed configuration in Triton's JSON form."""
        reply, _ = await self._client.call(GetConfig(model=model, version=shortened(version)))
        assert isinstance(reply, Config)
        found: dict[str, Any] = json.loads(reply.config)
        return found

    async def statistics(self, model: str, version: str) -> list[dict[str, Any]]:
        """`model_stats` in Triton's JSON form."""
        reply, _ = await self._client.call(GetStatistics(model=model, version=shortened(version)))
        assert isinstance(reply, Statistics)
        return list(reply.model_stats)

    async def index(self, ready: bool) -> Sequence[IndexEntry]:
        """The repository index; `ready`: only what is."""
        reply, _ = await self._client.call(GetIndex(ready=ready))
        assert isinstance(reply, Index)
        return reply.models

    async def load(self, model: str, parameters: Mapping[str, str | bytes]) -> None:
        """Load or reload; returns when it is ready."""
        config, files = split(model, parameters)
        packed = None if config is None else await asyncio.to_thread(pack, config, files)
        await self._change(model, LoadModel(model=model, parameters=packed is not None), packed)

    async def unload(self, model: str, unload_dependents: bool) -> None:
        """Unload, with members of an ensemble that nobody else needs if so wished."""
        await self._change(model, UnloadModel(model=model, unload_dependents=unload_dependents))

    async def _change(self, model: str, message: LoadModel | UnloadModel, packed: int | None = None) -> None:
        """Returns when the broker has done it, which goes on, and counts, when whoever asked for it has left.

        Takes the descriptor `packed` over.
        """

        def ended(task: asyncio.Task[Answer]) -> None:
            self._may_load.release()
            close_all(descriptors)
            self._loads.discard(task)
            self.inference.forget_latest(model)
            if not task.cancelled():
                task.exception()  # nobody may be waiting

        descriptors = [] if packed is None else [packed]
        try:
            await self._may_load.acquire()
        except BaseException:
            close_all(descriptors)
            raise
        call = self._client.call(message, timeout=LOAD_S, fds=descriptors)
        task = asyncio.get_running_loop().create_task(call)
        self._loads.add(task)
        task.add_done_callback(ended)
        await asyncio.shield(task)

    # --- inference -------------------------------------------------------------------------------------------------

    async def infer(self, request: InferRequest, caller: Caller) -> InferResponse:
        """Run one request. Cancelled with the task that awaits it."""
        began, failed = self._enter(), True
        if (trace := request.trace) is not None:
            trace.begin(request)
        try:
            response = await self.inference.infer(request, caller)
            failed = False
            if trace is not None:
                trace.mark("INFER_RESPONSE_COMPLETE")
                trace.ended(response.version)
            return response
        finally:
            self._leave(caller.transport, began, failed)

    async def stream(self, request: InferRequest, caller: Caller) -> ResponseStream:
        """Check one request and have its responses come. The request is taken over: its inputs are let go."""
        began = self._enter()
        if request.trace is not None:
            request.trace.begin(request)
        try:
            responses = await self.inference.stream(request, caller)
        except BaseException:
            self._leave(caller.transport, began, failed=True)
            raise
        responses.on_end = partial(self._leave, caller.transport, began)
        return responses

    def _enter(self) -> int:
        """A request begins: when. Raises InferError when no more may."""
        if self.exiting:
            raise InferError(Code.UNAVAILABLE, "Server exiting")
        self._running += 1
        self._idle.clear()
        return time.monotonic_ns()

    def _leave(self, transport: Transport, began: int, failed: bool) -> None:
        self._running -= 1
        if not self._running:
            self._idle.set()
        if self.on_ended is not None:
            self.on_ended(transport, time.monotonic_ns() - began, failed)

    def copied(self, reason: str, byte_size: int) -> None:
        """Bytes of tensors were copied in this process, for one of `shm.gateway_counters.COPIES`."""
        if self.on_copied is not None:
            self.on_copied(reason, byte_size)

    async def idle(self) -> None:
        """Return when no request runs."""
        await self._idle.wait()

    # --- shared memory ---------------------------------------------------------------------------------------------

    async def register_system(self, caller: Caller, name: str, key: str, byte_size: int, offset: int) -> None:
        """For the caller's principal."""
        await self.shared.register_system(caller, name, key, byte_size, offset)

    async def register_cuda(self, caller: Caller, name: str, handle: bytes, device: int, byte_size: int) -> None:
        """For the caller's principal."""
        await self.shared.register_cuda(caller, name, handle, device, byte_size)

    async def unregister(self, caller: Caller, kind: str, name: str) -> None:
        """`kind`: "system", "cuda", "" for any; `name` "": all of the caller's of it. Unknown names succeed."""
        await self.shared.unregister(caller, kind, name)

    async def regions(self, caller: Caller, kind: str, name: str) -> list[RegionRecord]:
        """Those of the caller, sorted by name; a `name` that is missing or of the other kind is NOT_FOUND."""
        return await self.shared.records(caller, kind, name)
