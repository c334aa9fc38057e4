"""Where in a body something is wrong: beside Triton's text, which stays as it is, in a header of the reply."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from broker.gateway.http.codec import decode
from broker.gateway.http.json import dumps
from broker.gateway.http.message import error_reply
from broker.gateway.placed import DETAIL, MAX_DETAIL, Placed
from shm.errors import Code, InferError

X = {"name": "x", "shape": [2], "datatype": "FP32", "data": [1, 2]}
NOT_STRING = "attempt to access JSON non-string as string"
NOT_DOUBLE = "Unable to parse 'data': attempt to access JSON non-double as double"


def infer_error(document: Any) -> Placed:
    body = document if isinstance(document, bytes) else dumps(document)
    with pytest.raises(Placed) as caught:
        decode("m", "", body, len(body), 1 << 20)
    return caught.value


def second(**changes: Any) -> dict[str, Any]:
    return {"inputs": [X, X | changes]}


@pytest.mark.parametrize(
    ("document", "text", "detail"),
    [
        (
            [],
            "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'",
            "the body: expected an object, got an array of 0",
        ),
        (
            {},
            "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'",
            "inputs: it is missing",
        ),
        (
            {"inputs": {}},
            "Unable to parse 'inputs': attempt to access JSON non-array as array",
            "inputs: expected an array, got an object",
        ),
        ({"id": 7, "inputs": []}, f"Unable to parse 'id': {NOT_STRING}", "id: expected a string, got the number 7"),
        (
            {"parameters": []},
            "failed to get request params.: attempt to access JSON non-object as object",
            "parameters: expected an object, got an array of 0",
        ),
        (
            {"parameters": {"priority": -1}},
            "Unable to parse 'priority': attempt to access JSON non-unsigned-integer as unsigned-integer",
            "parameters.priority: expected an integer from 0 to 2^64-1, got the number -1",
        ),
        (
            {"parameters": {"mine": None}},
            "parameter 'mine' has invalid type. It should be either 'int', 'bool', or 'string'.",
            "parameters.mine: expected a number, a string, true or false, got null",
        ),
        (
            second(name=1),
            f"Unable to parse 'name': {NOT_STRING}",
            "inputs[1].name: expected a string, got the number 1",
        ),
        (
            second(shape=[1, "2"]),
            "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer",
            "input 'x', inputs[1].shape: expected an integer from 0 to 2^64-1, got the string '2'",
        ),
        (
            second(data="a"),
            "Unable to parse 'data': attempt to access JSON non-array as array",
            "input 'x', inputs[1].data: expected an array, got the string 'a'",
        ),
        (
            second(data=[[1], ["b"]]),
            NOT_DOUBLE,
            "input 'x', inputs[1].data[1][0]: expected a number, got the string 'b'",
        ),
        (
            second(data=[[[]], [1, [True]]]),
            NOT_DOUBLE,
            "input 'x', inputs[1].data[1][1][0]: expected a number, got true",
        ),
        (
            second(data=[[[1, 2], []], [[3], [4, None]]]),
            NOT_DOUBLE,
            "input 'x', inputs[1].data[1][1][1]: expected a number, got null",
        ),
        (
            second(data=[[1, [2]], [[3, ["b", True]]]]),
            NOT_DOUBLE,
            "input 'x', inputs[1].data[1][0][1][0]: expected a number, got the string 'b'",
        ),
        (
            second(data=[[1, 2], [3, [4, "b"]]]),
            NOT_DOUBLE,
            "input 'x', inputs[1].data[1][1][1]: expected a number, got the string 'b'",
        ),
        (
            b'{"inputs":[{"name":"x","shape":[2],"datatype":"FP32","data":[NaN,"b"]}]}',
            NOT_DOUBLE,
            "input 'x', inputs[0].data[1]: expected a number, got the string 'b'",
        ),
        (
            b'{"inputs":[{"name":"x","shape":[3],"datatype":"UINT8","data":[1,NaN,-1]}]}',
            "Unable to parse 'data': attempt to access JSON non-unsigned-integer as unsigned-integer",
            "input 'x', inputs[0].data[1]: expected an integer from 0 to 2^64-1, got the number nan",
        ),
        (
            second(data=[1, -1, "b"], datatype="UINT8"),
            "Unable to parse 'data': attempt to access JSON non-unsigned-integer as unsigned-integer",
            "input 'x', inputs[1].data[1]: expected an integer from 0 to 2^64-1, got the number -1",
        ),
        (
            second(data=[1, None, 2], datatype="BOOL"),
            "Unable to parse 'data': attempt to access JSON non-boolean as boolean",
            "input 'x', inputs[1].data[1]: expected true or false, got null",
        ),
        (
            second(data=[1, -1], datatype="UINT8"),
            "Unable to parse 'data': attempt to access JSON non-unsigned-integer as unsigned-integer",
            "input 'x', inputs[1].data[1]: expected an integer from 0 to 2^64-1, got the number -1",
        ),
        (
            second(data=[True, 2], datatype="BOOL"),
            "Unable to parse 'data': attempt to access JSON non-boolean as boolean",
            "input 'x', inputs[1].data[1]: expected true or false, got the number 2",
        ),
        (
            second(data=["a", None], datatype="BYTES"),
            f"Unable to parse JSON bytes array: {NOT_STRING}",
            "input 'x', inputs[1].data[1]: expected a string, got null",
        ),
        (
            second(data=[1, 2, 3]),
            "Unable to parse 'data': Shape does not match true shape of 'data' field",
            "input 'x', inputs[1].data: expected 2 elements, as the shape says, got 3",
        ),
        (
            second(data=[1]),
            "Failed to parse 'data' field: shape does not match true shape",
            "input 'x', inputs[1].data: expected 2 elements, as the shape says, got 1",
        ),
        (
            {"inputs": [X, 5]},
            "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
            "'shared_memory_region' in 'parameters'. But no field is set",
            "inputs[1]: expected an object, got the number 5",
        ),
        (
            second(parameters={"binary_data_size": 8}),
            "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
            "'shared_memory_region' in 'parameters'. But set 'data' 'binary_data_size'",
            "input 'x', inputs[1]: expected 'data', or 'binary_data_size' or 'shared_memory_region' in its "
            "'parameters', got 'data' and 'binary_data_size'",
        ),
        (
            {"inputs": [{"name": "r", "shape": [1], "datatype": "FP32", "parameters": {"shared_memory_region": 1}}]},
            f"Unable to parse 'shared_memory_region': {NOT_STRING}",
            "input 'r', inputs[0].parameters.shared_memory_region: expected a string, got the number 1",
        ),
        (
            {"inputs": [X], "outputs": [{"name": "y", "parameters": {"binary_data": 1}}]},
            "Unable to parse 'binary_data': attempt to access JSON non-boolean as boolean",
            "output 'y', outputs[0].parameters.binary_data: expected true or false, got the number 1",
        ),
        (
            second(datatype="INT8", data=[[1], [-300]]),
            "Unable to parse 'data': a value of input 'x' does not fit in INT8",
            "input 'x', inputs[1].data[1][0]: expected a number from -128 to 127 (INT8), got the number -300",
        ),
        (
            second(data=[1.5, -(10**400)]),
            "Unable to parse 'data': a value of input 'x' does not fit in FP32",
            f"input 'x', inputs[1].data[1]: expected a number below 1.8e308 (FP32), got the number -1{'0' * 62}...",
        ),
        (
            b'{"id":"1e400","inputs":[{"name":"x","shape":[2],"datatype":"FP32","data":[[1],[-1e400]]}]}',
            "failed to parse the request JSON buffer: Number too big to be stored in double. at 79",
            "inputs[0].data[1][0]: expected a number below 1.8e308, got -1e400",
        ),
        (
            b'{"a":{"b":[[],{}]},"a b":[1,' + b"7" * 5000 + b"]}",
            "failed to parse the request JSON buffer: Number too big to be stored in double. at 28",
            f"a b[1]: expected a number below 1.8e308, got {'7' * 64}...",
        ),
        (
            b'{"a":1e999,"a":1}',
            "failed to parse the request JSON buffer: Number too big to be stored in double. at 5",
            "the body: expected a number below 1.8e308, got 1e999",
        ),
        (
            second(datatype="FLOAT"),
            "invalid datatype for input x",
            "input 'x', inputs[1].datatype: expected one of 'BF16', 'BOOL', 'BYTES', 'FP16', 'FP32', 'FP64', 'INT16', "
            "'INT32', 'INT64', 'INT8', 'UINT16', 'UINT32', 'UINT64', 'UINT8', got the string 'FLOAT'",
        ),
        (
            second(datatype="FP16"),
            "receiving FP16 data via JSON is not supported. Please use the binary data format for input x",
            "input 'x', inputs[1].datatype: expected another datatype, or binary data ('binary_data_size'), got FP16",
        ),
        (
            second(shape=[2**63]),
            f"invalid shape for input 'x': shape [{2**63}] contains one or more invalid dimensions",
            f"input 'x', inputs[1].shape: expected at most {2**63 - 1} elements in all, got {2**63}",
        ),
        (
            {"inputs": [{"name": "b", "shape": [1], "datatype": "FP32", "parameters": {"binary_data_size": 4}}]},
            "unexpected size for input 'b', expecting 4 additional bytes for model 'm'",
            "input 'b', inputs[0].parameters.binary_data_size: expected at most 0, the bytes left behind the JSON, got "
            "4",
        ),
        (
            {"inputs": [X], "parameters": {"triton_mine": 1}},
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified.",
            "parameters.triton_mine: expected another name, 'triton_' begins those that Triton keeps for itself",
        ),
        (
            {"inputs": [X], "outputs": [{"parameters": {"shared_memory_region": "r", "classification": 1}}]},
            "Output can't set both 'shared_memory_region' and 'classification'",
            "outputs[0].parameters.classification: expected none of it beside 'shared_memory_region', got both",
        ),
        (
            {"inputs": [X], "outputs": [{}]},
            "Unable to parse 'name': attempt to access non-existing object member 'name'",
            "outputs[0].name: it is missing",
        ),
    ],
)
def test_infer(document: Any, text: str, detail: str) -> None:
    error = infer_error(document)
    assert (error.message, error.detail) == (text, detail)
    reply = error_reply(error)
    assert reply.headers == ((DETAIL, detail),)
    assert reply.parts == (dumps({"error": text}),), "the body is Triton's"


@pytest.mark.parametrize("seed", range(30))
def test_the_place_of_an_element_in_nested_arrays(seed: int) -> None:
    rng = random.Random(seed)
    places: list[str] = []

    def arrays(depth: int, place: str) -> list[Any]:
        array: list[Any] = []
        for index in range(rng.randrange(1, 5)):
            here = f"{place}[{index}]"
            if depth and rng.random() < 0.8:
                array.append([] if rng.random() < 0.1 else arrays(depth - 1, here))
            else:
                array.append(len(places))
                places.append(here)
        return array

    data = arrays(seed % 4, "")
    places.append(f"[{len(data)}]")
    data.append(len(places) - 1)
    wrong = rng.randrange(len(places))
    text = re.sub(rb"\b%d\b" % wrong, b"null", dumps(data))
    place = f"input 'x', inputs[1].data{places[wrong]}"
    assert infer_error(second(data=json.loads(text))).detail == f"{place}: expected a number, got null"


def test_a_detail_is_a_header_s_value_whatever_came() -> None:
    error = infer_error({"inputs": [{"name": "ä\r\n\x7f" * 1000, "shape": "€" * 100, "datatype": "FP32", "data": []}]})
    assert error.detail.isascii()
    assert error.detail.isprintable()
    assert error.detail.startswith("input '\\xe4\\x0d\\x0a\\x7f")
    assert "expected an array, got the string '" in error.detail
    long = Placed(Code.INTERNAL, "", "p" * 5000, "wrong")
    assert len(long.detail) == MAX_DETAIL
    assert error_reply(InferError(Code.INTERNAL, "no")).headers == ()
