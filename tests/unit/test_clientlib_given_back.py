"""Clients at the broker's limit of channels: what an event loop or ended threads do not use goes for what is needed."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import clientlib
from clientlib import async_lane
from clientlib.async_client import AsyncClient
from clientlib.channels import Lanes
from clientlib.pending import Pending
from shm.errors import Code, InferError
from shm.layout import FINAL
from tests.fakes.small_broker import MAX_CHANNELS, SmallBroker, connect

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


def thread() -> ThreadPoolExecutor:
    """One thread, which ends with it."""
    return ThreadPoolExecutor(1)


def in_thread(client: clientlib.Client, model: str) -> None:
    with thread() as one:
        one.submit(infer, client, model).result(60)


def infer(client: clientlib.Client, model: str) -> None:
    result = client.infer(model, {"x": ONE if model == "double" else ONE[0]}, timeout=60)
    name, value = {"double": ("y", 2), "spread": ("y", 1), "nonzero": ("i", 1)}[model]
    assert result[name].max() == value


def lanes_of(client: clientlib.Client) -> list[str]:
    assert client.native.link is not None
    return sorted(lane.worker for lane in client.native.link.lanes.all())


def test_what_ended_threads_have_left_is_given_back(broker: SmallBroker) -> None:
    with connect(broker) as client:
        in_thread(client, "double")
        in_thread(client, "spread")
        in_thread(client, "double")
        assert broker.calls.count("OpenChannel") == 2, "the next thread has it"
        in_thread(client, "nonzero")
        assert (broker.closed, lanes_of(client)) == ([2], ["cpu/a", "cpu/c"]), "that of the thread that ended first"
        in_thread(client, "spread")
        assert (broker.closed, lanes_of(client)) == ([2, 1], ["cpu/b", "cpu/c"])
        for model in ("double", "nonzero", "spread") * 5:
            in_thread(client, model)


def test_what_a_living_thread_has_is_not_given_back(broker: SmallBroker) -> None:
    with connect(broker) as client, thread() as other:
        other.submit(infer, client, "double").result(60)
        infer(client, "spread")
        with pytest.raises(InferError, match="too many channels"):
            infer(client, "nonzero")
        assert broker.closed == []
        other.shutdown()
        infer(client, "nonzero")
        assert broker.closed == [1]
        infer(client, "spread")


def test_requests_that_ended_threads_have_left_keep_their_channel(broker: SmallBroker) -> None:
    broker.workers["twice"] = "cpu/b"
    with connect(broker) as client:
        region = client.create_region("r", 64)
        plan = client.prepare("double", {"x": region.tensor((1, 2), "FP32")})
        elsewhere = client.prepare("twice", {"x": region.tensor((1, 4), "FP32", offset=32)})
        broker.hold = True
        with thread() as other:
            pending = other.submit(plan.submit).result(60)
        assert not pending.done()
        with thread() as another:
            left = another.submit(elsewhere.submit).result(60)
        with pytest.raises(InferError, match="too many channels"):
            infer(client, "nonzero")
        assert broker.closed == []
        broker.release()
        assert pending.result(60)["y"].shape == (1, 2)
        infer(client, "nonzero")
        assert broker.closed == [1]
        assert left.result(60)["y"].shape == (1, 4), "its channel was kept"
        assert pending.done()
        assert not pending.cancel()


def test_one_that_was_left_meanwhile_is_taken_and_not_given_back(broker: SmallBroker) -> None:
    with connect(broker) as client, thread() as owner:
        in_thread(client, "spread")
        owner.submit(infer, client, "double").result(60)

        def refuse(asked: Any) -> Any:
            owner.shutdown()
            raise InferError(Code.UNAVAILABLE, "too many channels: there are as many as there can be")

        broker.answers["OpenChannel"] = refuse
        infer(client, "double")
        assert (broker.closed, lanes_of(client)) == ([], ["cpu/a", "cpu/b"])


def test_what_cannot_be_given_back_can_be_shared_all_the_time() -> None:
    class Busy:
        unread = False
        role = threading.Lock()

        @property
        def outstanding(self) -> int:
            assert len(lanes.all()) == 1
            return 1

        def reap(self) -> None:
            pass

        def close(self) -> None:
            pass

    lanes, channel, nobody = Lanes(1), Busy(), None
    lane = lanes.add("cpu/a", channel, nobody)  # type: ignore[arg-type]
    lanes.give_back(lane)
    assert lanes.give_up() is None
    assert lanes.mine("cpu/a") is lane


def test_a_channel_that_is_shared_lives_as_long_as_those_who_share_it(broker: SmallBroker) -> None:
    with connect(broker) as client, thread() as sharing, thread() as other:
        with thread() as owner:
            plan = client.prepare("double", {"x": client.create_region("r", 64).tensor((1, 2), "FP32")})
            owner.submit(plan.infer).result(60)
            other.submit(infer, client, "spread").result(60)
            sharing.submit(plan.infer).result(60)
            assert broker.calls.count("OpenChannel") == 2, "there is none for a third thread"
        with pytest.raises(InferError, match="too many channels"):
            infer(client, "nonzero")
        sharing.submit(plan.infer).result(60)
        assert broker.closed == []
        sharing.shutdown()
        infer(client, "nonzero")
        assert broker.closed == [1]


def test_an_answer_that_does_not_come_costs_no_channel(broker: SmallBroker) -> None:
    """Only a refusal says that there are too many."""
    with connect(broker) as client:
        in_thread(client, "double")
        broker.answers["OpenChannel"] = lambda asked: None
        with pytest.raises(InferError, match="no answer"):
            client.infer("spread", {"x": ONE[0]}, timeout=0.2)
        assert (broker.closed, lanes_of(client)) == ([], ["cpu/a"])


def test_a_worker_that_cannot_have_a_channel_costs_those_to_others_nothing(broker: SmallBroker) -> None:
    """It is refused for the worker's sake: no room helps, and each try may take as long as the first."""
    with connect(broker) as client:
        in_thread(client, "double")
        in_thread(client, "spread")

        def refuse(asked: Any) -> Any:
            raise InferError(Code.UNAVAILABLE, "the worker process 7 did not serve a channel within 30 s")

        broker.answers["OpenChannel"] = refuse
        with pytest.raises(InferError, match="process 7"):
            infer(client, "nonzero")
        assert (broker.closed, lanes_of(client)) == ([], ["cpu/a", "cpu/b"])
        assert broker.calls.count("OpenChannel") == 3
        text = "no memory quota for a channel of 64 slots: asked 9 bytes, used 1 (by uid 0: 1), limit 5"
        refusals = [InferError(Code.UNAVAILABLE, text)]

        def lack(asked: Any) -> Any:
            del broker.answers["OpenChannel"]
            raise refusals.pop()

        broker.answers["OpenChannel"] = lack
        infer(client, "nonzero")
        assert broker.closed == [1], "what is lacking may be had from another channel"


def test_what_has_ended_when_its_channel_is_given_back_is_not_lost() -> None:
    """Another thread settles a request and closes its channel between two looks of the one that waits for it."""

    class Closing:
        channel = SimpleNamespace(role=threading.Lock())
        waiters: tuple[()] = ()

        @property
        def error(self) -> InferError:
            pending.entry = (1, 1, FINAL, 0, 0, 0, 0, 0)
            return InferError(Code.UNAVAILABLE, "the channel was given back: try again")

        def look(self) -> None:
            pass

    pending: Any = object.__new__(Pending)
    pending.lane = Closing()
    pending.entry = pending._wakes = None
    assert pending.done()
    pending.entry = None
    assert pending.wait(math.inf)


def test_many_threads_that_come_and_go(broker: SmallBroker) -> None:
    """No more of them at once than there are channels."""
    with connect(broker) as client:
        for at in range(30):
            with thread() as one, thread() as other:
                asked = [
                    each.submit(infer, client, ("double", "spread", "nonzero")[(at + more) % 3])
                    for each, more in ((one, at // 3), (other, at // 9))
                ]
                for each in asked:
                    each.result(60)
        assert len(lanes_of(client)) <= MAX_CHANNELS
        assert len(broker.closed) >= 10
