"""An error over any transport frees what its request had at once, without Python looking for cycles."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest

import clientlib
from shm.errors import InferError
from tests.fakes.gateways import Gateway, url_of

pytestmark = pytest.mark.timeout(180)
Array = npt.NDArray[np.float32]


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def left(call: Callable[[Array], object]) -> object:
    """What is left of an argument of `call`, which must fail."""
    x = np.ones((1, 4), np.float32)
    reference = weakref.ref(x)
    try:
        call(x)
        raise AssertionError("it did not fail")
    except InferError:
        del x
    return reference()


async def left_async(call: Callable[[Array], Awaitable[object]]) -> object:
    x = np.ones((1, 4), np.float32)
    reference = weakref.ref(x)
    try:
        await call(x)
        raise AssertionError("it did not fail")
    except InferError:
        del x
    await asyncio.sleep(0)  # the turn of the loop that brought the error refers to it
    return reference()


def test_threads(broker: Gateway, transport: str) -> None:
    with clientlib.connect(url_of(broker, transport)) as client:
        assert left(lambda x: client.infer("nosuch", {"x": x})) is None
        assert left(lambda x: client.infer("add1", {"q": x})) is None
        assert left(lambda x: client.infer("add1", {"x": x.repeat(9, 0)})) is None
        assert left(lambda x: client.infer("add1", {"x": x}, timeout=1e-9)) is None
        assert left(lambda x: client.infer("slow", {"x": x[0, :1]}, timeout=0.02)) is None
        assert left(lambda x: next(client.stream("nosuch", {"x": x}))) is None


def test_loops(broker: Gateway, transport: str) -> None:
    async def main() -> None:
        async with await clientlib.connect_async(url_of(broker, transport)) as client:
            assert await left_async(lambda x: client.infer("nosuch", {"x": x})) is None
            assert await left_async(lambda x: client.infer("add1", {"q": x})) is None
            assert await left_async(lambda x: client.infer("add1", {"x": x.repeat(9, 0)})) is None
            assert await left_async(lambda x: client.infer("add1", {"x": x}, timeout=1e-9)) is None
            assert await left_async(lambda x: anext(client.stream("nosuch", {"x": x}))) is None

    asyncio.run(main())
