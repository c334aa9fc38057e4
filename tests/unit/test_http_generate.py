"""The infer and generate endpoints' own rules, without sockets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shm.errors import InferError
from shm.message_values import ModelMetadata, TensorMetadata
from tests.fakes.http_endpoints import Asker
from tests.fakes.kserve import METADATA


@pytest.fixture
def asker() -> Asker:
    return Asker()


def test_unknown_models_come_before_bad_bodies(asker: Asker) -> None:
    assert asker.refused("POST", "/v2/models/x/infer", b"{") == (400, "Request for unknown model: 'x' is not found")
    assert asker.refused("POST", "/v2/models/add1/infer", b"{")[0] == 500


def test_other_codings_are_refused_with_those_that_work(asker: Asker) -> None:
    reply = asker.ask("POST", "/v2/models/add1/infer", b"{}", {"Content-Encoding": "br"})
    assert (reply.status, reply.headers) == (501, (("Accept-Encoding", "gzip, deflate"),))
    assert json.loads(reply.parts[0]) == {"error": "Unsupported compression type"}


def test_a_pattern_that_is_none() -> None:
    with pytest.raises(InferError, match="--http-header-forward-pattern"):
        Asker(http_header_forward_pattern="(")


def test_generate(asker: Asker) -> None:
    path = "/v2/models/add1/generate"
    answer = {"model_name": "add1", "model_version": "1", "y": [2.0, 3.0, 4.0, 5.0]}
    assert asker.json("POST", path, {"x": [1, 2, 3, 4], "id": "7", "temperature": 0.5, "parameters": {"top": 3}}) == {
        "id": "7",
        **answer,
    }
    assert asker.service.asked[-1].parameters == {"temperature": 0.5, "top": 3}
    assert asker.service.asked[-1].inputs[0].shape == (1, 4)
    reply = asker.ask("POST", f"{path}_stream", {"x": [1, 2, 3, 4]})
    assert reply.content_type == "text/event-stream; charset=utf-8"
    event = b"".join(reply.parts)
    assert (event[:6], event[-2:]) == (b"data: ", b"\n\n")
    assert json.loads(event[6:]) == answer


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ([], (500, "attempt to access JSON non-object as object")),
        ({"x": [1, 2, 3]}, (400, "The schema can not convert input 'x' to tensor with proper shape")),
        ({"x": "a"}, (500, "Unable to parse 'data': attempt to access JSON non-double as double")),
        ({"x": [[1], 2, 3, 4]}, (500, "Unable to parse 'data': attempt to access JSON non-double as double")),
        ({"id": 7}, (500, "Unable to parse 'id': attempt to access JSON non-string as string")),
        (
            {"parameters": 1},
            (500, "Expected JSON object for keyword: 'parameters': attempt to access JSON non-object as object"),
        ),
        (
            {"k": {}},
            (400, "parameter 'k' has invalid type. It should be either 'int', 'bool', or 'string'."),
        ),
    ],
)
def test_refused_generate(asker: Asker, body: Any, expected: tuple[int, str]) -> None:
    for path in ("/v2/models/add1/generate", "/v2/models/add1/generate_stream"):
        assert asker.refused("POST", path, body) == expected


def test_generate_takes_no_coding_and_no_input_named_parameters(asker: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InferError, match="Unsupported content-encoding, only 'identity' is supported"):
        asker.ask("POST", "/v2/models/add1/generate", {}, {"Content-Encoding": "gzip"})

    async def metadata(*_: str) -> ModelMetadata:
        tensor = TensorMetadata(name="parameters", datatype="FP32", shape=(1,))
        return ModelMetadata(name="add1", version="1", inputs=(*METADATA.inputs, tensor))

    monkeypatch.setattr(asker.service, "metadata", metadata)
    assert asker.refused("POST", "/v2/models/add1/generate", {"parameters": {}}) == (
        400,
        "Keyword 'parameters' for nested schema also given as input tensor name",
    )


@pytest.mark.parametrize(
    "body",
    [
        b'{"x": [1, 2, 3, 4], "temperature": 1, "x": [1, 2, 3, 4]}',
        b'{"x": [1, 2, 3, 4], "x": "of another type"}',
        b'{"x": [1, 2, 3, 4], "parameters": {"x": [1, 2, 3, 4]}}',
    ],
)
@pytest.mark.parametrize("end", ["generate", "generate_stream"])
def test_an_input_that_comes_twice_is_refused(asker: Asker, body: bytes, end: str) -> None:
    where = "Converting keyword: 'parameters': " if b"parameters" in body else ""
    expected = (400, f"{where}input 'x' already exists in request")
    assert asker.refused("POST", f"/v2/models/add1/{end}", body) == expected
