"""Streams on every transport and kind of client: what decoupled models send, or which transports bring it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

import clientlib
from clientlib import InferError
from tests.fakes import models, streaming
from tests.fakes.gateways import Gateway, url_of
from tests.fakes.streaming import X, acts, repeat, same

pytestmark = pytest.mark.timeout(180)
CARRY = ("native", "grpc")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    root = models.write_repository(tmp_path_factory.mktemp("repository"), {"add1": models.add1()})
    streaming.write_models(root)
    with Gateway(root, tmp_path_factory.mktemp("run"), "--model-control-mode=explicit", "--load-model=*") as broker:
        yield broker.ready()


@pytest.fixture(params=CARRY)
def transport(request) -> str:
    return request.param


def indexes(results):
    return [int(result["INDEX"][0]) for result in results]


@pytest.mark.parametrize("count", [0, 1, 3, 500])
def test_every_response_comes_in_order(client, count):
    stream = client.stream("repeat", repeat(count, first=5))
    assert [(int(r["OUT"][0]), int(r["IDX"][0])) for r in stream] == [(5 + i, i) for i in range(count)]
    assert list(stream) == []


@pytest.mark.parametrize("size", [0, 3, 2_000_000])
def test_responses_of_any_size_and_with_outputs_missing(client, size):
    results = list(client.stream("acts", acts(3, size)))
    assert [same(result, i, size) for i, result in enumerate(results)] == [True] * 3
    assert results[0].copied_bytes >= 20 + 2 * size
    assert results[0]["Y"].flags.writeable


def test_of_a_model_and_of_a_plan(client):
    assert indexes(client.model("acts").stream(acts(3))) == [0, 1, 2]
    tensor = client.create_region("streams", 4096).tensor([5], "INT32")
    try:
        tensor.array()[:] = acts(4)["ACT"]
        plan = client.prepare("acts", {"ACT": tensor}, ["INDEX"])
        for _ in range(3):
            results = list(plan.stream(timeout=20))
            assert indexes(results) == [0, 1, 2, 3]
            assert set(results[0]) == {"INDEX"}
        plan.release()
        with pytest.raises(InferError, match="released"):
            next(plan.stream())
    finally:
        client.unregister("streams")


def test_outputs_cannot_be_placed(client):
    region = client.create_region("streams", 4096)
    try:
        with pytest.raises(InferError, match="they cannot be placed") as caught:
            next(client.stream("square", {"IN": np.ones(1, np.int32)}, {"OUT": region.tensor([1], "INT32")}))
        assert caught.value.code == "INVALID_ARG"
    finally:
        client.unregister("streams")


def test_an_error_in_the_middle_is_raised_in_its_place(client):
    stream = client.stream("acts", acts(4, error=1))
    assert same(next(stream), 0, 4)
    with pytest.raises(InferError, match="response 1 is none"):
        next(stream)
    assert indexes(stream) == [2, 3]
    last = client.stream("acts", acts(2, error=1))
    assert same(next(last), 0, 4)
    with pytest.raises(InferError, match="response 1 is none"):
        next(last)
    assert list(last) == []


def test_what_the_model_or_the_broker_refuses(client):
    with pytest.raises(InferError, match="unknown model"):
        next(client.stream("nobody", {"x": X}))
    for refused, text in (
        (("square", {"IN": np.ones(1, np.int64)}), "data_type  INT32"),
        (("square", {"IN": np.ones((1, 1), np.int32)}), "fix: "),
        (("repeat", repeat(3) | {"DELAY": np.zeros(2, np.uint32)}), "shape to match"),
    ):
        with pytest.raises(InferError, match=text) as caught:
            next(client.stream(*refused))
        assert caught.value.code == "INVALID_ARG"
    with pytest.raises(InferError, match="decoupled"):
        client.infer("square", {"IN": np.ones(1, np.int32)})
    assert len(list(client.stream("square", {"IN": np.full(1, 2, np.int32)}))) == 2


def test_cancel_in_the_middle(client):
    stream = client.stream("repeat", repeat(100_000, 1))
    next(stream)
    assert stream.cancel()
    with pytest.raises(InferError) as caught:
        list(stream)
    assert caught.value.code == "CANCELLED"
    assert list(stream) == []
    assert not stream.cancel()


@pytest.mark.parametrize("how", ["close", "drop"])
def test_who_leaves_early_gives_everything_back(connect, how):
    client = connect(slots=4)
    for _ in range(20):
        stream = client.stream("repeat", repeat(1000, 1), timeout=30)
        next(stream)
        if how == "close":
            stream.close()
            assert list(stream) == []
        del stream
    assert indexes(client.stream("acts", acts(3), timeout=30)) == [0, 1, 2]
    assert client.infer("add1", {"x": X}, timeout=30)["y"].shape == X.shape


def test_the_deadline_is_for_all_of_it(client):
    stream = client.stream("repeat", repeat(100_000, 1), timeout=0.3)
    with pytest.raises(InferError, match="Request timeout expired") as caught:
        list(stream)
    assert caught.value.code == "UNAVAILABLE"
    assert list(stream) == []


# Over a wire once: all clients are one to the gateways, and are refused a model of which two streams ended a worker.
@pytest.mark.parametrize(
    ("transport", "connect"), [("native", "threads"), ("native", "loop"), ("grpc", "loop")], indirect=["connect"]
)
def test_a_worker_that_dies_in_the_middle(client):
    stream = client.stream("acts", acts(10, death=3))
    with pytest.raises(InferError, match="after its first response"):
        list(stream)
    assert list(stream) == []
    assert indexes(client.stream("acts", acts(3), timeout=30)) == [0, 1, 2]


def test_a_client_that_closes_in_the_middle(connect):
    client = connect()
    stream = client.stream("repeat", repeat(100_000, 1))
    next(stream)
    client.close()
    with pytest.raises(InferError) as caught:
        list(stream)
    assert caught.value.code == "UNAVAILABLE"
    assert "closed" in caught.value.message
    assert list(stream) == []


@pytest.mark.parametrize("transport", ["native", "zmq", "grpc", "http"])
def test_a_model_of_another_kind_has_one_response(client):
    stream = client.stream("add1", {"x": X})
    assert np.array_equal(next(stream)["y"], X + 1)
    assert list(stream) == []
    (large,) = client.stream("add1", {"x": np.ones((4, 65536), np.float32)})
    assert (large["y"] == 2).all()
    with pytest.raises(InferError, match="FP64"):
        next(client.stream("add1", {"x": X.astype(np.float64)}))


@pytest.mark.parametrize("transport", ["zmq", "http"])
def test_a_transport_that_cannot_names_those_that_can(client):
    with pytest.raises(InferError, match=r"does not carry; connect by grpc://…, or by ipc://…") as caught:
        next(client.stream("square", {"IN": np.ones(1, np.int32)}))
    assert caught.value.code == "UNSUPPORTED"
    assert np.array_equal(client.infer("add1", {"x": X})["y"], X + 1)


def test_a_reload_between_two_streams(client):
    one = {"IN": np.full(1, 3, np.int32)}
    assert client.model("square").metadata.decoupled
    for _ in range(2):
        assert len(list(client.stream("square", one, timeout=30))) == 3
        client.load("square")


def test_streams_of_many_threads(broker, transport):
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(5):
                size = number * 100 + turn
                results = list(client.stream("acts", acts(20, size), timeout=60))
                assert [same(result, i, size) for i, result in enumerate(results)] == [True] * 20
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    with clientlib.connect(url_of(broker, transport)) as client:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
