"""The generate endpoints: flat JSON by tensor name in, flat JSON out, in one piece or as server-sent events.

Shapes follow from the model's metadata and the number of elements; keys that name no input become request parameters.
One response per request: models that answer more than once cannot be asked through the service yet.
"""

from __future__ import annotations

import math
from typing import Any, final

from broker.gateway.http_codec import custom_parameter, forward_headers, is_finite
from broker.gateway.http_errors import RAISE_LIMIT, invalid
from broker.gateway.http_inference import forward_pattern
from broker.gateway.http_json import MISSING, as_object, as_string, dumps, find, parse, repeated, unhurried
from broker.gateway.http_message import EVENTS, Reply, Request
from broker.gateway.http_tensors import read_flat, write_data
from broker.gateway.kserve import Buffer, InferRequest, InferResponse, InputTensor, Service
from broker.gateway.options import GatewayOptions
from shm.errors import InferError
from shm.message_values import ModelMetadata, TensorMetadata

_NESTED = "parameters"  # its members are taken as if they stood beside it


@final
class Generate:
    """The endpoints, on one service."""

    def __init__(self, service: Service, options: GatewayOptions) -> None:
        self._service = service
        self._limit = options.http_max_input_size
        self._forward = forward_pattern(options)

    async def generate(self, request: Request, model: str, version: str) -> Reply:
        """POST …/generate."""
        return Reply(parts=(await self._run(request, model, version),))

    async def stream(self, request: Request, model: str, version: str) -> Reply:
        """POST …/generate_stream."""
        return Reply(parts=(b"data: ", await self._run(request, model, version), b"\n\n"), content_type=EVENTS)

    async def _run(self, request: Request, model: str, version: str) -> bytes:
        metadata = await self._service.metadata(model, version)
        if request.headers.get("Content-Encoding") not in (None, "", "identity"):
            raise invalid("Unsupported content-encoding, only 'identity' is supported.")
        size = len(request.body)
        wanted = await unhurried(size, read_generate, metadata, version, request.body, self._limit)
        if self._forward is not None:
            forward_headers(wanted, request.raw_headers, self._forward)
        response = await self._service.infer(wanted, request.caller)
        size = sum(memoryview(output.data).nbytes for output in response.outputs if output.data is not None)
        return await unhurried(size, encode_generate, response)


def read_generate(metadata: ModelMetadata, version: str, body: Buffer, limit: int) -> InferRequest:
    """As `decode_generate`, from bytes; an input that is there twice is refused."""
    document = as_object(parse(body))
    twice = repeated(body, (tensor.name for tensor in metadata.inputs))
    if twice is not None:
        raise _already(twice)
    return decode_generate(metadata, version, document, limit)


def decode_generate(metadata: ModelMetadata, version: str, document: Any, limit: int) -> InferRequest:
    """The request that `document` makes of `metadata`'s model; inputs hold at most `limit` bytes. Raises InferError."""
    request = InferRequest(metadata.name, version)
    if (identifier := find(document, "id")) is not MISSING:
        request.id = as_string(identifier, "Unable to parse 'id': ")
    inputs = {tensor.name: tensor for tensor in metadata.inputs}
    members = dict(as_object(document))
    nested = members.pop(_NESTED, MISSING)
    if nested is not MISSING:
        if _NESTED in inputs:
            raise invalid(f"Keyword '{_NESTED}' for nested schema also given as input tensor name")
        nested = as_object(nested, f"Expected JSON object for keyword: '{_NESTED}': ")
        for name in nested:
            if name in inputs and name in members:
                raise _already(name)
        members |= nested
    used = 0
    for name, value in members.items():
        tensor = inputs.get(name)
        if tensor is not None:
            request.inputs.append(_read(tensor, value, used, limit))
            used += len(request.inputs[-1].data or b"")
        elif name != "id":
            request.parameters[name] = custom_parameter(name, value)
    return request


def encode_generate(response: InferResponse) -> bytes:
    """Flat JSON in Triton's order, which is the names'. Raises InferError for tensors that have no JSON form."""
    fields: dict[str, Any] = {"id": response.id} if response.id else {}
    fields |= {"model_name": response.model, "model_version": response.version}
    for name, parameter in response.parameters.items():
        fields.setdefault(name, parameter)
    all_finite = is_finite(response.parameters)
    for output in response.outputs:
        if output.data is None or output.name in fields:
            continue
        values, finite = write_data(output.data, output.name, output.datatype, output.shape)
        fields[output.name] = values[0] if len(values) == 1 else values
        all_finite = all_finite and finite
    return dumps(dict(sorted(fields.items())), finite=all_finite)


def _already(name: str) -> InferError:
    return invalid(f"input '{name}' already exists in request")


def _read(tensor: TensorMetadata, value: Any, used: int, limit: int) -> InputTensor:
    values = value if type(value) is list else [value]
    data = read_flat(values, tensor.name, tensor.datatype, limit)
    if not data:
        return InputTensor(tensor.name, tensor.datatype, (), b"")
    if used + len(data) > limit:
        raise invalid(
            f"request size of {used} bytes with input '{tensor.name}' of size {len(data)} bytes exceeds the maximum "
            f"allowed input size of {limit}. {RAISE_LIMIT}"
        )
    return InputTensor(tensor.name, tensor.datatype, shape_for(tensor, len(values)), data)


def shape_for(tensor: TensorMetadata, count: int) -> tuple[int, ...]:
    """The tensor's shape for `count` elements: the innermost open dimension takes what the fixed ones leave.

    Raises InferError when they leave no whole number.
    """
    shape = list(tensor.shape)
    fixed = math.prod(dim for dim in shape if dim != -1)
    rest, remainder = divmod(count, fixed) if fixed else (0, 1)
    for index in reversed(range(len(shape))):
        if shape[index] == -1:
            shape[index], rest = rest, 1
    if remainder or rest != 1:
        raise invalid(f"The schema can not convert input '{tensor.name}' to tensor with proper shape")
    return tuple(shape)
