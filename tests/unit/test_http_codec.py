"""Infer bodies, decoded and encoded, without a server."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from broker.gateway.http.codec import decode, decode_raw, encode, forward_headers, header_length
from broker.gateway.kserve import InferRequest, InferResponse, OutputTensor
from shm.errors import InferError
from shm.message_values import ModelMetadata, TensorMetadata

LIMIT = 1 << 20
NO_FIELD = "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters'"


def body(document: Any, *blobs: bytes) -> tuple[bytes, int]:
    text = json.dumps(document).encode()
    return b"".join((text, *blobs)), len(text)


def read(document: Any, *blobs: bytes) -> tuple[InferRequest, bool]:
    data, length = body(document, *blobs)
    return decode("m", "", data, length, LIMIT)


def refused(document: Any, *blobs: bytes) -> tuple[str, str]:
    with pytest.raises(InferError) as caught:
        read(document, *blobs)
    return caught.value.code, caught.value.message


def an_input(**changes: Any) -> dict[str, Any]:
    item = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]} | changes
    return {name: value for name, value in item.items() if value is not None}


def region(**parameters: Any) -> dict[str, Any]:
    return {"shared_memory_region": "r", "shared_memory_byte_size": 8} | parameters


# --- header length ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("header", "length"), [(None, 10), ("10", 10), ("0", 0), (" 7 ", 7), ("+3", 3), ("5x", 5)])
def test_header_length(header: str | None, length: int) -> None:
    assert header_length(header, 10) == length


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ("abc", "Unable to parse Inference-Header-Content-Length, got: abc"),
        ("", "Unable to parse Inference-Header-Content-Length, got: "),
        ("-1", "inference header size should be in range (0, 10), got: -1"),
        ("11", "inference header size should be in range (0, 10), got: 11"),
        (str(2**31), "value is out of range [ -2147483648, 2147483647 ], got: 2147483648"),
        ("9" * 5000, "value is out of range ["),
    ],
)
def test_bad_header_length(header: str, text: str) -> None:
    with pytest.raises(InferError) as caught:
        header_length(header, 10)
    assert caught.value.code == "INVALID_ARG"
    assert text in caught.value.message


# --- requests ---------------------------------------------------------------------------------------------------------


def test_a_whole_request() -> None:
    request, binary = read(
        {
            "id": "7",
            "parameters": {
                "sequence_id": 5,
                "sequence_start": True,
                "sequence_end": False,
                "priority": 2,
                "timeout": 9,
                "binary_data_output": True,
                "text": "t",
                "number": -3,
                "flag": True,
                "real": 0.5,
                "huge": 2**63,
            },
            "inputs": [
                an_input(data=None, parameters={"binary_data_size": 8}),
                an_input(name="y", data=None, parameters=region(shared_memory_offset=2**64 - 1)),
                an_input(name="z", data=[[1], [2.5]]),
                an_input(name="s", datatype="BYTES", data=["a", "ä"]),
            ],
            "outputs": [
                {"name": "o", "parameters": {"binary_data": True, "classification": 3}},
                {"name": "p", "parameters": region(binary_data=False, shared_memory_offset=4)},
                {"name": "q"},
            ],
        },
        b"12345678",
    )
    assert binary
    assert (request.id, request.sequence_id, request.sequence_start, request.sequence_end) == ("7", 5, True, False)
    assert (request.priority, request.timeout_us) == (2, 9)
    assert request.parameters == {"text": "t", "number": -3, "flag": True, "real": 0.5, "huge": 2.0**63}
    x, y, z, s = request.inputs
    assert (x.name, x.datatype, x.shape, bytes(x.data or b"")) == ("x", "FP32", (1, 2), b"12345678")
    assert (y.region, y.offset, y.byte_size, y.data) == ("r", 2**64 - 1, 8, None)
    assert bytes(z.data or b"") == np.array([1, 2.5], np.float32).tobytes()
    assert s.data == b"\x01\0\0\0a\x02\0\0\0\xc3\xa4"
    assert request.outputs is not None
    o, p, q = request.outputs
    assert (o.binary, o.classes, o.region) == (True, 3, "")
    assert (p.binary, p.region, p.offset, p.byte_size) == (False, "r", 4, 8)
    assert (q.binary, q.classes) == (False, 0)


def test_no_outputs_means_all() -> None:
    assert read({"inputs": [an_input()]})[0].outputs is None
    assert read({"inputs": [an_input()], "outputs": []})[0].outputs is None


def test_binary_inputs_are_views_of_the_body() -> None:
    document = {"inputs": [an_input(data=None, parameters={"binary_data_size": 4, "unknown": 1})]}
    data, length = body(document, b"abcd")
    tensor = decode("m", "", data, length, LIMIT)[0].inputs[0]
    assert isinstance(tensor.data, memoryview)
    assert tensor.data.obj is data


def test_sequence_ids_may_be_text() -> None:
    assert read({"inputs": [an_input()], "parameters": {"sequence_id": "abc"}})[0].sequence_id == "abc"


@pytest.mark.parametrize(
    ("document", "code", "text"),
    [
        ({}, "INTERNAL", "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
        ([], "INTERNAL", "attempt to access non-existing object member 'inputs'"),
        ({"inputs": {}}, "INTERNAL", "Unable to parse 'inputs': attempt to access JSON non-array as array"),
        ({"inputs": [7]}, "INVALID_ARG", NO_FIELD),
        ({"inputs": [an_input(data=None)]}, "INVALID_ARG", "'parameters'. But no field is set"),
        (
            {"inputs": [an_input(parameters={"binary_data_size": 8})]},
            "INVALID_ARG",
            "But set 'data' 'binary_data_size'",
        ),
        ({"inputs": [an_input(parameters=region())]}, "INVALID_ARG", "But set 'data' 'shared_memory_region'"),
        ({"inputs": [an_input(parameters=[])]}, "INTERNAL", "Unable to parse 'parameters'"),
        ({"inputs": [an_input(name=None)]}, "INTERNAL", "Unable to parse 'name'"),
        ({"inputs": [an_input(name=3)]}, "INTERNAL", "Unable to parse 'name': attempt to access JSON non-string"),
        ({"inputs": [an_input(datatype=3)]}, "INTERNAL", "Unable to parse 'datatype': attempt to access JSON non-"),
        ({"inputs": [an_input(shape=None)]}, "INTERNAL", "Unable to parse 'shape': attempt to access non-existing"),
        ({"inputs": [an_input(shape=3)]}, "INTERNAL", "Unable to parse 'shape': attempt to access JSON non-array"),
        ({"inputs": [an_input(shape=[2, -5])]}, "INTERNAL", "Unable to parse 'shape': attempt to access JSON non-unsi"),
        ({"inputs": [an_input(shape=[True, 2])]}, "INTERNAL", "Unable to parse 'shape': attempt to access JSON non-un"),
        ({"inputs": [an_input(shape=[1.0, 2])]}, "INTERNAL", "Unable to parse 'shape': attempt to access JSON non-uns"),
        ({"inputs": [an_input(shape=[16, 2**60 + 2])]}, "INVALID_ARG", "causes total element count to exceed maximum"),
        ({"inputs": [an_input(shape=[4, 2**60 - 2])]}, "INVALID_ARG", "byte size overflow for input 'x': element cou"),
        ({"inputs": [an_input(shape=[2**63])]}, "INVALID_ARG", "contains one or more invalid dimensions"),
        ({"inputs": [an_input(shape=[1 << 20])]}, "INVALID_ARG", "JSON input 'x' has a byte_size (4194304 bytes)"),
        ({"inputs": [an_input(data="x")]}, "INTERNAL", "Unable to parse 'data': attempt to access JSON non-array as"),
        ({"inputs": [an_input(data=[1, 2, 3])]}, "INTERNAL", "Unable to parse 'data': Shape does not match true shape"),
        ({"inputs": [an_input(data=[1])]}, "INTERNAL", "Failed to parse 'data' field: shape does not match true shape"),
        ({"inputs": [an_input(data=[True, 1])]}, "INTERNAL", "Unable to parse 'data': attempt to access JSON non-doub"),
        ({"inputs": [an_input(datatype="FP16")]}, "INVALID_ARG", "receiving FP16 data via JSON is not supported. Plea"),
        ({"inputs": [an_input(datatype="BF16")]}, "INVALID_ARG", "receiving BF16 data via JSON is not supported. Plea"),
        ({"inputs": [an_input(datatype="F")]}, "INVALID_ARG", "invalid datatype for input x"),
        ({"inputs": [an_input(datatype="INT8", data=[1, 300])]}, "INVALID_ARG", "does not fit in INT8"),
        ({"inputs": [an_input(datatype="INT8", data=[1.0, 2])]}, "INTERNAL", "non-signed-integer as signed-integer"),
        ({"inputs": [an_input(datatype="UINT8", data=[-1, 2])]}, "INTERNAL", "non-unsigned-integer as unsigned-intege"),
        ({"inputs": [an_input(datatype="BOOL", data=[2, 1])]}, "INTERNAL", "non-boolean as boolean"),
        ({"inputs": [an_input(datatype="BYTES")]}, "INTERNAL", "Unable to parse JSON bytes array: attempt to access J"),
        ({"inputs": [], "id": 7}, "INTERNAL", "Unable to parse 'id': attempt to access JSON non-string as string"),
        ({"inputs": [], "outputs": 7}, "INTERNAL", "Unable to parse 'outputs': attempt to access JSON non-array as"),
        ({"inputs": [], "outputs": [{}]}, "INTERNAL", "Unable to parse 'name': attempt to access non-existing object"),
        ({"inputs": [], "parameters": []}, "INTERNAL", "failed to get request params.: attempt to access JSON non-ob"),
        ({"inputs": [], "parameters": {"triton_x": 1}}, "INVALID_ARG", "parameter keys starting with 'triton_' are r"),
        ({"inputs": [], "parameters": {"x": None}}, "INVALID_ARG", "parameter 'x' has invalid type. It should be eit"),
        ({"inputs": [], "parameters": {"priority": -1}}, "INTERNAL", "Unable to parse 'priority': attempt to access"),
        ({"inputs": [], "parameters": {"timeout": 1.0}}, "INTERNAL", "Unable to parse 'timeout': attempt to access J"),
        ({"inputs": [], "parameters": {"sequence_start": 1}}, "INTERNAL", "Unable to parse 'sequence_start': attempt"),
        ({"inputs": [], "parameters": {"sequence_id": []}}, "INTERNAL", "Unable to parse 'sequence_id': attempt to a"),
    ],
)
def test_refused_requests(document: Any, code: str, text: str) -> None:
    came = refused(document)
    assert came[0] == code
    assert text in came[1]


@pytest.mark.parametrize("value", [True, 1.0, "64", -1, 2**64, None, []])
@pytest.mark.parametrize("name", ["shared_memory_byte_size", "shared_memory_offset"])
def test_numbers_of_regions_are_unsigned_integers(name: str, value: Any) -> None:
    expected = f"Unable to parse '{name}': attempt to access JSON non-unsigned-integer as unsigned-integer"
    parameters = region(**{name: value})
    assert refused({"inputs": [an_input(data=None, parameters=parameters)]}) == ("INTERNAL", expected)
    assert refused({"inputs": [], "outputs": [{"name": "o", "parameters": parameters}]}) == ("INTERNAL", expected)


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        (region(classification=1), "Output can't set both 'shared_memory_region' and 'classification'"),
        (region(binary_data=True), "Output can't set both 'shared_memory_region' and 'binary_data'"),
    ],
)
def test_outputs_cannot_be_in_two_places(parameters: dict[str, Any], text: str) -> None:
    assert refused({"inputs": [], "outputs": [{"name": "o", "parameters": parameters}]}) == ("INVALID_ARG", text)


def test_binary_sizes_and_body_must_agree() -> None:
    document = {"inputs": [an_input(data=None, parameters={"binary_data_size": 8})]}
    assert refused(document, b"123") == (
        "INVALID_ARG",
        "unexpected size for input 'x', expecting 5 additional bytes for model 'm'",
    )
    assert refused(document, b"123456789") == ("INVALID_ARG", "unexpected additional input data for model 'm'")
    assert refused({"inputs": []}, b"1") == ("INVALID_ARG", "unexpected additional input data for model 'm'")
    huge = {"inputs": [an_input(data=None, parameters={"binary_data_size": 2**64 - 1})]}
    assert "unexpected size for input 'x'" in refused(huge, b"123")[1]


@pytest.mark.parametrize(("depth", "taken"), [(50, True), (100, True), (101, False), (120, False)])
@pytest.mark.parametrize(("datatype", "value"), [("INT64", "123"), ("BYTES", '"hello"')])
def test_depth_of_data(depth: int, taken: bool, datatype: str, value: str) -> None:
    data = json.loads("[" * depth + value + "]" * depth)
    document = {"inputs": [an_input(datatype=datatype, shape=[1, 1], data=data)]}
    if taken:
        assert read(document)[0].inputs[0].data
    else:
        assert refused(document) == ("INVALID_ARG", "JSON nesting depth exceeds maximum allowed limit (100)")


@pytest.mark.parametrize(("depth", "taken"), [(2, True), (100, True), (101, False)])
def test_depth_of_data_with_scalars_beside_arrays(depth: int, taken: bool) -> None:
    data = json.loads("[1," * (depth - 1) + "[2]" + ",3]" * (depth - 1))
    document = {"inputs": [an_input(datatype="INT8", shape=[2 * depth - 1], data=data)]}
    if taken:
        assert read(document)[0].inputs[0].data == b"\1" * (depth - 1) + b"\2" + b"\3" * (depth - 1)
    else:
        assert refused(document) == ("INVALID_ARG", "JSON nesting depth exceeds maximum allowed limit (100)")


@pytest.mark.parametrize("datatype", ["BOOL", "UINT8", "UINT64", "INT8", "INT64", "FP32", "FP64", "BYTES"])
def test_data_goes_in_and_comes_back(datatype: str) -> None:
    data: dict[str, list[Any]] = {
        "BOOL": [True, False],
        "UINT64": [0, 2**64 - 1],
        "INT64": [-(2**63), 2**63 - 1],
        "FP32": [0.5, -2.0],
        "FP64": [0.1, float("inf")],
        "BYTES": ["", "ä\0b"],
    }
    values = data.get(datatype, [1, 2])
    given = read({"inputs": [an_input(datatype=datatype, data=[[value] for value in values])]})[0].inputs[0]
    output = OutputTensor("o", datatype, (1, 2), given.data)
    text, blobs = encode(InferResponse("m", "1", "", [output]), None, False)
    assert blobs == []
    assert json.loads(text)["outputs"][0]["data"] == values


def test_elements_that_are_no_data() -> None:
    assert read({"inputs": [an_input(shape=[0, 2], data=["anything"])]})[0].inputs[0].data == b""


# --- raw bodies -------------------------------------------------------------------------------------------------------


def model(*inputs: TensorMetadata, batch: int = 0) -> ModelMetadata:
    return ModelMetadata(name="m", version="1", max_batch_size=batch, inputs=inputs)


def tensor(datatype: str, *shape: int) -> TensorMetadata:
    return TensorMetadata(name="x", datatype=datatype, shape=shape)


@pytest.mark.parametrize(
    ("metadata", "shape"),
    [
        (model(tensor("FP32", -1, 4)), (2, 4)),
        (model(tensor("FP32", 2, 4)), (2, 4)),
        (model(tensor("FP32", -1, 2, -1), batch=8), (1, 2, 4)),
        (model(tensor("FP32", -1, 8), batch=8), (1, 8)),
    ],
)
def test_the_shape_of_a_raw_body(metadata: ModelMetadata, shape: tuple[int, ...]) -> None:
    request = decode_raw(metadata, bytes(32))
    assert [(each.name, each.datatype, each.shape) for each in request.inputs] == [("x", "FP32", shape)]
    assert request.inputs[0].data == bytes(32)


def test_raw_strings_get_their_length() -> None:
    (given,) = decode_raw(model(tensor("BYTES", 1)), b"427").inputs
    assert (given.data, given.shape) == (b"\x03\0\0\x00427", (1,))


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        (
            model(tensor("FP32", 1), tensor("FP32", 1), tensor("FP32", 1)),
            "Raw request must only have 1 input (found 1) to be deduced but got 3 inputs in 'm' model configuration",
        ),
        (
            model(tensor("FP32", -1, -1)),
            "The shape of the raw input 'x' can not be deduced because there are more than one variable-sized "
            "dimension",
        ),
        (model(tensor("BYTES", -1)), "For BYTE datatype raw input 'x', the model must have input shape [1]"),
    ],
)
def test_raw_bodies_that_say_too_little(metadata: ModelMetadata, text: str) -> None:
    with pytest.raises(InferError) as caught:
        decode_raw(metadata, b"1234")
    assert (caught.value.code, caught.value.message) == ("INVALID_ARG", text)


# --- responses --------------------------------------------------------------------------------------------------------


def test_outputs_in_three_places() -> None:
    request = read({"inputs": [], "outputs": [{"name": "b", "parameters": {"binary_data": True}}, {"name": "j"}]})[0]
    response = InferResponse(
        "m",
        "3",
        "7",
        [
            OutputTensor("b", "FP32", (1,), memoryview(np.ones(1, np.float32))),
            OutputTensor("j", "INT8", (2,), b"\x01\xff"),
            OutputTensor("s", "FP32", (1,), None),
        ],
        {"flag": True},
    )
    text, blobs = encode(response, request.outputs, True)
    assert json.loads(text) == {
        "id": "7",
        "model_name": "m",
        "model_version": "3",
        "parameters": {"flag": True},
        "outputs": [
            {"name": "b", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}},
            {"name": "j", "datatype": "INT8", "shape": [2], "data": [1, -1]},
            {"name": "s", "datatype": "FP32", "shape": [1]},
        ],
    }
    assert [bytes(blob) for blob in blobs] == [np.ones(1, np.float32).tobytes()]


def test_empty_outputs_have_no_blob() -> None:
    empty = OutputTensor("o", "FP32", (0, 4), memoryview(np.empty((0, 4), np.float32)))
    text, blobs = encode(InferResponse("m", "1", "", [empty]), None, True)
    assert json.loads(text)["outputs"][0]["parameters"] == {"binary_data_size": 0}
    assert blobs == []


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (
            OutputTensor("o", "FP16", (1,), b"12"),
            "sending FP16 data via JSON is not supported. Please use the binary d",
        ),
        (OutputTensor("o", "FP32", (2,), b"1234"), "output tensor shape does not match size of output for 'o'"),
        (OutputTensor("o", "BYTES", (1,), b"1234"), "output 'o'"),
    ],
)
def test_outputs_that_json_cannot_say(output: OutputTensor, text: str) -> None:
    with pytest.raises(InferError) as caught:
        encode(InferResponse("m", "1", "", [output]), None, False)
    assert text in caught.value.message


def test_bytes_that_are_no_text_go_out_as_they_are() -> None:
    text, _ = encode(InferResponse("m", "1", "", [OutputTensor("o", "BYTES", (1,), b"\x01\0\0\0\xff")]), None, False)
    assert b'"data":["\xff"]' in text


# --- forwarded headers ------------------------------------------------------------------------------------------------


def test_headers_become_parameters() -> None:
    request = InferRequest("m")
    headers = ((b"X-Trace-Id", b"7"), (b"Host", b"h"), (b"my-trace", b"8"))
    forward_headers(request, headers, re.compile("TRACE", re.IGNORECASE))
    assert request.parameters == {"X-Trace-Id": "7", "my-trace": "8"}


@pytest.mark.parametrize("name", [b"timeout", b"triton_x"])
def test_reserved_headers_are_not_forwarded(name: bytes) -> None:
    with pytest.raises(InferError, match=r"is reserved for Triton usage and cannot be forwarded\."):
        forward_headers(InferRequest("m"), ((name, b"1"),), re.compile(".*"))
