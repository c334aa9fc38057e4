"""Triton's log and trace settings, as clients read and change them over the network.

Kept by `broker.control`, asked by `broker.gateway_answers`. Front ends check the types of their own wire first; every
rule (`broker.gateway.setting_rules`) is held here all the same, and an update with anything wrong in it changes
nothing. Names that Triton does not know are ignored, as it does. Gateways are told of every change: they trace.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

import msgspec

from broker.gateway.options import LogOptions, TraceSetting, TraceTable
from broker.gateway.setting_rules import LOG_TYPES, OFF, check_log, file_is_fixed, levels, number, only_one
from shm.errors import Code, InferError

_DEFAULTS: Final[Mapping[str, str | list[str]]] = {
    "trace_level": [OFF],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
}


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
            raise file_is_fixed("log")
        known = {name: changes[name] for name in LOG_TYPES if name in changes}
        check_log(known)
        if known:
            options = msgspec.convert(msgspec.to_builtins(self.options) | known, LogOptions)
            self._apply(options)
            self.options = options
        settings: dict[str, Any] = msgspec.to_builtins(self.options)
        return settings


@final
class TraceState:
    """Global trace settings, and what each model has for itself; the rest of a model's follow the global ones.

    `trace_file`, `initial`: what the command line says; clearing a global setting returns to that. `apply` is told of
    every change: of which model, "" of the global ones, and what all of them are now.
    """

    __slots__ = ("_began", "_defaults", "_global", "_models", "_trace_file", "apply")

    def __init__(self, trace_file: str = "", initial: Mapping[str, str | list[str]] | None = None) -> None:
        self._trace_file = trace_file
        self._began = time.time_ns()
        self._defaults = {**_DEFAULTS, **(initial or {})}
        self._global: dict[str, str | list[str]] = {}
        self._models: dict[str, dict[str, str | list[str]]] = {}
        self.apply: Callable[[str, dict[str, TraceSetting]], None] = lambda model, settings: None

    def table(self) -> TraceTable:
        """What gateways have to know."""
        settings = {name: {**self._defaults, **self._global, **own} for name, own in {**self._models, "": {}}.items()}
        return TraceTable(file=self._trace_file, began=self._began, settings=settings)

    def of(self, model: str) -> dict[str, str | list[str]]:
        """The settings of `model`, "": the global ones."""
        return self._shown({**self._defaults, **self._global, **self._models.get(model, {})})

    def update(self, model: str, changes: Mapping[str, str | list[str] | None]) -> dict[str, str | list[str]]:
        """The settings after the change; None, or nothing, clears one. Raises UNSUPPORTED, INVALID_ARG."""
        if "trace_file" in changes:
            raise file_is_fixed("trace")
        own = dict(self._models.get(model, {}) if model else self._global)
        for name, value in changes.items():
            if name not in _DEFAULTS:
                continue
            if not value:
                own.pop(name, None)
            elif name == "trace_level":
                known = levels([value] if isinstance(value, str) else value)
                own |= {"trace_level": known} if known else {}
            else:
                own[name] = number(name, _single(name, value))
        self._check({**self._defaults, **(self._global if model else {}), **own})
        if not model:
            self._global = own
        elif own:
            self._models[model] = own
        else:
            self._models.pop(model, None)
        if changes.keys() & _DEFAULTS.keys():
            self.apply(model, self.table().settings)
        return self.of(model)

    def _shown(self, settings: Mapping[str, str | list[str]]) -> dict[str, str | list[str]]:
        return {**settings, "trace_file": self._trace_file, "trace_mode": "triton"}

    def _check(self, settings: Mapping[str, str | list[str]]) -> None:
        if settings["trace_level"] == [OFF]:
            return
        reason = "sample rate must be non-zero" if settings["trace_rate"] == "0" else ""
        reason = reason or ("" if self._trace_file else "trace file name is not given")
        reason = reason or unwritable(self._trace_file)
        if reason:
            raise InferError(Code.INVALID_ARG, f"Attempting to set invalid trace setting :{reason}")


def unwritable(path: str) -> str:
    """Why traces cannot be written to `path`, or to files beside it; "" if they can be."""
    directory = os.path.dirname(path) or "."
    try:
        if os.path.lexists(path):
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY))
        elif not os.path.isdir(directory):
            return f"trace file '{path}' cannot be written: there is no directory '{directory}'"
        elif not os.access(directory, os.W_OK | os.X_OK):
            return f"trace file '{path}' cannot be written: no file may be made in '{directory}'"
    except (OSError, ValueError) as error:
        return f"trace file '{path}' cannot be written: {getattr(error, 'strerror', None) or error}"
    return ""


def _single(name: str, value: str | Sequence[str]) -> str:
    if isinstance(value, str):
        return value
    if len(value) != 1:
        raise only_one(name)
    return value[0]
