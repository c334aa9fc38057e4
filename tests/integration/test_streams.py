"""Streams of the client library, through a real broker and its worker: every response comes, whole and in order."""

from __future__ import annotations

import asyncio
import gc
import threading

import numpy as np
import pytest

from clientlib import InferError
from clientlib import client as client_module
from clientlib.recipe import Budget
from tests.fakes.streaming import X, acts, client, on_loop, repeat, same, streaming, works  # noqa: F401 (fixtures)
from tests.fakes.streaming_backend import response

pytestmark = pytest.mark.timeout(180)


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


def test_a_thread_whose_streams_have_all_places_is_told(client, monkeypatch):
    """It cannot read them while it waits."""
    monkeypatch.setattr(client_module, "BUDGET", Budget(places=2, byte_size=0))
    streams = [client.stream("repeat", repeat(10_000)) for _ in range(2)]
    with pytest.raises(InferError, match="all 2 places of this plan are in use"):
        client.stream("repeat", repeat(10_000))
    for stream in streams:
        assert len(list(stream)) == 10_000


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


def test_streams_leave_no_memory_behind(client):
    stream = client.stream("acts", acts(3, 100))
    results = list(stream)
    del stream
    gc.collect()
    kept = results[2]["Y"]
    for _ in range(100):
        list(client.stream("acts", acts(3, 100)))
    assert np.array_equal(kept, response(2, 100)["Y"])  # its own memory
