"""Triton's log and trace settings, as clients read and change them over the network.

Kept by `broker.control`, asked by `broker.gateway_answers`. Front ends check the types of their own wire first; every
rule is held here all the same, with Triton's texts, and an update with anything wrong in it changes nothing. Names that
Triton does not know are ignored, as it does. Trace settings are state only: nothing is traced yet.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

import msgspec

from broker.gateway.options import LogOptions
from shm.errors import Code, InferError

MAX_INT32: Final = 2**31 - 1
LEVELS: Final = ("TIMESTAMPS", "TENSORS")
OFF: Final = ["OFF"]
# Smallest value of each; the texts name what the field could hold, the parser what an int can.
_NUMBERS: Final = {"trace_rate": 0, "trace_count": -1, "log_frequency": 0}
_RANGES: Final = {
    "trace_rate": f"[ 0, {2**32 - 1} ]",
    "trace_count": f"[ -1, {MAX_INT32} ]",
    "log_frequency": f"[ 0, {2**32 - 1} ]",
}
_DEFAULTS: Final[Mapping[str, str | list[str]]] = {
    "trace_level": OFF,
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
}
_INTEGER: Final = re.compile(r"\s*([+-]?[0-9]+)", re.ASCII)  # what C's parser takes, whatever follows


@final
class LogState:
    """What the broker logs. `apply` is called with the outcome of every change."""

    __slots__ = ("_apply", "options")

    def __init__(self, options: LogOptions, apply: Callable[[LogOptions], None]) -> None:
        self.options = options
        self._apply = apply

    def update(self, changes: Mapping[str, bool | int | str]) -> dict[str, Any]:
        """All settings after the change. Raises UNSUPPORTED, INVALID_ARG."""
        if "log_file" in changes:
            raise InferError(Code.UNSUPPORTED, "log file location can not be updated through network protocol")
        known = {name: changes[name] for name in LogOptions.__struct_fields__ if name in changes}
        for name in ("log_info", "log_warning", "log_error"):
            if not isinstance(known.get(name, True), bool):
                raise _invalid(f"expect boolean for '{name}'")
        level = known.get("log_verbose_level", 0)
        if isinstance(level, bool) or not isinstance(level, int) or not 0 <= level <= MAX_INT32:
            raise _invalid("expect int32 for 'log_verbose_level'")
        style = known.get("log_format", "default")
        if not isinstance(style, str):
            raise _invalid("expect string for 'log_format'")
        if style not in ("default", "ISO8601"):
            raise _invalid(f"invalid argument for log_format, got: {style}")
        if known:
            options = msgspec.convert(msgspec.to_builtins(self.options) | known, LogOptions)
            self._apply(options)
            self.options = options
        settings: dict[str, Any] = msgspec.to_builtins(self.options)
        return settings


@final
class TraceState:
    """Global trace settings, and what each model has for itself; the rest of a model's follow the global ones.

    `trace_file`, `initial`: what the command line says; clearing a global setting returns to that.
    """

    __slots__ = ("_defaults", "_global", "_models", "_trace_file")

    def __init__(self, trace_file: str = "", initial: Mapping[str, str | list[str]] | None = None) -> None:
        self._trace_file = trace_file
        self._defaults = {**_DEFAULTS, **(initial or {})}
        self._global: dict[str, str | list[str]] = {}
        self._models: dict[str, dict[str, str | list[str]]] = {}

    def of(self, model: str) -> dict[str, str | list[str]]:
        """The settings of `model`, "": the global ones."""
        return self._shown({**self._defaults, **self._global, **self._models.get(model, {})})

    def update(self, model: str, changes: Mapping[str, str | list[str] | None]) -> dict[str, str | list[str]]:
        """The settings after the change; None, or nothing, clears one. Raises UNSUPPORTED, INVALID_ARG."""
        if "trace_file" in changes:
            raise InferError(Code.UNSUPPORTED, "trace file location can not be updated through network protocol")
        own = dict(self._models.get(model, {}) if model else self._global)
        for name, value in changes.items():
            if name not in _DEFAULTS:
                continue
            if not value:
                own.pop(name, None)
            elif name == "trace_level":
                own |= {"trace_level": levels} if (levels := _levels(value)) else {}
            else:
                own[name] = _number(name, value)
        self._check({**self._defaults, **(self._global if model else {}), **own})
        if not model:
            self._global = own
        elif own:
            self._models[model] = own
        else:
            self._models.pop(model, None)
        return self.of(model)

    def _shown(self, settings: Mapping[str, str | list[str]]) -> dict[str, str | list[str]]:
        return {**settings, "trace_file": self._trace_file, "trace_mode": "triton"}

    def _check(self, settings: Mapping[str, str | list[str]]) -> None:
        if settings["trace_level"] == OFF:
            return
        reason = "sample rate must be non-zero" if settings["trace_rate"] == "0" else ""
        reason = reason or ("" if self._trace_file else "trace file name is not given")
        if reason:
            raise _invalid(f"Attempting to set invalid trace setting :{reason}")


def _levels(value: str | Sequence[str]) -> list[str]:
    """In Triton's order; unknown ones are ignored."""
    asked = [value] if isinstance(value, str) else list(value)
    if "OFF" in asked:
        if len(asked) > 1:
            raise _invalid("Expect only one trace level 'OFF' is specified")
        return OFF
    return [level for level in LEVELS if level in asked]


def _number(name: str, value: str | Sequence[str]) -> str:
    """The number in the text, as text."""
    if not isinstance(value, str):
        if len(value) != 1:
            raise _invalid(f"expect only 1 value for '{name}'")
        value = value[0]
    match = _INTEGER.match(value)
    if match is None:
        raise _invalid(f"Unable to parse '{name}', got: {value}")
    number = int(match[1]) if len(match[1]) <= 20 else MAX_INT32 + 1
    if name == "trace_count" and -MAX_INT32 <= number < -1:
        raise _invalid(f"Unable to parse 'trace_count'. Expecting value >= -1, got: {value}")
    if not _NUMBERS[name] <= number <= MAX_INT32:
        raise _invalid(f"Unable to parse '{name}', value is out of range {_RANGES[name]}, got: {value}")
    return str(number)


def _invalid(text: str) -> InferError:
    return InferError(Code.INVALID_ARG, text)
