"""Every endpoint's reading of its request, without sockets: paths, methods, bodies, and Triton's texts."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from broker.gateway.http.errors import status_of
from broker.gateway.http.message import Reply
from shm.errors import Code, InferError
from shm.message_values import RegionRecord
from tests.fakes.http_endpoints import Asker


@pytest.fixture
def asker() -> Asker:
    return Asker()


@pytest.mark.parametrize(
    ("path", "category", "methods", "names"),
    [
        ("/v2", "metadata", {"GET"}, ()),
        ("/v2/health/live", "health", {"GET"}, ()),
        ("/v2/health/ready", "health", {"GET"}, ()),
        ("/v2/models/stats", "statistics", {"GET"}, ()),
        ("/v2/models/m", "metadata", {"GET"}, ("m", "")),
        ("/v2/models/m/versions/3", "metadata", {"GET"}, ("m", "3")),
        ("/v2/models/a%20b/ready", "health", {"GET"}, ("a b", "")),
        ("/v2/models/a%2Bb+c/infer", "inference", {"POST"}, ("a+b+c", "")),
        ("/v2/models/%73tats", "metadata", {"GET"}, ("stats", "")),
        ("/v2/models/m%2Finfer/stats", "statistics", {"GET"}, ("m/infer", "")),
        ("/v2/models/%2e%2e%2Fx/config", "model-config", {"GET"}, ("../x", "")),
        ("/v2/models/a%252Fb/ready", "health", {"GET"}, ("a%2Fb", "")),
        ("/v2/models/100%/ready", "health", {"GET"}, ("100%", "")),
        ("/v2/systemsharedmemory/region/%C3%BC%2Fcam%200/register", "shared-memory", {"POST"}, ("ü/cam 0",)),
        ("/v2/models/m/versions/3/config", "model-config", {"GET"}, ("m", "3")),
        ("/v2/models/m/stats", "statistics", {"GET"}, ("m", "")),
        ("/v2/models/m/infer", "inference", {"POST"}, ("m", "")),
        ("/v2/models/m/versions/1/infer", "inference", {"POST"}, ("m", "1")),
        ("/v2/models/m/generate", "inference", {"POST"}, ("m", "")),
        ("/v2/models/m/versions/1/generate_stream", "inference", {"POST"}, ("m", "1")),
        ("/v2/models/m/trace/setting", "trace", {"GET", "POST"}, ("m",)),
        ("/v2/trace/setting", "trace", {"GET", "POST"}, ()),
        ("/v2/logging", "logging", {"GET", "POST"}, ()),
        ("/v2/repository/index", "model-repository", {"POST"}, ("",)),
        ("/v2/repository/r/index", "model-repository", {"POST"}, ("r",)),
        ("/v2/repository/models/m/load", "model-repository", {"POST"}, ("", "m")),
        ("/v2/repository/r/models/m/unload", "model-repository", {"POST"}, ("r", "m")),
        ("/v2/systemsharedmemory/status", "shared-memory", {"GET"}, ("",)),
        ("/v2/systemsharedmemory/region/r/status", "shared-memory", {"GET"}, ("r",)),
        ("/v2/systemsharedmemory/region/r/register", "shared-memory", {"POST"}, ("r",)),
        ("/v2/systemsharedmemory/register", "shared-memory", {"POST"}, ("",)),
        ("/v2/systemsharedmemory/unregister", "shared-memory", {"POST"}, ("",)),
        ("/v2/cudasharedmemory/region/r/unregister", "shared-memory", {"POST"}, ("r",)),
        ("/v2/cudasharedmemory/status", "shared-memory", {"GET"}, ("",)),
    ],
)
def test_paths(asker: Asker, path: str, category: str, methods: set[str], names: tuple[str, ...]) -> None:
    found = asker.routes.find(path)
    assert found is not None
    assert (found[0].category, set(found[0].methods), found[1]) == (category, methods, names)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "/v2/",
        "//v2",
        "/V2",
        "/v2/health",
        "/v2/health/live/",
        "/v2/models",
        "/v2/models/",
        "/v2/models/m/",
        "/v2/models/m/x",
        "/v2/models/m/versions/abc/infer",
        "/v2/models/m/versions/1/trace/setting",
        "/v2/models/m%2Finfer/x",
        "/v2/%6dodels/m/infer",
        "/v2/models/m/%69nfer",
        "/v2/models/m%00/infer",
        "/v2/models/%ff/infer",
        "/v2/models/%C3/infer",
        "/v2/models/%C0%AF/infer",
        "/v2%2Fmodels/m",
        "/v2/models/m/versions/%31/infer",
        "/v2/models/../models/m/infer",
        "/v2/repository",
        "/v2/repository/models/m",
        "/v2/systemsharedmemory",
        "/v2/systemsharedmemory/region//status",
        "/v2/sharedmemory/status",
        "/v2/logging/",
        "/metrics",
    ],
)
def test_paths_that_are_none(asker: Asker, path: str) -> None:
    assert asker.routes.find(path) is None


def test_statuses() -> None:
    statuses = {code.name: status_of(InferError(code, "")) for code in Code if code}
    assert statuses == {
        "UNKNOWN": 400,
        "INTERNAL": 500,
        "NOT_FOUND": 404,
        "INVALID_ARG": 400,
        "UNAVAILABLE": 503,
        "UNSUPPORTED": 501,
        "ALREADY_EXISTS": 400,
        "CANCELLED": 400,
    }


def test_reading_endpoints(asker: Asker) -> None:
    assert asker.json("GET", "/v2")["extensions"] == ["classification", "binary_tensor_data"]
    assert asker.ask("GET", "/v2/health/live").status == 200
    assert asker.ask("GET", "/v2/models/add1/ready").parts == ()
    assert asker.json("GET", "/v2/models/add1") == {
        "name": "add1",
        "versions": ["1"],
        "platform": "onnxruntime_onnx",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 4]}],
    }
    assert asker.json("GET", "/v2/models/add1/config")["max_batch_size"] == 8
    assert asker.json("GET", "/v2/models/stats")["model_stats"][0]["inference_stats"]["queue"] == {"count": 1, "ns": 2}
    assert asker.refused("GET", "/v2/models/x") == (400, "Request for unknown model: 'x' is not found")


def test_what_is_not_ready(asker: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no(*_: str) -> bool:
        return False

    for name in ("live", "ready", "model_ready"):
        monkeypatch.setattr(asker.service, name, no)
    assert asker.ask("GET", "/v2/health/live") == Reply(400)
    assert asker.ask("GET", "/v2/health/ready") == Reply(400)
    assert asker.refused("GET", "/v2/models/add1/ready") == (400, "Model version not ready")


# --- repository -------------------------------------------------------------------------------------------------------


def test_index(asker: Asker) -> None:
    ready = {"name": "add1", "version": "1", "state": "READY"}
    assert asker.json("POST", "/v2/repository/index") == [ready, {"name": "never"}]
    assert asker.json("POST", "/v2/repository/x/index", {"ready": True}) == [ready]
    expected = (400, "Invalid value for 'ready': expected a boolean")
    assert asker.refused("POST", "/v2/repository/index", {"ready": 1}) == expected
    deep = b'{"ready":' + b"[" * 250_000 + b"true" + b"]" * 250_000 + b"}"
    assert asker.refused("POST", "/v2/repository/index", deep) == expected


def test_load_and_unload(asker: Asker) -> None:
    path = "/v2/repository/models/add1"
    files = {"config": "{}", "file:1/model.onnx": base64.b64encode(b"abc").decode()}
    asker.ask("POST", f"{path}/load")
    asker.ask("POST", f"{path}/load", {"parameters": files})
    asker.ask(
        "POST", f"{path}/load", {"parameters": {"file:in lines": "YW\r\nJ\nj\n", "file:unpadded": "YQ", "file:0": ""}}
    )
    asker.ask("POST", f"{path}/unload")
    asker.ask("POST", f"{path}/unload", {"parameters": {"unload_dependents": True}})
    assert asker.service.loads == [
        ("add1", {}),
        ("add1", {"config": "{}", "file:1/model.onnx": b"abc"}),
        ("add1", {"file:in lines": b"abc", "file:unpadded": b"a", "file:0": b""}),
        ("add1", {"unload_dependents": False}),
        ("add1", {"unload_dependents": True}),
    ]


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("models/add1/load", {"parameters": {"config": 1}}, (500, "attempt to access JSON non-string as string")),
        ("models/add1/load", b"[]", (500, "attempt to access JSON non-object as object")),
        ("models/add1/unload", b'"x"', (500, "attempt to access JSON non-object as object")),
        ("models/add1/load", {"parameters": []}, (500, "attempt to access JSON non-object as object")),
        ("models/add1/load", {"parameters": {"x": "y"}}, (500, "unexpected error on creating Triton parameter")),
        ("r/models/add1/load", b"", (501, "'repository_name' specification is not supported")),
        ("r/models/add1/unload", b"", (501, "'repository_name' specification is not supported")),
        (
            "models/add1/unload",
            {"parameters": {"unload_dependents": 1}},
            (500, "Unable to parse 'unload_dependents': attempt to access JSON non-boolean as boolean"),
        ),
    ],
)
def test_refused_loads(asker: Asker, path: str, body: Any, expected: tuple[int, str]) -> None:
    assert asker.refused("POST", f"/v2/repository/{path}", body) == expected
    assert asker.service.loads == []


# --- shared memory ----------------------------------------------------------------------------------------------------

DISABLED = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."


def test_system_regions(asker: Asker) -> None:
    path = "/v2/systemsharedmemory"
    asker.ask("POST", f"{path}/region/r/register", {"key": "/k", "byte_size": 64})
    row = {"name": "r", "key": "/k", "offset": 0, "byte_size": 64}
    assert asker.json("GET", f"{path}/status") == [row]
    assert asker.json("GET", f"{path}/region/r/status") == [row]
    assert asker.refused("POST", f"{path}/region/r/register", {"key": "/k", "byte_size": 64, "offset": 0}) == (
        400,
        "shared memory region 'r' already in manager",
    )
    asker.ask("POST", f"{path}/region/r/unregister")
    asker.ask("POST", f"{path}/unregister")
    assert asker.json("GET", f"{path}/status") == []
    assert asker.refused("GET", f"{path}/region/r/status")[0] == 404


NOT_UINT = "attempt to access JSON non-unsigned-integer as unsigned-integer"


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/register", b"", (400, "'region name' is necessary to register system shared memory region")),
        ("/region/r/register", b"", (500, "failed to parse the request JSON buffer: The document is empty. at 0")),
        ("/region/r/register", {}, (400, "Shared memory register request has no 'key' field")),
        ("/region/r/register", {"key": 1}, (500, "attempt to access JSON non-string as string")),
        ("/region/r/register", {"key": "k"}, (400, "Shared memory register request has no 'byte_size' field")),
        ("/region/r/register", {"key": "k", "byte_size": True}, (500, NOT_UINT)),
        ("/region/r/register", {"key": "k", "byte_size": 1.0}, (500, NOT_UINT)),
        ("/region/r/register", {"key": "k", "byte_size": 2**64}, (500, NOT_UINT)),
        ("/region/r/register", {"key": "k", "byte_size": "64"}, (500, NOT_UINT)),
        ("/region/r/register", {"key": "k", "byte_size": 1, "offset": -1}, (500, NOT_UINT)),
        ("/region/r/register", {"key": "k", "byte_size": 1, "offset": None}, (500, NOT_UINT)),
    ],
)
def test_refused_system_registers(asker: Asker, path: str, body: Any, expected: tuple[int, str]) -> None:
    assert asker.refused("POST", f"/v2/systemsharedmemory{path}", body) == expected


def cuda(**changes: Any) -> dict[str, Any]:
    body = {"raw_handle": {"b64": base64.b64encode(bytes(64)).decode()}, "device_id": 0, "byte_size": 8} | changes
    return {name: value for name, value in body.items() if value is not None}


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/register", cuda(), (400, "'region name' is necessary to register cuda shared memory region")),
        ("/region/r/register", {}, (400, "Shared memory register request has no 'raw_handle' field")),
        (
            "/region/r/register",
            cuda(raw_handle={}),
            (500, "attempt to access non-existing object member 'b64'"),
        ),
        (
            "/region/r/register",
            cuda(raw_handle={"b64": "QQ=="}),
            (400, "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t"),
        ),
        ("/region/r/register", cuda(byte_size=None), (500, "attempt to access non-existing object member 'byte_size'")),
        ("/region/r/register", cuda(device_id=-1), (500, NOT_UINT)),
        ("/region/r/register", cuda(), (400, "failed to register shared memory region: invalid args")),
    ],
)
def test_refused_cuda_registers(asker: Asker, path: str, body: Any, expected: tuple[int, str]) -> None:
    assert asker.refused("POST", f"/v2/cudasharedmemory{path}", body) == expected


def test_cuda_status(asker: Asker) -> None:
    asker.service.held["g"] = RegionRecord(name="g", kind="cuda", key="3", byte_size=8)
    assert asker.json("GET", "/v2/cudasharedmemory/status") == [{"name": "g", "device_id": 3, "byte_size": 8}]


@pytest.mark.parametrize("kind", ["system", "cuda"])
def test_shared_memory_switched_off(kind: str) -> None:
    asker = Asker(allow_client_shm=False)
    for path in ("/region/r/register", "/register", "/region/r/unregister", "/unregister"):
        assert asker.refused("POST", f"/v2/{kind}sharedmemory{path}", b"no json") == (501, DISABLED)
    assert asker.json("GET", f"/v2/{kind}sharedmemory/status") == []


# --- settings ---------------------------------------------------------------------------------------------------------


def test_log_settings(asker: Asker) -> None:
    assert asker.json("GET", "/v2/logging")["log_format"] == "default"
    changes = {"log_info": False, "log_verbose_level": 2, "log_format": "ISO8601", "log_error": None, "other": 1}
    after = asker.json("POST", "/v2/logging", changes)
    assert (after["log_info"], after["log_verbose_level"], after["log_format"]) == (False, 2, "ISO8601")
    assert after["log_error"] is True
    assert "other" not in after


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", (500, "failed to parse the request JSON buffer: The document is empty. at 0")),
        ({"log_file": "x"}, (501, "log file location can not be updated through network protocol")),
        ({"log_format": "x"}, (503, "invalid argument for --log_format, got: x")),
        ({"log_info": 1}, (500, "attempt to access JSON non-boolean as boolean")),
        ({"log_verbose_level": -1}, (500, NOT_UINT)),
        ({"log_format": 1}, (500, "attempt to access JSON non-string as string")),
    ],
)
def test_refused_log_settings(asker: Asker, body: Any, expected: tuple[int, str]) -> None:
    before = dict(asker.service.log)
    assert asker.refused("POST", "/v2/logging", body) == expected
    assert asker.service.log == before


def test_trace_settings(asker: Asker) -> None:
    assert asker.json("GET", "/v2/trace/setting")["trace_level"] == ["OFF"]
    body = {"trace_level": ["TENSORS", "TIMESTAMPS", "MAX"], "trace_rate": "7x", "trace_count": None}
    after = asker.json("POST", "/v2/models/add1/trace/setting", body)
    assert after == {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "7", "trace_count": None}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"trace_file": "x"}, (501, "trace file location can not be updated through network protocol")),
        ({"trace_level": "OFF"}, (500, "attempt to access JSON non-array as array")),
        ({"trace_level": [1]}, (500, "attempt to access JSON non-string as string")),
        ({"trace_level": ["OFF", "TENSORS"]}, (400, "Expect only one trace level 'OFF' is specified")),
        ({"trace_rate": 5}, (500, "attempt to access JSON non-string as string")),
        ({"trace_rate": "x"}, (400, "Unable to parse 'trace_rate', got: x")),
        ({"trace_count": "-2"}, (400, "Unable to parse 'trace_count'. Expecting value >= -1, got:-2")),
        (
            {"trace_count": "9" * 40},
            (400, f"Unable to parse 'trace_count', value is out of range [ -1, 2147483647 ], got: {'9' * 40}"),
        ),
        (
            {"log_frequency": "4294967296"},
            (400, "Unable to parse 'log_frequency', value is out of range [ 0, 4294967295 ], got: 4294967296"),
        ),
    ],
)
def test_refused_trace_settings(asker: Asker, body: Any, expected: tuple[int, str]) -> None:
    assert asker.refused("POST", "/v2/trace/setting", body) == expected


def test_trace_settings_of_unknown_models(asker: Asker) -> None:
    unknown = (400, "Request for unknown model : x")
    assert asker.refused("GET", "/v2/models/x/trace/setting") == unknown
    assert asker.refused("POST", "/v2/models/x/trace/setting", {"trace_file": "y"}) == unknown
