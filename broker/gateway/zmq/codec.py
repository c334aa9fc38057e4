"""ZeroMQ messages to the plain data of `kserve`, and back. No sockets, no state.

Used by `zmq.server` and its parts.
"""

from __future__ import annotations

from typing import Final, cast, final

import msgspec

from broker.gateway.kserve import InferRequest, InferResponse, InputTensor, RequestedOutput
from broker.gateway.placed import Placed
from shm.errors import Code, InferError, ProtocolError
from shm.zmq_messages import (
    MAX_REPLY,
    ClientMessage,
    Error,
    Infer,
    Input,
    Output,
    OutputIs,
    Prepare,
    Reply,
    Result,
    Run,
)

_decoder: Final[msgspec.msgpack.Decoder[ClientMessage]] = msgspec.msgpack.Decoder(ClientMessage)
_encoder: Final = msgspec.msgpack.Encoder()


class _Head(msgspec.Struct):
    id: int = 0


_head: Final = msgspec.msgpack.Decoder(_Head)


@final
class Refused(ProtocolError):
    """A msgpack map that is no request: its `id`, if it has one, names what is answered by the error."""

    def __init__(self, message: str, request: int = 0) -> None:
        super().__init__(message)
        self.request = request

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.message, self.request))


def decode(data: bytes) -> ClientMessage:
    """One request. Raises Refused for a msgpack map that is none, ProtocolError for anything else."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        problem = f"not a message of this protocol: {error}"
    try:
        request = _head.decode(data).id
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise ProtocolError(problem) from None
    raise Refused(problem, request if 0 < request < 2**63 else 0)


def encode(reply: Reply) -> bytes:
    """The frame of a reply; an error in its place when it does not fit a message."""
    data = _encoder.encode(reply)
    if len(data) > MAX_REPLY:
        return _encoder.encode(
            failure(
                reply.id,
                InferError(
                    Code.INVALID_ARG,
                    f"the reply takes {len(data)} bytes, more than the {MAX_REPLY} of a message: place large outputs "
                    "in a registered region",
                ),
            )
        )
    return data


def failure(request: int, error: InferError) -> Error:
    """The reply to a request that ended with `error`."""
    place = f" ({error.detail})" if isinstance(error, Placed) else ""
    return Error(id=request, code=error.code, message=error.message + place)


def infer_request(message: Infer) -> InferRequest:
    """Raises InferError for tensors that are neither inline nor in a region, or both."""
    return InferRequest(
        message.model,
        message.version,
        str(message.id),
        [_input(tensor, message.model) for tensor in message.inputs],
        None if message.outputs is None else [_output(output) for output in message.outputs],
        message.priority,
        message.timeout_us,
        message.sequence_id,
        message.sequence_start,
        message.sequence_end,
        message.parameters,
    )


def inline_size(message: Infer) -> int:
    """Bytes of tensors inside the message."""
    return sum(tensor.data.nbytes for tensor in message.inputs if tensor.data is not None)


def check_prepare(message: Prepare) -> None:
    """Raises InferError for what cannot be run by number."""
    for tensor in message.inputs:
        if tensor.data is not None or not tensor.region:
            raise InferError(
                Code.INVALID_ARG,
                f"input '{tensor.name}' of a prepared request must name a region: what is inline is sent with 'infer'",
            )
    if message.output_slots > 1:
        for output in message.outputs or ():
            if output.region and output.stride < output.byte_size:
                raise InferError(
                    Code.INVALID_ARG,
                    f"output '{output.name}' has {message.output_slots} positions of {output.byte_size} bytes, but a "
                    f"stride of {output.stride}: they would overlap",
                )


def run_request(prepared: Prepare, run: Run) -> InferRequest:
    """The inference at the positions that `run` names. Raises InferError for positions that do not exist."""
    k, j = run.input_slot, run.output_slot
    if k >= prepared.input_slots or j >= prepared.output_slots:
        raise InferError(
            Code.INVALID_ARG,
            f"input_slot {k}, output_slot {j}: prepared were {prepared.input_slots} and {prepared.output_slots}",
        )
    return InferRequest(
        prepared.model,
        prepared.version,
        str(run.id),
        [
            InputTensor(x.name, x.datatype, x.shape, None, x.region, x.offset + k * x.stride, x.byte_size)
            for x in prepared.inputs
        ],
        None
        if prepared.outputs is None
        else [
            RequestedOutput(y.name, y.region, y.offset + j * y.stride, y.byte_size, y.classes) for y in prepared.outputs
        ],
        run.priority,
        run.timeout_us,
        run.sequence_id,
        run.sequence_start,
        run.sequence_end,
        prepared.parameters,
    )


def result(request: int, response: InferResponse) -> Result:
    """The reply to an inference."""
    return Result(
        id=request,
        model=response.model,
        version=response.version,
        outputs=[
            OutputIs(name=output.name, datatype=output.datatype, shape=output.shape, data=cast(bytearray, output.data))
            for output in response.outputs
        ],
        parameters=response.parameters,
    )


def _input(tensor: Input, model: str) -> InputTensor:
    inline = tensor.data is not None
    if inline == bool(tensor.region) or (inline and (tensor.offset or tensor.byte_size)):
        raise InferError(
            Code.INVALID_ARG,
            f"input '{tensor.name}' for model '{model}' needs either 'data', or 'region' with 'offset' and 'byte_size'",
        )
    return InputTensor(
        tensor.name, tensor.datatype, tensor.shape, tensor.data, tensor.region, tensor.offset, tensor.byte_size
    )


def _output(output: Output) -> RequestedOutput:
    return RequestedOutput(output.name, output.region, output.offset, output.byte_size, output.classes)
