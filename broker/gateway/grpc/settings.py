"""Parameters of gRPC's load, unload, log and trace requests: their types, checked with Triton's texts.

Used by `broker.gateway.grpc.calls`. What settings may be is in `broker.gateway.setting_rules`; those of traces are held
by the broker.
"""

from __future__ import annotations

from typing import Any, Final

from broker.gateway import setting_rules as rules
from shm.errors import Code, InferError

_CHOICES: Final = {bool: "bool_param", int: "uint32_param", str: "string_param"}


def load_parameters(parameters: Any) -> dict[str, str | bytes]:
    """`config` is a string, `file:…` are bytes; nothing else is known."""
    found: dict[str, str | bytes] = {}
    for name, value in parameters.items():
        if name != "config" and not name.startswith("file:"):
            raise _invalid(f"unrecognized load parameter '{name}'.")
        expected = "string_param" if name == "config" else "bytes_param"
        if value.WhichOneof("parameter_choice") != expected:
            raise _invalid(f"invalid value type for load parameter '{name}', expected {expected}.")
        found[name] = getattr(value, expected)
    return found


def unload_dependents(parameters: Any) -> bool:
    """Other parameters are ignored, as in Triton."""
    if "unload_dependents" not in parameters:
        return False
    value = parameters["unload_dependents"]
    if value.WhichOneof("parameter_choice") != "bool_param":
        raise _invalid("invalid value type for 'unload_dependents' parameter, expected bool_param.")
    return bool(value.bool_param)


def log_update(settings: Any) -> dict[str, bool | int | str]:
    """What is to be changed. Unknown names are ignored, as in Triton; nothing is changed if anything is wrong."""
    if "log_file" in settings:
        raise rules.file_is_fixed("log")
    update: dict[str, bool | int | str] = {}
    for name, kind in rules.LOG_TYPES.items():
        if name in settings:
            if settings[name].WhichOneof("parameter_choice") != _CHOICES[kind]:
                raise rules.of_another_type(name)
            update[name] = getattr(settings[name], _CHOICES[kind])
    rules.check_log(update)
    return update


def trace_update(settings: Any) -> dict[str, str | list[str] | None]:
    """What is to be changed; None, which gRPC sends as no values, clears to the global value."""
    if "trace_file" in settings:
        raise rules.file_is_fixed("trace")
    rules.report_ignored(settings, settings["trace_level"].value if "trace_level" in settings else ())
    update: dict[str, str | list[str] | None] = {}
    if "trace_level" in settings:
        update["trace_level"] = list(settings["trace_level"].value) or None
    for name in rules.NUMBERS:
        if name in settings:
            values = settings[name].value
            if len(values) > 1:
                raise rules.only_one(name)
            update[name] = values[0] if values else None
    return update


def _invalid(text: str) -> InferError:
    return InferError(Code.INVALID_ARG, text)
