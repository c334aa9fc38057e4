"""A decoupled model is unloaded while a request of it goes on: what was accepted is finished, and that shows."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import clientlib
from shm.errors import InferError
from tests.fakes.broker import Broker, eventually
from tests.fakes.streaming import repeat, write_models


def test_it_is_unloading_until_the_last_response(tmp_path: Path) -> None:
    write_models(tmp_path / "models")
    (tmp_path / "run").mkdir(mode=0o700)
    arguments = ("--model-control-mode=explicit", "--load-model=repeat")
    with Broker(tmp_path / "models", tmp_path / "run", *arguments) as broker:
        broker.ready()
        with clientlib.connect(broker.directory) as client:
            stream = client.stream("repeat", repeat(20_000, delay_ms=20))
            next(stream)
            client.unload("repeat")
            for _ in range(10):
                next(stream)
                assert client.models()["repeat"].state == "UNLOADING"
            stream.close()
            eventually(lambda: client.models()["repeat"].state == "UNAVAILABLE", "it is unloaded")
            # The plan that the client keeps for such arrays was made before.
            with pytest.raises(InferError, match="'repeat' has no available versions") as raised:
                next(client.stream("repeat", repeat(20_000, delay_ms=20)))
            assert raised.value.code == "NOT_FOUND"
            client.load("repeat")
            with client.stream("repeat", repeat(20_000, delay_ms=20)) as stream:
                next(stream)
        asyncio.run(on_a_loop(broker))


async def on_a_loop(broker: Broker) -> None:
    async with await clientlib.connect_async(broker.directory) as client:
        for _ in range(2):
            async with client.stream("repeat", repeat(3)) as stream:
                await anext(stream)
            await client.unload("repeat")
            with pytest.raises(InferError, match="'repeat' has no available versions") as raised:
                await anext(client.stream("repeat", repeat(3)))
            assert raised.value.code == "NOT_FOUND"
            await client.load("repeat")
