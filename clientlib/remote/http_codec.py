"""Words as HTTP requests of KServe v2 / Triton, and answers back. Pure: no socket, no waiting.

Used by `clientlib.remote.http_transport` and `clientlib.remote.http_async`. Tensors travel behind the JSON, as Triton's
binary tensor data extension has it.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import msgspec

from clientlib import details
from clientlib.address import Address
from clientlib.remote import transport
from clientlib.remote.transport import Buffer, InferAnswer, InferRequest, OutputTensor, Word
from shm.errors import Code, InferError, no_version
from shm.message_values import IndexEntry, ModelMetadata, TensorMetadata
from shm.parameters import Parameter

T = TypeVar("T")
HEADER_LENGTH = "Inference-Header-Content-Length"
# 400 stands for several codes; most often it is this one.
_CODES = {
    400: Code.INVALID_ARG,
    403: Code.UNAVAILABLE,
    404: Code.NOT_FOUND,
    405: Code.UNSUPPORTED,
    500: Code.INTERNAL,
    501: Code.UNSUPPORTED,
    502: Code.UNAVAILABLE,
    503: Code.UNAVAILABLE,
    504: Code.UNAVAILABLE,
}
# Texts of Triton's and ours that no error of another code has.
_CODES_OF_400 = (
    (re.compile(r"shared memory region '.*' already in manager", re.DOTALL), Code.ALREADY_EXISTS),
    (re.compile(r"the request was cancelled"), Code.CANCELLED),
)
_MAX_TEXT = 4096  # characters of an answer that is no JSON, in an error
_DIGITS = re.compile("[0-9]+")


class HttpCall(NamedTuple):
    """A request; `parts` is its body. `read` makes the answer of a 200's body.

    `repeatable`: doing it twice is doing it once.
    """

    method: str
    path: str
    parts: Sequence[Buffer]
    headers: dict[str, str]
    read: Callable[[bytes], Any]
    repeatable: bool = True
    word: Word | None = None  # what is said; None: a request


def encode(address: Address, word: Word) -> HttpCall:
    """The request that says a control word."""
    return _encode(address, word)._replace(word=word)


def _encode(address: Address, word: Word) -> HttpCall:
    match word:
        case transport.Live():
            return _get(address, "/v2/health/live", lambda body: True)
        case transport.Index():
            return _post(address, "/v2/repository/index", _index, repeatable=True)
        case transport.Metadata(model, version):
            return _get(address, _model(model, version), lambda body: _metadata(body, version))
        case transport.Config(model, version):
            call = _get(address, f"{_model(model, version)}/config", _object)
            return call._replace(headers={details.HEADER: details.VALUE})
        case transport.Statistics(model, version):
            path = f"{_model(model, version)}/stats" if model else "/v2/models/stats"
            return _get(address, path, _statistics)
        case transport.Load(model):
            parameters: dict[str, Any] = {} if word.config is None else {"config": word.config}
            for path, data in word.files.items():
                parameters[f"file:{path}"] = base64.b64encode(data).decode()
            return _change(address, f"/v2/repository/models/{_quoted(model)}/load", parameters)
        case transport.Unload(model):
            parameters = {"unload_dependents": True} if word.unload_dependents else {}
            return _change(address, f"/v2/repository/models/{_quoted(model)}/unload", parameters)
        case _:
            raise InferError(Code.UNSUPPORTED, f"{type(word).__name__} is not said over HTTP: memory is not shared")


def encode_infer(address: Address, request: InferRequest) -> HttpCall:
    """The request that runs a model. Its parts are the JSON and views of the inputs' data."""
    parts: list[Buffer] = [b""]
    inputs = []
    for tensor in request.inputs:
        assert tensor.data is not None
        inputs.append(
            {
                "name": tensor.name,
                "shape": tensor.shape,
                "datatype": tensor.datatype,
                "parameters": {"binary_data_size": len(tensor.data)},
            }
        )
        parts.append(tensor.data)
    parameters: dict[str, Any] = {**request.parameters, "binary_data_output": True}
    if request.timeout_us:
        parameters["timeout"] = request.timeout_us
    if request.priority:
        parameters["priority"] = request.priority
    if request.sequence_id:
        parameters["sequence_id"] = request.sequence_id
        parameters["sequence_start"] = request.sequence_start
        parameters["sequence_end"] = request.sequence_end
    message: dict[str, Any] = {"inputs": inputs, "parameters": parameters}
    if request.outputs is not None:
        message["outputs"] = [{"name": wanted.name, "parameters": {"binary_data": True}} for wanted in request.outputs]
    parts[0] = header = msgspec.json.encode(message)
    headers = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(header))}
    path = f"{address.path}{_model(request.model, request.version)}/infer"
    return HttpCall("POST", path, parts, headers, _nothing, repeatable=False)


def decode_head(header: bytes) -> tuple[list[tuple[OutputTensor, int]], dict[str, Parameter]]:
    """The outputs that an answer's JSON describes, with the bytes that follow it for each; and its parameters."""
    outputs = []
    answer = _convert(_object(header), _Answer)
    for entry in answer.outputs:
        size = entry.parameters.binary_data_size
        if size < 0:
            raise InferError(Code.INTERNAL, f"the server's answer has no binary data for output '{entry.name}'")
        outputs.append((OutputTensor(entry.name, entry.datatype, entry.shape, None), size))
    return outputs, {name: v for name, v in answer.parameters.items() if isinstance(v, bool | int | float | str)}


def header_length(value: str | None, body_length: int) -> int:
    """Bytes of JSON in front of the binary data; the whole body without the header."""
    length = body_length if value is None else int(value) if value.isdecimal() else -1
    if not 0 <= length <= body_length:
        raise InferError(Code.INTERNAL, f"the server's answer has a {HEADER_LENGTH} of {value} in {body_length} bytes")
    return length


def decode_infer(value: str | None, body: bytes) -> InferAnswer:
    """The answer of a body that was read in one piece; `value` is its Inference-Header-Content-Length."""
    view = memoryview(body)
    position = header_length(value, len(body))
    described, parameters = decode_head(bytes(view[:position]))
    outputs = []
    for tensor, size in described:
        tensor.data = view[position : position + size]
        position += size
        outputs.append(tensor)
    check_end(position, len(body))
    return InferAnswer(outputs, parameters=parameters)


def check_end(position: int, body_length: int) -> None:
    """Raises InferError unless the outputs' bytes are all there are."""
    if position != body_length:
        raise InferError(
            Code.INTERNAL, f"the server's answer has {body_length} bytes, its outputs end at byte {position}"
        )


def error_of(status: int, body: bytes, word: Word | None = None) -> InferError:
    """The error that an answer with another status than 200 carries. `word`: what was said; None for a request."""
    code = _CODES.get(status, Code.INVALID_ARG if 400 <= status < 500 else Code.UNKNOWN)
    try:
        text = json.loads(body)["error"]
    except (ValueError, TypeError, KeyError):
        text = body.decode("utf-8", "replace")[:_MAX_TEXT].strip()
    if status == 400:
        code = next((better for pattern, better in _CODES_OF_400 if pattern.fullmatch(str(text).strip())), code)
    return InferError(
        code, transport.plain(str(text), word) if text else f"the server answered with HTTP status {status}"
    )


def _get(address: Address, path: str, read: Callable[[bytes], Any]) -> HttpCall:
    return HttpCall("GET", address.path + path, (), {}, read)


def _post(address: Address, path: str, read: Callable[[bytes], Any], *, repeatable: bool = False) -> HttpCall:
    return HttpCall("POST", address.path + path, (b"{}",), {"Content-Type": "application/json"}, read, repeatable)


def _change(address: Address, path: str, parameters: dict[str, Any]) -> HttpCall:
    body = msgspec.json.encode({"parameters": parameters} if parameters else {})
    return HttpCall("POST", address.path + path, (body,), {"Content-Type": "application/json"}, _nothing, False)


def _model(model: str, version: str) -> str:
    if version and not _DIGITS.fullmatch(version):
        raise no_version(version)  # the path of another version would be none: "Not Found"
    path = f"/v2/models/{_quoted(model)}"
    return f"{path}/versions/{_quoted(version)}" if version else path


def _quoted(name: str) -> str:
    return quote(name, safe="")


def _nothing(body: bytes) -> None:
    return None


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InferError(Code.INTERNAL, f"the server's answer is no JSON: {error}") from None


def _object(body: bytes) -> dict[str, Any]:
    value = _json(body)
    if not isinstance(value, dict):
        raise InferError(Code.INTERNAL, f"the server's answer is {type(value).__name__} where an object belongs")
    return value


def _convert(value: object, kind: type[T]) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise InferError(Code.INTERNAL, f"the server's answer cannot be read: {error}") from None


def _index(body: bytes) -> list[IndexEntry]:
    return _convert(_json(body), list[IndexEntry])


class _OutputParameters(msgspec.Struct, frozen=True):
    binary_data_size: int = -1


class _Output(msgspec.Struct):
    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: _OutputParameters = _OutputParameters()


class _Answer(msgspec.Struct):
    outputs: list[_Output] = []
    parameters: dict[str, object] = {}


class _Metadata(msgspec.Struct):
    name: str
    versions: list[str] = []
    platform: str = ""
    inputs: list[TensorMetadata] = []
    outputs: list[TensorMetadata] = []


def _metadata(body: bytes, version: str) -> ModelMetadata:
    found = _convert(_object(body), _Metadata)
    return ModelMetadata(
        name=found.name,
        version=version or transport.latest(found.versions),
        versions=tuple(found.versions),
        platform=found.platform,
        inputs=tuple(found.inputs),
        outputs=tuple(found.outputs),
    )


def _statistics(body: bytes) -> list[dict[str, Any]]:
    return _convert(_object(body).get("model_stats", []), list[dict[str, Any]])
