"""An `AsyncClient` on a session that somebody else connected, and what gateways need of it: raw calls, raw bytes."""

from __future__ import annotations

import asyncio
import socket
import struct

import numpy as np
import pytest

from clientlib.async_client import AsyncClient
from clientlib.recipe import ArrayInput, Budget, Recipe
from clientlib.region import NamedRegion
from shm import messages, sockets
from shm.errors import InferError
from shm.gateway_messages import Exiting
from shm.messages import Goodbye, RegionInfo
from shm.run_directory import SOCKET
from tests.fakes.small_broker import SmallBroker

BUDGET = Budget(places=8, byte_size=1 << 20)


def adopted(small_broker: SmallBroker, test, **options):
    """Run `test(client)` with a client on a socket that was connected by hand."""

    async def main():
        sock = sockets.seqpacket()
        sock.connect(str(small_broker.directory / SOCKET))
        client = await AsyncClient.adopt(sock, **options)
        try:
            async with asyncio.timeout(60):
                await test(client)
        finally:
            await client.close()

    asyncio.run(main())


def double(raw=True, **outputs):
    return Recipe("double", "", {"x": ArrayInput("FP32", (1, 4), 16)}, outputs or None, 1, 1, BUDGET, raw=raw)


def test_its_verbs_are_those_of_any_client(small_broker):
    async def test(client):
        assert "double" in await client.models()
        assert (await client.infer("double", {"x": np.ones((1, 2), np.float32)}))["y"].tolist() == [[2, 2]]

    adopted(small_broker, test)


def test_raw_calls(small_broker):
    async def test(client):
        reply, fds = await client.call(messages.GetModel(model="double"))
        assert (reply.models[0].name, fds) == ("double", [])
        with pytest.raises(InferError, match="unknown model: 'nobody'"):
            await client.call(messages.GetModel(model="nobody"))
        reply, fds = await client.call(messages.OpenRegion(name="r", token="t"), expects=1)
        assert isinstance(reply, RegionInfo)
        assert len(fds) == 1
        sockets.close_all(fds)

    adopted(small_broker, test)


def test_notices_are_passed_on_and_the_end_is_told(small_broker):
    async def test(client):
        session = small_broker._sessions[0]
        sockets.send(session.sock, messages.encode(Exiting()), [])
        sockets.send(session.sock, messages.encode(Goodbye(reason="shutting down")), [])
        assert not client.lost.is_set()
        await asyncio.to_thread(small_broker.stop)
        await client.lost.wait()
        assert [type(notice).__name__ for notice in heard] == ["Exiting", "Goodbye"]
        with pytest.raises(InferError, match="closed"):  # and it does not connect again
            await client.models()

    heard = []
    adopted(small_broker, test, on_notice=heard.append)
    small_broker.start()  # the fixture stops it


def test_an_adopted_socket_that_is_nobodys(small_broker):
    async def main():
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.close()
        with pytest.raises(InferError, match="the other end of its socket"):
            await AsyncClient.adopt(ours)
        assert ours.fileno() == -1

    asyncio.run(main())


def test_raw_results_are_bytes_and_shapes(small_broker):
    async def test(client):
        plan = await client.prepare_recipe(double())
        value = np.frombuffer(np.arange(4, dtype=np.float32).tobytes(), np.uint8)
        results = [await plan.infer_arrays([value], 0, 0) for _ in range(20)]  # more than there are places
        for result in results:
            assert result["y"].dtype == np.uint8
            assert struct.unpack("<4f", result["y"]) == (0, 2, 4, 6)
            assert result.shapes == {"y": (1, 4)}
        assert results[0].copied_bytes == 16
        assert results[-1].copied_bytes == 32, "the last ones' places had to go on serving"

    adopted(small_broker, test)


def test_raw_strings_are_not_decoded(small_broker):
    async def test(client):
        data = b"".join(struct.pack("<I", len(text)) + text for text in (b"\xff\xfe", b"", b"abc"))
        recipe = Recipe("echo", "", {"x": ArrayInput("BYTES", (3,), len(data))}, None, 1, 1, BUDGET, raw=True)
        plan = await client.prepare_recipe(recipe)
        result = await plan.infer_arrays([np.frombuffer(data, np.uint8)], 0, 0)
        assert result["y"].tobytes() == data
        assert result.shapes["y"] == (3,)

    adopted(small_broker, test)


def test_raw_results_of_open_shape_grow(small_broker):
    async def test(client):
        recipe = Recipe("spread", "", {"x": ArrayInput("FP32", (2,), 8)}, None, 1, 1, BUDGET, raw=True)
        plan = await client.prepare_recipe(recipe)
        result = await plan.infer_arrays([np.frombuffer(struct.pack("<2f", 1, 2), np.uint8)], 0, 0)
        assert result.shapes == {"y": (80_000,)}
        assert result["y"].nbytes == 320_000

    adopted(small_broker, test)


def test_a_named_region_is_never_touched(small_broker):
    async def test(client):
        info, fds = await client.call(messages.OpenRegion(name="theirs", token="t"), expects=1)
        sockets.close_all(fds)
        region = client.name_region(info, (1, 2))
        assert isinstance(region, NamedRegion)
        with pytest.raises(InferError, match="not mapped here"):
            region.array((4,), "FP32")
        plan = await client.prepare_recipe(double(y=region.tensor((1, 4), "FP32")))
        result = await plan.infer_arrays([np.zeros(16, np.uint8)], 0, 0)
        assert (list(result), result.shapes) == ([], {"y": (1, 4)})
        client.forget_region(region)
        with pytest.raises(InferError, match="Unable to find shared memory region: 'theirs'"):
            await client.prepare_recipe(double(y=region.tensor((1, 4), "FP32")))

    adopted(small_broker, test)


def test_plans_that_are_used_first_at_the_same_time_share_one_channel(small_broker):
    async def test(client):
        plans = [await client.prepare_recipe(double()) for _ in range(100)]
        value = np.zeros(16, np.uint8)
        await asyncio.gather(*(plan.infer_arrays([value], 0, 0) for plan in plans))
        assert small_broker.calls.count("OpenChannel") == 1

    adopted(small_broker, test)


def test_places_are_free_again_whoever_keeps_the_errors(small_broker):
    async def test(client):
        recipe = double()
        recipe.budget = Budget(places=2, byte_size=0)
        plan = await client.prepare_recipe(recipe)
        value = np.zeros(16, np.uint8)
        kept = []
        for _ in range(3):
            small_broker.hold = True
            tasks = [asyncio.create_task(plan.infer_arrays([value], 0, 0)) for _ in range(2)]
            while len(small_broker._held) < 2:  # noqa: ASYNC110 (the broker's thread makes it true)
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            kept += await asyncio.gather(*tasks, return_exceptions=True)
            small_broker.release()
            with pytest.raises(InferError) as expired:
                await plan.infer_arrays([value], 1, 0)
            kept.append(expired.value)
            assert (await plan.infer_arrays([value], 0, 0)).shapes == {"y": (1, 4)}

    adopted(small_broker, test)
