"""The unary RPCs of `inference.GRPCInferenceService` other than ModelInfer: one function each, and the table of them.

Used by `broker.gateway.grpc.server`, which parses requests, asks the access policy and turns errors into statuses.
Every function takes (service, request message, caller) and gives the response message.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf import json_format
from tritonclient.grpc import service_pb2

from broker.gateway.grpc.settings import load_parameters, log_update, trace_update, unload_dependents
from broker.gateway.kserve import Caller, Category, Service
from clientlib import details
from shm.errors import Code, InferError
from shm.message_values import TensorMetadata


@dataclass(frozen=True, slots=True)
class Call:
    """An RPC: what is restricted by `category`, the class of its request, and what answers it."""

    category: Category
    request: Any
    answer: Callable[[Service, Any, Caller], Awaitable[Any]]


async def server_live(service: Service, request: Any, caller: Caller) -> Any:
    """Is the broker up?"""
    return service_pb2.ServerLiveResponse(live=await service.live())


async def server_ready(service: Service, request: Any, caller: Caller) -> Any:
    """As --strict-readiness says."""
    return service_pb2.ServerReadyResponse(ready=await service.ready())


async def model_ready(service: Service, request: Any, caller: Caller) -> Any:
    """Whether one version, or the latest, is READY. A model that is not known is not; HTTP says so in words."""
    try:
        ready = await service.model_ready(request.name, request.version)
    except InferError as error:
        if not error.message.startswith("Request for unknown model: "):
            raise
        ready = False
    return service_pb2.ModelReadyResponse(ready=ready)


async def server_metadata(service: Service, request: Any, caller: Caller) -> Any:
    """Name, version and extensions."""
    return service_pb2.ServerMetadataResponse(
        name=service.server_name, version=service.server_version, extensions=service.extensions
    )


async def model_metadata(service: Service, request: Any, caller: Caller) -> Any:
    """Inputs and outputs; shapes with the batch dimension."""
    found = await service.metadata(request.name, request.version)
    response = service_pb2.ModelMetadataResponse
    return response(
        name=found.name,
        versions=found.versions,
        platform=found.platform,
        inputs=_tensors(found.inputs),
        outputs=_tensors(found.outputs),
    )


async def model_config(service: Service, request: Any, caller: Caller) -> Any:
    """The completed configuration. The service has it as JSON, in which 64-bit numbers may be numbers or strings."""
    config = await service.config(request.name, request.version)
    if details.asked(caller.headers):
        details.add_to(config, await service.metadata(request.name, request.version))
    return _from_json({"config": config}, service_pb2.ModelConfigResponse())


async def model_statistics(service: Service, request: Any, caller: Caller) -> Any:
    """Of one model, or of all of them."""
    found = await service.statistics(request.name, request.version)
    return _from_json({"model_stats": found}, service_pb2.ModelStatisticsResponse())


async def repository_index(service: Service, request: Any, caller: Caller) -> Any:
    """All models of the repository, or those that are READY."""
    _refuse_repository(request)
    models = [
        service_pb2.RepositoryIndexResponse.ModelIndex(
            name=entry.name, version=entry.version, state=entry.state, reason=entry.reason
        )
        for entry in await service.index(request.ready)
    ]
    return service_pb2.RepositoryIndexResponse(models=models)


async def repository_load(service: Service, request: Any, caller: Caller) -> Any:
    """Answered when the model is READY."""
    _refuse_repository(request)
    await service.load(request.model_name, load_parameters(request.parameters))
    return service_pb2.RepositoryModelLoadResponse()


async def repository_unload(service: Service, request: Any, caller: Caller) -> Any:
    """Answered at once; draining goes on."""
    _refuse_repository(request)
    await service.unload(request.model_name, unload_dependents(request.parameters))
    return service_pb2.RepositoryModelUnloadResponse()


async def system_status(service: Service, request: Any, caller: Caller) -> Any:
    """The caller's system regions."""
    response = service_pb2.SystemSharedMemoryStatusResponse
    status = response.RegionStatus
    found = await service.regions(caller, "system", request.name)
    return response(
        regions={r.name: status(name=r.name, key=r.key, offset=r.offset, byte_size=r.byte_size) for r in found}
    )


async def system_register(service: Service, request: Any, caller: Caller) -> Any:
    """A POSIX region, by its key."""
    await service.register_system(caller, request.name, request.key, request.byte_size, request.offset)
    return service_pb2.SystemSharedMemoryRegisterResponse()


async def system_unregister(service: Service, request: Any, caller: Caller) -> Any:
    """No name: all of the caller's."""
    await service.unregister(caller, "system", request.name)
    return service_pb2.SystemSharedMemoryUnregisterResponse()


async def cuda_status(service: Service, request: Any, caller: Caller) -> Any:
    """The caller's CUDA regions. `key` of such a region is its device's number."""
    response = service_pb2.CudaSharedMemoryStatusResponse
    status = response.RegionStatus
    found = await service.regions(caller, "cuda", request.name)
    return response(
        regions={
            r.name: status(name=r.name, device_id=int(r.key) if r.key.isdecimal() else 0, byte_size=r.byte_size)
            for r in found
        }
    )


async def cuda_register(service: Service, request: Any, caller: Caller) -> Any:
    """A cudaIpcMemHandle_t, as bytes of whatever length came: the service checks it."""
    await service.register_cuda(caller, request.name, request.raw_handle, request.device_id, request.byte_size)
    return service_pb2.CudaSharedMemoryRegisterResponse()


async def cuda_unregister(service: Service, request: Any, caller: Caller) -> Any:
    """No name: all of the caller's."""
    await service.unregister(caller, "cuda", request.name)
    return service_pb2.CudaSharedMemoryUnregisterResponse()


async def trace_setting(service: Service, request: Any, caller: Caller) -> Any:
    """Of one model, or the global ones; after the change, if any."""
    if request.model_name and request.settings:
        await service.trace_settings(
            request.model_name, {}
        )  # is it there? As in Triton, before the values are looked at
    settings = await service.trace_settings(request.model_name, trace_update(request.settings))
    response = service_pb2.TraceSettingResponse()
    for name, value in settings.items():
        response.settings[name].value.extend([value] if isinstance(value, str) else value)
    return response


async def log_settings(service: Service, request: Any, caller: Caller) -> Any:
    """After the change, if any."""
    settings = await service.log_settings(log_update(request.settings))
    response = service_pb2.LogSettingsResponse()
    for name, value in settings.items():
        if isinstance(value, bool):
            response.settings[name].bool_param = value
        elif isinstance(value, int):
            response.settings[name].uint32_param = value
        else:
            response.settings[name].string_param = value
    return response


def _tensors(tensors: Iterable[TensorMetadata]) -> list[Any]:
    message = service_pb2.ModelMetadataResponse.TensorMetadata
    return [message(name=each.name, datatype=each.datatype, shape=each.shape) for each in tensors]


def _from_json(value: dict[str, Any], message: Any) -> Any:
    try:
        return json_format.ParseDict(value, message, ignore_unknown_fields=True)
    except json_format.ParseError as error:
        raise InferError(Code.INTERNAL, str(error)) from None


def _refuse_repository(request: Any) -> None:
    if request.repository_name:
        raise InferError(Code.UNSUPPORTED, "'repository_name' specification is not supported")


CALLS: Final[dict[str, Call]] = {
    "ServerLive": Call("health", service_pb2.ServerLiveRequest, server_live),
    "ServerReady": Call("health", service_pb2.ServerReadyRequest, server_ready),
    "ModelReady": Call("health", service_pb2.ModelReadyRequest, model_ready),
    "ServerMetadata": Call("metadata", service_pb2.ServerMetadataRequest, server_metadata),
    "ModelMetadata": Call("metadata", service_pb2.ModelMetadataRequest, model_metadata),
    "ModelConfig": Call("model-config", service_pb2.ModelConfigRequest, model_config),
    "ModelStatistics": Call("statistics", service_pb2.ModelStatisticsRequest, model_statistics),
    "RepositoryIndex": Call("model-repository", service_pb2.RepositoryIndexRequest, repository_index),
    "RepositoryModelLoad": Call("model-repository", service_pb2.RepositoryModelLoadRequest, repository_load),
    "RepositoryModelUnload": Call("model-repository", service_pb2.RepositoryModelUnloadRequest, repository_unload),
    "SystemSharedMemoryStatus": Call("shared-memory", service_pb2.SystemSharedMemoryStatusRequest, system_status),
    "SystemSharedMemoryRegister": Call("shared-memory", service_pb2.SystemSharedMemoryRegisterRequest, system_register),
    "SystemSharedMemoryUnregister": Call(
        "shared-memory", service_pb2.SystemSharedMemoryUnregisterRequest, system_unregister
    ),
    "CudaSharedMemoryStatus": Call("shared-memory", service_pb2.CudaSharedMemoryStatusRequest, cuda_status),
    "CudaSharedMemoryRegister": Call("shared-memory", service_pb2.CudaSharedMemoryRegisterRequest, cuda_register),
    "CudaSharedMemoryUnregister": Call("shared-memory", service_pb2.CudaSharedMemoryUnregisterRequest, cuda_unregister),
    "TraceSetting": Call("trace", service_pb2.TraceSettingRequest, trace_setting),
    "LogSettings": Call("logging", service_pb2.LogSettingsRequest, log_settings),
}
