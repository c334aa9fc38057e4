"""Endpoints about the server and its models: health, metadata, configuration, statistics, the repository.

Each takes the request and what its path names (see `broker.gateway.http.routes`); raises InferError.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import re
from typing import Any, Final, final

from broker.gateway.http.errors import invalid, too_deep
from broker.gateway.http.json import MISSING, as_bool, as_object, as_string, dumps, find, shown
from broker.gateway.http.message import Reply, Request, json_reply
from broker.gateway.kserve import Service
from broker.gateway.placed import Placed, Within, refused
from clientlib import details
from shm.errors import Code, InferError, shortened
from shm.message_values import IndexEntry, TensorMetadata

_NOT_BASE64: Final = re.compile(r"[^A-Za-z0-9+/]")
_NO_FILE: Final = re.compile(r"[^A-Za-z0-9+/\r\n]")  # lines of base64 end somewhere
_INT_MAX: Final = 2**31 - 1


@final
class Models:
    """The endpoints, on one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def server(self, request: Request) -> Reply:
        """GET /v2."""
        service = self._service
        return json_reply(
            {"name": service.server_name, "version": service.server_version, "extensions": service.extensions}
        )

    async def live(self, request: Request) -> Reply:
        """GET /v2/health/live."""
        return Reply(200 if await self._service.live() else 400)

    async def ready(self, request: Request) -> Reply:
        """GET /v2/health/ready."""
        return Reply(200 if await self._service.ready() else 400)

    async def model_ready(self, request: Request, model: str, version: str) -> Reply:
        """GET …/ready of a model."""
        if not await self._service.model_ready(model, version):
            raise invalid("Model version not ready")
        return Reply()

    async def metadata(self, request: Request, model: str, version: str) -> Reply:
        """GET of a model."""
        found = await self._service.metadata(model, version)
        return json_reply(
            {
                "name": found.name,
                "versions": found.versions,
                "platform": found.platform,
                "inputs": [_tensor(tensor) for tensor in found.inputs],
                "outputs": [_tensor(tensor) for tensor in found.outputs],
            }
        )

    async def config(self, request: Request, model: str, version: str) -> Reply:
        """GET …/config."""
        config = await self._service.config(model, version)
        if details.asked(request.headers):
            details.add_to(config, await self._service.metadata(model, version))
        return json_reply(config)

    async def statistics(self, request: Request, model: str = "", version: str = "") -> Reply:
        """GET …/stats, of one model or of all."""
        return json_reply({"model_stats": await self._service.statistics(model, version)})

    async def index(self, request: Request, repository: str) -> Reply:
        """POST /v2/repository/index; a repository's name is ignored, as in Triton."""
        ready = find(await _parse_index(request), "ready") if request.body else MISSING
        if ready is MISSING:
            ready = False
        elif type(ready) is not bool:
            raise _ready_is_no_boolean(ready)
        return Reply(parts=(dumps([_index_entry(entry) for entry in await self._service.index(ready)]),))

    async def load(self, request: Request, repository: str, model: str) -> Reply:
        """POST …/models/M/load."""
        _check_repository(repository)
        document = as_object(await request.json()) if request.body else {}
        found = find(document, "parameters")
        parameters = {} if found is MISSING else as_object(found, place="parameters")
        with Within("parameters"):
            texts = {name: _load_parameter(name, value) for name, value in parameters.items()}
        await self._service.load(model, texts)
        return Reply()

    async def unload(self, request: Request, repository: str, model: str) -> Reply:
        """POST …/models/M/unload."""
        _check_repository(repository)
        document = as_object(await request.json()) if request.body else {}
        dependents = find(find(document, "parameters"), "unload_dependents")
        if dependents is MISSING:
            dependents = False
        with Within("parameters"):
            dependents = as_bool(dependents, "Unable to parse 'unload_dependents': ")
        await self._service.unload(model, dependents)
        return Reply()


def decode_base64(text: str, name: str) -> bytes:
    """What `text` says, skipping what is no base64, as Triton's reader does. Raises InferError for 2 GiB and more."""
    if len(text) > _INT_MAX:
        raise refused(
            f"'{name}' exceeds the maximum allowed data size limit INT_MAX",
            shortened(name),
            f"expected at most {_INT_MAX} characters, got {len(text)}",
        )
    digits = _NOT_BASE64.sub("", text)
    if len(digits) % 4 == 1:
        digits = digits[:-1]
    return base64.b64decode(digits + "=" * (-len(digits) % 4))


def _file(text: str, name: str) -> bytes:
    """The content of a file. Triton's reader skips what is no base64, and the model is another one, or empty."""
    with contextlib.suppress(ValueError):  # it has lines, or less at its end than it should
        return binascii.a2b_base64(text, strict_mode=True)
    digits = text.rstrip("=\r\n")
    if found := _NO_FILE.search(digits):
        came = f"{found[0]!r} at character {found.start() + 1}"
    elif len(_NOT_BASE64.sub("", digits)) % 4 == 1:
        came = "a text whose end is missing"
    else:
        return decode_base64(text, name)
    raise refused(f"'{shortened(name)}' must be base64, got {came}", shortened(name), f"expected base64, got {came}")


def _tensor(tensor: TensorMetadata) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}


def _index_entry(entry: IndexEntry) -> dict[str, str]:
    """Only what is known of it."""
    fields = {"name": entry.name, "version": entry.version, "state": entry.state, "reason": entry.reason}
    return {name: value for name, value in fields.items() if value or name == "name"}


async def _parse_index(request: Request) -> Any:
    try:
        return await request.json()
    except InferError as error:
        # Triton's parser nests without bound, so that it comes to look at what is nested: it cannot be a boolean.
        raise _ready_is_no_boolean() if error.message == too_deep().message else error from None


def _ready_is_no_boolean(value: object = MISSING) -> Placed:
    """`value`: what came, where that is known."""
    came = "arrays or objects in one another" if value is MISSING else shown(value)
    return refused("Invalid value for 'ready': expected a boolean", "ready", f"expected true or false, got {came}")


def _check_repository(name: str) -> None:
    if name:
        raise InferError(Code.UNSUPPORTED, "'repository_name' specification is not supported")


def _load_parameter(name: str, value: object) -> str | bytes:
    place = shortened(name)
    text = as_string(value, place=place)
    if name == "config":
        return text
    if name.startswith("file:"):
        return _file(text, name)
    problem = "expected 'config' or 'file:' with a path below the model's directory"
    raise Placed(Code.INTERNAL, "unexpected error on creating Triton parameter", place, problem)
