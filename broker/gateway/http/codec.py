"""The infer endpoint's bodies: from JSON with tensors behind it to `InferRequest`, from `InferResponse` back.

A body is JSON of Inference-Header-Content-Length bytes, then the binary tensors one after the other in the order of the
inputs. Nothing is copied here: inputs are views of the body, outputs are passed on as they are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal

from broker.gateway.http.errors import invalid
from broker.gateway.http.json import (
    INT64_MAX,
    INT64_MIN,
    MISSING,
    as_array,
    as_bool,
    as_object,
    as_string,
    as_uint,
    dumps,
    find,
    member,
    parse,
    shown,
)
from broker.gateway.http.tensors import count_elements, read_data, write_data
from broker.gateway.kserve import Buffer, InferRequest, InferResponse, InputTensor, Parameter, RequestedOutput
from broker.gateway.placed import Placed, Within, refused, tensor_at
from shm.datatypes import BYTES, element_size
from shm.errors import Code, shortened
from shm.message_values import ModelMetadata

HEADER_LENGTH: Final = "Inference-Header-Content-Length"
RESERVED: Final = frozenset(
    ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output")
)
_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1
_STOI: Final = re.compile(r"\s*[+-]?\d+")
_PARAMETERS: Final = frozenset(
    (
        *("binary_data", "binary_data_size", "classification"),
        *("shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"),
    )
)
_CONTENTS: Final = "'data', 'binary_data_size' in 'parameters', 'shared_memory_region' in 'parameters'"


def header_length(header: str | None, body_length: int) -> int:
    """Bytes of JSON in a body; without the header all of them. Raises InferError."""
    if header is None:
        return body_length
    found = _STOI.match(header)
    if found is None:
        raise _no_length(f"Unable to parse {HEADER_LENGTH}, got: {header}", header, body_length)
    # Longer ones are out of range whatever they say, and converting them takes quadratic time.
    value = int(found[0]) if len(found[0]) < 32 else _INT32_MAX + 1
    if not _INT32_MIN <= value <= _INT32_MAX:
        text = f"Unable to parse {HEADER_LENGTH}, value is out of range [ {_INT32_MIN}, {_INT32_MAX} ], got: {header}"
        raise _no_length(text, header, body_length)
    if not 0 <= value <= body_length:
        text = f"inference header size should be in range (0, {body_length}), got: {header}"
        raise _no_length(text, header, body_length)
    return value


def _no_length(text: str, header: str, body_length: int) -> Placed:
    problem = f"expected a number from 0 to {body_length}, the bytes of the body, got {shortened(header)!r}"
    return refused(text, HEADER_LENGTH, problem)


def decode(model: str, version: str, body: Buffer, json_length: int, limit: int) -> tuple[InferRequest, bool]:
    """The request in `body`, and whether outputs that it does not list are wanted as binary. Raises InferError.

    `limit`: bytes of an input given as JSON (--http-max-input-size).
    """
    view = memoryview(body)
    document = parse(body if json_length == len(view) else view[:json_length])
    request = InferRequest(model, version)
    if (identifier := find(document, "id")) is not MISSING:
        request.id = as_string(identifier, "Unable to parse 'id': ")
    binary = False
    if (parameters := find(document, "parameters")) is not MISSING:
        with Within("parameters"):
            binary = read_parameters(request, as_object(parameters, "failed to get request params.: "))
    position = json_length
    inputs = as_array(member(document, "inputs", "Unable to parse 'inputs': "), "Unable to parse 'inputs': ")
    for index, item in enumerate(inputs):
        try:
            tensor, position = _read_input(item, view, position, model, limit)
        except Placed as error:
            raise _placed(error, "input", index, item) from None
        request.inputs.append(tensor)
    if position != len(view):
        raise refused(
            f"unexpected additional input data for model '{model}'",
            "",
            f"expected {position - json_length} bytes behind the JSON, the 'binary_data_size' of all inputs, got "
            f"{len(view) - json_length}",
        )
    if (outputs := find(document, "outputs")) is not MISSING:
        listed = []
        for index, item in enumerate(as_array(outputs, "Unable to parse 'outputs': ")):
            try:
                listed.append(_read_output(item))
            except Placed as error:
                raise _placed(error, "output", index, item) from None
        request.outputs = listed or None
    return request, binary


def decode_raw(metadata: ModelMetadata, body: Buffer) -> InferRequest:
    """A body that is one tensor and nothing else, for a model with one input, whose shape follows from the size."""
    model = metadata.name
    if len(metadata.inputs) != 1:
        raise invalid(
            f"Raw request must only have 1 input (found 1) to be deduced but got {len(metadata.inputs)} inputs in "
            f"'{model}' model configuration"
        )
    (expected,) = metadata.inputs
    batched = metadata.max_batch_size > 0
    shape = list(expected.shape[1:] if batched else expected.shape)
    data: Buffer = body
    if expected.datatype == BYTES:
        if math.prod(shape) != 1:
            raise invalid(f"For BYTE datatype raw input '{expected.name}', the model must have input shape [1]")
        data = b"".join((len(body).to_bytes(4, "little"), body))
    elif -1 in shape:
        if shape.count(-1) > 1:
            raise invalid(
                f"The shape of the raw input '{expected.name}' can not be deduced because there are more than one "
                "variable-sized dimension"
            )
        others = math.prod(dim for dim in shape if dim != -1) * element_size(expected.datatype)
        shape[shape.index(-1)] = len(body) // others if others else 0
    full = (1, *shape) if batched else tuple(shape)
    return InferRequest(model, metadata.version, inputs=[InputTensor(expected.name, expected.datatype, full, data)])


def read_parameters(request: InferRequest, parameters: dict[str, Any]) -> bool:
    """Set what the `parameters` of a request say; returns binary_data_output. Raises InferError."""
    binary = False
    for name, value in parameters.items():
        if name == "binary_data_output":
            binary = as_bool(value, "Unable to parse 'binary_data_output': ")
        elif name.startswith("triton_"):
            raise refused(
                "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified.",
                shortened(name),
                "expected another name, 'triton_' begins those that Triton keeps for itself",
            )
        elif not _read_option(request, name, value):
            request.parameters[name] = custom_parameter(name, value)
    return binary


def _read_option(request: InferRequest, name: str, value: Any) -> bool:
    """Set what a parameter with a meaning of its own says; False: `name` is none of them. Raises InferError."""
    if name == "sequence_id":
        is_number = type(value) is int and value >= 0
        check = as_uint if is_number else as_string
        request.sequence_id = check(value, "Unable to parse 'sequence_id': ")
    elif name == "sequence_start":
        request.sequence_start = as_bool(value, "Unable to parse 'sequence_start': ")
    elif name == "sequence_end":
        request.sequence_end = as_bool(value, "Unable to parse 'sequence_end': ")
    elif name == "priority":
        request.priority = as_uint(value, "Unable to parse 'priority': ")
    elif name == "timeout":
        request.timeout_us = as_uint(value, "Unable to parse 'timeout': ")
    else:
        return False
    return True


def custom_parameter(name: str, value: Any) -> Parameter:
    """A parameter that goes to the model. Raises InferError for null, arrays and objects."""
    if type(value) is int and not INT64_MIN <= value <= INT64_MAX:
        return float(value)
    if type(value) in (str, int, bool, float):
        return value  # type: ignore[no-any-return]
    raise Placed(
        Code.INVALID_ARG,
        f"parameter '{name}' has invalid type. It should be either 'int', 'bool', or 'string'.",
        shortened(name),
        f"expected a number, a string, true or false, got {shown(value)}",
    )


def forward_headers(request: InferRequest, headers: Iterable[tuple[bytes, bytes]], pattern: re.Pattern[str]) -> None:
    """--http-header-forward-pattern: headers with a matching name become parameters. Raises InferError."""
    for raw_name, raw_value in headers:
        name = raw_name.decode(errors="replace")
        if pattern.search(name) is None:
            continue
        if name in RESERVED or name.startswith("triton_"):
            raise refused(
                f"Header '{name}' is reserved for Triton usage and cannot be forwarded.",
                f"header {shortened(name)}",
                "expected another name, since --http-header-forward-pattern makes a parameter of it",
            )
        request.parameters[name] = raw_value.decode(errors="replace")


def encode(
    response: InferResponse, requested: Sequence[RequestedOutput] | None, binary: bool
) -> tuple[bytes, list[Buffer]]:
    """JSON, and the binary tensors that follow it. `binary`: for outputs that `requested` does not list."""
    kinds = {output.name: output.binary for output in requested or ()}
    blobs: list[Buffer] = []
    outputs: list[dict[str, Any]] = []
    all_finite = True
    for output in response.outputs:
        entry: dict[str, Any] = {"name": output.name, "datatype": output.datatype, "shape": output.shape}
        if output.data is None:
            pass  # it is in the caller's region
        elif kinds.get(output.name, binary):
            blob = byte_view(output.data)
            entry["parameters"] = {"binary_data_size": len(blob)}
            if blob:
                blobs.append(blob)
        else:
            entry["data"], finite = write_data(output.data, output.name, output.datatype, output.shape)
            all_finite = all_finite and finite
        outputs.append(entry)
    document: dict[str, Any] = {"id": response.id} if response.id else {}
    document["model_name"], document["model_version"] = response.model, response.version
    if response.parameters:
        document["parameters"] = response.parameters
        all_finite = all_finite and is_finite(response.parameters)
    document["outputs"] = outputs
    return dumps(document, finite=all_finite), blobs


def json_size(response: InferResponse, requested: Sequence[RequestedOutput] | None, binary: bool) -> int:
    """Bytes of the tensors that `encode` will write as JSON."""
    kinds = {output.name: output.binary for output in requested or ()}
    texts = [o.data for o in response.outputs if o.data is not None and not kinds.get(o.name, binary)]
    return sum(memoryview(data).nbytes for data in texts)


def is_finite(parameters: dict[str, Parameter]) -> bool:
    """Can strict JSON say them all?"""
    return all(math.isfinite(value) for value in parameters.values() if type(value) is float)


def byte_view(data: Buffer) -> Buffer:
    """`data` so that its len() is its size in bytes."""
    if isinstance(data, memoryview) and (data.ndim != 1 or data.itemsize != 1):
        return data.cast("B") if data.nbytes else b""
    return data


def _placed(error: Placed, kind: Literal["input", "output"], index: int, item: Any) -> Placed:
    """`error` in an entry of `inputs` or `outputs`, with the name that the entry gives itself."""
    if type(item) is not dict:
        problem = f"expected an object, got {shown(item)}"
        return Placed(error.code, error.message, tensor_at(kind, index, None), problem)
    if error.place in _PARAMETERS:
        error = error.inside("parameters")
    return error.inside(tensor_at(kind, index, item.get("name")))


def _read_input(item: Any, body: memoryview, position: int, model: str, limit: int) -> tuple[InputTensor, int]:
    """One entry of `inputs`, and where the next binary tensor begins."""
    parameters = find(item, "parameters")
    parameters = {} if parameters is MISSING else as_object(parameters, "Unable to parse 'parameters': ")
    has_data = find(item, "data") is not MISSING
    has_binary, has_region = "binary_data_size" in parameters, "shared_memory_region" in parameters
    if has_data + has_binary + has_region != 1:
        raise _not_one(has_data, has_binary, has_region)
    name = as_string(member(item, "name", "Unable to parse 'name': "), "Unable to parse 'name': ")
    datatype = as_string(member(item, "datatype", "Unable to parse 'datatype': "), "Unable to parse 'datatype': ")
    shape_json = as_array(member(item, "shape", "Unable to parse 'shape': "), "Unable to parse 'shape': ")
    shape = tuple([as_uint(dim, "Unable to parse 'shape': ") for dim in shape_json])
    if has_region:
        region, offset, size = _read_region(parameters)
        return InputTensor(name, datatype, shape, None, region, offset, size), position
    if has_binary:
        size = as_uint(parameters["binary_data_size"], "Unable to parse 'binary_data_size': ")
        end = position + size
        if end > len(body):
            raise refused(
                f"unexpected size for input '{name}', expecting {end - len(body)} additional bytes for model '{model}'",
                "binary_data_size",
                f"expected at most {len(body) - position}, the bytes left behind the JSON, got {size}",
            )
        return InputTensor(name, datatype, shape, body[position:end]), end
    count = count_elements(name, shape)
    return InputTensor(name, datatype, shape, read_data(item["data"], name, datatype, count, limit)), position


def _not_one(has_data: bool, has_binary: bool, has_region: bool) -> Placed:
    came = [
        name
        for name, has in (
            ("'data'", has_data),
            ("'binary_data_size'", has_binary),
            ("'shared_memory_region'", has_region),
        )
        if has
    ]
    what = f"set {' '.join(came)}" if came else "no field is set"
    return Placed(
        Code.INVALID_ARG,
        f"Input must set only one of the following fields: {_CONTENTS}. But {what}",
        "",
        "expected 'data', or 'binary_data_size' or 'shared_memory_region' in its 'parameters', got "
        + (" and ".join(came) or "none of them"),
    )


def _read_region(parameters: dict[str, Any]) -> tuple[str, int, int]:
    """(name, offset, byte size). The numbers exactly, up to 2**64 - 1: the registry says what is too far."""
    return (
        as_string(parameters["shared_memory_region"], "Unable to parse 'shared_memory_region': "),
        as_uint(parameters.get("shared_memory_offset", 0), "Unable to parse 'shared_memory_offset': "),
        as_uint(parameters.get("shared_memory_byte_size", 0), "Unable to parse 'shared_memory_byte_size': "),
    )


def _read_output(item: Any) -> RequestedOutput:
    parameters = find(item, "parameters")
    parameters = {} if parameters is MISSING else as_object(parameters, "Unable to parse 'parameters': ")
    has_region = "shared_memory_region" in parameters
    if has_region and "classification" in parameters:
        raise _not_both("classification")
    binary = as_bool(parameters.get("binary_data", False), "Unable to parse 'binary_data': ")
    if has_region and binary:  # the clients say `false` beside a region
        raise _not_both("binary_data")
    name = as_string(member(item, "name", "Unable to parse 'name': "), "Unable to parse 'name': ")
    if has_region:
        return RequestedOutput(name, *_read_region(parameters), binary=False)
    classes = as_uint(parameters.get("classification", 0), "Unable to set 'classification': ")
    return RequestedOutput(name, classes=classes, binary=binary)


def _not_both(name: str) -> Placed:
    text = f"Output can't set both 'shared_memory_region' and '{name}'"
    return refused(text, name, "expected none of it beside 'shared_memory_region', got both")
