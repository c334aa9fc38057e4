"""Endpoints of the log and trace settings. Raises InferError with Triton's texts for values it would refuse."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, final

from broker.gateway.http_errors import invalid
from broker.gateway.http_json import MISSING, as_array, as_bool, as_string, as_uint, find
from broker.gateway.http_message import Reply, Request, json_reply
from broker.gateway.kserve import Service
from shm.errors import Code, InferError

_LOG_FIELDS: Final[dict[str, Callable[[Any], bool | int | str]]] = {
    "log_info": as_bool,
    "log_warning": as_bool,
    "log_error": as_bool,
    "log_verbose_level": as_uint,
    "log_format": as_string,
}
_LOG_FORMATS: Final = ("default", "ISO8601")
_TRACE_LEVELS: Final = ("OFF", "TIMESTAMPS", "TENSORS")
_INT32_MAX: Final = 2**31 - 1
_MIN_COUNT: Final = -1  # no limit
_RANGES: Final = {
    "trace_rate": (0, 2**32 - 1),
    "trace_count": (_MIN_COUNT, _INT32_MAX),
    "log_frequency": (0, 2**32 - 1),
}
_STOI: Final = re.compile(r"\s*[+-]?\d+")


@final
class SettingsEndpoints:
    """The endpoints, on one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def log(self, request: Request) -> Reply:
        """GET /v2/logging."""
        return json_reply(await self._service.log_settings({}))

    async def set_log(self, request: Request) -> Reply:
        """POST /v2/logging: what is null or not named stays as it is."""
        return json_reply(await self._service.log_settings(log_update(await request.json())))

    async def trace(self, request: Request, model: str = "") -> Reply:
        """GET /v2/trace/setting, of one model or the global ones."""
        await self._check_model(model)
        return json_reply(await self._service.trace_settings(model, {}))

    async def set_trace(self, request: Request, model: str = "") -> Reply:
        """POST /v2/trace/setting: null goes back to the global value."""
        await self._check_model(model)
        return json_reply(await self._service.trace_settings(model, trace_update(await request.json())))

    async def _check_model(self, model: str) -> None:
        if model and not await self._service.model_ready(model, ""):
            raise invalid(f"Request for unknown model : {model}")


def log_update(document: Any) -> dict[str, bool | int | str]:
    """The changes that a body asks for."""
    if find(document, "log_file") not in (MISSING, None):
        raise InferError(Code.UNSUPPORTED, "log file location can not be updated through network protocol")
    update: dict[str, bool | int | str] = {}
    for name, check in _LOG_FIELDS.items():
        value = find(document, name)
        if value not in (MISSING, None):
            update[name] = check(value)
    if update.get("log_format", "default") not in _LOG_FORMATS:
        raise InferError(Code.UNAVAILABLE, f"invalid argument for --log_format, got: {update['log_format']}")
    return update


def trace_update(document: Any) -> dict[str, str | list[str] | None]:
    """The changes that a body asks for."""
    if find(document, "trace_file") is not MISSING:
        raise InferError(Code.UNSUPPORTED, "trace file location can not be updated through network protocol")
    update: dict[str, str | list[str] | None] = {}
    if (levels := find(document, "trace_level")) is None:
        update["trace_level"] = None
    elif levels is not MISSING and (known := _levels(as_array(levels))):
        update["trace_level"] = known
    for name in _RANGES:
        if (value := find(document, name)) is None:
            update[name] = None
        elif value is not MISSING:
            update[name] = _number(name, as_string(value))
    return update


def _levels(values: list[Any]) -> list[str]:
    """Levels that do not exist are passed over, as in Triton."""
    names = [as_string(value) for value in values]
    if "OFF" in names and len(names) > 1:
        raise invalid("Expect only one trace level 'OFF' is specified")
    return [level for level in _TRACE_LEVELS if level in names]


def _number(name: str, text: str) -> str:
    """`text` as Triton reads it: what follows the digits is passed over, and what does not fit in an int is refused."""
    found = _STOI.match(text)
    if found is None:
        raise invalid(f"Unable to parse '{name}', got: {text}")
    value = int(found[0]) if len(found[0]) < 32 else _INT32_MAX + 1
    low, high = _RANGES[name]
    if not -_INT32_MAX - 1 <= value <= _INT32_MAX or (low == 0 and value < 0):
        raise invalid(f"Unable to parse '{name}', value is out of range [ {low}, {high} ], got: {text}")
    if value < low:
        raise invalid(f"Unable to parse '{name}'. Expecting value >= {low}, got:{text}")
    return str(value)
