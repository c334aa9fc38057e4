"""Words as messages of `inference.GRPCInferenceService`, and back. Pure: no channel, no waiting.

Used by both classes of `clientlib.remote.grpc_transport`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tritonclient.grpc import service_pb2

from clientlib import details
from clientlib.address import Address
from clientlib.pending import expired
from clientlib.remote import transport
from clientlib.remote.transport import InferAnswer, InferRequest, OutputTensor, Word
from shm.errors import Code, InferError
from shm.message_values import IndexEntry, ModelMetadata, TensorMetadata
from shm.parameters import Parameter

# By the number of a gRPC status.
_CODES = {
    1: Code.CANCELLED,
    2: Code.UNKNOWN,
    3: Code.INVALID_ARG,
    4: Code.UNAVAILABLE,
    5: Code.NOT_FOUND,
    6: Code.ALREADY_EXISTS,
    8: Code.UNAVAILABLE,
    12: Code.UNSUPPORTED,
    13: Code.INTERNAL,
    14: Code.UNAVAILABLE,
}
_DEADLINE_EXCEEDED, _UNAVAILABLE = 4, 14
# How gRPC's own reports of a connection begin, which the server has not said.
_NEVER_SENT = (
    "failed to connect",
    "DNS resolution failed",
    "connections to all backends failing",
    "empty address list",
)
_LOST = (
    "Socket closed",
    "recvmsg",
    "sendmsg",
    "Connection reset",
    "Broken pipe",
    "Stream removed",
    "GOAWAY",
    "keepalive",
)


Metadata = tuple[tuple[str, str], ...]
DETAILED: Metadata = ((details.HEADER, details.VALUE),)


class Rpc(NamedTuple):
    """A method of the service, what it is asked, and how its answer is read."""

    method: str
    request: Any
    read: Callable[[Any], Any]
    metadata: Metadata = ()


def encode(word: Word) -> Rpc:
    """The call that says a control word."""
    match word:
        case transport.Live():
            return Rpc("ServerLive", service_pb2.ServerLiveRequest(), lambda reply: bool(reply.live))
        case transport.Index():
            return Rpc("RepositoryIndex", service_pb2.RepositoryIndexRequest(), _index)
        case transport.Metadata(model, version):
            asked = service_pb2.ModelMetadataRequest(name=model, version=version)
            return Rpc("ModelMetadata", asked, lambda reply: _metadata(reply, version))
        case transport.Config(model, version):
            asked = service_pb2.ModelConfigRequest(name=model, version=version)
            return Rpc("ModelConfig", asked, _config, DETAILED)
        case transport.Statistics(model, version):
            asked = service_pb2.ModelStatisticsRequest(name=model, version=version)
            return Rpc("ModelStatistics", asked, lambda reply: [_model_stats(each) for each in reply.model_stats])
        case transport.Load(model):
            asked = service_pb2.RepositoryModelLoadRequest(model_name=model)
            if word.config is not None:
                asked.parameters["config"].string_param = word.config
            for path, data in word.files.items():
                asked.parameters[f"file:{path}"].bytes_param = data
            return Rpc("RepositoryModelLoad", asked, _nothing)
        case transport.Unload(model):
            asked = service_pb2.RepositoryModelUnloadRequest(model_name=model)
            if word.unload_dependents:
                asked.parameters["unload_dependents"].bool_param = True
            return Rpc("RepositoryModelUnload", asked, _nothing)
        case _:
            raise InferError(Code.UNSUPPORTED, f"{type(word).__name__} is not said over gRPC: memory is not shared")


def encode_infer(request: InferRequest) -> Any:
    """The message of a request. Copies the inputs' data into it."""
    message = service_pb2.ModelInferRequest(model_name=request.model, model_version=request.version)
    for tensor in request.inputs:
        assert tensor.data is not None
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_input_contents.append(bytes(tensor.data))
    for wanted in request.outputs or ():
        message.outputs.add(name=wanted.name)
    parameters = message.parameters
    for name, value in request.parameters.items():
        setattr(parameters[name], _choice(value), value)
    if request.timeout_us:
        parameters["timeout"].int64_param = request.timeout_us
    if request.priority:
        parameters["priority"].uint64_param = request.priority
    if request.sequence_id:
        if request.sequence_id >= 2**63:  # the wire's number is signed
            raise InferError(Code.INVALID_ARG, f"over gRPC a sequence_id is at most {2**63 - 1}")
        parameters["sequence_id"].int64_param = request.sequence_id
        parameters["sequence_start"].bool_param = request.sequence_start
        parameters["sequence_end"].bool_param = request.sequence_end
    return message


def _choice(value: Parameter) -> str:
    """The field of a parameter's message for such a value."""
    if isinstance(value, bool):
        return "bool_param"
    if isinstance(value, int):
        return "int64_param" if value < 2**63 else "uint64_param"
    return "double_param" if isinstance(value, float) else "string_param"


def decode_infer(reply: Any) -> InferAnswer:
    """The answer of a `ModelInferResponse`."""
    raw = reply.raw_output_contents
    if len(raw) != len(reply.outputs):
        raise InferError(
            Code.INTERNAL, f"the server's answer has {len(raw)} raw_output_contents for {len(reply.outputs)} outputs"
        )
    return InferAnswer(
        [
            OutputTensor(tensor.name, tensor.datatype, tuple(tensor.shape), data)
            for tensor, data in zip(reply.outputs, raw, strict=True)
        ],
        parameters=_said(reply.parameters),
    )


def _said(parameters: Any) -> dict[str, Parameter]:
    """Parameters of an answer; those of a kind that is not known are left out."""
    found = {}
    for name, parameter in parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is not None:
            found[name] = getattr(parameter, choice)
    return found


def error_of(address: Address, number: int, text: str, word: Word | None) -> InferError:
    """The error of a call that ended with status `number`. `word`: what was said; None for a request."""
    if number == _DEADLINE_EXCEEDED:
        return expired() if word is None else transport.late(address, word)
    if number == _UNAVAILABLE and text.startswith(_NEVER_SENT):
        return transport.unreachable(address, text.rpartition("last error: ")[2])
    if number == _UNAVAILABLE and text.startswith(_LOST):
        return transport.lost(address, text)
    return InferError(_CODES.get(number, Code.UNKNOWN), transport.plain(text, word))


def _nothing(reply: Any) -> None:
    return None


def _index(reply: Any) -> list[IndexEntry]:
    return [
        IndexEntry(name=each.name, version=each.version, state=each.state, reason=each.reason) for each in reply.models
    ]


def _metadata(reply: Any, version: str) -> ModelMetadata:
    return ModelMetadata(
        name=reply.name,
        version=version or transport.latest(reply.versions),
        versions=tuple(reply.versions),
        platform=reply.platform,
        inputs=_tensors(reply.inputs),
        outputs=_tensors(reply.outputs),
    )


def _tensors(tensors: Any) -> tuple[TensorMetadata, ...]:
    return tuple(TensorMetadata(name=each.name, datatype=each.datatype, shape=tuple(each.shape)) for each in tensors)


def _config(reply: Any) -> dict[str, Any]:
    config = reply.config
    return {
        "name": config.name,
        "max_batch_size": config.max_batch_size,
        "model_transaction_policy": {"decoupled": config.model_transaction_policy.decoupled},
        "input": [{"name": each.name, "optional": each.optional} for each in config.input],
        "parameters": {name: {"string_value": each.string_value} for name, each in config.parameters.items()},
    }


def _duration(statistic: Any) -> dict[str, int]:
    return {"count": statistic.count, "ns": statistic.ns}


def _durations(statistics: Any, names: tuple[str, ...]) -> dict[str, dict[str, int]]:
    return {name: _duration(getattr(statistics, name)) for name in names}


_COMPUTE = ("compute_input", "compute_infer", "compute_output")
_INFER = ("success", "fail", "queue", *_COMPUTE, "cache_hit", "cache_miss")
_RESPONSE = ("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel")


def _model_stats(stats: Any) -> dict[str, Any]:
    """In the JSON form of HTTP."""
    document: dict[str, Any] = {
        "name": stats.name,
        "version": stats.version,
        "last_inference": stats.last_inference,
        "inference_count": stats.inference_count,
        "execution_count": stats.execution_count,
        "inference_stats": _durations(stats.inference_stats, _INFER),
        "batch_stats": [{"batch_size": each.batch_size, **_durations(each, _COMPUTE)} for each in stats.batch_stats],
        "memory_usage": [
            {"type": each.type, "id": each.id, "byte_size": each.byte_size} for each in stats.memory_usage
        ],
    }
    if stats.response_stats:
        document["response_stats"] = {
            index: _durations(each, _RESPONSE) for index, each in stats.response_stats.items()
        }
    return document
