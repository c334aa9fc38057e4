"""The gRPC and HTTP front ends over a `FakeService`, in a thread with an event loop of its own, for remote clients."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from broker.gateway.grpc.server import GrpcServer
from broker.gateway.http.server import HttpServer
from broker.gateway.kserve import Caller, Transport
from broker.gateway.options import GatewayOptions
from tests.fakes.gateways import free_ports
from tests.fakes.kserve import FakeService


class Fronts:
    """`service` is looked at and changed from the tests' thread; `call` runs something in the servers' loop."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.service = FakeService()
        self._directory = directory
        self._grpc_port, self._http_port = free_ports(2)
        self._options = options
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="front ends")
        self._thread.start()
        self.start()

    def url(self, scheme: str) -> str:
        return f"{scheme}://127.0.0.1:{self._http_port if scheme == 'http' else self._grpc_port}"

    def call(self, coroutine: Coroutine[Any, Any, Any], limit_s: float = 60) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(limit_s)

    def start(self) -> None:
        def identify(transport: Transport) -> Any:
            return lambda peer, headers: Caller(transport)

        async def start() -> None:
            options = GatewayOptions(
                directory=str(self._directory),
                broker_uid=os.getuid(),
                grpc_port=self._grpc_port,
                http_port=self._http_port,
                **self._options,
            )
            self._servers = [
                GrpcServer(self.service, options, identify("grpc")),
                HttpServer(self.service, options, identify("http")),
            ]
            for server in self._servers:
                await server.start()

        self.call(start())

    def stop(self) -> None:
        """As if the gateway went away: connections end, nobody listens."""

        async def stop() -> None:
            for server in self._servers:
                await server.stop(0)

        self.call(stop())
        self._servers = []

    def hold(self) -> None:
        """From now on `infer` waits until `release`."""

        async def hold() -> None:
            self.service.gate = asyncio.Event()

        self.call(hold())

    def release(self) -> None:
        async def release() -> None:
            if self.service.gate is not None:
                self.service.gate.set()
                self.service.gate = None

        self.call(release())

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        assert not self._thread.is_alive()
        self._loop.close()
