"""Steps of sequences that come one right after the other at a gateway that knows nothing of their model yet."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from broker.gateway.service import GatewayService
from tests.fakes.gateway_core import REMOTE, arrays, request, served
from tests.fakes.lender import Lending
from tests.integration.test_sequence_ids import MODELS

STEPS, SEQUENCES = 6, 10  # no more than a plan has places


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
