"""Parameters: what a caller tells a model beside its tensors, and a model its caller (Triton's parameters extension).

A prepared plan carries those of its requests, so a submission stays as small as it is. The limits here are checked by
the client library for a quick answer, and by the broker (`broker.plan_check`) for everybody. Those of a response end
the note beside its completion, which says so (`shm.layout.GIVEN`); the worker packs them, clients unpack them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from shm.errors import Code, InferError
from shm.layout import NOTE_BYTES

Parameter = bool | int | float | str

MAX_COUNT: Final = 64
MAX_BYTES: Final = 4096  # of names and texts in UTF-8, and 8 for each number
# Of a response: as many as lie in a note beside the shapes of outputs.
MAX_GIVEN_COUNT: Final = 16
MAX_GIVEN_BYTES: Final = 384
# Names that Triton's protocols give a meaning of their own; a model never sees them.
RESERVED: Final = frozenset(
    ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output")
)
RESERVED_PREFIX: Final = "triton_"
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final[msgspec.msgpack.Decoder[dict[str, Parameter]]] = msgspec.msgpack.Decoder(dict[str, Parameter])


def check(parameters: Mapping[str, object]) -> None:
    """Raises InferError INVALID_ARG for what no model can be given, naming the parameter."""
    if len(parameters) > MAX_COUNT:
        raise InferError(
            Code.INVALID_ARG, f"a request has at most {MAX_COUNT} parameters of its own, got {len(parameters)}"
        )
    size = _checked_size(parameters)
    if size > MAX_BYTES:
        raise InferError(
            Code.INVALID_ARG,
            f"the parameters of a request have {size} bytes, at most {MAX_BYTES} are possible: send large values as an "
            "input",
        )


def pack(parameters: Mapping[str, object]) -> bytes:
    """Those of a response, as its note ends with them; b"" for none.

    Raises InferError INVALID_ARG for what no response can have.
    """
    if not parameters:
        return b""
    if len(parameters) > MAX_GIVEN_COUNT:
        raise InferError(
            Code.INVALID_ARG, f"a response has at most {MAX_GIVEN_COUNT} parameters, the model gave {len(parameters)}"
        )
    size = _checked_size(parameters)
    if size > MAX_GIVEN_BYTES:
        raise InferError(
            Code.INVALID_ARG,
            f"the parameters of a response have {size} bytes, at most {MAX_GIVEN_BYTES} are possible: give large "
            "values as an output",
        )
    for name, value in parameters.items():
        if is_reserved(name):
            raise InferError(
                Code.INVALID_ARG, f"parameter '{name}' of a response has a meaning of its own in Triton's protocols"
            )
        if type(value) is int and value >= 2**63:
            raise InferError(Code.INVALID_ARG, f"parameter '{name:.80}' of a response does not fit a signed 64-bit int")
    return encoded(parameters)


def encoded(parameters: Mapping[str, object]) -> bytes:
    """As `pack`, of what somebody else has checked."""
    return _encoder.encode(parameters)


def unpack(packed: bytes) -> dict[str, Parameter]:
    """What `pack` was given. Raises InferError INTERNAL for bytes that it did not make."""
    try:
        return _decoder.decode(packed)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InferError(Code.INTERNAL, f"the worker reported parameters that cannot be: {error}") from None


def beside(note: bytes, packed: bytes) -> bytes:
    """A whole note that says `note` and ends with parameters. Raises InferError where there is no room for both."""
    room = NOTE_BYTES - len(note) - len(_length(packed))
    if not fits_beside(note, packed):
        raise InferError(
            Code.INVALID_ARG,
            f"the parameters of a response take {len(packed)} bytes, beside the shapes of its outputs there is room "
            f"for {max(room, 0)}: give fewer of them, or ask for fewer outputs whose shape only the run tells",
        )
    return note.ljust(room + len(note) - len(packed), b"\0") + packed + _length(packed)


def fits_beside(note: bytes, packed: bytes) -> bool:
    """Is there room for both in a note?"""
    return len(note) + len(packed) + len(_length(packed)) <= NOTE_BYTES


def end_of(note: bytes) -> bytes:
    """The packed parameters that a whole note ends with. Of a note without them: anything, but never an error."""
    length = int.from_bytes(note[-2:], "little")
    return note[-2 - length : -2]


def _length(packed: bytes) -> bytes:
    return len(packed).to_bytes(2, "little")


def _checked_size(parameters: Mapping[str, object]) -> int:
    size = 0
    for name, value in parameters.items():
        if not isinstance(name, str) or not name:
            raise InferError(Code.INVALID_ARG, f"the name of a parameter must be a string, got {name!r:.80}")
        if not isinstance(value, bool | int | float | str):
            raise InferError(
                Code.INVALID_ARG,
                f"parameter '{name:.80}' must be a bool, an int, a float or a string, got {type(value).__name__}",
            )
        if type(value) is int and not -(2**63) <= value < 2**64:
            raise InferError(Code.INVALID_ARG, f"parameter '{name:.80}' does not fit 64 bits")
        size += _byte_size(name) + (_byte_size(value) if isinstance(value, str) else 8)
    return size


def is_reserved(name: str) -> bool:
    """Does Triton's protocol give this name a meaning of its own?"""
    return name in RESERVED or name.startswith(RESERVED_PREFIX)


def key_of(parameters: Mapping[str, Parameter]) -> tuple[tuple[str, str, str], ...]:
    """Equal for equal parameters, whatever their order; 1, 1.0 and True are not equal."""
    return tuple(sorted((name, type(value).__name__, str(value)) for name, value in parameters.items()))


def _byte_size(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise InferError(Code.INVALID_ARG, f"parameter {text!r:.80} is no valid text") from None
