"""Endpoints of the shared-memory extensions. The order of the checks is Triton's.

Each takes the request and the region's name, "" for none; raises InferError. What a caller may not touch is
`broker.gateway.regions`'s to refuse.
"""

from __future__ import annotations

from typing import Any, Final, final

from broker.gateway.http.errors import SHM_DISABLED, invalid
from broker.gateway.http.json import MISSING, as_string, as_uint, find, member, shown
from broker.gateway.http.message import Reply, Request, json_reply
from broker.gateway.http.models import decode_base64
from broker.gateway.kserve import Service
from broker.gateway.placed import Within, refused
from shm.errors import Code, InferError
from shm.message_values import RegionRecord

HANDLE_SIZE: Final = 64  # bytes of a cudaIpcMemHandle_t


@final
class Regions:
    """The endpoints, on one service. `allowed`: --allow-client-shm."""

    def __init__(self, service: Service, allowed: bool) -> None:
        self._service = service
        self._allowed = allowed

    async def system_status(self, request: Request, name: str) -> Reply:
        """GET /v2/systemsharedmemory[/region/R]/status."""
        records = await self._service.regions(request.caller, "system", name)
        return json_reply([_system(record) for record in records])

    async def cuda_status(self, request: Request, name: str) -> Reply:
        """GET /v2/cudasharedmemory[/region/R]/status."""
        return json_reply([_cuda(record) for record in await self._service.regions(request.caller, "cuda", name)])

    async def system_register(self, request: Request, name: str) -> Reply:
        """POST /v2/systemsharedmemory/region/R/register."""
        self._check_register(name, "system")
        document = await request.json()
        key = as_string(_field(document, "key"), place="key")
        offset = find(document, "offset")
        offset = 0 if offset is MISSING else as_uint(offset, place="offset")
        byte_size = as_uint(_field(document, "byte_size"), place="byte_size")
        await self._service.register_system(request.caller, name, key, byte_size, offset)
        return Reply()

    async def cuda_register(self, request: Request, name: str) -> Reply:
        """POST /v2/cudasharedmemory/region/R/register."""
        self._check_register(name, "cuda")
        document = await request.json()
        raw_handle = _field(document, "raw_handle")
        with Within("raw_handle"):
            text = as_string(member(raw_handle, "b64"), place="b64")
        byte_size = as_uint(member(document, "byte_size"), place="byte_size")
        device = as_uint(member(document, "device_id"), place="device_id")
        handle = decode_base64(text, "raw_handle")
        if len(handle) != HANDLE_SIZE:
            problem = f"expected {HANDLE_SIZE} bytes in base64, got {len(handle)}"
            raise refused("'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t", "raw_handle.b64", problem)
        await self._service.register_cuda(request.caller, name, handle, device, byte_size)
        return Reply()

    async def system_unregister(self, request: Request, name: str) -> Reply:
        """POST /v2/systemsharedmemory[/region/R]/unregister; without a name: all of the caller's."""
        self._check_allowed()
        await self._service.unregister(request.caller, "system", name)
        return Reply()

    async def cuda_unregister(self, request: Request, name: str) -> Reply:
        """POST /v2/cudasharedmemory[/region/R]/unregister."""
        self._check_allowed()
        await self._service.unregister(request.caller, "cuda", name)
        return Reply()

    def _check_register(self, name: str, kind: str) -> None:
        self._check_allowed()
        if not name:
            raise invalid(f"'region name' is necessary to register {kind} shared memory region")

    def _check_allowed(self) -> None:
        if not self._allowed:
            raise InferError(Code.UNSUPPORTED, SHM_DISABLED)


def _field(document: Any, name: str) -> Any:
    value = find(document, name)
    if value is MISSING:
        text = f"Shared memory register request has no '{name}' field"
        if type(document) is not dict:
            raise refused(text, "", f"expected an object, got {shown(document)}")
        raise refused(text, name, "it is missing")
    return value


def _system(record: RegionRecord) -> dict[str, Any]:
    return {"name": record.name, "key": record.key, "offset": record.offset, "byte_size": record.byte_size}


def _cuda(record: RegionRecord) -> dict[str, Any]:
    device = int(record.key) if record.key.isdecimal() else 0
    return {"name": record.name, "device_id": device, "byte_size": record.byte_size}
