"""The gateway's core when principals' regions change under way: unregistered, replaced, truncated."""

from __future__ import annotations

import asyncio
import itertools
import os

import numpy as np
import pytest

from shm.errors import InferError
from tests.fakes import models
from tests.fakes.gateway_core import LOCAL, REMOTE, SIZE, arrays, asked, posix_memory, refused, request, served
from tests.fakes.lender import Lending

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def lending(tmp_path_factory):
    repository = models.write_repository(
        tmp_path_factory.mktemp("repository"), {"add1": models.add1(), "two_input": models.two_input()}
    )
    models.write_model(repository, "nonzero", models.nonzero(), config=models.NONZERO_CONFIG)
    with Lending(repository, tmp_path_factory.mktemp("run")) as broker:
        yield broker.ready()


@pytest.fixture
def memory():
    with posix_memory() as make:
        yield make


def test_unregistering_under_load(lending, memory):
    key, _, array = memory()
    array[:4] = 1

    async def test(service):
        await service.register_system(LOCAL, "r", key, SIZE, 0)
        enough = asyncio.Event()

        async def ask():
            for answered in itertools.count(1):
                await service.infer(asked(), LOCAL)
                if answered == 50:
                    enough.set()

        tasks = [asyncio.create_task(ask()) for _ in range(4)]
        await enough.wait()
        await service.unregister(LOCAL, "system", "r")
        for task in tasks:
            with refused("NOT_FOUND", "Unable to find shared memory region: 'r'"):
                await task
        assert await service.regions(LOCAL, "system", "") == []

    served(lending, test)


def test_a_name_that_means_other_memory_now(lending, memory):
    (key, _, first), (other_key, _, second) = memory(), memory("other")
    first[:4], second[:4] = 1, 2

    async def test(service):
        for key_now, array in ((key, first), (other_key, second)) * 3:
            await service.register_system(LOCAL, "r", key_now, SIZE, 0)
            array[1024:1028] = 0
            await service.infer(asked(), LOCAL)
            assert array[1024:1028].tolist() == (array[:4] + 1).tolist()
            await service.unregister(LOCAL, "system", "r")

    served(lending, test)


def test_a_region_that_another_gateway_replaced(lending, memory):
    (key, _, first), (other_key, _, second) = memory(), memory("other")
    first[:4], second[:4] = 1, 2

    async def test(service):
        # As another gateway would do it: this one's caches hear nothing.
        behind = type(service.shared)(service.shared._client)
        await service.register_system(LOCAL, "r", key, SIZE, 0)
        await service.infer(asked(), LOCAL)
        await behind.unregister(LOCAL, "system", "r")
        with refused("NOT_FOUND", "Unable to find shared memory region: 'r'"):
            await service.infer(asked(), LOCAL)
        await behind.register_system(LOCAL, "r", key, SIZE, 0)
        await service.infer(asked(), LOCAL)
        await behind.unregister(LOCAL, "system", "r")
        await behind.register_system(LOCAL, "r", other_key, SIZE, 0)
        await service.infer(asked(), LOCAL)
        assert second[1024:1028].tolist() == [3, 3, 3, 3]

    served(lending, test)


def test_a_file_that_is_truncated_under_load_costs_its_owner_alone(lending, memory):
    key, fd, array = memory()
    array[:4] = 1

    async def test(service):
        await service.register_system(LOCAL, "r", key, SIZE, 0)
        errors = []

        async def ask():
            while not errors:
                try:
                    await service.infer(asked(), LOCAL)
                except InferError as error:
                    errors.append(error)

        async def others():
            while not errors:
                response = await service.infer(request("two_input", {"a": row, "b": row}), REMOTE)
                assert arrays(response)["total"].tolist() == [[2, 2, 2, 2]]

        row = np.ones((1, 4), np.float32)
        tasks = [asyncio.create_task(each) for each in (ask(), ask(), ask(), others(), others())]
        for _ in range(100):
            await asyncio.sleep(0)
        os.ftruncate(fd, 0)
        await asyncio.gather(*tasks)
        for error in errors:
            # Seen in time, too late (the worker has died of it), or after the broker had retired it.
            assert "changed size" in error.message or error.code in ("UNAVAILABLE", "NOT_FOUND"), error
        assert os.fstat(fd).st_size == 0, "nobody made it longer again"
        response = await service.infer(request("two_input", {"a": row, "b": row}), REMOTE)
        assert arrays(response)["total"].tolist() == [[2, 2, 2, 2]]

    served(lending, test)
