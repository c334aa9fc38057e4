"""An event loop's client at the broker's limit of channels: what it does not use is given back for what it needs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

import clientlib
from clientlib import async_lane
from clientlib.async_client import AsyncClient
from shm.errors import InferError
from tests.fakes.small_broker import MAX_CHANNELS, SmallBroker

ONE = np.ones((1, 2), np.float32)


@pytest.fixture
def broker(small_broker: SmallBroker) -> SmallBroker:
    """A worker for each model: one more than a session has channels."""
    small_broker.workers = {"double": "cpu/a", "spread": "cpu/b", "nonzero": "cpu/c"}
    assert len(small_broker.workers) == MAX_CHANNELS + 1
    return small_broker


@asynccontextmanager
async def connected(broker: SmallBroker) -> AsyncIterator[AsyncClient]:
    client = await clientlib.connect_async(f"ipc://{broker.directory}")
    try:
        async with asyncio.timeout(60):
            yield client
    finally:
        await client.close()


async def double(client: AsyncClient) -> None:
    assert (await client.infer("double", {"x": ONE}))["y"].tolist() == [[2, 2]]


async def nonzero(client: AsyncClient) -> None:
    assert (await client.infer("nonzero", {"x": ONE[0]}))["i"].tolist() == [[0, 1]]


async def spread(client: AsyncClient) -> None:
    assert (await client.infer("spread", {"x": ONE[0]}))["y"].shape == (80_000,)


def workers(client: AsyncClient) -> set[str]:
    assert client.native.link is not None
    return {lane.worker for lane in client.native.link.lanes.all()}


def test_the_one_that_was_not_used_for_the_longest_is_given_back(
    broker: SmallBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_lane, "UNUSED_S", 0.0)

    async def test() -> None:
        async with connected(broker) as client:
            await double(client)
            await spread(client)
            assert broker.closed == []
            await double(client)
            await nonzero(client)
            assert (broker.closed, workers(client)) == ([2], {"cpu/a", "cpu/c"})
            await spread(client)
            assert (broker.closed, workers(client)) == ([2, 1], {"cpu/b", "cpu/c"})
            for ask in (double, nonzero, spread) * 3:
                await ask(client)

    asyncio.run(test())


def test_none_is_given_back_that_was_used_lately(broker: SmallBroker) -> None:
    async def test() -> None:
        async with connected(broker) as client:
            await double(client)
            await spread(client)
            with pytest.raises(InferError, match="too many channels"):
                await nonzero(client)
            await double(client)
            await spread(client)
            assert (broker.closed, workers(client)) == ([], {"cpu/a", "cpu/b"})

    asyncio.run(test())


def test_none_is_given_back_that_is_in_use(broker: SmallBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_lane, "UNUSED_S", 0.0)

    async def test() -> None:
        async with connected(broker) as client:
            await double(client)
            await spread(client)
            broker.hold = True
            asked = [asyncio.create_task(ask(client)) for ask in (double, spread)]
            assert client.native.link is not None
            lanes = client.native.link.lanes.all()
            while not all(lane.channel.outstanding for lane in lanes):  # noqa: ASYNC110 (the tasks make it true)
                await asyncio.sleep(0)
            with pytest.raises(InferError, match="too many channels"):
                await nonzero(client)
            broker.release()
            await asyncio.gather(*asked)
            await nonzero(client)
            assert len(broker.closed) == 1

    asyncio.run(test())


def test_whoever_has_kept_one_is_told_and_may_try_again(broker: SmallBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_lane, "UNUSED_S", 0.0)

    async def test() -> None:
        async with connected(broker) as client:
            region = await client.create_region("r", 64)
            x, y = region.tensor((1, 2), "FP32"), region.tensor((1, 2), "FP32", offset=32)
            plan = await client.prepare("double", {"x": x}, {"y": y})
            await plan.infer()
            bound = plan._bound
            assert bound is not None
            await spread(client)
            await nonzero(client)
            assert plan._bound is None
            with pytest.raises(InferError, match="which nobody used, was given back for another one: try again"):
                bound.lane.submit(None)  # type: ignore[arg-type]
            await plan.infer()

    asyncio.run(test())
