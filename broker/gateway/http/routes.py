"""Which endpoint a method and a path mean: the one place that knows paths.

A path is matched as it came and nothing is tidied up, as in Triton, so that no second spelling of a path exists that a
rule could miss. Then, unlike there, the names in it are decoded, once: Triton's clients quote them, and a model named
"a+b" or a region named "cam 0" could not be asked for. What a name decodes to leads nowhere else: which endpoint it is,
and with it what the access policy says, is settled by then.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NamedTuple, final
from urllib.parse import unquote

from broker.gateway.http.errors import NOT_FOUND
from broker.gateway.http.generate import Generate
from broker.gateway.http.inference import Inference
from broker.gateway.http.message import Reply
from broker.gateway.http.models import Models
from broker.gateway.http.regions import Regions
from broker.gateway.http.settings import SettingsEndpoints
from broker.gateway.kserve import Category, Service
from broker.gateway.options import GatewayOptions
from broker.gateway.placed import Placed
from shm.errors import Code, InferError, shortened

Handler = Callable[..., Awaitable[Reply]]  # of the request, then of what the path names

_MODEL: Final = re.compile(
    r"/v2/models/([^/]+)(?:/versions/([0-9]+))?"
    r"(?:/(infer|generate|generate_stream|ready|config|stats|trace/setting))?"
)
_VERSION: Final = re.compile(r"/v2/models/[^/]+/versions/([^/]*)(?:/.*)?")  # whatever it is called
_REPOSITORY: Final = re.compile(r"/v2/repository(?:/([^/]+))?/(?:index|models/([^/]+)/(load|unload))")
_REGION: Final = re.compile(r"/v2/(system|cuda)sharedmemory(?:/region/([^/]+))?/(status|register|unregister)")


class Endpoint(NamedTuple):
    """`category`: whose restriction applies. `methods`: what each does; any other is not allowed."""

    category: Category
    methods: Mapping[str, Handler]


@final
class Routes:
    """The table, on one service."""

    def __init__(self, service: Service, options: GatewayOptions) -> None:
        models = Models(service)
        settings = SettingsEndpoints(service)
        regions = Regions(service, options.allow_client_shm)
        generate = Generate(service, options)
        log = Endpoint("logging", {"GET": settings.log, "POST": settings.set_log})
        trace = Endpoint("trace", {"GET": settings.trace, "POST": settings.set_trace})
        statistics = Endpoint("statistics", {"GET": models.statistics})
        self._exact: dict[str, Endpoint] = {
            "/v2": Endpoint("metadata", {"GET": models.server}),
            "/v2/health/live": Endpoint("health", {"GET": models.live}),
            "/v2/health/ready": Endpoint("health", {"GET": models.ready}),
            "/v2/models/stats": statistics,
            "/v2/logging": log,
            "/v2/trace/setting": trace,
        }
        self._model: dict[str | None, Endpoint] = {
            None: Endpoint("metadata", {"GET": models.metadata}),
            "ready": Endpoint("health", {"GET": models.model_ready}),
            "config": Endpoint("model-config", {"GET": models.config}),
            "stats": statistics,
            "trace/setting": trace,
            "infer": Endpoint("inference", {"POST": Inference(service, options).infer}),
            "generate": Endpoint("inference", {"POST": generate.generate}),
            "generate_stream": Endpoint("inference", {"POST": generate.stream}),
        }
        self._repository: dict[str | None, Endpoint] = {
            None: Endpoint("model-repository", {"POST": models.index}),
            "load": Endpoint("model-repository", {"POST": models.load}),
            "unload": Endpoint("model-repository", {"POST": models.unload}),
        }
        self._region: dict[tuple[str, str], Endpoint] = {
            ("system", "status"): Endpoint("shared-memory", {"GET": regions.system_status}),
            ("system", "register"): Endpoint("shared-memory", {"POST": regions.system_register}),
            ("system", "unregister"): Endpoint("shared-memory", {"POST": regions.system_unregister}),
            ("cuda", "status"): Endpoint("shared-memory", {"GET": regions.cuda_status}),
            ("cuda", "register"): Endpoint("shared-memory", {"POST": regions.cuda_register}),
            ("cuda", "unregister"): Endpoint("shared-memory", {"POST": regions.cuda_unregister}),
        }

    def find(self, path: str) -> tuple[Endpoint, tuple[str, ...]] | None:
        """The endpoint and what `path` (without the query) names, or None; also for names that are no UTF-8 text."""
        found = self._match(path)
        if found is None or "%" not in path:
            return found
        try:
            return found[0], tuple(map(_decoded, found[1]))
        except ValueError:
            return None

    def _match(self, path: str) -> tuple[Endpoint, tuple[str, ...]] | None:
        if (exact := self._exact.get(path)) is not None:
            return exact, ()
        if (found := _MODEL.fullmatch(path)) is not None:
            model, version, action = found.groups()
            if action != "trace/setting":
                return self._model[action], (model, version or "")
            return (self._model[action], (model,)) if version is None else None
        if (found := _REGION.fullmatch(path)) is not None:
            kind, name, action = found.groups()
            return self._region[kind, action], (name or "",)
        if (found := _REPOSITORY.fullmatch(path)) is not None:
            repository, model, action = found.groups()
            return self._repository[action], (repository or "", model) if action else (repository or "",)
        return None


def unknown(path: str) -> InferError:
    """The error for a path that no endpoint has."""
    found = _VERSION.fullmatch(path)
    if found is None or found[1].isdecimal():
        return InferError(Code.NOT_FOUND, NOT_FOUND)
    problem = f"expected the number of a version behind 'versions', got '{shortened(found[1])}'"
    return Placed(Code.NOT_FOUND, NOT_FOUND, "the path", problem)


def _decoded(name: str) -> str:
    """Raises ValueError for what is no UTF-8, or has a NUL, which no name has."""
    decoded = unquote(name, errors="strict")
    if "\0" in decoded:
        raise ValueError
    return decoded
