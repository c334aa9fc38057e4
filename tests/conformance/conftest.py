"""One real broker with a gateway for all tests of transports, and clients of every transport and kind.

Modules with fixtures of the same names use their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import onnx
import pytest
from onnx import helper

import clientlib
from tests.fakes import models
from tests.fakes.blocking import Blocking
from tests.fakes.gateways import Gateway, url_of

SUMS = """backend: "sequence"
input { name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] }
sequence_batching { max_sequence_idle_microseconds: 60000000 direct { } control_input [
  { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } },
  { name: "READY" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } } ] }"""
TRANSPORTS = ("native", "zmq", "grpc", "http")


@pytest.fixture(scope="package")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    repository = models.write_samples(tmp_path_factory.mktemp("repository"))
    models.write_model(repository, "slow", long_run(), config="max_batch_size: 0\n")
    models.write_model(repository, "add+1", models.add1())
    models.write_model(repository, "vector", models.identity(dims=("n",)))
    models.write_model(repository, "sums", config=SUMS)
    flags = ("--model-control-mode=explicit", "--load-model=*")
    with Gateway(repository, tmp_path_factory.mktemp("run"), *flags) as broker:
        yield broker.ready()


def long_run() -> onnx.ModelProto:
    """x, y: FP32 [1]. Tens of billions of operations, none of which can be done before x is known."""
    size, rounds = 640, 60
    nodes = [helper.make_node("Mul", ["weights", "x"], ["m0"])]
    nodes += [helper.make_node("MatMul", [f"m{k}", "weights"], [f"m{k + 1}"]) for k in range(rounds)]
    nodes += [helper.make_node("ReduceMax", [f"m{rounds}"], ["max"], axes=[0, 1], keepdims=0)]
    nodes += [helper.make_node("Reshape", ["max", "one"], ["y"])]
    weights = np.full((size, size), 1 / size, np.float32)
    constants = {"weights": weights, "one": np.array([1], np.int64)}
    return models.build(nodes, [models.tensor("x", [1])], [models.tensor("y", [1])], constants)


@pytest.fixture(params=TRANSPORTS)
def transport(request) -> str:
    return request.param


@pytest.fixture(params=["threads", "loop"])
def connect(request, transport, broker):
    """`connect()` makes a client that blocks; all are closed at the end."""
    made = []
    runner = asyncio.Runner()

    def connect(**options):
        url = url_of(broker, transport)
        if request.param == "threads":
            client = clientlib.connect(url, **options)
        else:
            client = Blocking(runner.run(clientlib.connect_async(url, **options)), runner)
        made.append(client)
        return client

    with runner:
        yield connect
        for client in made:
            client.close()


@pytest.fixture
def client(connect):
    return connect()
