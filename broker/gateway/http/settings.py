"""Endpoints of the log and trace settings: how HTTP says a value, and where its texts differ from the rules'.

The rules are `broker.gateway.setting_rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, final

from broker.gateway import setting_rules as rules
from broker.gateway.http.json import MISSING, as_array, as_bool, as_string, as_uint, find
from broker.gateway.http.message import Reply, Request, json_reply
from broker.gateway.kserve import Service
from shm.errors import Code, InferError

_CHECKS: Final[Mapping[type, Callable[..., bool | int | str]]] = {bool: as_bool, int: as_uint, str: as_string}


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
        return json_reply(await self._service.trace_settings(model, {}))

    async def set_trace(self, request: Request, model: str = "") -> Reply:
        """POST /v2/trace/setting: null goes back to the global value."""
        if model:
            await self._service.trace_settings(
                model, {}
            )  # is it there? As in Triton, before anything else is looked at
        return json_reply(await self._service.trace_settings(model, trace_update(await request.json())))


def log_update(document: Any) -> dict[str, bool | int | str]:
    """The changes that a body asks for."""
    if find(document, "log_file") not in (MISSING, None):
        raise rules.file_is_fixed("log")
    update: dict[str, bool | int | str] = {}
    for name, kind in rules.LOG_TYPES.items():
        value = find(document, name)
        if value not in (MISSING, None):
            update[name] = _CHECKS[kind](value, place=name)
    if (style := update.get("log_format", rules.LOG_FORMATS[0])) not in rules.LOG_FORMATS:
        raise InferError(Code.UNAVAILABLE, f"invalid argument for --log_format, got: {style}")
    return update


def trace_update(document: Any) -> dict[str, str | list[str] | None]:
    """The changes that a body asks for."""
    if find(document, "trace_file") is not MISSING:
        raise rules.file_is_fixed("trace")
    update: dict[str, str | list[str] | None] = {}
    named: list[str] = []
    if (levels := find(document, "trace_level")) is None:
        update["trace_level"] = None
    elif levels is not MISSING:
        listed = as_array(levels, place="trace_level")
        named = [as_string(level, place=f"trace_level[{index}]") for index, level in enumerate(listed)]
        if known := rules.levels(named):
            update["trace_level"] = known
    rules.report_ignored(document if isinstance(document, dict) else (), named)
    for name in rules.NUMBERS:
        if (value := find(document, name)) is None:
            update[name] = None
        elif value is not MISSING:
            update[name] = rules.number(name, as_string(value, place=name), got=", got:")
    return update
