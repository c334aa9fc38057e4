"""ZeroMQ messages of the client's words, and what the gateway's answers say. No I/O.

Used by `zmq_transport`. The messages are those of docs/wire-protocol.md.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from clientlib.remote import transport
from clientlib.remote.transport import Buffer, InferAnswer, InferRequest, OutputTensor, Word, plain
from shm import zmq_messages as wire
from shm.errors import Code, InferError

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final[msgspec.msgpack.Decoder[wire.GatewayMessage]] = msgspec.msgpack.Decoder(wire.GatewayMessage)


def encode(message: wire.Request) -> bytes:
    """The frame of a message. Raises InferError when it is larger than the gateway takes."""
    data = _encoder.encode(message)
    if len(data) > wire.MAX_MESSAGE:
        raise InferError(
            Code.INVALID_ARG,
            f"the request takes {len(data)} bytes, more than the {wire.MAX_MESSAGE} of a ZeroMQ message: place large "
            "tensors in a region (create_region, register_system_shm)",
        )
    return data


def decode(data: bytes) -> wire.GatewayMessage | None:
    """A message of the gateway, None for what is none."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None


def word_message(word: Word, number: int) -> wire.Request:
    """`word` as a request with id `number`."""
    match word:
        case transport.Live():
            return wire.Server(id=number)
        case transport.Index():
            return wire.Models(id=number)
        case transport.Metadata():
            return wire.Metadata(id=number, model=word.model, version=word.version)
        case transport.Config():
            return wire.Config(id=number, model=word.model, version=word.version)
        case transport.Statistics():
            return wire.Statistics(id=number, model=word.model, version=word.version)
        case transport.Load():
            return wire.Load(id=number, model=word.model, config=word.config or "", files=dict(word.files))
        case transport.Unload():
            return wire.Unload(id=number, model=word.model, unload_dependents=word.unload_dependents)
        case transport.RegisterSystem():
            return wire.Register(id=number, name=word.name, key=word.key, byte_size=word.byte_size, offset=word.offset)
        case transport.Unregister():
            return wire.Unregister(id=number, name=word.name)


def answer(reply: wire.GatewayMessage, word: Word) -> Any:
    """What a reply to a word says. Raises InferError for an error."""
    match reply:
        case wire.ServerState():
            return reply.live
        case wire.Index():
            return list(reply.models)
        case wire.MetadataIs():
            return reply.metadata
        case wire.ConfigIs():
            return reply.config
        case wire.StatisticsAre():
            return reply.model_stats
        case wire.Done():
            return None
        case _:
            raise error_of(reply, word)


def infer_message(request: InferRequest, number: int) -> wire.Infer:
    """An inference as a request with id `number`."""
    return wire.Infer(
        id=number,
        model=request.model,
        version=request.version,
        inputs=tuple(
            wire.Input(name=x.name, datatype=x.datatype, shape=x.shape, data=_bytes(x.data))
            if x.data is not None
            else wire.Input(
                name=x.name,
                datatype=x.datatype,
                shape=x.shape,
                region=x.region,
                offset=x.offset,
                byte_size=x.byte_size,
            )
            for x in request.inputs
        ),
        outputs=None
        if request.outputs is None
        else tuple(
            wire.Output(name=y.name, region=y.region, offset=y.offset, byte_size=y.byte_size) for y in request.outputs
        ),
        timeout_us=request.timeout_us,
        priority=request.priority,
        sequence_id=request.sequence_id,
        sequence_start=request.sequence_start,
        sequence_end=request.sequence_end,
        parameters=dict(request.parameters),
    )


def _bytes(data: Buffer) -> memoryview:
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")  # an empty view of many dimensions cannot be cast


def infer_answer(reply: wire.GatewayMessage) -> InferAnswer | InferError:
    """How an inference ended."""
    if isinstance(reply, wire.Result):
        outputs = [OutputTensor(y.name, y.datatype, y.shape, y.data) for y in reply.outputs]
        return InferAnswer(outputs, parameters=reply.parameters)
    return error_of(reply)


def error_of(reply: wire.GatewayMessage, word: Word | None = None) -> InferError:
    """The error that a reply is. `word`: what was said; None for a request."""
    if isinstance(reply, wire.Error):
        return InferError(reply.code, plain(reply.message, word))
    return InferError(Code.INTERNAL, f"the gateway answered with {type(reply).__name__}: is it of this version?")
