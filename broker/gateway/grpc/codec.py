"""Inference messages of `inference.GRPCInferenceService`, from and to `broker.gateway.kserve`'s plain data.

Used by `broker.gateway.grpc.server` (ModelInfer) and `grpc.stream` (ModelStreamInfer). Error texts are Triton's, as are
the rules: `raw_input_contents` has one entry per input that lies in no region, `raw_output_contents` one per output.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from broker.gateway.grpc.contents import MAX_TYPED_ELEMENTS, typed_contents
from broker.gateway.kserve import (
    Buffer,
    InferRequest,
    InferResponse,
    InputTensor,
    OutputTensor,
    Parameter,
    RequestedOutput,
)
from clientlib.details import CODE
from shm.errors import Code, InferError

MAX_MESSAGE: Final = 2**31 - 1  # bytes; gRPC's own limit, and Triton's

# Decoding holds the event loop, so what costs time per entry is bounded; tensors' bytes cost nothing per byte here.
MAX_HEAD: Final = 64 << 20  # bytes of a request without its raw_input_contents
MAX_ENTRIES: Final = 4096  # inputs, outputs, parameters, and fields looked at by `split_contents`

_LONG_FROM = 128 << 10  # bytes; some milliseconds
_SPLIT_FROM = 16 << 10  # bytes; protobuf copies each tensor twice, which costs less than looking for them below this
_RAW_INPUT_TAG = service_pb2.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER << 3 | 2
_RAW_OUTPUT_TAG = bytes((service_pb2.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER << 3 | 2,))
_INFER_RESPONSE_TAG = bytes((service_pb2.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER << 3 | 2,))
_UNSIGNED = 2**64 - 1

EMPTY_FINAL: Final = "triton_enable_empty_final_response"
FINAL: Final = "triton_final_response"


def parse(message: Any, raw: Buffer) -> Any:
    """A protobuf message of class `message`. Raises InferError (INTERNAL, as gRPC's own codecs) if `raw` is none."""
    try:
        return message.FromString(raw)
    except (DecodeError, ValueError):  # ValueError: nested too deeply
        raise InferError(Code.INTERNAL, f"failed to parse the request as {message.DESCRIPTOR.full_name}") from None


def takes_long(raw: bytes) -> bool:
    """Has `raw` so much beside its raw_input_contents that others should not wait while it is decoded?"""
    if len(raw) < _LONG_FROM:
        return False
    split = split_contents(raw)
    return split is None or len(split[0]) >= _LONG_FROM


def decode_request(raw: bytes, understood: list[InferRequest] | None = None) -> InferRequest:
    """A ModelInferRequest. Large tensors are views of `raw`, not copies. Raises InferError with Triton's texts.

    The request is added to `understood` as soon as its model and id are known, for `stream_error`.
    """
    message, contents = _parse_infer(raw)
    model = message.model_name
    request = InferRequest(model, message.model_version, message.id)
    if understood is not None:
        understood.append(request)
    for what in ("inputs", "outputs", "parameters"):
        if len(getattr(message, what)) > MAX_ENTRIES:
            given = len(getattr(message, what))
            raise _invalid(f"expected at most {MAX_ENTRIES} {what} but got {given} {what} for model '{model}'")
    if message.parameters:
        _read_parameters(request, message.parameters)
    request.inputs = _read_inputs(message, contents)
    if message.outputs:
        request.outputs = [_read_output(output) for output in message.outputs]
    return request


def encode_response(response: InferResponse, final: bool | None = None) -> bytes:
    """A ModelInferResponse; `final` (streams): the parameter that tells whether this is the request's last response.

    The tensors' bytes are copied once. Raises InferError (INVALID_ARG) for more than gRPC can send.
    """
    message = service_pb2.ModelInferResponse(
        model_name=response.model,
        model_version=response.version,
        id=response.id,
        outputs=[
            service_pb2.ModelInferResponse.InferOutputTensor(name=o.name, datatype=o.datatype, shape=o.shape)
            for o in response.outputs
        ],
    )
    for name, value in response.parameters.items():
        _write_parameter(message.parameters[name], value)
    if final is not None:
        message.parameters[FINAL].bool_param = final
    return _joined(message.SerializeToString(), response.outputs)


def stream_message(response: bytes) -> bytes:
    """A ModelStreamInferResponse with an encoded ModelInferResponse inside."""
    return b"".join((_INFER_RESPONSE_TAG, varint(len(response)), response))


def stream_error(error: InferError, request: InferRequest | None, *, final: bool = True, coded: bool = False) -> bytes:
    """A ModelStreamInferResponse with an error; the stream goes on. `request`: as far as it was understood; `final`:
    nothing more of it comes; `coded`: with the error's code, for which Triton's message has no field.
    """
    infer = _empty(request, final)
    if coded:
        infer.parameters[CODE].string_param = error.code
    message = service_pb2.ModelStreamInferResponse(error_message=error.message, infer_response=infer)
    encoded: bytes = message.SerializeToString()
    return encoded


def stream_end(request: InferRequest) -> bytes:
    """A ModelStreamInferResponse without outputs: all responses to `request` have been sent."""
    encoded: bytes = service_pb2.ModelStreamInferResponse(infer_response=_empty(request, True)).SerializeToString()
    return encoded


def split_contents(raw: bytes) -> tuple[bytes, list[memoryview]] | None:
    """`raw` without its raw_input_contents, and views of these. None: nothing to gain, or not well formed."""
    view = memoryview(raw)
    rest: list[memoryview] = []
    contents: list[memoryview] = []
    position = start = 0
    try:
        for _ in range(MAX_ENTRIES):
            if position == len(raw):
                rest.append(view[start:])
                return b"".join(rest), contents
            tag, after = _read_varint(raw, position)
            kind = tag & 7
            if kind == 2:
                size, after = _read_varint(raw, after)
                if after + size > len(raw):
                    return None
                if tag == _RAW_INPUT_TAG:
                    rest.append(view[start:position])
                    contents.append(view[after : after + size])
                    start = after + size
                after += size
            elif kind == 0:
                _, after = _read_varint(raw, after)
            else:
                after += {1: 8, 5: 4}[kind]
            position = after
    except (IndexError, KeyError):
        pass
    return None


def varint(value: int) -> bytes:
    """`value`, 0 or more, as protobuf writes lengths."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _empty(request: InferRequest | None, final: bool) -> Any:
    infer = service_pb2.ModelInferResponse()
    if request is not None:
        infer.id, infer.model_name, infer.model_version = request.id, request.model, request.version
    infer.parameters[FINAL].bool_param = final
    return infer


def _read_varint(raw: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise IndexError("no varint")


def _parse_infer(raw: bytes) -> tuple[Any, Sequence[Buffer]]:
    """The message, and its raw_input_contents."""
    split = split_contents(raw) if len(raw) >= _SPLIT_FROM else None
    head, contents = (raw, None) if split is None else split
    if len(head) > MAX_HEAD:
        raise _invalid(
            f"a request of {len(head)} bytes without its raw_input_contents exceeds the maximum of {MAX_HEAD}: "
            "send tensors as raw_input_contents"
        )
    message = parse(service_pb2.ModelInferRequest, head)
    return message, message.raw_input_contents if contents is None else contents


def _read_inputs(message: Any, contents: Sequence[Buffer]) -> list[InputTensor]:
    used = 0
    room = MAX_TYPED_ELEMENTS
    inputs: list[InputTensor] = []
    for tensor in message.inputs:
        parsed = InputTensor(tensor.name, tensor.datatype, tuple(tensor.shape))
        inputs.append(parsed)
        if tensor.parameters and (region := _region(tensor)):
            parsed.region, parsed.offset, parsed.byte_size = region
            if tensor.HasField("contents"):
                raise _invalid(
                    "unexpected 'content' provided when using shared memory for input tensor "
                    f"'{tensor.name}' for model '{message.model_name}'"
                )
        elif tensor.HasField("contents"):
            if contents:
                raise _invalid(
                    "contents field must not be specified when using raw_input_contents for "
                    f"'{tensor.name}' for model '{message.model_name}'"
                )
            parsed.data, elements = typed_contents(tensor, message.model_name, room)
            room -= elements
        elif used < len(contents):
            parsed.data = contents[used]
            used += 1
        else:
            raise _invalid(
                f"unable to find data for input tensor '{tensor.name}' for model '{message.model_name}' in request."
            )
    return inputs


def _read_output(tensor: Any) -> RequestedOutput:
    output = RequestedOutput(tensor.name)
    parameters = tensor.parameters
    if not parameters:
        return output
    region = _region(tensor)
    if region is not None:
        output.region, output.offset, output.byte_size = region
    if "classification" in parameters:
        if parameters["classification"].WhichOneof("parameter_choice") != "int64_param":
            raise _invalid("invalid value type for 'classification' parameter, expected int64_param")
        output.classes = parameters["classification"].int64_param
        if output.classes <= 0:
            raise _invalid("invalid value for 'classification' parameter, expected >= 0")
        if region is not None:
            raise _invalid("output can't set both 'shared_memory_region' and 'classification'")
    return output


def _region(tensor: Any) -> tuple[str, int, int] | None:
    """Region, offset and byte size from a tensor's parameters. Negative numbers wrap to uint64, as in Triton."""
    parameters = tensor.parameters
    region: str | None = None
    numbers = {"shared_memory_offset": 0, "shared_memory_byte_size": 0}
    if "shared_memory_region" in parameters:
        region = _typed(parameters, "shared_memory_region", "string_param", tensor.name)
    for name in numbers:
        if name in parameters:
            if region is None:
                raise _invalid(
                    f"'{name}' can not be specified without 'shared_memory_region' parameter for tensor '{tensor.name}'"
                )
            numbers[name] = _typed(parameters, name, "int64_param", tensor.name) & _UNSIGNED
        elif region is not None and name == "shared_memory_byte_size":
            raise _invalid(
                f"'{name}' must be specified along with 'shared_memory_region' parameter for tensor '{tensor.name}'"
            )
    if region is None:
        return None
    if not region:  # never a region's name, and "" means none in plain data
        raise InferError(Code.NOT_FOUND, "Unable to find shared memory region: ''")
    return region, numbers["shared_memory_offset"], numbers["shared_memory_byte_size"]


def _typed(parameters: Any, name: str, choice: str, tensor: str) -> Any:
    if parameters[name].WhichOneof("parameter_choice") != choice:
        raise _invalid(f"invalid value type for '{name}' parameter for tensor '{tensor}', expected {choice}.")
    return getattr(parameters[name], choice)


def _read_parameters(request: InferRequest, parameters: Any) -> None:
    """Those that Triton knows go to fields of the request, all others to its `parameters`."""
    for name, parameter in parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        value: Any = getattr(parameter, choice) if choice else None
        expected = _EXPECTED.get(name)
        if expected is not None:
            if choice not in expected:
                raise _wrong_type(name, " or ".join(expected))
            _set_known(request, name, value)
        elif name.startswith("triton_"):
            raise _invalid(
                "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys "
                f"starting with 'triton_' are allowed: {EMPTY_FINAL}"
            )
        elif choice is None:
            raise _wrong_type(name, "int64_param, bool_param, or string_param")
        else:
            request.parameters[name] = value


_EXPECTED: Final = {
    "sequence_id": ("int64_param", "string_param"),
    "sequence_start": ("bool_param",),
    "sequence_end": ("bool_param",),
    "priority": ("int64_param", "uint64_param"),
    "timeout": ("int64_param",),
    EMPTY_FINAL: ("bool_param",),
}


def _set_known(request: InferRequest, name: str, value: Any) -> None:
    if name == "sequence_id":
        request.sequence_id = value if isinstance(value, str) else value & _UNSIGNED
    elif name == "sequence_start":
        request.sequence_start = value
    elif name == "sequence_end":
        request.sequence_end = value
    elif name == "timeout":
        request.timeout_us = max(value, 0)  # negative is, as uint64, no timeout in Triton
    elif name == "priority":
        if value < 0:
            raise _invalid("invalid value for 'priority', expected value >= 0.")
        request.priority = value
    elif name == EMPTY_FINAL:
        request.empty_final = value


def _write_parameter(parameter: Any, value: Parameter) -> None:
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int) and value < 1 << 63:
        parameter.int64_param = value
    elif isinstance(value, int):
        parameter.uint64_param = value  # the id of a sequence
    elif isinstance(value, float):
        parameter.double_param = value
    else:
        parameter.string_param = value


def _joined(head: bytes, outputs: Iterable[OutputTensor]) -> bytes:
    """`head` and the outputs' bytes as raw_output_contents: written by hand, because protobuf copies twice."""
    parts: list[Buffer] = [head]
    size = len(head)
    for output in outputs:
        data = b"" if output.data is None else output.data
        length = data.nbytes if isinstance(data, memoryview) else len(data)
        prefix = _RAW_OUTPUT_TAG + varint(length)
        parts += (prefix, data)
        size += len(prefix) + length
    if size > MAX_MESSAGE:
        raise _invalid(f"Response has byte size {size} which exceeds gRPC's byte size limit {MAX_MESSAGE}.")
    return b"".join(parts)


def _wrong_type(name: str, expected: str) -> InferError:
    return _invalid(f"invalid value type for '{name}' parameter, expected {expected}.")


def _invalid(text: str) -> InferError:
    return InferError(Code.INVALID_ARG, text)
