"""Every field of every body with every wrong value: an answer or an InferError, and nothing else."""

from __future__ import annotations

import base64
import copy
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from broker.gateway.kserve import Caller, InferRequest, InferResponse
from shm.errors import InferError
from tests.fakes.http_endpoints import Asker

WRONG: tuple[Any, ...] = (
    None,
    True,
    1.0,
    -1,
    "64",
    "",
    "a\0\r\n\x1b[31m",
    [],
    {},
    [[]],
    [None],
    {"x": 1},
    math.nan,
    math.inf,
    2**63,
    2**64,
    -(2**63) - 1,
    10**300,
)
REGION = {"shared_memory_region": "r", "shared_memory_byte_size": 8, "shared_memory_offset": 0}
BODIES: dict[str, Any] = {
    "/v2/models/add1/infer": {
        "id": "7",
        "parameters": {"sequence_id": 1, "sequence_start": True, "priority": 1, "timeout": 1, "mine": 1},
        "inputs": [
            {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [[1.0, 2, 3, 4]]},
            {"name": "s", "shape": [2], "datatype": "BYTES", "data": ["a", "b"]},
            {"name": "b", "shape": [1], "datatype": "BOOL", "data": [True]},
            {"name": "u", "shape": [1], "datatype": "UINT8", "data": [1]},
            {"name": "r", "shape": [2], "datatype": "FP32", "parameters": REGION},
            {"name": "e", "shape": [0], "datatype": "FP32", "parameters": {"binary_data_size": 0}},
        ],
        "outputs": [
            {"name": "y", "parameters": {"binary_data": False, "classification": 1}},
            {"name": "z", "parameters": REGION | {"binary_data": False}},
        ],
    },
    "/v2/models/add1/generate": {"x": [1, 2, 3, 4], "id": "7", "parameters": {"mine": 1}},
    "/v2/systemsharedmemory/region/r/register": {"key": "/k", "byte_size": 8, "offset": 0},
    "/v2/cudasharedmemory/region/r/register": {
        "raw_handle": {"b64": base64.b64encode(bytes(64)).decode()},
        "device_id": 0,
        "byte_size": 8,
    },
    "/v2/repository/index": {"ready": True},
    "/v2/repository/models/add1/load": {"parameters": {"config": "{}", "file:x": "QQ=="}},
    "/v2/repository/models/add1/unload": {"parameters": {"unload_dependents": True}},
    "/v2/logging": {"log_info": True, "log_verbose_level": 1, "log_format": "default", "log_file": None},
    "/v2/trace/setting": {"trace_level": ["OFF"], "trace_rate": "1", "trace_count": "1", "log_frequency": "1"},
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something can be replaced."""
    yield path
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in members:
        yield from places(member, (*path, key))


def replaced(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    changed = copy.deepcopy(document)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


async def infer(request: InferRequest, _: Caller) -> InferResponse:
    return InferResponse(request.model, "1", request.id, [], request.parameters)


def outcome(path: str, body: bytes) -> tuple[str, str]:
    """Code and message, "" for an answer."""
    asker = Asker()
    asker.service.infer = infer  # type: ignore[method-assign]
    try:
        asker.ask("POST", path, body)
    except InferError as error:
        return error.code, error.message
    return "", ""


@pytest.mark.parametrize("path", BODIES)
def test_wrong_values(path: str) -> None:
    outcomes = {
        (place, repr(value)): outcome(path, json.dumps(replaced(BODIES[path], place, value)).encode())
        for place in places(BODIES[path])
        for value in WRONG
    }
    assert {code for code, _ in outcomes.values()} <= {"", "INVALID_ARG", "INTERNAL", "UNSUPPORTED", "UNAVAILABLE"}
    assert not [message for _, message in outcomes.values() if "Traceback" in message]
    assert sum(code != "" for code, _ in outcomes.values()) >= len(WRONG) - 1


@pytest.mark.parametrize("path", BODIES)
def test_truncated_bodies(path: str) -> None:
    body = json.dumps(BODIES[path]).encode()
    for end in range(1, len(body)):
        with pytest.raises(InferError) as caught:
            Asker().ask("POST", path, body[:end])
        assert caught.value.code == "INTERNAL"
