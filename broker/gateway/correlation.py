"""Which sequence a request belongs to: Triton's `sequence_id`, a number or a string, as a submission can carry it.

Schedulers know sequences by 64-bit numbers. A string becomes its hash; a model whose CORRID control is of TYPE_STRING
gets the string itself too, as one more input of the plan (`ModelMetadata.correlation`). Used by
`broker.gateway.inference` and `plan_cache`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Hashable
from dataclasses import replace
from typing import Final

import msgspec

from broker.gateway.kserve import InferRequest, InputTensor
from clientlib.submission import MAX_SEQUENCE_ID
from shm.datatypes import BYTES
from shm.errors import Code, InferError
from shm.message_values import ModelMetadata

MAX_TEXT: Final = 128  # bytes, as in Triton
NO_SEQUENCE: Final = (0, False, False)
# What schedulers of sequences say; Triton does not put the request's id before it.
SAID: Final = re.compile(
    r"inference request (for sequence|to model)|Server is stopping, scheduler|timeout of the corresponding sequence"
)


def sequence_of(request: InferRequest) -> tuple[int, bool, bool]:
    """As a submission carries it: number, start, end. Models without sequences ignore it all.

    Without an id that fits 64 bits nothing is carried: a sequence model refuses that.
    """
    number = number_of(request.sequence_id) if request.sequence_id else 0
    if not 0 < number <= MAX_SEQUENCE_ID:
        return NO_SEQUENCE
    return number, request.sequence_start, request.sequence_end


def number_of(identity: int | str) -> int:
    """The number of a sequence: never 0 for a string that is not empty. The same on every gateway."""
    if isinstance(identity, int):
        return identity
    digest = hashlib.blake2b(identity.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


def key_of(request: InferRequest) -> Hashable:
    """What a plan depends on: the kind of the id, and how long it is as a string."""
    identity = request.sequence_id
    return ("sequence", len(identity.encode()) if isinstance(identity, str) else -1)


def check(model: ModelMetadata, request: InferRequest) -> None:
    """Raises InferError when the model's CORRID control cannot take the request's id."""
    identity, control = request.sequence_id, model.correlation
    if not identity:
        return
    if isinstance(identity, str) and len(identity.encode()) > MAX_TEXT:
        raise InferError(
            Code.INVALID_ARG, f"correlation ID of {len(identity.encode())} bytes is longer than {MAX_TEXT} bytes"
        )
    if control is not None and isinstance(identity, str) != (control.datatype == BYTES):
        came = BYTES if isinstance(identity, str) else "UINT64"
        raise InferError(
            Code.INVALID_ARG,
            f"sequence batching control 'CORRID' data-type is '{came}', but model '{model.name}' expects "
            f"'{control.datatype}'",
        )


def with_text(model: ModelMetadata, request: InferRequest) -> tuple[ModelMetadata, InferRequest]:
    """Model and request with the string id as one more input, for a plan. Both as they are where none is wanted."""
    control = model.correlation
    if control is None or control.datatype != BYTES or not request.sequence_id:
        return model, request
    if any(tensor.name == control.name for tensor in request.inputs):
        return model, request  # refused: a client cannot send a control
    shape = (1,) * len(control.shape)
    text = InputTensor(control.name, BYTES, shape, text_bytes(request))
    wider = msgspec.structs.replace(model, inputs=(*model.inputs, control))
    return wider, replace(request, inputs=[*request.inputs, text])


def text_bytes(request: InferRequest) -> bytes:
    """The string id as one element of a BYTES tensor."""
    text = str(request.sequence_id).encode()
    return len(text).to_bytes(4, "little") + text


def in_words(message: str, request: InferRequest) -> str:
    """What a scheduler says of a sequence, with the id that the client gave it."""
    identity = request.sequence_id
    if not identity or isinstance(identity, int):
        return message
    return message.replace(f"sequence {number_of(identity)} ", f"sequence {identity} ")
