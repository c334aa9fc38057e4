"""Where in a body something is wrong: `generate`, and the endpoints that are not about requests."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from broker.gateway.http.errors import status_of
from broker.gateway.http.generate import decode_generate, explained
from broker.gateway.http.routes import unknown
from broker.gateway.kserve import InferRequest
from broker.gateway.placed import Placed
from broker.gateway.validation import check
from shm.errors import Code, InferError
from shm.message_values import ModelMetadata, TensorMetadata
from tests.fakes.http_endpoints import Asker

NOT_STRING = "attempt to access JSON non-string as string"
CUDA = "/v2/cudasharedmemory/region/r/register"
NOT_UINT = "attempt to access JSON non-unsigned-integer as unsigned-integer"


@pytest.mark.parametrize(
    ("path", "document", "text", "detail"),
    [
        (
            "/v2/repository/models/m/load",
            {"parameters": [1]},
            "attempt to access JSON non-object as object",
            "parameters: expected an object, got an array of 1",
        ),
        (
            "/v2/repository/models/m/load",
            {"parameters": {"config": {"a": 1}}},
            NOT_STRING,
            "parameters.config: expected a string, got an object",
        ),
        (
            "/v2/repository/models/m/load",
            {"parameters": {"confg": "{}"}},
            "unexpected error on creating Triton parameter",
            "parameters.confg: expected 'config' or 'file:' with a path below the model's directory",
        ),
        (
            "/v2/repository/models/m/load",
            {"parameters": {"file:1/m": "@@@"}},
            "'file:1/m' must be base64, got '@' at character 1",
            "parameters.file:1/m: expected base64, got '@' at character 1",
        ),
        (
            "/v2/repository/models/m/load",
            {"parameters": {"file:1/m": "YQ==YQ=="}},
            "'file:1/m' must be base64, got '=' at character 3",
            "parameters.file:1/m: expected base64, got '=' at character 3",
        ),
        (
            "/v2/repository/models/m/load",
            {"parameters": {"file:1/m": "YWJjY"}},
            "'file:1/m' must be base64, got a text whose end is missing",
            "parameters.file:1/m: expected base64, got a text whose end is missing",
        ),
        (
            "/v2/repository/models/m/unload",
            {"parameters": {"unload_dependents": 1}},
            "Unable to parse 'unload_dependents': attempt to access JSON non-boolean as boolean",
            "parameters.unload_dependents: expected true or false, got the number 1",
        ),
        (
            "/v2/repository/index",
            {"ready": "yes"},
            "Invalid value for 'ready': expected a boolean",
            "ready: expected true or false, got the string 'yes'",
        ),
        (
            "/v2/systemsharedmemory/region/r/register",
            {"key": "/k", "byte_size": "8"},
            NOT_UINT,
            "byte_size: expected an integer from 0 to 2^64-1, got the string '8'",
        ),
        (
            "/v2/systemsharedmemory/region/r/register",
            {"byte_size": 8},
            "Shared memory register request has no 'key' field",
            "key: it is missing",
        ),
        (
            CUDA,
            {"raw_handle": {"b64": 1}, "device_id": 0, "byte_size": 8},
            NOT_STRING,
            "raw_handle.b64: expected a string, got the number 1",
        ),
        (
            CUDA,
            {"raw_handle": {}, "device_id": 0, "byte_size": 8},
            "attempt to access non-existing object member 'b64'",
            "raw_handle.b64: it is missing",
        ),
        (
            CUDA,
            {"raw_handle": {"b64": "QQ=="}, "device_id": 0, "byte_size": 8},
            "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t",
            "raw_handle.b64: expected 64 bytes in base64, got 1",
        ),
        (
            "/v2/trace/setting",
            {"trace_level": ["OFF", 1]},
            NOT_STRING,
            "trace_level[1]: expected a string, got the number 1",
        ),
        ("/v2/trace/setting", {"trace_rate": 1}, NOT_STRING, "trace_rate: expected a string, got the number 1"),
        (
            "/v2/logging",
            {"log_info": 1},
            "attempt to access JSON non-boolean as boolean",
            "log_info: expected true or false, got the number 1",
        ),
    ],
)
def test_other_endpoints(path: str, document: Any, text: str, detail: str) -> None:
    with pytest.raises(Placed) as caught:
        Asker().ask("POST", path, document)
    assert (caught.value.message, caught.value.detail) == (text, detail)


@pytest.mark.parametrize("rest", ["", "/", "/infer", "/trace/setting"])
@pytest.mark.parametrize("version", ["", "abc", "-1", "1.0"])
def test_a_version_that_is_no_number(version: str, rest: str) -> None:
    path = f"/v2/models/m/versions/{version}{rest}"
    assert Asker().routes.find(path) is None
    error = unknown(path)
    assert isinstance(error, Placed)
    assert (status_of(error), error.message) == (404, "Not Found")
    assert error.detail == f"the path: expected the number of a version behind 'versions', got '{version}'"


def test_other_paths_that_nothing_has() -> None:
    for path in ("/", "/v2/models", "/v2/models/m/versions/1/", "/v2/models/m/versions"):
        error = unknown(path)
        assert not isinstance(error, Placed)
        assert (status_of(error), error.message) == (404, "Not Found")


# --- generate ---------------------------------------------------------------------------------------------------------


TEXT = TensorMetadata(name="text", datatype="BYTES", shape=(-1,))
SIZES = TensorMetadata(name="sizes", datatype="INT32", shape=(2, 2))
HINT = TensorMetadata(name="hint", datatype="BYTES", shape=(1,), optional=True)
MODEL = ModelMetadata(name="m", version="1", inputs=(TEXT, SIZES, HINT))


@pytest.mark.parametrize(
    ("document", "text", "detail"),
    [
        ([], "attempt to access JSON non-object as object", "the body: expected an object, got an array of 0"),
        (
            {"text": ["a", 1]},
            f"Unable to parse JSON bytes array: {NOT_STRING}",
            "text[1]: expected a string, got the number 1",
        ),
        (
            {"sizes": [1, 2]},
            "The schema can not convert input 'sizes' to tensor with proper shape",
            "sizes: expected as many elements as fill the shape [2,2], got 2",
        ),
        (
            {"parameters": {"sizes": ["a"]}},
            "Converting keyword: 'parameters': Unable to parse 'data': attempt to access JSON non-signed-integer as "
            "signed-integer",
            "parameters.sizes[0]: expected an integer, got the string 'a'",
        ),
        (
            {"text": 1},
            f"Unable to parse JSON bytes array: {NOT_STRING}",
            "text: expected a string, got the number 1",
        ),
        (
            {"parameters": {"sizes": 2**31}},
            "Converting keyword: 'parameters': Unable to parse 'data': a value of input 'sizes' does not fit in INT32",
            "parameters.sizes: expected a number from -2147483648 to 2147483647 (INT32), got the number 2147483648",
        ),
        (
            {"text": "a", "parameters": {"text": "b"}},
            "Converting keyword: 'parameters': input 'text' already exists in request",
            "parameters.text: expected it once, got it twice",
        ),
        (
            {"txt": ["a"]},
            "parameter 'txt' has invalid type. It should be either 'int', 'bool', or 'string'.",
            "txt: this is no input of the model, which has 'text', 'sizes', 'hint', so it is a parameter of the request"
            ": expected a number, a string, true or false, got an array of 1",
        ),
    ],
)
def test_generate(document: Any, text: str, detail: str) -> None:
    with pytest.raises(Placed) as caught:
        decode_generate(MODEL, "", document, 1 << 20)
    assert (caught.value.message, caught.value.detail) == (text, detail)


def test_options_of_infer_are_the_model_s_own_parameters() -> None:
    document = {"priority": -1, "parameters": {"timeout": 0.5, "sequence_id": "s", "mine": 1}}
    wanted = decode_generate(MODEL, "", document, 1 << 20)
    assert (wanted.priority, wanted.timeout_us, wanted.sequence_id) == (0, 0, 0)
    assert wanted.parameters == {"priority": -1, "timeout": 0.5, "sequence_id": "s", "mine": 1}


def test_what_does_not_fit_the_model_is_told_by_the_body_s_own_names() -> None:
    wanted = decode_generate(MODEL, "", {"text": ["a"] * 9, "parameters": {"sizes": [1, 2, 3, 4]}}, 1 << 20)
    small = msgspec.structs.replace(MODEL, max_batch_size=8)
    with pytest.raises(Placed) as caught:
        check(small, wanted)
    assert caught.value.detail == "input 'sizes', inputs[1].shape[0]: expected 9, as in the inputs before, got 2"
    error = explained(caught.value, small, wanted)
    assert isinstance(error, Placed)
    assert error.detail == "sizes: shape[0]: expected 9, as in the inputs before, got 2"


def test_inputs_that_are_missing_and_what_may_have_been_meant_for_them() -> None:
    refused = InferError(Code.INVALID_ARG, "expected number of inputs between 2 and 3 but got 0 inputs for model 'm'.")
    wanted = decode_generate(MODEL, "", {"txt": "a", "size": 1}, 1 << 20)
    error = explained(refused, MODEL, wanted)
    assert isinstance(error, Placed)
    assert (error.code, error.message) == (refused.code, refused.message)
    assert error.detail == (
        "the body: expected 'text' (BYTES [-1]), 'sizes' (INT32 [2,2]), too, got no input; 'txt', 'size' are no input "
        "of the model, but parameters of the request"
    )
    other = InferError(Code.UNAVAILABLE, "no")
    assert explained(other, MODEL, wanted) is other
    whole = decode_generate(MODEL, "", {"text": "a", "sizes": [1, 2, 3, 4]}, 1 << 20)
    assert explained(refused, MODEL, whole) is refused
    many = InferRequest("m", "", parameters={f"p{number}": 1 for number in range(1000)})
    assert len(str(explained(refused, MODEL, many))) < 1000
