"""Triton's traces of a running broker: switched on by clients, in files that are whole while they are written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from tests.fakes.broker import eventually
from tests.fakes.gateways import Gateway

IDENTITY = """
backend: "identity"
input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ 4 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 4 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""
SQUARE = """
backend: "square"
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU } ]
model_transaction_policy { decoupled: true }
"""
CORE = ["REQUEST_START", "QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"]
DONE = ["INFER_RESPONSE_COMPLETE", "REQUEST_END"]
HTTP = ["HTTP_RECV_START", "HTTP_RECV_END", *CORE, *DONE, "HTTP_SEND_START", "HTTP_SEND_END"]
GRPC = ["GRPC_WAITREAD_START", "GRPC_WAITREAD_END", *CORE, *DONE, "GRPC_SEND_START", "GRPC_SEND_END"]


class Traced(Gateway):
    def settings(self, model: str = "", **changes: Any) -> dict[str, Any]:
        path = f"/v2/models/{model}/trace/setting" if model else "/v2/trace/setting"
        status, reply = self.post(path, changes)
        assert status == 200, reply
        found: dict[str, Any] = reply
        return found

    def http(self, model: str = "plain", identifier: str = "", size: int = 4) -> None:
        with triton_http.InferenceServerClient(f"127.0.0.1:{self.ports['http']}") as client:
            tensor = triton_http.InferInput("INPUT0", [size], "INT32")
            tensor.set_data_from_numpy(np.zeros(size, np.int32))
            client.infer(model, [tensor], request_id=identifier)

    def grpc(self) -> None:
        with triton_grpc.InferenceServerClient(f"127.0.0.1:{self.ports['grpc']}") as client:
            tensor = triton_grpc.InferInput("INPUT0", [4], "INT32")
            tensor.set_data_from_numpy(np.zeros(4, np.int32))
            client.infer("plain", [tensor])

    def stream(self, model: str, name: str, values: list[int]) -> None:
        came: Queue[Any] = Queue()
        with triton_grpc.InferenceServerClient(f"127.0.0.1:{self.ports['grpc']}") as client:
            client.start_stream(lambda result, error: came.put((result, error)))
            tensor = triton_grpc.InferInput(name, [len(values)], "INT32")
            tensor.set_data_from_numpy(np.array(values, np.int32))
            client.async_stream_infer(model, [tensor], enable_empty_final_response=True)
            final = False
            while not final:
                result, error = came.get(timeout=30)
                assert error is None
                final = result.get_response().parameters["triton_final_response"].bool_param
            client.stop_stream()


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    root = tmp_path_factory.mktemp("repository")
    for name, config in (("plain", IDENTITY), ("other", IDENTITY), ("square", SQUARE)):
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)
    run = tmp_path_factory.mktemp("run")
    flags = (f"--trace-config=triton,file={run}/t", "--trace-config=rate=1", "--trace-config=level=OFF")
    with Traced(root, run, *flags) as gateway:
        gateway.ready()
        yield gateway


def traces(path: Path) -> dict[int, tuple[dict[str, Any], dict[str, int]]]:
    """By id: what a trace says of its request, and when was what (of several, the last)."""
    found: dict[int, tuple[dict[str, Any], dict[str, int]]] = {}
    if path.exists():
        for each in json.loads(path.read_bytes()):
            head, moments = found.setdefault(each.pop("id"), ({}, {}))
            moments.update({event["name"]: event["ns"] for event in each.pop("timestamps", ())})
            head.update(each)
    return dict(sorted(found.items()))  # as they began


def wait_for(path: Path, count: int) -> list[tuple[dict[str, Any], dict[str, int]]]:
    return list(eventually(lambda: len(found := traces(path)) >= count and found, f"{count} in {path}").values())


def test_all_requests_once_it_is_switched_on(traced: Traced) -> None:
    file = Path(traced.directory, "t")
    traced.http()
    assert traced.settings(trace_level=["TIMESTAMPS"])["trace_level"] == ["TIMESTAMPS"]
    traced.http(identifier='one "of" mine')
    traced.grpc()
    with pytest.raises(Exception, match="unexpected shape"):
        traced.http(size=3)
    traced.stream("plain", "INPUT0", [1, 2, 3, 4])
    traced.stream("square", "IN", [3])
    found = wait_for(file, 4)
    assert traced.settings(trace_level=["OFF"])["trace_level"] == ["OFF"]
    traced.http()
    assert [head["model_name"] for head, _ in found] == ["plain"] * 3 + ["square"]
    assert found[0][0] == {"model_name": "plain", "model_version": 1, "request_id": 'one "of" mine'}
    assert "request_id" not in found[1][0]
    assert [list(moments) for _, moments in found] == [
        HTTP,
        GRPC,
        [*GRPC[:2], *CORE, *DONE],
        [*GRPC[:2], "REQUEST_START", "QUEUE_START", *DONE],
    ]
    for _, moments in found:
        assert sorted(moments.values()) == list(moments.values())
    text = file.read_text()
    assert text.count('"name":"INFER_RESPONSE_COMPLETE"') == 3 + 3
    traced.http("other")
    assert len(traces(file)) == 4


def test_a_model_that_is_not_there(traced: Traced) -> None:
    text = "Request for unknown model : nope"
    assert traced.post("/v2/models/nope/trace/setting", {"trace_rate": "1"}) == (400, {"error": text})
    status, body = traced.get("/v2/models/nope/trace/setting")
    assert (status, json.loads(body)) == (400, {"error": text})
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{traced.ports['grpc']}") as client:
        for settings in ({}, {"trace_file": "f"}):
            with pytest.raises(InferenceServerException, match=text):
                client.update_trace_settings("nope", settings)


def test_a_model_of_its_own_and_a_count(traced: Traced) -> None:
    settings = traced.settings("other", trace_level=["TIMESTAMPS"], trace_rate="2", log_frequency="2")
    assert (settings["trace_rate"], settings["log_frequency"], settings["trace_count"]) == ("2", "2", "-1")
    for _ in range(8):
        traced.http("other")
    traced.http("plain")
    for number in range(2):
        found = wait_for(Path(traced.directory, f"t.{number}"), 2)
        assert [head["model_name"] for head, _ in found] == ["other"] * 2
    assert traced.settings("other", log_frequency=None, trace_count="3", trace_rate="1")["trace_count"] == "3"
    for _ in range(5):
        traced.http("other")
    assert len(wait_for(Path(traced.directory, "t.2"), 3)) == 3
    status, shown = traced.get("/v2/models/other/trace/setting")
    assert (status, json.loads(shown)["trace_count"]) == (200, "0")
    status, shown = traced.get("/v2/models/plain/trace/setting")
    assert (status, json.loads(shown)["trace_count"]) == (200, "-1")
    assert not Path(traced.directory, "t.3").exists()
