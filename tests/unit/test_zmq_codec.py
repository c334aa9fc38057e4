"""The ZeroMQ gateway's messages, to and from plain data."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.gateway.kserve import InferResponse, InputTensor, OutputTensor, RequestedOutput
from broker.gateway.placed import Placed
from broker.gateway.zmq import codec
from shm import zmq_messages as words
from shm.errors import Code, InferError, ProtocolError

IN_REGION = {"name": "x", "datatype": "FP32", "shape": [1, 4], "region": "in", "offset": 8, "byte_size": 16}
INLINE = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": bytes(16)}


def packed(kind: str, **fields: Any) -> bytes:
    data: bytes = msgpack.packb({"type": kind, "id": 7, **fields})
    return data


def infer(**fields: Any) -> words.Infer:
    message = codec.decode(packed("infer", **{"model": "m", "inputs": [IN_REGION], **fields}))
    assert isinstance(message, words.Infer)
    return message


def test_an_inference_by_region() -> None:
    message = infer(
        outputs=[{"name": "y", "region": "out", "offset": 4, "byte_size": 16}],
        version="2",
        timeout_us=1000,
        priority=3,
        sequence_id="s",
        sequence_start=True,
        parameters={"a": 1, "b": True, "c": "x", "d": 0.5},
    )
    request = codec.infer_request(message)
    assert request.inputs == [InputTensor("x", "FP32", (1, 4), None, "in", 8, 16)]
    assert request.outputs == [RequestedOutput("y", "out", 4, 16)]
    assert (request.model, request.version, request.timeout_us, request.priority) == ("m", "2", 1000, 3)
    assert (request.sequence_id, request.sequence_start, request.sequence_end) == ("s", True, False)
    assert request.parameters == {"a": 1, "b": True, "c": "x", "d": 0.5}
    assert codec.inline_size(message) == 0


def test_an_inline_inference() -> None:
    message = infer(inputs=[INLINE])
    request = codec.infer_request(message)
    assert bytes(request.inputs[0].data or b"") == bytes(16)
    assert request.outputs is None
    assert codec.inline_size(message) == 16


@pytest.mark.parametrize(
    "tensor",
    [
        {**INLINE, "region": "in"},
        {**INLINE, "offset": 4},
        {"name": "x", "datatype": "FP32", "shape": [4]},
    ],
    ids=["both", "offset without region", "neither"],
)
def test_a_tensor_is_inline_or_in_a_region(tensor: dict[str, Any]) -> None:
    with pytest.raises(InferError, match="needs either 'data', or 'region'") as caught:
        codec.infer_request(infer(inputs=[tensor]))
    assert caught.value.code == "INVALID_ARG"


@pytest.mark.parametrize(
    "fields",
    [
        {"inputs": [{**IN_REGION, "offset": -1}]},
        {"inputs": [{**IN_REGION, "byte_size": 2**63}]},
        {"inputs": [{**IN_REGION, "shape": [1.0]}]},
        {"inputs": [{**IN_REGION, "shape": [True]}]},
        {"inputs": [{**IN_REGION, "shape": [1] * 65}]},
        {"inputs": [{**IN_REGION, "more": 1}]},
        {"inputs": [IN_REGION] * 4097},
        {"inputs": None},
        {"timeout_us": "1"},
        {"model": "m" * 5000},
        {"parameters": {"a": [1]}},
        {"unknown": 1},
        {"type": "infers"},
    ],
    ids=str,
)
def test_what_is_no_request_is_refused_by_its_id(fields: dict[str, Any]) -> None:
    with pytest.raises(codec.Refused) as caught:
        codec.decode(packed("infer", **{"model": "m", "inputs": [IN_REGION], **fields}))
    assert caught.value.request == 7


@pytest.mark.parametrize("number", [0, -1, 2**63, 2**64 - 1, "1", None])
def test_an_id_that_is_none_is_answered_as_0(number: object) -> None:
    with pytest.raises(codec.ProtocolError) as caught:
        codec.decode(msgpack.packb({"type": "heartbeat", "id": number}))
    assert getattr(caught.value, "request", 0) == 0


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x91" * 100_000, msgpack.packb([1]), packed("heartbeat") + b"\0", b"\x80\x04]\x94."]
)
def test_what_is_no_map_is_not_refused_but_bad(data: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        codec.decode(data)
    assert not isinstance(caught.value, codec.Refused) or caught.value.request == 0


@given(st.binary(max_size=200), st.integers(0, 200))
@settings(max_examples=300, deadline=None)
def test_bytes_of_any_kind_give_a_message_or_a_protocol_error(noise: bytes, at: int) -> None:
    good = packed("infer", model="m", inputs=[IN_REGION, INLINE])
    for data in (noise, good[:at], good[:at] + noise):
        try:
            codec.decode(data)
        except ProtocolError:
            pass


def prepare(**fields: Any) -> words.Prepare:
    given = {"model": "m", "inputs": [{**IN_REGION, "stride": 16}], **fields}
    message = codec.decode(packed("prepare", **given))
    assert isinstance(message, words.Prepare)
    return message


def run(**fields: Any) -> words.Run:
    message = codec.decode(packed("run", number=1, **fields))
    assert isinstance(message, words.Run)
    return message


def test_positions_of_what_is_prepared() -> None:
    output = {"name": "y", "region": "out", "byte_size": 16, "stride": 32}
    prepared = prepare(outputs=[output], input_slots=20, output_slots=4, parameters={"a": 1})
    codec.check_prepare(prepared)
    request = codec.run_request(prepared, run(input_slot=3, output_slot=2, timeout_us=5))
    assert request.inputs == [InputTensor("x", "FP32", (1, 4), None, "in", 8 + 3 * 16, 16)]
    assert request.outputs == [RequestedOutput("y", "out", 64, 16)]
    assert request.timeout_us == 5
    assert request.parameters == {"a": 1}
    for slots in ({"input_slot": 20}, {"output_slot": 4}):
        with pytest.raises(InferError, match="prepared were 20 and 4"):
            codec.run_request(prepared, run(**slots))


def test_what_cannot_be_prepared() -> None:
    with pytest.raises(InferError, match="must name a region"):
        codec.check_prepare(prepare(inputs=[INLINE]))
    output = {"name": "y", "region": "out", "byte_size": 16, "stride": 15}
    with pytest.raises(InferError, match="they would overlap"):
        codec.check_prepare(prepare(outputs=[output], output_slots=2))


def test_results_and_errors_on_the_wire() -> None:
    response = InferResponse(
        "m", "1", "", [OutputTensor("y", "FP32", (1,), None), OutputTensor("z", "FP32", (1,), memoryview(b"1234"))]
    )
    assert msgpack.unpackb(codec.encode(codec.result(9, response))) == {
        "type": "result",
        "id": 9,
        "model": "m",
        "version": "1",
        "outputs": [
            {"name": "y", "datatype": "FP32", "shape": [1]},
            {"name": "z", "datatype": "FP32", "shape": [1], "data": b"1234"},
        ],
    }
    error = codec.failure(9, InferError(Code.NOT_FOUND, "no"))
    assert msgpack.unpackb(codec.encode(error)) == {"type": "error", "id": 9, "code": "NOT_FOUND", "message": "no"}


def test_a_reply_that_fits_no_message_is_an_error_that_says_so() -> None:
    response = InferResponse("m", "1", "", [OutputTensor("y", "UINT8", (16 << 20,), bytes(16 << 20))])
    reply = msgpack.unpackb(codec.encode(codec.result(9, response)))
    assert (reply["type"], reply["id"], reply["code"]) == ("error", 9, "INVALID_ARG")
    assert "more than the 16777216 of a message" in reply["message"]


def test_an_error_that_knows_its_place_says_it() -> None:
    placed = Placed(Code.INVALID_ARG, "no", "inputs[1].shape", "expected [1], got [2]")
    assert codec.failure(9, placed).message == "no (inputs[1].shape: expected [1], got [2])"
    assert codec.failure(9, InferError(Code.INVALID_ARG, "no")).message == "no"
