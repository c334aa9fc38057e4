"""Triton's request `timeout` over its protocols, with and without an override; and what a burst finds idle."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

import clientlib
from tests.fakes import models
from tests.fakes.broker import eventually
from tests.fakes.gateways import Gateway, url_of

TIMEOUT_S = 0.02
CONFIG = """max_batch_size: 2
dynamic_batching {{
  preferred_batch_size: 2
  max_queue_delay_microseconds: 60000000
  default_queue_policy {{ default_timeout_microseconds: 50000000 allow_timeout_override: {allowed} }}
}}
"""
BURST = """backend: "identity"
max_batch_size: 1
instance_group {{ count: 1 kind: KIND_CPU }}
input {{ name: "x" data_type: TYPE_FP32 dims: 4 }}
output {{ name: "y" data_type: TYPE_FP32 dims: 4 }}
parameters {{ key: "execute_delay_ms" value {{ string_value: "200" }} }}
{}
"""
DROPS = 'parameters { key: "drop_oldest" value { string_value: "true" } }'
LIMITS = {
    "refuses": "dynamic_batching { default_queue_policy { max_queue_size: 1 } }",
    "drops": f"dynamic_batching {{ default_queue_policy {{ max_queue_size: 1 }} }}\n{DROPS}",
    "drops_bytes": f'parameters {{ key: "max_queue_bytes" value {{ string_value: "16" }} }}\n{DROPS}',
    "bytes": 'parameters { key: "max_queue_bytes" value { string_value: "16" } }',
}
X = np.ones((1, 4), np.float32)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    root = tmp_path_factory.mktemp("repository")
    for allowed in ("true", "false"):
        models.write_model(root, allowed, models.add1(), config=CONFIG.format(allowed=allowed))
    models.write_model(root, "plain", models.add1())
    for name, limit in LIMITS.items():
        models.write_model(root, name, config=BURST.format(limit))
    with Gateway(root, tmp_path_factory.mktemp("run")) as broker:
        yield broker.ready()


def ask_grpc(served: Gateway, model: str, timeout_s: float) -> Any:
    with triton.InferenceServerClient(url_of(served, "grpc").removeprefix("grpc://")) as client:
        x = triton.InferInput("x", X.shape, "FP32")
        x.set_data_from_numpy(X)
        try:
            return client.infer(model, [x], timeout=int(timeout_s * 1e6)).as_numpy("y").tolist()
        except InferenceServerException as error:
            return error.status(), error.message()


def ask_http(served: Gateway, model: str, timeout_s: float) -> Any:
    x = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": X.tolist()}
    document = {"inputs": [x], "parameters": {"timeout": int(timeout_s * 1e6)}}
    status, answer = served.post(f"/v2/models/{model}/infer", document)
    return [answer["outputs"][0]["data"]] if status == 200 else (status, answer["error"])


ASKS = {"grpc": ask_grpc, "http": ask_http}


def pending(served: Gateway, model: str) -> int:
    waiting: int = json.loads(served.get(f"/v2/models/{model}/stats")[1])["model_stats"][0]["pending"]
    return waiting


def answered(asked: Future[Any]) -> Any:
    return asked.result(30)


@pytest.mark.parametrize("wire", ASKS)
def test_where_the_policy_allows_it_a_request_ends_by_its_own_timeout(served: Gateway, wire: str) -> None:
    kind = {"grpc": "StatusCode.UNAVAILABLE", "http": 503}[wire]
    assert ASKS[wire](served, "true", TIMEOUT_S) == (kind, "Request timeout expired")


def test_which_timeout_it_was_is_said_beside_tritons_text(served: Gateway) -> None:
    detail = (
        "timeout: expected an answer of model 'true' within 20000 microseconds, or within default_timeout_microseconds "
        "of its queue's policy, if that is less, got none"
    )
    x = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": X.tolist()}
    body = json.dumps({"inputs": [x], "parameters": {"timeout": 20_000}}).encode()
    connection = http.client.HTTPConnection("127.0.0.1", served.ports["http"], timeout=30)
    with contextlib.closing(connection):
        connection.request("POST", "/v2/models/true/infer", body)
        assert connection.getresponse().headers["Tensorbroker-Detail"] == detail
    wanted = service_pb2.ModelInferRequest(model_name="true", raw_input_contents=[X.tobytes()])
    wanted.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    wanted.parameters["timeout"].int64_param = 20_000
    with grpc.insecure_channel(url_of(served, "grpc").removeprefix("grpc://")) as channel:
        with pytest.raises(grpc.RpcError) as raised:
            service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(wanted, timeout=30)
        trailers: Any = raised.value
        assert dict(trailers.trailing_metadata())["tensorbroker-detail"] == detail


@pytest.mark.parametrize("wire", ASKS)
def test_elsewhere_the_timeout_says_nothing(served: Gateway, wire: str) -> None:
    assert ASKS[wire](served, "plain", 1e-6) == (X + 1).tolist()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(ASKS[wire], served, "false", TIMEOUT_S)
        began = time.monotonic()
        while time.monotonic() < began + 3 * TIMEOUT_S:
            time.sleep(TIMEOUT_S)
        assert not first.done()
        second = threads.submit(ASKS[wire], served, "false", TIMEOUT_S)
        assert answered(first) == answered(second) == (X + 1).tolist()


@pytest.mark.parametrize("wire", ["native", "grpc", "http"])
@pytest.mark.parametrize("model", ["true", "false"])
def test_a_deadline_of_the_client_library_ends_its_request_everywhere(served: Gateway, wire: str, model: str) -> None:
    with clientlib.connect(url_of(served, wire)) as client:
        with pytest.raises(clientlib.InferError) as late:
            client.infer(model, {"x": X}, timeout=TIMEOUT_S)
        assert late.value.code == "UNAVAILABLE"
        assert np.array_equal(client.infer("plain", {"x": X}, timeout=30)["y"], X + 1)
    eventually(lambda: pending(served, model) == 0, "nothing of it waits on")


@pytest.mark.parametrize("model", LIMITS)
def test_an_idle_instance_takes_the_first_of_a_burst(served: Gateway, model: str) -> None:
    """Four at once, one instance, room for one that waits: however many of them one sweep of the worker finds."""
    with clientlib.connect(served.directory) as client:
        region = client.create_region("burst", 1024)
        x, y = region.tensor((1, 4), "FP32", stride=16), region.tensor((1, 4), "FP32", offset=512, stride=16)
        plan = client.prepare(model, {"x": x}, {"y": y}, slots=4)
        told: list[str] = []
        for request in [plan.submit(timeout=30, input_slot=slot, output_slot=slot) for slot in range(4)]:
            try:
                request.result()
                told.append("")
            except clientlib.InferError as error:
                told.append(error.message)
    ran = {slot for slot, text in enumerate(told) if not text}
    assert ran >= ({0, 3} if model.startswith("drops") else {0, 1}), told
