"""Loads and unloads through a gateway: they take long, and nobody else waits for them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from broker.gateway.options import GatewayOptions
from broker.gateway.service import LOADS, GatewayService
from shm.errors import Code, InferError
from shm.gateway_messages import GetServer, ServerState
from shm.messages import Done, LoadModel, Message


class Broker:
    """The client of a broker whose loads end when the test says so."""

    def __init__(self) -> None:
        self.loading: list[asyncio.Future[None]] = []

    async def call(self, message: Message, **_: object) -> tuple[Any, list[int]]:
        if isinstance(message, GetServer):
            return ServerState(live=True, ready=True), []
        assert isinstance(message, LoadModel)
        self.loading.append(asyncio.get_running_loop().create_future())
        await self.loading[-1]
        return Done(), []


class Anybody:
    def check(self, category: str, caller: object) -> None:
        """May."""


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_loads_that_nobody_waits_for_count_until_they_end() -> None:
    async def main() -> None:
        broker = Broker()
        service = GatewayService(broker, GatewayOptions(), Anybody())  # type: ignore[arg-type]
        tasks = [asyncio.create_task(service.load("m", {})) for _ in range(LOADS)]
        await turns()
        assert len(broker.loading) == LOADS
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        patient, left = asyncio.create_task(service.load("m", {})), asyncio.create_task(service.load("m", {}))
        await turns()
        assert len(broker.loading) == LOADS
        assert await service.live()
        left.cancel()
        broker.loading[0].set_exception(InferError(Code.INTERNAL, "nobody hears of it"))
        await turns()
        assert len(broker.loading) == LOADS + 1
        broker.loading[-1].set_exception(InferError(Code.INTERNAL, "failed to load 'm'"))
        with pytest.raises(InferError, match="failed to load 'm'"):
            await patient
        for each in broker.loading[1:-1]:
            each.set_result(None)
        await turns()
        assert len(broker.loading) == LOADS + 1

    asyncio.run(main())
