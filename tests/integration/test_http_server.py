"""The HTTP front end under unmodified clients: tritonclient's two, curl, and what they rely on."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

from broker.gateway.kserve import InferRequest, InferResponse, OutputTensor
from shm.errors import Code, InferError
from tests.fakes.broker import eventually
from tests.fakes.http_server import Running, running
from tests.fakes.kserve import FakeService


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    with running(http_header_forward_pattern="^x-keep") as server:
        yield server


@pytest.fixture
def server(shared: Running) -> Iterator[Running]:
    fresh = FakeService()
    vars(shared.service).update(vars(fresh))
    yield shared
    eventually(lambda: shared.connections() == 0, "connections are gone")


@pytest.fixture
def client(server: Running) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.url) as client:
        yield client


def an_input(array: np.ndarray[Any, Any], name: str = "x", binary: bool = True) -> triton.InferInput:
    item = triton.InferInput(name, array.shape, "FP32")
    item.set_data_from_numpy(array, binary_data=binary)
    return item


X = np.arange(8, dtype=np.float32).reshape(2, 4)


def test_everything_that_the_client_reads(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("add1")
    assert client.is_model_ready("add1", "1")
    assert not client.is_model_ready("other")
    assert client.get_server_metadata()["name"] == "triton"
    assert client.get_model_metadata("add1", "1")["inputs"][0]["shape"] == [-1, 4]
    assert client.get_model_config("add1")["name"] == "add1"
    assert client.get_model_repository_index()[1] == {"name": "never"}
    assert client.get_inference_statistics()["model_stats"][0]["execution_count"] == 5
    assert client.get_inference_statistics("add1", "1")["model_stats"][0]["name"] == "add1"
    assert client.get_log_settings()["log_file"] == ""
    assert client.update_log_settings({"log_verbose_level": 1})["log_verbose_level"] == 1
    assert client.get_trace_settings("add1")["trace_rate"] == "1000"
    assert client.update_trace_settings(settings={"trace_rate": "5"})["trace_rate"] == "5"
    with pytest.raises(InferenceServerException) as caught:
        client.get_model_metadata("other")
    assert (caught.value.status(), caught.value.message()) == ("400", "Request for unknown model: 'other' is not found")


def test_everything_that_the_client_changes(server: Running, client: triton.InferenceServerClient) -> None:
    client.load_model("add1", config="{}", files={"file:1/model.onnx": b"\x00\xff"})
    client.unload_model("add1", unload_dependents=True)
    assert server.service.loads == [
        ("add1", {"config": "{}", "file:1/model.onnx": b"\x00\xff"}),
        ("add1", {"unload_dependents": True}),
    ]
    client.register_system_shared_memory("r", "/key", 64, offset=8)
    assert client.get_system_shared_memory_status() == [{"name": "r", "key": "/key", "offset": 8, "byte_size": 64}]
    with pytest.raises(InferenceServerException, match="shared memory region 'r' already in manager"):
        client.register_system_shared_memory("r", "/key", 64)
    client.unregister_system_shared_memory("r")
    client.unregister_system_shared_memory()
    assert client.get_system_shared_memory_status() == []
    with pytest.raises(
        InferenceServerException, match="'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t"
    ):
        client.register_cuda_shared_memory("g", b"QQ==", 0, 64)
    client.unregister_cuda_shared_memory()
    assert client.get_cuda_shared_memory_status() == []


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False, None])
@pytest.mark.parametrize("coding", [None, "gzip", "deflate"])
def test_infer(
    client: triton.InferenceServerClient, binary_in: bool, binary_out: bool | None, coding: str | None
) -> None:
    outputs = None if binary_out is None else [triton.InferRequestedOutput("y", binary_data=binary_out)]
    result = client.infer(
        "add1",
        [an_input(X, binary=binary_in)],
        outputs=outputs,
        request_id="7",
        request_compression_algorithm=coding,
        response_compression_algorithm=coding,
    )
    assert result.get_response()["id"] == "7"
    np.testing.assert_array_equal(result.as_numpy("y"), X + 1)


def test_what_a_request_says_arrives(server: Running, client: triton.InferenceServerClient) -> None:
    client.infer(
        "add1",
        [an_input(X)],
        model_version="1",
        sequence_id="abc",
        sequence_start=True,
        priority=3,
        timeout=500,
        parameters={"a": 1, "b": "t", "c": True},
        headers={"X-Keep-Me": "yes", "X-Other": "no"},
    )
    asked = server.service.asked[-1]
    assert (asked.model, asked.version, asked.priority, asked.timeout_us) == ("add1", "1", 3, 500)
    assert (asked.sequence_id, asked.sequence_start, asked.sequence_end) == ("abc", True, False)
    assert asked.parameters == {"a": 1, "b": "t", "c": True, "X-Keep-Me": "yes"}


def test_regions_travel_by_name(server: Running, client: triton.InferenceServerClient) -> None:
    item = triton.InferInput("x", [1, 4], "FP32")
    item.set_shared_memory("in put", 16, offset=2**64 - 32)
    output = triton.InferRequestedOutput("y")
    output.set_shared_memory("out", 16)
    result = client.infer("add1", [item], outputs=[output])
    assert result.get_output("y") == {"name": "y", "datatype": "FP32", "shape": [1, 4]}
    asked = server.service.asked[-1]
    assert (asked.inputs[0].region, asked.inputs[0].offset, asked.inputs[0].byte_size) == ("in put", 2**64 - 32, 16)
    assert asked.outputs is not None
    assert (asked.outputs[0].region, asked.outputs[0].byte_size) == ("out", 16)


def test_a_raw_body(server: Running) -> None:
    with server.connect() as peer:
        status, headers, body = peer.request(
            "POST", "/v2/models/add1/infer", X[0].tobytes(), "Inference-Header-Content-Length: 0"
        ).reply()
    assert status == 200
    assert headers["content-type"] == "application/octet-stream"
    assert body[int(headers["inference-header-content-length"]) :] == (X[0] + 1).tobytes()
    assert server.service.asked[-1].inputs[0].shape == (1, 4)


def test_large_tensors(client: triton.InferenceServerClient) -> None:
    large = np.arange(1 << 20, dtype=np.float32).reshape(-1, 4)
    np.testing.assert_array_equal(client.infer("add1", [an_input(large)]).as_numpy("y"), large + 1)


def test_bytes_that_are_no_text_get_the_clients_own_advice(
    server: Running, client: triton.InferenceServerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def infer(request: InferRequest, _: object) -> InferResponse:
        return InferResponse("add1", "1", "", [OutputTensor("y", "BYTES", (1,), b"\x01\0\0\0\xff")])

    monkeypatch.setattr(server.service, "infer", infer)
    with pytest.raises(InferenceServerException, match="Please use binary_data=True"):
        client.infer("add1", [an_input(X)], outputs=[triton.InferRequestedOutput("y", binary_data=False)])


@pytest.mark.parametrize(
    ("code", "status"), [(Code.ALREADY_EXISTS, "400"), (Code.CANCELLED, "400"), (Code.UNAVAILABLE, "503")]
)
def test_errors(server: Running, client: triton.InferenceServerClient, code: Code, status: str) -> None:
    server.service.fails = InferError(code, "why")
    with pytest.raises(InferenceServerException) as caught:
        client.infer("add1", [an_input(X)])
    assert (caught.value.status(), caught.value.message()) == (status, "why")


def test_what_goes_wrong_inside_is_not_told(
    server: Running, client: triton.InferenceServerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def infer(*_: object) -> InferResponse:
        raise ValueError("a secret")

    monkeypatch.setattr(server.service, "infer", infer)
    with pytest.raises(InferenceServerException) as caught:
        client.infer("add1", [an_input(X)])
    assert (caught.value.status(), caught.value.message()) == ("500", "internal error")


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """By the front end: what earlier tests left may be collected, and complain, at any time."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("broker.gateway")]


def test_a_verbose_log_has_every_request(
    server: Running, client: triton.InferenceServerClient, caplog: pytest.LogCaptureFixture
) -> None:
    assert client.is_server_live()
    assert not said(caplog)
    server.service.fails = InferError(Code.INVALID_ARG, "why")
    with caplog.at_level(logging.DEBUG, "broker.gateway"):
        assert client.is_server_live()
        with pytest.raises(InferenceServerException):
            client.infer("add1", [an_input(X)])
    assert said(caplog) == [
        "HTTP request: GET /v2/health/live",
        "HTTP request: POST /v2/models/add1/infer",
        "HTTP request failed: why",
    ]


def test_async_infer(client: triton.InferenceServerClient) -> None:
    results = [client.async_infer("add1", [an_input(X)]) for _ in range(4)]
    for result in results:
        np.testing.assert_array_equal(result.get_result().as_numpy("y"), X + 1)


@pytest.mark.parametrize("coding", [None, "gzip", "deflate"])
def test_the_asyncio_client(server: Running, coding: str | None) -> None:
    async def use() -> None:
        async with triton_aio.InferenceServerClient(server.url) as client:
            assert await client.is_server_live()
            assert (await client.get_model_metadata("add1"))["name"] == "add1"
            result = await client.infer("add1", [an_input(X)], response_compression_algorithm=coding)
            np.testing.assert_array_equal(result.as_numpy("y"), X + 1)
            await client.register_system_shared_memory("r", "/key", 64)
            assert [row["name"] for row in await client.get_system_shared_memory_status()] == ["r"]
            await client.unregister_system_shared_memory()
            with pytest.raises(InferenceServerException, match="unknown model"):
                await client.infer("other", [an_input(X)])

    asyncio.run(use())


def test_exiting(server: Running, client: triton.InferenceServerClient) -> None:
    server.service.exiting = True
    assert not client.is_server_live()
    with server.connect() as peer:
        assert peer.request("GET", "/v2/health/ready").error() == (503, "Server exiting")
    with pytest.raises(InferenceServerException, match="Server exiting"):
        client.infer("add1", [an_input(X)])


def test_the_policy_is_asked_first_on_every_path(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    from broker.gateway.access import Restricted

    def check(category: str, _: object) -> None:
        raise Restricted(f"no {category}")

    monkeypatch.setattr(server.service, "check", check)
    for method, path, category in (
        ("POST", "/v2/models/add1/infer", "inference"),
        ("DELETE", "/v2/models/add1/infer", "inference"),
        ("POST", "/v2/models/add1/generate", "inference"),
        ("GET", "/v2/models/add1/ready", "health"),
        ("GET", "/v2", "metadata"),
        ("POST", "/v2/repository/index", "model-repository"),
        ("POST", "/v2/systemsharedmemory/unregister", "shared-memory"),
    ):
        with server.connect() as peer:
            assert peer.request(method, path, b"no json").error() == (403, f"no {category}")
    assert server.service.asked == []


# --- curl and HTTP's own rules ----------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(server: Running, tmp_path: Path) -> None:
    def curl(*arguments: str) -> str:
        command = ["curl", "-s", "--max-time", "20", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    url = f"http://{server.url}/v2"
    assert json.loads(curl(url))["name"] == "triton"
    assert curl("-o", "/dev/null", "-w", "%{http_code}", f"{url}/health/ready") == "200"
    body = '{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[1,2,3,NaN]}]}'
    assert '"data":[2.0,3.0,4.0,NaN]' in curl("-d", body, f"{url}/models/add1/infer")
    assert curl("-I", url).startswith("HTTP/1.1 405")
    assert "Not Found" in curl("-0", f"http://{server.url}/")
    # Larger than curl sends unasked: it waits for "100 Continue".
    large = tmp_path / "large"
    large.write_bytes(np.zeros(1 << 19, np.float32).tobytes())
    header = "Inference-Header-Content-Length: 0"
    sent = curl("-H", header, "-H", "Expect: 100-continue", "--data-binary", f"@{large}", "-o", "/dev/null",
                "-w", "%{http_code} %{size_download}", f"{url}/models/add1/infer")  # fmt: skip
    assert sent.split()[0] == "200"
    assert int(sent.split()[1]) > 2 << 20
    unix = f"{server.options.directory}/http.sock"
    assert json.loads(curl("--unix-socket", unix, "http://localhost/v2"))["name"] == "triton"


def test_head_has_no_body(server: Running) -> None:
    with server.connect() as peer:
        peer.request("HEAD", "/v2").request("GET", "/v2/health/live")
        start = peer.sock.recv(1 << 16)
        while start.count(b"HTTP/1.1") < 2:
            start += peer.sock.recv(1 << 16)
    assert start.startswith(b"HTTP/1.1 405")
    assert b'Method Not Allowed"' not in start


def test_pipelined_requests_are_answered_in_order(server: Running) -> None:
    with server.connect() as peer:
        for number in range(100):
            peer.request("GET", f"/v2/models/m{number}")
        answers = [peer.error()[1] for _ in range(100)]
    assert answers == [f"Request for unknown model: 'm{number}' is not found" for number in range(100)]


def test_http_1_0_closes_unless_asked(server: Running) -> None:
    with server.connect() as peer:
        status, headers, _ = peer.send(b"GET /v2/health/live HTTP/1.0\r\n\r\n").reply()
        assert (status, headers["connection"]) == (200, "close")
        assert peer.closed()
    with server.connect() as peer:
        peer.send(b"GET /v2/health/live HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert peer.reply()[1]["connection"] == "keep-alive"
        assert peer.send(b"GET /v2/health/live HTTP/1.0\r\n\r\n").reply()[0] == 200


def test_the_client_is_gone_before_the_answer(server: Running) -> None:
    server.service.gate = server.call(asyncio.Event)
    with server.connect() as peer:
        peer.request("POST", "/v2/models/add1/infer", X.tobytes(), "Inference-Header-Content-Length: 0")
        eventually(lambda: len(server.service.asked) == 1, "the request runs")
    eventually(lambda: server.service.cancelled == 1, "the request is cancelled")
