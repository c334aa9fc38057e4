"""Steps of sequences that come one right after the other at a gateway that knows nothing of their model yet."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from broker.gateway.kserve import InferRequest
from broker.gateway.service import GatewayService
from shm.message_values import ModelMetadata
from tests.fakes.gateway_core import REMOTE, arrays, request, served
from tests.fakes.lender import Lending
from tests.integration.test_sequence_ids import MODELS

STEPS, SEQUENCES = 20, 10  # more sequences than slots, more steps than other plans have places


@pytest.fixture(scope="module")
def lending(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lending]:
    root = tmp_path_factory.mktemp("repository")
    (root / "plain" / "1").mkdir(parents=True)
    (root / "plain" / "config.pbtxt").write_text(MODELS["plain"])
    with Lending(root, tmp_path_factory.mktemp("run")) as broker:
        yield broker.ready()


@pytest.mark.parametrize("attempt", range(8))
def test_no_step_overtakes_another(lending: Lending, attempt: int) -> None:
    async def test(service: GatewayService) -> None:
        async def step(number: int, at: int) -> int:
            asked = request("plain", {"INPUT": np.full((1, 1), at + 1, np.int32)})
            asked.sequence_id, asked.sequence_start, asked.sequence_end = number, at == 0, at == STEPS - 1
            return int(arrays(await service.infer(asked, REMOTE))["OUTPUT"][0, 0])

        tasks = []
        for at in range(STEPS):
            for number in range(1, SEQUENCES + 1):
                tasks.append(asyncio.create_task(step(number, at)))
                if (number + at + attempt) % 3 == 0:
                    await asyncio.sleep(0)  # some come while the first ones wait for this and that
        results = await asyncio.wait_for(asyncio.gather(*tasks), 60)
        assert results == [sum(range(1, at + 2)) for at in range(STEPS) for _ in range(SEQUENCES)]

    served(lending, test)


def test_sequences_of_another_model_wait_for_nothing(lending: Lending) -> None:
    """However many steps wait for a model that takes long to say what it is."""

    async def test(service: GatewayService) -> None:
        metadata = service.inference.metadata

        async def slow(model: str, version: str) -> ModelMetadata:
            if model == "slow":
                await asyncio.Event().wait()
            return await metadata(model, version)

        def asked(model: str, number: int) -> InferRequest:
            made = request(model, {"INPUT": np.full((1, 1), 1, np.int32)})
            made.sequence_id, made.sequence_start, made.sequence_end = number, True, True
            return made

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(service.inference, "metadata", slow)
            waiting = [asyncio.create_task(service.infer(asked("slow", 1000 + n), REMOTE)) for n in range(400)]
            await asyncio.sleep(0)
            answers = await asyncio.wait_for(
                asyncio.gather(*(service.infer(asked("plain", number), REMOTE) for number in range(1, 5))), 30
            )
            assert len(answers) == 4
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        assert len(service.inference._steps) == 0

    served(lending, test)
