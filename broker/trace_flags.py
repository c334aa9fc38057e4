"""The trace flags of tritonserver: what the trace settings are at start. Used by `broker.options`.

Traced are the moments of requests, to a file: Triton's mode "triton", level TIMESTAMPS.
"""

from __future__ import annotations

from typing import NamedTuple

from broker.flags import Given, UsageError, integer
from broker.settings import unwritable

_LEVELS = {
    **dict.fromkeys(("false", "off"), "OFF"),
    **dict.fromkeys(("true", "on", "min", "max", "timestamps"), "TIMESTAMPS"),
    "tensors": "TENSORS",
}
_FORMAT = "--trace-config option format is '<trace mode>,<setting>=<value>'. Got "


class TraceOptions(NamedTuple):
    """`settings` are those that were given, by the name that they have in Triton's trace API. `without_effect`: what
    was given and changes nothing here.
    """

    file: str
    settings: dict[str, str | list[str]]
    without_effect: frozenset[str]


def trace_options(given: Given) -> TraceOptions:
    """From the deprecated flags and --trace-config, which wins. Raises UsageError."""
    file = given.text("trace-file", "")
    levels = [_level(text) for text in given.all("trace-level")]
    without_effect = set()
    numbers = {
        name: str(given.integer(flag, 0))
        for flag, name in (
            ("trace-rate", "trace_rate"),
            ("trace-count", "trace_count"),
            ("trace-log-frequency", "log_frequency"),
        )
        if flag in given
    }
    for argument in given.all("trace-config"):
        mode, name, value = _parse(argument)
        if (mode, name) == ("triton", "file"):
            file = value
        elif (mode, name) == ("triton", "log-frequency"):
            numbers["log_frequency"] = str(integer("trace-config", value))
        elif mode == "" and name in ("rate", "count"):
            numbers[f"trace_{name}"] = str(integer("trace-config", value))
        elif mode == "" and name == "level":
            levels.append(_level(value))
        elif mode == "" and name == "mode":
            mode = _mode(value)
        if mode == "opentelemetry":
            without_effect.add("--trace-config mode=opentelemetry")
    if "TENSORS" in levels:
        without_effect.add("--trace-config level=TENSORS")
    settings: dict[str, str | list[str]] = {**numbers}
    if levels:
        settings["trace_level"] = ["OFF"] if "OFF" in levels else sorted(set(levels), reverse=True)  # Triton's order
    return TraceOptions(file, settings, frozenset(without_effect))


def check_file(options: TraceOptions) -> None:
    """Raises UsageError for a file that cannot be written although traces are wanted from the start."""
    wanted = options.settings.get("trace_level", ["OFF"]) != ["OFF"]
    if wanted and options.file and (reason := unwritable(options.file)):
        raise UsageError(reason)


def _parse(argument: str) -> tuple[str, str, str]:
    """`[mode,]setting=value`."""
    before, _, value = argument.partition("=")
    mode, comma, name = before.rpartition(",")
    if comma and not mode:
        raise UsageError(
            "No trace mode specified. --trace-config option format is <trace mode>,<setting>=<value> or "
            f"<setting>=<value>. Got {argument}"
        )
    if not name or not value:
        raise UsageError(f"{_FORMAT}{argument}")
    return _mode(mode) if mode else "", name, value


def _mode(text: str) -> str:
    if text.lower() not in ("triton", "opentelemetry"):
        raise UsageError(
            f'invalid value for trace mode option: {text}. Available options are "triton" and "opentelemetry"'
        )
    return text.lower()


def _level(text: str) -> str:
    if text.lower() not in _LEVELS:
        raise UsageError(f"invalid value for trace level option: {text}")
    return _LEVELS[text.lower()]
