"""Triton's rules for its log and trace settings, with its texts: what a value may be, whichever way it comes.

Used by `broker.settings`, which keeps the settings, and by the front ends, which know how their wire says a value.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

from shm.errors import Code, InferError

LOG_TYPES: Final[Mapping[str, type]] = {
    "log_info": bool,
    "log_warning": bool,
    "log_error": bool,
    "log_verbose_level": int,
    "log_format": str,
}
LOG_TYPE_NAMES: Final[Mapping[type, str]] = {bool: "boolean", int: "int32", str: "string"}  # in errors
LOG_FORMATS: Final = ("default", "ISO8601")
OFF: Final = "OFF"
LEVELS: Final = ("TIMESTAMPS", "TENSORS")
MAX_INT32: Final = 2**31 - 1
# The smallest value of each, and the largest that the text of an error names; what is parsed is an int all the same.
NUMBERS: Final[Mapping[str, tuple[int, int]]] = {
    "trace_rate": (0, 2**32 - 1),
    "trace_count": (-1, MAX_INT32),
    "log_frequency": (0, 2**32 - 1),
}
TRACE_NAMES: Final = ("trace_level", *NUMBERS)
MAX_SHOWN, MAX_SHOWN_NAMES = 64, 8  # characters of a name, and names, that a warning quotes
_log = logging.getLogger(__name__)
_INTEGER: Final = re.compile(r"\s*([+-]?[0-9]+)", re.ASCII)  # what C's parser takes, whatever follows


def file_is_fixed(kind: Literal["log", "trace"]) -> InferError:
    """No client says which file is written."""
    return InferError(Code.UNSUPPORTED, f"{kind} file location can not be updated through network protocol")


def of_another_type(name: str) -> InferError:
    """A log setting came as what it cannot be."""
    return _invalid(f"expect {LOG_TYPE_NAMES[LOG_TYPES[name]]} for '{name}'")


def check_log(settings: Mapping[str, object]) -> None:
    """Raises InferError for a value of the wrong type, or one that there is not. All names are known.

    HTTP says otherwise of a format that there is not.
    """
    for name, value in settings.items():
        if type(value) is not LOG_TYPES[name]:
            raise of_another_type(name)
        if isinstance(value, int) and not 0 <= value <= MAX_INT32:
            raise of_another_type(name)
    style = settings.get("log_format", LOG_FORMATS[0])
    if style not in LOG_FORMATS:
        raise _invalid(f"invalid argument for log_format, got: {style}")


def report_ignored(names: Iterable[str], level_names: Iterable[str] = ()) -> None:
    """Trace settings and levels that there are not change nothing, as in Triton: a warning in the log names them."""
    unknown = [name for name in names if name not in TRACE_NAMES]
    if unknown:
        _log.warning("trace settings that there are not were ignored: %s; there are %s", _few(unknown), TRACE_NAMES)
    unknown = [name for name in level_names if name not in (OFF, *LEVELS)]
    if unknown:
        _log.warning("trace levels that there are not were ignored: %s; there are %s", _few(unknown), (OFF, *LEVELS))


def _few(names: Sequence[str]) -> str:
    return ", ".join(repr(name[:MAX_SHOWN]) for name in names[:MAX_SHOWN_NAMES])


def levels(names: Sequence[str]) -> list[str]:
    """Those that exist, in Triton's order; others are passed over. Raises InferError for OFF beside another."""
    if OFF in names:
        if len(names) > 1:
            raise _invalid("Expect only one trace level 'OFF' is specified")
        return [OFF]
    return [level for level in LEVELS if level in names]


def number(name: str, text: str, *, got: str = ", got: ") -> str:
    """What one of `NUMBERS` is set to by `text`, as text. `got`: how the wire quotes what is too small."""
    match = _INTEGER.match(text)
    if match is None:
        raise _invalid(f"Unable to parse '{name}', got: {text}")
    value = int(match[1]) if len(match[1]) <= 20 else MAX_INT32 + 1
    low, high = NUMBERS[name]
    if low < 0 and -MAX_INT32 - 1 <= value < low:
        raise _invalid(f"Unable to parse '{name}'. Expecting value >= {low}{got}{text}")
    if not low <= value <= MAX_INT32:
        raise _invalid(f"Unable to parse '{name}', value is out of range [ {low}, {high} ], got: {text}")
    return str(value)


def only_one(name: str) -> InferError:
    """A number came as a list of none or several."""
    return _invalid(f"expect only 1 value for '{name}'")


def _invalid(text: str) -> InferError:
    return InferError(Code.INVALID_ARG, text)
