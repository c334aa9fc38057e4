"""What each ZeroMQ message asks of the service, and what answers it. One function per message, no I/O of its own.

Used by `zmq.server`, which answers what concerns the session itself: hello, heartbeat, goodbye, cancel.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, final

from broker.gateway.kserve import Category, InferRequest, Service
from broker.gateway.zmq.clients import Client
from broker.gateway.zmq.codec import check_prepare, infer_request, result, run_request
from shm import zmq_messages as words
from shm.errors import Code, InferError


@final
class Verbs:
    """Of one service. Every method raises InferError."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._table: Final[dict[type, tuple[Category, Callable[[Client, Any], Awaitable[words.Reply]]]]] = {
            words.Infer: ("inference", self._infer),
            words.Run: ("inference", self._run),
            words.Prepare: ("inference", self._prepare),
            words.Release: ("inference", self._release),
            words.Server: ("health", self._server),
            words.Models: ("model-repository", self._models),
            words.Metadata: ("metadata", self._metadata),
            words.Config: ("model-config", self._config),
            words.Statistics: ("statistics", self._statistics),
            words.Load: ("model-repository", self._load),
            words.Unload: ("model-repository", self._unload),
            words.Register: ("shared-memory", self._register),
            words.RegisterCuda: ("shared-memory", self._register_cuda),
            words.Unregister: ("shared-memory", self._unregister),
            words.Regions: ("shared-memory", self._regions),
        }

    async def answer(self, client: Client, message: words.Request) -> words.Reply:
        """The reply to `message`."""
        category, verb = self._table[type(message)]
        self._service.check(category, client.caller)
        return await verb(client, message)

    async def forget(self, client: Client) -> None:
        """The client is gone, and so is everything it registered."""
        await self._service.unregister(client.caller, "", "")

    # --- inference -------------------------------------------------------------------------------------------------

    async def _infer(self, client: Client, message: words.Infer) -> words.Reply:
        return await self._run_one(client, message.id, infer_request(message))

    async def _run(self, client: Client, message: words.Run) -> words.Reply:
        prepared = client.prepared.get(message.number)
        if prepared is None:
            raise InferError(Code.NOT_FOUND, f"nothing is prepared as {message.number}: prepare it (again)")
        return await self._run_one(client, message.id, run_request(prepared, message))

    async def _run_one(self, client: Client, request: int, inference: InferRequest) -> words.Reply:
        response = await self._service.infer(inference, client.caller)
        self._service.copied("response", response.byte_size)  # by msgpack
        return result(request, response)

    async def _prepare(self, client: Client, message: words.Prepare) -> words.Reply:
        check_prepare(message)
        await self._service.metadata(message.model, message.version)  # is there such a model?
        return words.Prepared(id=message.id, number=client.keep(message))

    async def _release(self, client: Client, message: words.Release) -> words.Reply:
        client.prepared.pop(message.number, None)
        return words.Done(id=message.id)

    # --- what there is ---------------------------------------------------------------------------------------------

    async def _server(self, client: Client, message: words.Server) -> words.Reply:
        service = self._service
        return words.ServerState(
            id=message.id,
            name=service.server_name,
            version=service.server_version,
            extensions=service.extensions,
            live=await service.live(),
            ready=await service.ready(),
        )

    async def _models(self, client: Client, message: words.Models) -> words.Reply:
        return words.Index(id=message.id, models=tuple(await self._service.index(message.ready)))

    async def _metadata(self, client: Client, message: words.Metadata) -> words.Reply:
        metadata = await self._service.metadata(message.model, message.version)
        return words.MetadataIs(id=message.id, metadata=metadata)

    async def _config(self, client: Client, message: words.Config) -> words.Reply:
        return words.ConfigIs(id=message.id, config=await self._service.config(message.model, message.version))

    async def _statistics(self, client: Client, message: words.Statistics) -> words.Reply:
        found = await self._service.statistics(message.model, message.version)
        return words.StatisticsAre(id=message.id, model_stats=found)

    async def _load(self, client: Client, message: words.Load) -> words.Reply:
        parameters: dict[str, str | bytes] = {f"file:{path}": data for path, data in message.files.items()}
        if message.config:
            parameters["config"] = message.config
        await self._service.load(message.model, parameters)
        return words.Done(id=message.id)

    async def _unload(self, client: Client, message: words.Unload) -> words.Reply:
        await self._service.unload(message.model, message.unload_dependents)
        return words.Done(id=message.id)

    # --- memory ----------------------------------------------------------------------------------------------------

    async def _register(self, client: Client, message: words.Register) -> words.Reply:
        await self._service.register_system(client.caller, message.name, message.key, message.byte_size, message.offset)
        return words.Done(id=message.id)

    async def _register_cuda(self, client: Client, message: words.RegisterCuda) -> words.Reply:
        await self._service.register_cuda(
            client.caller, message.name, message.handle, message.device, message.byte_size
        )
        return words.Done(id=message.id)

    async def _unregister(self, client: Client, message: words.Unregister) -> words.Reply:
        for kind in ("system", "cuda"):
            await self._service.unregister(client.caller, kind, message.name)
        return words.Done(id=message.id)

    async def _regions(self, client: Client, message: words.Regions) -> words.Reply:
        records = [
            record
            for kind in ("system", "cuda")
            for record in await self._service.regions(client.caller, kind, "")
            if record.kind == kind and message.name in ("", record.name)
        ]
        if message.name and not records:
            raise InferError(Code.NOT_FOUND, f"Unable to find shared memory region: '{message.name}'")
        return words.RegionsAre(
            id=message.id,
            regions=tuple(
                words.RegionIs(name=r.name, kind=r.kind, key=r.key, offset=r.offset, byte_size=r.byte_size)
                for r in sorted(records, key=lambda record: record.name)
            ),
        )
