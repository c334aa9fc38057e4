"""What people pass for a name, a version or a number, made plain, or an InferError that says what was expected.

Called by the verbs of both clients before anything is sent. Knows no model, no region and no broker.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping
from typing import Any, SupportsIndex

import numpy as np

from shm.errors import Code, InferError
from shm.parameters import Parameter, check, is_reserved

LONGEST_NAME = 256  # characters of a region's name or a token
LONGEST_TEXT = 4096  # … of a model's name, a version or a key
MOST = 2**63 - 1
FOREVER_S = 1e9


def whole(value: SupportsIndex, what: str, least: int = 0, most: int = MOST) -> int:
    """`value` as a plain integer from `least` to `most`. Raises InferError INVALID_ARG, naming it `what`."""
    try:
        number = least - 1 if isinstance(value, np.ndarray) else operator.index(value)
    except TypeError:
        number = least - 1
    if not least <= number <= most:
        limit = f"from {least} to {most}" if most != MOST else f"of at least {least}"
        raise InferError(Code.INVALID_ARG, f"{what} must be an integer {limit}, got {shown(value)}")
    return number


def text(value: str, what: str, longest: int = LONGEST_NAME, *, empty: bool = False) -> str:
    """`value` as a plain string. Raises InferError INVALID_ARG, naming it `what`; for "" too unless `empty`."""
    if isinstance(value, str) and (value or empty) and len(value) <= longest and _is_utf8(value):
        return str.__str__(value)  # a plain one, also of numpy's and of enumerations
    raise InferError(
        Code.INVALID_ARG, f"{what} must be a string of {0 if empty else 1} to {longest} characters, got {shown(value)}"
    )


def model_text(value: str, what: str = "model", *, empty: bool = False) -> str:
    """As `text`, for a model's name."""
    return text(value, what, LONGEST_TEXT, empty=empty)


def parameters_of(parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """A copy of what a caller gives a model beside its tensors. Raises InferError INVALID_ARG for what it cannot be."""
    if not isinstance(parameters, Mapping):
        raise InferError(Code.INVALID_ARG, f"parameters must map names to values, got {shown(parameters)}")
    given = {name: value.item() if isinstance(value, np.generic) else value for name, value in parameters.items()}
    check(given)
    for name in given:
        if is_reserved(name):
            raise InferError(
                Code.INVALID_ARG,
                f"Parameter {name} is a reserved parameter and cannot be specified. Priority, timeout and the sequence "
                "are arguments of their own",
            )
    return given


def version_text(value: str | int) -> str:
    """A model version; 1 is "1". "" leaves the choice to the broker."""
    if isinstance(value, str):
        return text(value, "version", LONGEST_TEXT, empty=True)
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number <= MOST:
        raise InferError(
            Code.INVALID_ARG,
            f"version must be a string such as '1', or '' for the version that the model's policy chooses, got "
            f"{shown(value)}",
        )
    return str(number)


def seconds(timeout: float, *, now: bool = False) -> float:
    """A time to wait; more than `FOREVER_S`, inf too, is that. `now`: 0 and less mean a look.

    Raises InferError INVALID_ARG for what is no time.
    """
    if (timeout.__class__ is float or timeout.__class__ is int) and 0 < timeout < FOREVER_S:
        return timeout
    try:
        if (timeout > 0 or (now and timeout <= 0)) and not isinstance(timeout, bool | np.bool_):
            return max(0.0, float(timeout)) if timeout < FOREVER_S else FOREVER_S
    except (TypeError, ValueError):  # no number, or an array of them
        pass
    least = "of 0 or more" if now else "greater than 0"
    raise InferError(Code.INVALID_ARG, f"timeout must be a number of seconds {least}, got {shown(timeout)}")


def shown(value: object) -> str:
    """A value as an error shows it: with its type where that is not plain to see, and never at length."""
    if isinstance(value, str) and len(value) > 64:
        return f"one of {len(value)} characters"
    shape = getattr(value, "shape", ())
    if isinstance(shape, tuple) and shape:
        return f"{type(value).__name__} of shape {list(shape)}"
    try:
        written = repr(value)
    except Exception:  # whatever the value's own code raises; integers of thousands of digits are refused too
        written = "one that cannot be shown"
    if len(written) > 64:
        written = f"{written[:60]}…"
    return written if value is None or isinstance(value, str) else f"{written} ({type(value).__name__})"


def _is_utf8(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


# A configuration to use in place of the repository's: a dict, or JSON text.
LoadConfig = Mapping[str, Any] | str | None
# Path below the model's directory → contents: the model then consists of these alone, and needs a LoadConfig.
LoadFiles = Mapping[str, bytes] | None


def load_arguments(config: LoadConfig, files: LoadFiles) -> tuple[str | None, dict[str, bytes]]:
    """`config` as JSON text, and `files` by their paths, which may be written as tritonclient does, with "file:".

    Raises InferError INVALID_ARG.
    """
    if config is not None and not isinstance(config, str):
        try:
            config = json.dumps(config)
        except (TypeError, ValueError, RecursionError) as error:
            raise InferError(
                Code.INVALID_ARG, f"config must be a dict of plain values, or JSON text: {error}"
            ) from None
    contents: dict[str, bytes] = {}
    for path, data in (files or {}).items():
        if not isinstance(path, str) or not isinstance(data, bytes | bytearray | memoryview):
            raise InferError(
                Code.INVALID_ARG, f"files must map paths to bytes, not {type(path).__name__} to {type(data).__name__}"
            )
        contents[path.removeprefix("file:")] = bytes(data)
    if contents and config is None:
        raise InferError(Code.INVALID_ARG, "Load parameter 'config' must be specified for model file override")
    return config, contents
