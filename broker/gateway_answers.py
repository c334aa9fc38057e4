"""Answers to the messages that mostly gateways send: for principals, and what else KServe's protocol asks.

The other half of `broker.control`, which looks these functions up by the type of the message. What acts for a principal
is answered to gateways only: anybody else could choose in whose name to read memory.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import msgspec

from broker.ensemble_members import with_members
from broker.principals import Principals
from broker.records import GATEWAY, Peer, region_info
from broker.repository.config import ModelConfig
from broker.sessions import Answer
from broker.settings import LogState, TraceState
from shm import messages
from shm.errors import Code, InferError
from shm.gateway_messages import (
    Config,
    GetConfig,
    GetIndex,
    GetMetrics,
    GetServer,
    Index,
    ListFor,
    LogSettings,
    Metrics,
    RegisterCudaFor,
    RegisterFor,
    ServerState,
    Serving,
    Settings,
    TraceSettings,
    UnregisterFor,
    UseRegion,
)
from shm.message_values import IndexEntry
from shm.messages import Message, ModelMetadata


class Models(Protocol):
    """What these answers need of the models."""

    def all(self) -> list[ModelMetadata]:
        """Every model version that is known."""

    def metadata(self, model: str, version: str = "") -> ModelMetadata:
        """Raises InferError with Triton's lookup texts."""

    def config(self, model: str, version: str = "") -> tuple[ModelConfig, int]:
        """The completed configuration. Raises as `metadata`."""

    def serving(self, model: str) -> ModelConfig | None:
        """The configuration of the highest version that is ready, if there is one."""

    async def index(self, *, ready: bool = False) -> list[IndexEntry]:
        """The repository index."""


class Parts(Protocol):
    """What these answers need of `broker.control.Control`."""

    exiting: bool
    principals: Principals
    log_state: LogState
    trace_state: TraceState
    strict_readiness: bool
    metrics: Callable[[], dict[str, Any]]
    on_serving: Callable[[Peer, Serving], None] | None

    @property
    def models(self) -> Models:
        """The models."""


R = TypeVar("R", bound=Message)
Function = Callable[[Parts, Peer, R], Awaitable[Answer]]


# --- on behalf of a principal, and what only gateways say ---------------------------------------------------------


async def register_for(parts: Parts, peer: Peer, request: RegisterFor) -> Answer:
    """Open a POSIX name in the principal's name. No descriptor: a gateway uses it by UseRegion."""
    entry = await parts.principals.register(
        request.principal, request.name, request.key, request.byte_size, request.offset
    )
    return Answer(region_info(entry))


async def register_cuda_for(parts: Parts, peer: Peer, request: RegisterCudaFor) -> Answer:
    """Answered when a worker has opened the memory, so that what cannot be opened is refused."""
    entry = await parts.principals.register_cuda(
        request.principal, request.name, request.handle, request.ordinal, request.byte_size
    )
    return Answer(region_info(entry))


async def unregister_for(parts: Parts, peer: Peer, request: UnregisterFor) -> Answer:
    """Answered when no worker will use the region for a new request."""
    await parts.principals.unregister(request.principal, request.name, request.kind)
    return Answer(messages.Done())


async def list_for(parts: Parts, peer: Peer, request: ListFor) -> Answer:
    """The principal's own regions, those that requests still use included."""
    return Answer(messages.Regions(regions=tuple(await parts.principals.regions(request.principal))))


async def use_region(parts: Parts, peer: Peer, request: UseRegion) -> Answer:
    """The principal's region as one of the gateway's session."""
    entry = parts.principals.use(peer, request.principal, request.name)
    if request.descriptor and entry.fd < 0:
        raise InferError(Code.UNSUPPORTED, f"shared memory region '{request.name}' has no descriptor: it is on a GPU")
    return Answer(region_info(entry), (entry.fd,) if request.descriptor else ())


async def serving(parts: Parts, peer: Peer, request: Serving) -> Answer:
    """A gateway listens, or says why it cannot."""
    if parts.on_serving is not None:
        parts.on_serving(peer, request)
    return Answer(messages.Done())


# --- what anybody may ask -----------------------------------------------------------------------------------------


async def get_config(parts: Parts, peer: Peer, request: GetConfig) -> Answer:
    """As the loader completed it, with the label files as they were then."""
    config, version = parts.models.config(request.model, request.version)
    if request.whole:
        whole = tuple(msgspec.msgpack.encode(each.for_reader) for each in with_members(config, parts.models.serving))
        return Answer(Config(config=config.json, whole=whole, version=version))
    labels = {tensor.name: tensor.labels for tensor in config.output if tensor.labels}
    return Answer(Config(config=config.json, labels=labels, version=version))


async def get_index(parts: Parts, peer: Peer, request: GetIndex) -> Answer:
    """Also of what was never loaded."""
    return Answer(Index(models=tuple(await parts.models.index(ready=request.ready))))


async def get_server(parts: Parts, peer: Peer, request: GetServer) -> Answer:
    """Also while the broker exits."""
    live = not parts.exiting
    ready = live and (not parts.strict_readiness or all(map(_is_ready, parts.models.all())))
    return Answer(ServerState(live=live, ready=ready))


async def get_metrics(parts: Parts, peer: Peer, request: GetMetrics) -> Answer:
    """The numbers of this moment."""
    return Answer(Metrics(metrics=parts.metrics()))


async def log_settings(parts: Parts, peer: Peer, request: LogSettings) -> Answer:
    """After the change, if any."""
    return Answer(Settings(settings=parts.log_state.update(request.update)))


async def trace_settings(parts: Parts, peer: Peer, request: TraceSettings) -> Answer:
    """After the change, if any. Triton wants a model that is ready, and has a text of its own for others."""
    if request.model:
        try:
            parts.models.metadata(request.model)
        except InferError:
            raise InferError(Code.INVALID_ARG, f"Request for unknown model : {request.model}") from None
    return Answer(Settings(settings=parts.trace_state.update(request.model, request.update)))


def _is_ready(model: ModelMetadata) -> bool:
    """Triton's strict readiness: a version that was unloaded on purpose, or a model without any, does not count."""
    idle = model.reason.partition(":")[0] in ("", "unloaded") or model.reason.startswith("Not loaded: ")
    return model.state == "READY" or (model.state == "UNAVAILABLE" and idle)


def _for_gateways(function: Function[R]) -> Function[R]:
    async def checked(parts: Parts, peer: Peer, request: R) -> Answer:
        if peer.role != GATEWAY:
            raise InferError(Code.INVALID_ARG, "only gateways act for principals")
        return await function(parts, peer, request)

    return checked


ANSWERS: dict[type[Message], Function[Any]] = {
    RegisterFor: _for_gateways(register_for),
    RegisterCudaFor: _for_gateways(register_cuda_for),
    UnregisterFor: _for_gateways(unregister_for),
    ListFor: _for_gateways(list_for),
    UseRegion: _for_gateways(use_region),
    Serving: _for_gateways(serving),
    GetConfig: get_config,
    GetIndex: get_index,
    GetServer: get_server,
    GetMetrics: get_metrics,
    LogSettings: log_settings,
    TraceSettings: trace_settings,
}
