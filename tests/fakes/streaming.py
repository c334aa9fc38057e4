"""A broker with decoupled models for the tests of streams, what to ask of them, and what must come.

repeat, square   as Triton's       acts   `tests.fakes.streaming_backend`       add1   not decoupled
"""

from __future__ import annotations

import asyncio
import functools
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clientlib
from tests.fakes import models, streaming_backend
from tests.fakes.broker import Broker
from tests.fakes.streaming_backend import response

DECOUPLED = 'max_batch_size: 0\nmodel_transaction_policy { decoupled: true }\nbackend: "%s"\n'
REPEAT = (
    DECOUPLED % "repeat"
    + """
input [
  { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] },
  { name: "DELAY" data_type: TYPE_UINT32 dims: [ -1 ] },
  { name: "WAIT" data_type: TYPE_UINT32 dims: [ 1 ] }
]
output [
  { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] },
  { name: "IDX" data_type: TYPE_UINT32 dims: [ 1 ] }
]
"""
)
SQUARE = (
    DECOUPLED % "square"
    + """
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
"""
)
X = np.arange(8, dtype=np.float32).reshape(2, 4)


def write_models(root: Path) -> None:
    """The decoupled ones."""
    for name, config in (("repeat", REPEAT), ("square", SQUARE), ("acts", streaming_backend.CONFIG)):
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)
    shutil.copy(streaming_backend.__file__, root / "acts" / "backend.py")


@pytest.fixture(scope="module")
def streaming(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    root = models.write_repository(tmp_path_factory.mktemp("repository"), {"add1": models.add1()})
    write_models(root)
    with Broker(root, tmp_path_factory.mktemp("run")) as broker:
        yield broker.ready()


@pytest.fixture
def client(streaming: Broker) -> Iterator[clientlib.Client]:
    with clientlib.connect(streaming.directory) as client:
        yield client


def on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """The test gets an `AsyncClient`."""

    async def run(streaming: Broker) -> None:
        async with asyncio.timeout(150), await clientlib.connect_async(streaming.directory) as client:
            await test(client)

    def wrapper(streaming: Broker) -> None:
        asyncio.run(run(streaming))

    functools.update_wrapper(wrapper, test, assigned=("__name__", "__doc__", "__module__"), updated=())
    del wrapper.__wrapped__  # type: ignore[attr-defined]
    return wrapper


def repeat(count: int, delay_ms: int = 0, first: int = 0) -> dict[str, np.ndarray]:
    return {
        "IN": np.arange(first, first + count, dtype=np.int32),
        "DELAY": np.full(count, delay_ms, np.uint32),
        "WAIT": np.zeros(1, np.uint32),
    }


def acts(count: int, size: int = 4, delay_ms: int = 0, error: int = -1, death: int = -1) -> dict[str, np.ndarray]:
    return {"ACT": np.array([count, size, delay_ms, error, death], np.int32)}


def same(result: clientlib.InferResult, index: int, size: int) -> bool:
    expected = response(index, size)
    return set(result) == set(expected) and all(
        np.array_equal(result[name], array) and result[name].shape == array.shape for name, array in expected.items()
    )


async def indexes(results: AsyncIterator[clientlib.InferResult]) -> list[int]:
    return [int(result["INDEX"][0]) async for result in results]


async def read_into(seen: list[clientlib.InferResult], results: AsyncIterator[clientlib.InferResult]) -> None:
    async for result in results:
        seen.append(result)


def works(client: clientlib.Client) -> bool:
    """Do models of both kinds answer?"""
    plain = np.array_equal(client.infer("add1", {"x": X}, timeout=20)["y"], X + 1)
    return plain and len(list(client.stream("square", {"IN": np.array([3], np.int32)}, timeout=20))) == 3
