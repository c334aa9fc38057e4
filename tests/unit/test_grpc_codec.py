"""Inference messages of gRPC: what is understood, what is refused and with which of Triton's texts."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from broker.gateway.grpc import codec
from broker.gateway.grpc.codec import (
    decode_request,
    encode_response,
    split_contents,
    stream_error,
    stream_message,
    takes_long,
)
from broker.gateway.kserve import InferRequest, InferResponse, OutputTensor
from shm.errors import Code, InferError


def message(*, raw: list[bytes] | None = None, **fields: Any) -> Any:
    """A request for model `m` with inputs `x`, `y`, … of datatype FP32 and shape [1], one per raw content."""
    inputs = [
        service_pb2.ModelInferRequest.InferInputTensor(name=name, datatype="FP32", shape=[1])
        for name in "xyz"[: len(raw or [])]
    ]
    return service_pb2.ModelInferRequest(
        **{"model_name": "m", "inputs": inputs, "raw_input_contents": raw or [], **fields}
    )


def typed(datatype: str, **contents: Any) -> Any:
    request = message(raw=[b""])
    request.ClearField("raw_input_contents")
    request.inputs[0].datatype = datatype
    request.inputs[0].contents.CopyFrom(service_pb2.InferTensorContents(**contents))
    return request


def decoded(request: Any) -> InferRequest:
    return decode_request(request.SerializeToString())


def refused(request: Any) -> str:
    with pytest.raises(InferError) as caught:
        decoded(request)
    assert caught.value.code == "INVALID_ARG"
    return caught.value.message


def test_raw_contents_go_to_the_inputs_that_lie_in_no_region() -> None:
    request = message(raw=[b"first", b"", b"third"], model_version="2", id="7")
    request.inputs[1].parameters["shared_memory_region"].string_param = "r"
    request.inputs[1].parameters["shared_memory_byte_size"].int64_param = 64
    del request.raw_input_contents[1]
    found = decoded(request)
    assert (found.model, found.version, found.id, found.outputs) == ("m", "2", "7", None)
    assert [tensor.data for tensor in found.inputs] == [b"first", None, b"third"]
    assert (found.inputs[1].region, found.inputs[1].offset, found.inputs[1].byte_size) == ("r", 0, 64)
    assert found.inputs[0].shape == (1,)


def test_large_tensors_are_views_of_the_message() -> None:
    large = bytes(range(256)) * 256
    raw = message(raw=[large, b"small", large[::-1]]).SerializeToString()
    found = decode_request(raw)
    assert [bytes(tensor.data or b"") for tensor in found.inputs] == [large, b"small", large[::-1]]
    assert all(isinstance(tensor.data, memoryview) and tensor.data.obj is raw for tensor in found.inputs)


@given(
    contents=st.lists(st.binary(max_size=300), max_size=5),
    name=st.text(max_size=20),
    order=st.randoms(use_true_random=False),
)
def test_splitting_gives_what_protobuf_gives(contents: list[bytes], name: str, order: Any) -> None:
    parts = [service_pb2.ModelInferRequest(raw_input_contents=[each]).SerializeToString() for each in contents]
    others = [
        message(model_name=name).SerializeToString(),
        b"\xa0\x06\x81\x01",  # unknown fields: a varint,
        b"\xa1\x06" + bytes(8),  # 64 bits,
        b"\xa5\x06" + bytes(4),  # 32 bits
    ]
    for each in others:
        parts.insert(order.randint(0, len(parts)), each)
    split = split_contents(b"".join(parts))
    assert split is not None
    assert [bytes(each) for each in split[1]] == contents
    assert service_pb2.ModelInferRequest.FromString(split[0]).model_name == name


@given(st.binary(max_size=200))
def test_nothing_breaks_the_splitting(raw: bytes) -> None:
    split = split_contents(raw)
    if split is not None:
        assert len(split[0]) <= len(raw)


def test_every_truncation_is_a_parse_error_or_a_request() -> None:
    request = message(raw=[b"a" * 20000])
    request.parameters["sequence_id"].int64_param = 5
    raw = request.SerializeToString()
    ends = [*range(200), *range(200, len(raw), 997)]
    outcomes = set()
    for end in ends:
        try:
            decode_request(raw[:end])
        except InferError as error:
            outcomes.add(error.code)
    assert outcomes == {"INTERNAL", "INVALID_ARG"}


def test_deep_nesting_is_a_parse_error() -> None:
    raw = b""
    for _ in range(10_000):
        raw = b"\x0b" + raw + b"\x0c"  # groups, of which protobuf follows a hundred
    with pytest.raises(InferError) as caught:
        decode_request(raw)
    assert caught.value.code == "INTERNAL"


@pytest.mark.parametrize(
    ("datatype", "field", "values", "dtype"),
    [
        ("BOOL", "bool_contents", [True, False], "?"),
        ("INT8", "int_contents", [-128, 127, 300], "i1"),
        ("INT16", "int_contents", [-1, 32767], "<i2"),
        ("INT32", "int_contents", [-(2**31), 5], "<i4"),
        ("INT64", "int64_contents", [-(2**63), 2**63 - 1], "<i8"),
        ("UINT8", "uint_contents", [0, 255, 256], "u1"),
        ("UINT16", "uint_contents", [65535], "<u2"),
        ("UINT32", "uint_contents", [2**32 - 1], "<u4"),
        ("UINT64", "uint64_contents", [2**64 - 1], "<u8"),
        ("FP32", "fp32_contents", [1.5, float("inf")], "<f4"),
        ("FP64", "fp64_contents", [1e300], "<f8"),
    ],
)
def test_typed_contents(datatype: str, field: str, values: list[Any], dtype: str) -> None:
    data = decoded(typed(datatype, **{field: values})).inputs[0].data
    kind = np.dtype(dtype).kind
    expected = np.array(values, np.dtype(f"{kind}8") if kind in "iu" else dtype).astype(dtype)
    assert data == expected.tobytes()


def test_typed_strings() -> None:
    data = decoded(typed("BYTES", bytes_contents=[b"ab", b"", b"\0"])).inputs[0].data
    assert data == struct.pack("<I2sII1s", 2, b"ab", 0, 1, b"\0")


def test_many_typed_strings() -> None:
    values = [b"%d" % number for number in range(150_000)]  # more than are joined at once
    data = decoded(typed("BYTES", bytes_contents=values)).inputs[0].data
    assert data == b"".join(struct.pack("<I", len(value)) + value for value in values)


def test_what_takes_long_to_decode() -> None:
    tensor = bytes(200_000)
    assert not takes_long(message(raw=[tensor]).SerializeToString()), "raw contents are not looked at"
    assert takes_long(typed("BYTES", bytes_contents=[tensor]).SerializeToString())
    assert not takes_long(typed("BYTES", bytes_contents=[tensor[:1000]]).SerializeToString())
    assert takes_long(tensor), "what is not well formed either"


def test_typed_contents_that_do_not_go_with_the_datatype() -> None:
    what = "unexpected explicit tensor data for input tensor 'x' for model 'm'"
    assert refused(typed("FP32", int_contents=[1])) == f"{what} of type 'INT32', expected datatype 'FP32'"
    assert refused(typed("FP16", fp32_contents=[1])) == f"{what} of type 'FP32', expected datatype 'FP16'"
    assert refused(typed("FLOAT", fp32_contents=[1])) == f"{what} of type 'FP32', expected datatype '<invalid>'"
    both = typed("FP32", fp32_contents=[1], int64_contents=[1])
    both.inputs[0].datatype = "INT64"
    assert refused(both) == f"{what}, binary data was already supplied."


def test_typed_contents_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_TYPED_ELEMENTS", 5)
    request = typed("BOOL", bool_contents=[True] * 3)
    decoded(request)
    request.inputs.append(request.inputs[0])
    assert "send tensors as raw_input_contents" in refused(request)


def test_contents_of_two_kinds_or_of_none() -> None:
    request = typed("FP32", fp32_contents=[1])
    request.raw_input_contents.append(b"1234")
    assert refused(request) == (
        "contents field must not be specified when using raw_input_contents for 'x' for model 'm'"
    )
    request = message(raw=[b"1234", b"5678"])
    del request.raw_input_contents[1]
    assert refused(request) == "unable to find data for input tensor 'y' for model 'm' in request."
    request = typed("FP32", fp32_contents=[1])
    request.inputs[0].parameters["shared_memory_region"].string_param = "r"
    request.inputs[0].parameters["shared_memory_byte_size"].int64_param = 4
    assert refused(request) == (
        "unexpected 'content' provided when using shared memory for input tensor 'x' for model 'm'"
    )
    assert decoded(typed("FP32")).inputs[0].data == b""


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        (
            {"shared_memory_region": {"int64_param": 1}},
            "invalid value type for 'shared_memory_region' parameter for tensor 'x', expected string_param.",
        ),
        (
            {"shared_memory_offset": {"int64_param": 1}},
            "'shared_memory_offset' can not be specified without 'shared_memory_region' parameter for tensor 'x'",
        ),
        (
            {"shared_memory_byte_size": {"int64_param": 1}},
            "'shared_memory_byte_size' can not be specified without 'shared_memory_region' parameter for tensor 'x'",
        ),
        (
            {"shared_memory_region": {"string_param": "r"}},
            "'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter for tensor 'x'",
        ),
        (
            {"shared_memory_region": {"string_param": "r"}, "shared_memory_offset": {"uint64_param": 1}},
            "invalid value type for 'shared_memory_offset' parameter for tensor 'x', expected int64_param.",
        ),
        (
            {"shared_memory_region": {"string_param": "r"}, "shared_memory_byte_size": {}},
            "invalid value type for 'shared_memory_byte_size' parameter for tensor 'x', expected int64_param.",
        ),
    ],
)
@pytest.mark.parametrize("where", ["inputs", "outputs"])
def test_region_parameters_of_the_wrong_kind(where: str, parameters: dict[str, Any], text: str) -> None:
    request = message(raw=[b"1234"])
    request.outputs.add(name="x")
    for name, value in parameters.items():
        getattr(request, where)[0].parameters[name].CopyFrom(service_pb2.InferParameter(**value))
    assert refused(request) == text


def test_negative_numbers_of_regions_are_those_of_uint64() -> None:
    request = message(raw=[b""])
    parameters = request.inputs[0].parameters
    parameters["shared_memory_region"].string_param = "r"
    parameters["shared_memory_offset"].int64_param = -1
    parameters["shared_memory_byte_size"].int64_param = -64
    found = decoded(request).inputs[0]
    assert (found.offset, found.byte_size) == (2**64 - 1, 2**64 - 64)
    parameters["shared_memory_region"].string_param = ""
    with pytest.raises(InferError) as caught:
        decoded(request)
    assert (caught.value.code, caught.value.message) == ("NOT_FOUND", "Unable to find shared memory region: ''")


def test_outputs() -> None:
    request = message(raw=[b"1234"])
    request.outputs.add(name="a")
    request.outputs.add(name="b").parameters["classification"].int64_param = 3
    region = request.outputs.add(name="c").parameters
    region["shared_memory_region"].string_param = "r"
    region["shared_memory_byte_size"].int64_param = 8
    region["shared_memory_offset"].int64_param = 4
    found = decoded(request).outputs
    assert found is not None
    assert [(o.name, o.region, o.offset, o.byte_size, o.classes) for o in found] == [
        ("a", "", 0, 0, 0),
        ("b", "", 0, 0, 3),
        ("c", "r", 4, 8, 0),
    ]
    region["classification"].int64_param = 1
    assert refused(request) == "output can't set both 'shared_memory_region' and 'classification'"
    region["classification"].int64_param = 0
    assert refused(request) == "invalid value for 'classification' parameter, expected >= 0"
    region["classification"].string_param = "1"
    assert refused(request) == "invalid value type for 'classification' parameter, expected int64_param"


def test_parameters() -> None:
    request = message(raw=[b"1234"])
    given = request.parameters
    given["sequence_id"].int64_param = -1
    given["sequence_start"].bool_param = True
    given["sequence_end"].bool_param = True
    given["priority"].uint64_param = 2**64 - 1
    given["timeout"].int64_param = 5000
    given["triton_enable_empty_final_response"].bool_param = True
    given["b"].bool_param = False
    given["i"].int64_param = -3
    given["u"].uint64_param = 2**64 - 1
    given["d"].double_param = 0.5
    given["s"].string_param = ""
    found = decoded(request)
    assert (found.sequence_id, found.sequence_start, found.sequence_end) == (2**64 - 1, True, True)
    assert (found.priority, found.timeout_us) == (2**64 - 1, 5000)
    assert found.parameters == {"b": False, "i": -3, "u": 2**64 - 1, "d": 0.5, "s": ""}
    given["sequence_id"].string_param = "seven"
    given["timeout"].int64_param = -1
    assert (decoded(request).sequence_id, decoded(request).timeout_us) == ("seven", 0)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("sequence_id", {"bool_param": True}, "parameter, expected int64_param or string_param."),
        ("sequence_start", {"int64_param": 1}, "parameter, expected bool_param."),
        ("sequence_end", {}, "parameter, expected bool_param."),
        ("priority", {"string_param": "1"}, "parameter, expected int64_param or uint64_param."),
        ("timeout", {"uint64_param": 1}, "parameter, expected int64_param."),
        ("triton_enable_empty_final_response", {"int64_param": 1}, "parameter, expected bool_param."),
        ("mine", {}, "parameter, expected int64_param, bool_param, or string_param."),
    ],
)
def test_parameters_of_the_wrong_kind(name: str, value: dict[str, Any], text: str) -> None:
    request = message(raw=[b"1234"])
    request.parameters[name].CopyFrom(service_pb2.InferParameter(**value))
    assert refused(request) == f"invalid value type for '{name}' {text}"


def test_parameters_that_are_refused() -> None:
    request = message(raw=[b"1234"])
    request.parameters["priority"].int64_param = -1
    assert refused(request) == "invalid value for 'priority', expected value >= 0."
    request.parameters["priority"].int64_param = 1
    request.parameters["triton_x"].int64_param = 1
    assert refused(request) == (
        "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys starting with "
        "'triton_' are allowed: triton_enable_empty_final_response"
    )


def test_what_takes_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    request = message()
    for _ in range(codec.MAX_ENTRIES + 1):
        request.inputs.add()
    assert refused(request) == "expected at most 4096 inputs but got 4097 inputs for model 'm'"
    monkeypatch.setattr(codec, "MAX_HEAD", 100_000)
    assert "send tensors as raw_input_contents" in refused(typed("BYTES", bytes_contents=[b"a" * 100_000]))
    decoded(message(raw=[b"a" * 100_000]))


def test_responses() -> None:
    large = np.arange(1000, dtype=np.float32)
    outputs = [
        OutputTensor("a", "FP32", (1000,), memoryview(large)),
        OutputTensor("in a region", "INT8", (2, 3), None),
        OutputTensor("empty", "BYTES", (0,), b""),
    ]
    parameters: Any = {"b": True, "i": 3, "d": 0.5, "s": "x"}
    raw = encode_response(InferResponse("m", "1", "7", outputs, parameters))
    found = service_pb2.ModelInferResponse.FromString(raw)
    assert (found.model_name, found.model_version, found.id) == ("m", "1", "7")
    assert [(o.name, o.datatype, list(o.shape)) for o in found.outputs] == [
        ("a", "FP32", [1000]),
        ("in a region", "INT8", [2, 3]),
        ("empty", "BYTES", [0]),
    ]
    assert list(found.raw_output_contents) == [large.tobytes(), b"", b""]
    values = {
        name: getattr(value, str(value.WhichOneof("parameter_choice"))) for name, value in found.parameters.items()
    }
    assert values == parameters
    assert [type(value) for value in values.values()] == [type(parameters[name]) for name in values]


def test_stream_messages() -> None:
    inner = encode_response(InferResponse("m", "1", "7", []), final=True)
    found = service_pb2.ModelStreamInferResponse.FromString(stream_message(inner))
    assert found.error_message == ""
    assert found.infer_response.id == "7"
    assert found.infer_response.parameters["triton_final_response"].bool_param
    error = InferError(Code.NOT_FOUND, "no")
    found = service_pb2.ModelStreamInferResponse.FromString(stream_error(error, InferRequest("m", "2", "8")))
    assert (found.error_message, found.infer_response.id, found.infer_response.model_version) == ("no", "8", "2")
    assert found.infer_response.parameters["triton_final_response"].bool_param
    assert service_pb2.ModelStreamInferResponse.FromString(stream_error(error, None)).error_message == "no"


def test_a_response_that_gRPC_cannot_send(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_MESSAGE", 1000)
    with pytest.raises(InferError, match="Response has byte size 1024 which exceeds gRPC's byte size limit 1000"):
        encode_response(InferResponse("m", "1", "", [OutputTensor("y", "INT8", (1000,), bytes(1000))]))
