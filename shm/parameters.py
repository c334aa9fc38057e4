"""Request parameters: what a caller tells a model beside its tensors (Triton's parameters extension).

A prepared plan carries them, so a submission stays as small as it is. The limits here are checked by the client library
for a quick answer, and by the broker (`broker.plan_check`) for everybody.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from shm.errors import Code, InferError

Parameter = bool | int | float | str

MAX_COUNT: Final = 64
MAX_BYTES: Final = 4096  # of names and texts in UTF-8, and 8 for each number
# Names that Triton's protocols give a meaning of their own; a model never sees them.
RESERVED: Final = frozenset(
    ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output")
)
RESERVED_PREFIX: Final = "triton_"


def check(parameters: Mapping[str, object]) -> None:
    """Raises InferError INVALID_ARG for what no model can be given, naming the parameter."""
    if len(parameters) > MAX_COUNT:
        raise InferError(
            Code.INVALID_ARG, f"a request has at most {MAX_COUNT} parameters of its own, got {len(parameters)}"
        )
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
    if size > MAX_BYTES:
        raise InferError(
            Code.INVALID_ARG,
            f"the parameters of a request have {size} bytes, at most {MAX_BYTES} are possible: send large values as an "
            "input",
        )


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
