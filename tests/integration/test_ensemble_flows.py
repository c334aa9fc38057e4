"""Ensembles that branch, fail, lose a worker and see a member reloaded, in real brokers and over every protocol."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import onnx
import pytest
import tritonclient.grpc
import tritonclient.http
from onnx import TensorProto, helper

import clientlib
from shm.errors import InferError
from tests.fakes import models
from tests.fakes.broker import eventually, steady
from tests.fakes.gateways import Gateway
from tests.fakes.processes import kill_new

pytestmark = pytest.mark.timeout(120)
FLOW = """
platform: "ensemble" max_batch_size: 4
input { name: "IN" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "SUM" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "ONE_MORE" data_type: TYPE_FP32 dims: [ 4 ] }
ensemble_scheduling { step [
  { model_name: "add1" model_version: -1 input_map { key: "x" value: "IN" } output_map { key: "y" value: "ONE_MORE" } },
  { model_name: "add1" model_version: -1 input_map { key: "x" value: "ONE_MORE" }
    output_map { key: "y" value: "two" } },
  { model_name: "sum" model_version: -1 input_map { key: "a" value: "two" } input_map { key: "b" value: "IN" }
    output_map { key: "y" value: "SUM" } } ] }
"""
PICK = """
platform: "ensemble" max_batch_size: 0
input { name: "IN" data_type: TYPE_INT64 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }
ensemble_scheduling { step [
  { model_name: "pick" model_version: -1 input_map { key: "at" value: "IN" } output_map { key: "y" value: "OUT" } } ] }
"""


def sum_of_two() -> onnx.ModelProto:
    nodes = [helper.make_node("Add", ["a", "b"], ["y"])]
    shape = ["batch", 4]
    return models.build(nodes, [models.tensor("a", shape), models.tensor("b", shape)], [models.tensor("y", shape)])


def pick() -> onnx.ModelProto:
    """Element `at` of three: others fail."""
    nodes = [helper.make_node("Gather", ["data", "at"], ["y"])]
    data = {"data": np.arange(3, dtype=np.float32)}
    at = helper.make_tensor_value_info("at", TensorProto.INT64, [1])
    return models.build(nodes, [at], [models.tensor("y", [1])], data)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    root = tmp_path_factory.mktemp("repository")
    repository = models.write_repository(root, {"add1": models.add1(), "sum": sum_of_two(), "pick": pick()})
    models.write_model(repository, "flow", config=FLOW)
    models.write_model(repository, "pick_flow", config=PICK)
    flags = ("--model-control-mode=explicit", "--load-model=*")
    with Gateway(repository, tmp_path_factory.mktemp("run"), *flags) as broker:
        yield broker.ready()


@pytest.fixture
def client(broker: Gateway) -> Iterator[clientlib.Client]:
    with clientlib.connect(f"ipc://{broker.directory}") as client:
        yield client


def test_branches_meet(client):
    for rows in (1, 3):
        x = np.arange(4 * rows, dtype=np.float32).reshape(rows, 4)
        found = client.infer("flow", {"IN": x}, timeout=30)
        assert np.array_equal(found["ONE_MORE"], x + 1)
        assert np.array_equal(found["SUM"], 2 * x + 2)


def test_only_what_is_asked_for_runs(client):

    def ran() -> tuple[int, int]:
        flow, last = (client.statistics(name)[0] for name in ("flow", "sum"))
        return flow["inference_count"], last["inference_count"]

    flows, sums = steady(ran)
    x = np.ones((1, 4), np.float32)
    for outputs in (["ONE_MORE"], ["ONE_MORE", "SUM"]):
        found = client.infer("flow", {"IN": x}, outputs=outputs, timeout=30)
        assert found["ONE_MORE"].tolist() == [[2] * 4]
    eventually(lambda: ran() == (flows + 2, sums + 1), "the last step has run once")


def test_outputs_lie_where_the_client_wants_them(client):
    region = client.create_region("frames", 4096)
    x, y = region.tensor((1, 4), "FP32"), region.tensor((1, 4), "FP32", offset=1024)
    region.array((1, 4), np.float32)[:] = 5
    plan = client.prepare("flow", {"IN": x}, {"SUM": y})
    assert plan.infer(timeout=30)["SUM"].tolist() == [[12] * 4]
    assert region.array((1, 4), np.float32, 1024).tolist() == [[12] * 4]


@pytest.mark.parametrize("wire", [tritonclient.grpc, tritonclient.http])
def test_over_the_network(broker, wire):
    port = broker.ports["grpc" if wire is tritonclient.grpc else "http"]
    with wire.InferenceServerClient(f"127.0.0.1:{port}") as client:
        tensor = wire.InferInput("IN", [2, 4], "FP32")
        tensor.set_data_from_numpy(np.full((2, 4), 3, np.float32))
        found = client.infer("flow", [tensor])
        assert (found.as_numpy("SUM") == 8).all()
        assert (found.as_numpy("ONE_MORE") == 4).all()


def test_a_step_that_fails_is_named(client):
    assert client.infer("pick_flow", {"IN": np.array([2], np.int64)}, timeout=30)["OUT"].tolist() == [2]
    with pytest.raises(InferError, match=r"in ensemble 'pick_flow', .*indices.*pick"):
        client.infer("pick_flow", {"IN": np.array([7], np.int64)}, timeout=30)
    assert client.infer("pick_flow", {"IN": np.array([1], np.int64)}, timeout=30)["OUT"].tolist() == [1]


def test_members_may_be_reloaded_and_workers_die(broker, client):
    """Nobody notices more than one clear error."""
    stop = threading.Event()
    failures: list[str] = []
    answers = [0] * 3  # of each thread: what a death made run again has ended when all have gone on

    def ask(number: int) -> None:
        with clientlib.connect(f"ipc://{broker.directory}") as mine:
            x = np.full((1, 4), 1, np.float32)
            while not stop.is_set():
                try:
                    found = mine.infer("flow", {"IN": x}, timeout=30)
                except InferError as error:
                    failures.append(str(error))
                    return
                if found["SUM"].tolist() != [[4] * 4]:
                    failures.append(f"wrong: {found['SUM']}")
                answers[number] += 1

    def go_on(seen: list[int], what: str) -> None:
        eventually(lambda: failures or all(now > then + 4 for now, then in zip(answers, seen, strict=True)), what)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(answers))]
    for thread in threads:
        thread.start()
    for turn in range(3):
        client.load("add1")
        go_on(answers.copy(), f"answers after reload {turn}")
    gone: set[int] = set()
    for turn in range(3):
        kill_new(lambda: broker.status()["workers"][0]["pid"], gone)
        go_on(answers.copy(), f"answers after death {turn}")
    stop.set()
    for thread in threads:
        thread.join(60)
    assert failures == []
