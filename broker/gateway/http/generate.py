"""The generate endpoints: flat JSON by tensor name in, flat JSON out: one response, or server-sent events as they come.

Shapes follow from the model's metadata and the number of elements; keys that name no input become request parameters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, final

from broker.gateway.http.codec import custom_parameter, forward_headers, is_finite
from broker.gateway.http.errors import RAISE_LIMIT, body_of, internal, invalid, status_of
from broker.gateway.http.inference import forward_pattern, sampled
from broker.gateway.http.json import MISSING, as_object, as_string, dumps, find, parse, repeated, unhurried
from broker.gateway.http.message import EVENTS, Reply, Request
from broker.gateway.http.tensors import read_flat, write_data
from broker.gateway.kserve import Buffer, InferRequest, InferResponse, InputTensor, Responses, Service
from broker.gateway.options import GatewayOptions
from broker.gateway.placed import Placed, Within, refused
from shm.datatypes import shape_text
from shm.errors import Code, InferError, fresh, shortened
from shm.message_values import ModelMetadata, TensorMetadata

MAX_NAMED: Final = 8  # parameters that an error names
_OF_INPUT: Final = re.compile(
    r"inputs\[(\d+)\]\.?(\w.*)$"
)  # a place in a request that is no document: which, what of it
_NESTED: Final = "parameters"  # its members are taken as if they stood beside it
NOT_ONE: Final = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various "
    "number of responses"
)


@final
class Generate:
    """The endpoints, on one service."""

    def __init__(self, service: Service, options: GatewayOptions) -> None:
        self._service = service
        self._limit = options.http_max_input_size
        self._forward = forward_pattern(options)

    async def generate(self, request: Request, model: str, version: str) -> Reply:
        """POST …/generate."""
        responses = await self._ask(request, model, version)
        try:
            response = await anext(responses, None)
            if response is None or not (response.final or await anext(responses, None) is None):
                raise internal(NOT_ONE)
        finally:
            await responses.aclose()
        if response.error is not None:
            raise fresh(response.error)
        return Reply(parts=(await _encoded(response),))

    async def stream(self, request: Request, model: str, version: str) -> Reply:
        """POST …/generate_stream. The first response is waited for: it decides the status of them all."""
        events = Events(await self._ask(request, model, version))
        try:
            first = await anext(events, None)
        except BaseException:
            await events.aclose()
            raise
        parts = () if first is None else (first,)
        return Reply(events.status, parts, EVENTS, rest=events)

    async def _ask(self, request: Request, model: str, version: str) -> Responses:
        metadata = await self._service.metadata(model, version)
        if request.headers.get("Content-Encoding") not in (None, "", "identity"):
            raise invalid("Unsupported content-encoding, only 'identity' is supported.")
        wanted = await unhurried(len(request.body), read_generate, metadata, version, request.body, self._limit)
        if self._forward is not None:
            forward_headers(wanted, request.raw_headers, self._forward)
        if request.received[0]:
            wanted.trace = sampled(self._service, wanted.model, request)
        try:
            return await self._service.stream(wanted, request.caller)
        except InferError as error:
            raise explained(error, metadata, wanted) from None


@final
class Events:
    """Responses as server-sent events. `status`: of the last one, as HTTP would have it."""

    def __init__(self, responses: Responses) -> None:
        self._responses = responses
        self.status = 200

    def __aiter__(self) -> Events:
        return self

    async def __anext__(self) -> bytes:
        response = await anext(self._responses)
        try:
            if response.error is not None:
                raise fresh(response.error)
            text, self.status = await _encoded(response), 200
        except InferError as error:
            text, self.status = body_of(error.message), status_of(error)
        return b"".join((b"data: ", text, b"\n\n"))

    async def aclose(self) -> None:
        """Nobody wants any more of them: the request is cancelled if it still runs."""
        await self._responses.aclose()


async def _encoded(response: InferResponse) -> bytes:
    return await unhurried(response.byte_size, encode_generate, response)


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
    members = as_object(document)
    for name, value in members.items():
        if name != _NESTED:
            _take(request, inputs, name, value, limit)
            continue
        if _NESTED in inputs:
            raise invalid(f"Keyword '{_NESTED}' for nested schema also given as input tensor name")
        nested = as_object(value, f"Expected JSON object for keyword: '{_NESTED}': ")
        with Within(_NESTED, f"Converting keyword: '{_NESTED}': "):
            for inner, each in nested.items():
                if inner in inputs and inner in members:
                    raise _already(inner)
                _take(request, inputs, inner, each, limit)
    return request


def _take(request: InferRequest, inputs: Mapping[str, TensorMetadata], name: str, value: Any, limit: int) -> None:
    """One member of the document: an input, or a parameter."""
    tensor = inputs.get(name)
    if tensor is not None:
        used = sum(len(each.data or b"") for each in request.inputs)
        with Within(name):
            request.inputs.append(_read(tensor, value, used, limit))
    elif name != "id":  # also "timeout" and "priority": as in Triton they are the model's, which may have its own
        try:
            request.parameters[name] = custom_parameter(name, value)
        except Placed as error:
            raise Placed(error.code, error.message, error.place, f"{_no_input(inputs)}: {error.problem}") from None


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


def _no_input(inputs: Mapping[str, TensorMetadata]) -> str:
    return f"this is no input of the model, which has {_listed(inputs)}, so it is a parameter of the request"


def explained(error: InferError, metadata: ModelMetadata, wanted: InferRequest) -> InferError:
    """`error`, which the request met with, as its body has it: without `inputs`. Where some are missing, with what may
    have been meant for them.
    """
    given = [tensor.name for tensor in wanted.inputs]
    missing = [tensor for tensor in metadata.inputs if not tensor.optional and tensor.name not in given]
    if error.code == Code.INVALID_ARG.name and missing:
        lacks = ", ".join(f"'{each.name}' ({each.datatype} {shape_text(each.shape)})" for each in missing)
        others = ", ".join(f"'{shortened(name)}'" for name in list(wanted.parameters)[:MAX_NAMED])
        verb = "is" if len(wanted.parameters) == 1 else "are"
        came = f"; {others} {verb} no input of the model, but parameters of the request" if others else ""
        return Placed(error.code, error.message, "", f"expected {lacks}, too, got {_listed(given)}{came}")
    if isinstance(error, Placed) and (found := _OF_INPUT.search(error.place)) is not None:
        return Placed(error.code, error.message, given[int(found[1])], f"{found[2]}: {error.problem}")
    return error


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "no input"


def _already(name: str) -> Placed:
    return refused(f"input '{name}' already exists in request", name, "expected it once, got it twice")


def _read(tensor: TensorMetadata, value: Any, used: int, limit: int) -> InputTensor:
    data, count = read_flat(value, tensor.name, tensor.datatype, limit)
    if not data:
        return InputTensor(tensor.name, tensor.datatype, (), b"")
    if used + len(data) > limit:
        raise refused(
            f"request size of {used} bytes with input '{tensor.name}' of size {len(data)} bytes exceeds the maximum "
            f"allowed input size of {limit}. {RAISE_LIMIT}",
            "",
            f"expected at most {limit - used} bytes beside the other inputs, got {len(data)}",
        )
    return InputTensor(tensor.name, tensor.datatype, shape_for(tensor, count), data)


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
        raise refused(
            f"The schema can not convert input '{tensor.name}' to tensor with proper shape",
            "",
            f"expected as many elements as fill the shape {shape_text(tensor.shape)}, got {count}",
        )
    return tuple(shape)
