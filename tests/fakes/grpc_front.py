"""The gRPC front end over a `FakeService`, in a thread with an event loop of its own, for unmodified clients."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

from broker.gateway.grpc.server import GrpcServer
from broker.gateway.kserve import Caller
from broker.gateway.options import GatewayOptions
from tests.fakes.gateways import free_ports
from tests.fakes.kserve import FakeService


class Front:
    """`service` is looked at and changed from the tests' thread; `call` runs something in the server's loop."""

    def __init__(self, directory: Path, service: FakeService, **options: Any) -> None:
        self.service = service
        self.peers: set[str] = set()
        self.port = free_ports(1)[0]
        options = {"grpc_port": self.port, "directory": str(directory), "broker_uid": os.getuid(), **options}
        self.options = GatewayOptions(**options)
        self.server = GrpcServer(service, self.options, self._identify)
        self.url = f"127.0.0.1:{self.port}"
        self.unix = f"unix:{directory}/grpc.sock"
        self.lines: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gRPC front end")
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, Any], limit_s: float = 60) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(limit_s)

    def start(self) -> Front:
        self.lines = self.call(self.server.start())
        return self

    def hold(self) -> None:
        """From now on `infer` waits until `release`."""

        async def hold() -> None:
            self.service.gate = asyncio.Event()

        self.call(hold())

    def release(self) -> None:
        async def release() -> None:
            assert self.service.gate is not None
            self.service.gate.set()

        self.call(release())

    def wait(self, condition: Callable[[], bool], limit_s: float = 60.0) -> None:
        """Until `condition`, which the server's loop changes, holds there."""

        async def wait() -> None:
            async with asyncio.timeout(limit_s):
                while not condition():  # noqa: ASYNC110
                    await asyncio.sleep(0.002)

        self.call(wait(), limit_s + 10)

    def at_rest(self, tasks: int) -> None:
        """Until there are no more tasks than `tasks`, and no byte of any request is left."""
        self.wait(lambda: len(asyncio.all_tasks()) - 1 <= tasks and self.server.budget.used == 0)

    def tasks(self) -> int:
        """How many tasks the server's loop has; at rest always the same."""

        async def tasks() -> int:
            return len(asyncio.all_tasks())

        return int(self.call(tasks()))

    def stop(self, grace_s: float = 0) -> None:
        try:
            self.call(self.server.stop(grace_s))
        finally:
            self.call(_settle())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _identify(self, peer: str, metadata: Mapping[str, str]) -> Caller:
        self.peers.add(peer)
        return Caller("grpc", headers=metadata)


@contextlib.contextmanager
def front(directory: Path, service: FakeService | None = None, **options: Any) -> Iterator[Front]:
    """Afterwards nothing is counted as held any more."""
    running = Front(directory, service or FakeService(), **options)
    try:
        yield running.start()
    finally:
        running.stop()
    assert running.server.budget.used == 0


async def _settle() -> None:
    """Let what was cancelled end."""
    tasks: set[Awaitable[Any]] = {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}
    if tasks:
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
