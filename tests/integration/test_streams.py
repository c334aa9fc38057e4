"""Streams of the client library, through a real broker and its worker: what is sent arrives, whatever else happens."""

from __future__ import annotations

import asyncio
import functools
import gc
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clientlib
from clientlib import InferError
from tests.fakes import models, streaming_backend
from tests.fakes.broker import Broker, eventually
from tests.fakes.streaming_backend import response

pytestmark = pytest.mark.timeout(180)

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


@pytest.fixture(scope="module")
def streaming(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    root = models.write_repository(tmp_path_factory.mktemp("repository"), {"add1": models.add1()})
    for name, config in (("repeat", REPEAT), ("square", SQUARE), ("acts", streaming_backend.CONFIG)):
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)
    shutil.copy(streaming_backend.__file__, root / "acts" / "backend.py")
    with Broker(root, tmp_path_factory.mktemp("run")) as broker:
        yield broker.ready()


@pytest.fixture
def client(streaming: Broker) -> Iterator[clientlib.Client]:
    with clientlib.connect(streaming.directory) as client:
        yield client


def on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """The test gets an `AsyncClient`."""

    async def run(streaming: Broker) -> None:
        async with asyncio.timeout(60), await clientlib.connect_async(streaming.directory) as client:
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


@pytest.mark.parametrize("count", [0, 1, 3, 10_000])
def test_every_response_comes_in_order(client, count):
    stream = client.stream("repeat", repeat(count, 0, 7))
    assert [(int(r["OUT"][0]), int(r["IDX"][0])) for r in stream] == [(7 + i, i) for i in range(count)]


@pytest.mark.parametrize("count", [0, 1, 3, 10_000])
def test_every_response_comes_in_order_on_a_loop(streaming, count):
    @on_loop
    async def test(client):
        results = [int(result["OUT"][0]) async for result in client.stream("repeat", repeat(count))]
        assert results == list(range(count))

    test(streaming)


@pytest.mark.parametrize("size", [0, 4096, 4097, 3_000_000])
def test_large_responses_come_in_parts(client, size):
    for _ in range(2):  # the second time with larger rooms
        results = list(client.stream("acts", acts(3, size)))
        assert [same(result, i, size) for i, result in enumerate(results)] == [True] * 3


def test_rooms_grow_with_what_comes(client):
    tensor = client.create_region("acts", 4096).tensor([5], "INT32")
    tensor.array()[:] = acts(2, 200_000)["ACT"]
    plan = client.prepare("acts", {"ACT": tensor})
    before = plan.places_byte_size
    for _ in range(2):
        assert [same(result, i, 200_000) for i, result in enumerate(plan.stream())] == [True] * 2
    assert plan.places_byte_size > before


def test_a_model_of_another_kind_has_one_response(client):
    (result,) = client.stream("add1", {"x": X})
    assert np.array_equal(result["y"], X + 1)


@on_loop
async def test_a_model_of_another_kind_has_one_response_on_a_loop(client):
    stream = await client.stream("add1", {"x": X})
    assert not stream.final
    result = await anext(stream)
    assert np.array_equal(result["y"], X + 1)
    assert stream.final
    assert [_ async for _ in stream] == []


def test_decoupled_models_have_no_single_answer(client):
    region = client.create_region("in", 4096)
    plan = client.prepare("square", {"IN": region.tensor([1], "INT32")})
    for ask in (
        lambda: client.infer("square", {"IN": np.ones(1, np.int32)}),
        lambda: client.model("square")({"IN": np.ones(1, np.int32)}),
        plan.infer,
        plan.submit,
    ):
        with pytest.raises(InferError, match=r"'square' is decoupled.*stream\(\)") as caught:
            ask()
        assert caught.value.code == "INVALID_ARG"
        assert works(client)
    with pytest.raises(InferError, match="they cannot be placed"):
        client.stream("square", {"IN": np.ones(1, np.int32)}, {"OUT": region.tensor([1], "INT32", offset=64)})


@on_loop
async def test_decoupled_models_have_no_single_answer_on_a_loop(client):
    for _ in range(2):
        with pytest.raises(InferError, match=r"'square' is decoupled.*stream\(\)"):
            await client.infer("square", {"IN": np.ones(1, np.int32)})
        assert len([_ async for _ in client.stream("square", {"IN": np.ones(1, np.int32)})]) == 1


def test_only_the_outputs_that_were_asked_for(client):
    results = list(client.stream("acts", acts(3), ["INDEX"]))
    assert [dict(result) for result in results] == [{"INDEX": np.array([i], np.int32)} for i in range(3)]


def test_a_plan_with_its_inputs_in_a_region(client):
    region = client.create_region("in", 4096)
    plan = client.prepare("square", {"IN": region.tensor([1], "INT32")}, slots=2)
    tensor = region.tensor([1], "INT32")
    tensor.array()[:] = 5
    assert [int(result["OUT"][0]) for result in plan.stream(timeout=20)] == [5] * 5
    with pytest.raises(InferError, match="input_slot 7"):
        plan.stream(input_slot=7)
    with pytest.raises(InferError, match="rows"):
        plan.stream(rows="many")


def test_an_error_in_the_middle_is_raised_in_its_place(client):
    stream = client.stream("acts", acts(4, error=1))
    assert same(next(stream), 0, 4)
    with pytest.raises(InferError, match="response 1 is none") as caught:
        next(stream)
    assert caught.value.code == "INVALID_ARG"
    assert [same(result, 2 + i, 4) for i, result in enumerate(stream)] == [True, True]
    last = client.stream("acts", acts(2, error=1))
    assert same(next(last), 0, 4)
    with pytest.raises(InferError, match="response 1 is none"):
        next(last)
    assert list(last) == []


def test_a_request_that_the_model_refuses(client):
    wrong = repeat(3) | {"DELAY": np.zeros(2, np.uint32)}
    with pytest.raises(InferError, match="shape to match"):
        list(client.stream("repeat", wrong))
    with pytest.raises(InferError, match="unknown model"):
        client.stream("nobody", {"x": X})
    with pytest.raises(InferError, match="data-type"):
        client.stream("square", {"IN": np.ones(1, np.int64)})


def test_cancel_in_the_middle(client):
    stream = client.stream("repeat", repeat(100_000, 1))
    next(stream)
    assert stream.cancel()
    with pytest.raises(InferError, match="cancelled") as caught:
        list(stream)
    assert caught.value.code == "CANCELLED"
    assert list(stream) == []
    assert not stream.cancel()
    assert works(client)


@on_loop
async def test_cancel_in_the_middle_on_a_loop(client):
    stream = client.stream("repeat", repeat(100_000, 1))
    assert not stream.cancel()
    await anext(stream)
    assert stream.cancel()
    with pytest.raises(InferError, match="cancelled"):
        [_ async for _ in stream]
    assert [_ async for _ in stream] == []


@pytest.mark.parametrize("how", ["with", "close", "drop", "break"])
def test_who_leaves_early_gives_everything_back(client, how):
    for _ in range(150):  # a plan has 64 places
        stream = client.stream("repeat", repeat(1000, 1))
        if how == "with":
            with stream:
                next(stream)
            assert list(stream) == []
        elif how == "close":
            stream.close()
        elif how == "drop":
            next(stream)
            del stream
        else:
            for _ in stream:
                break
    assert works(client)


@pytest.mark.parametrize("how", ["with", "close", "drop"])
def test_who_leaves_early_on_a_loop_gives_everything_back(streaming, how):
    @on_loop
    async def test(client):
        plan = await client.prepare("repeat", await inputs_of(client))
        for _ in range(600):
            stream = plan.stream(timeout=20)
            if how == "with":
                async with stream:
                    await anext(stream)
            elif how == "close":
                await stream
                stream.close()
            else:
                await anext(stream)
                del stream
        assert len([_ async for _ in client.stream("square", {"IN": np.array([3], np.int32)})]) == 3

    test(streaming)


async def inputs_of(client: clientlib.AsyncClient) -> dict[str, clientlib.TensorRef]:
    region = await client.create_region("inputs", 1 << 16)
    refs, offset = {}, 0
    for name, array in repeat(1000, 1).items():
        datatype = "INT32" if name == "IN" else "UINT32"
        refs[name] = region.tensor(array.shape, datatype, offset)
        refs[name].array()[:] = array
        offset += 8192
    return refs


def test_the_deadline_is_for_all_of_it(client):
    stream = client.stream("repeat", repeat(100_000, 1), timeout=0.2)
    with pytest.raises(InferError, match="Request timeout expired") as caught:
        list(stream)
    assert caught.value.code == "UNAVAILABLE"
    assert list(stream) == []
    assert works(client)


@on_loop
async def test_the_deadline_is_for_all_of_it_on_a_loop(client):
    stream = client.stream("repeat", repeat(100_000, 1), timeout=0.2)
    with pytest.raises(InferError, match="Request timeout expired"):
        [_ async for _ in stream]
    assert [_ async for _ in stream] == []
    assert len([_ async for _ in client.stream("repeat", repeat(1))]) == 1
    queued = client.stream("repeat", repeat(1), timeout=1e-6)
    with pytest.raises(InferError, match="timeout expired"):
        [_ async for _ in queued]


def test_unread_responses_hold_nobody_up(client):
    stream = client.stream("repeat", repeat(5000))
    for _ in range(300):  # which takes in what comes for the stream
        client.infer("add1", {"x": X}, timeout=20)
    assert len(list(stream)) == 5000


@on_loop
async def test_a_slow_reader_gets_what_is_kept_and_is_told(client):
    stream = client.stream("acts", acts(1000, 1 << 20))
    first = await anext(stream)
    assert same(first, 0, 1 << 20)
    while stream.unread_bytes < 60 << 20:  # noqa: ASYNC110 (the lane counts)
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.1)
    seen: list[clientlib.InferResult] = []
    with pytest.raises(InferError, match="wait to be read") as caught:
        await read_into(seen, stream)
    assert caught.value.code == "UNAVAILABLE"
    assert 10 < len(seen) < 64
    assert all(same(result, 1 + i, 1 << 20) for i, result in enumerate(seen))
    assert [_ async for _ in client.stream("square", {"IN": np.zeros(1, np.int32)})] == []


def test_two_streams_and_a_request_beside_them(client):
    one, two = client.stream("repeat", repeat(500, 0, 1000)), client.stream("acts", acts(500, 5000))
    for index in range(500):
        assert int(next(one)["OUT"][0]) == 1000 + index
        assert same(next(two), index, 5000)
        assert np.array_equal(client.infer("add1", {"x": X})["y"], X + 1)
    assert list(one) == list(two) == []


@on_loop
async def test_a_hundred_streams_on_a_loop(client):
    async def one(number: int) -> None:
        results = [result async for result in client.stream("acts", acts(20, 100 * number, 1))]
        assert [same(result, i, 100 * number) for i, result in enumerate(results)] == [True] * 20

    async def beside() -> None:
        for _ in range(50):
            assert np.array_equal((await client.infer("add1", {"x": X}))["y"], X + 1)

    await asyncio.gather(beside(), *(one(number) for number in range(100)))


def test_many_threads(client):
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(10):
                size = 1000 * number + turn
                results = list(client.stream("acts", acts(30, size), timeout=60))
                assert [same(result, i, size) for i, result in enumerate(results)] == [True] * 30
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_threads_share_one_stream(client):
    stream = client.stream("repeat", repeat(3000))
    seen: list[int] = []

    def read() -> None:
        seen.extend(int(result["OUT"][0]) for result in stream)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == list(range(3000))


@on_loop
async def test_cancelling_the_task_cancels_the_request(client):
    came = asyncio.Event()
    held: list[clientlib.AsyncStream] = []

    async def read() -> None:
        stream = client.stream("repeat", repeat(100_000, 1))
        held.append(stream)  # what is left of it shows that nobody had to collect it
        async for _ in stream:
            came.set()

    task = asyncio.create_task(read())
    await came.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not held[0].cancel() or [_ async for _ in held[0]] == []
    assert [_ async for _ in held[0]] == []
    early = asyncio.create_task(read())
    await asyncio.sleep(0)
    early.cancel()
    with pytest.raises(asyncio.CancelledError):
        await early
    assert len([_ async for _ in client.stream("repeat", repeat(3))]) == 3


def test_a_client_that_closes_in_the_middle(streaming):
    with clientlib.connect(streaming.directory) as client:
        stream = client.stream("repeat", repeat(100_000, 1))
        next(stream)
    with pytest.raises(InferError, match="closed"):
        list(stream)
    assert list(stream) == []


READER = """
import sys, numpy as np, clientlib
client = clientlib.connect(sys.argv[1])
stream = client.stream("acts", {"ACT": np.array([100_000, 4, 0, -1, -1], np.int32)})
for _ in range(100):
    next(stream)
print("reading", flush=True)
sys.stdin.read()
"""


def test_a_client_that_dies_in_the_middle(streaming, client):
    root = str(Path(__file__).parent.parent.parent)
    with subprocess.Popen(
        [sys.executable, "-c", READER, str(streaming.directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=root,
    ) as reader:
        assert reader.stdout.readline() == b"reading\n"
        reader.send_signal(signal.SIGKILL)
        reader.wait()
    assert works(client)
    eventually(lambda: len(streaming.status()["sessions"]) <= 2, "the dead client's session is gone")
    assert works(client)


def test_a_worker_that_dies_in_the_middle(client):
    stream = client.stream("acts", acts(10, death=3))
    seen: list[clientlib.InferResult] = []
    with pytest.raises(InferError, match="after its first response") as caught:
        seen.extend(stream)
    assert caught.value.code == "UNAVAILABLE"
    assert [same(result, i, 4) for i, result in enumerate(seen)] == [True] * len(seen)
    assert len(seen) <= 3
    assert list(stream) == []
    assert works(client)


@on_loop
async def test_a_worker_that_dies_in_the_middle_on_a_loop(client):
    stream = client.stream("acts", acts(10, death=3))
    with pytest.raises(InferError) as caught:
        [_ async for _ in stream]
    assert caught.value.code == "UNAVAILABLE"
    assert await indexes(client.stream("acts", acts(3), timeout=20)) == [0, 1, 2]


def test_streams_leave_no_memory_behind(client):
    stream = client.stream("acts", acts(3, 100))
    results = list(stream)
    del stream
    gc.collect()
    kept = results[2]["Y"]
    for _ in range(100):
        list(client.stream("acts", acts(3, 100)))
    assert np.array_equal(kept, response(2, 100)["Y"])  # its own memory
