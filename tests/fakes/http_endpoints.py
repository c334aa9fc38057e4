"""Asks HTTP's endpoints without a server, on a `FakeService`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from broker.gateway.http.errors import status_of
from broker.gateway.http.message import Reply, Request
from broker.gateway.http.routes import Routes
from broker.gateway.kserve import Caller
from broker.gateway.options import GatewayOptions
from shm.errors import InferError
from tests.fakes.kserve import FakeService


class Asker:
    """`refused` gives status and message of an InferError."""

    def __init__(self, **options: Any) -> None:
        self.service = FakeService()
        self.routes = Routes(self.service, GatewayOptions(directory="/run", broker_uid=0, **options))

    def ask(self, method: str, path: str, body: Any = b"", headers: Mapping[str, str] | None = None) -> Reply:
        found = self.routes.find(path)
        assert found is not None, path
        endpoint, names = found
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = Request(headers or {}, (), data, Caller("http"), lambda size: None)
        return asyncio.run(endpoint.methods[method](request, *names))  # type: ignore[arg-type]

    def json(self, method: str, path: str, body: Any = b"") -> Any:
        reply = self.ask(method, path, body)
        assert reply.status == 200
        return json.loads(b"".join(reply.parts))

    def refused(self, method: str, path: str, body: Any = b"") -> tuple[int, str]:
        with pytest.raises(InferError) as caught:
            self.ask(method, path, body)
        return status_of(caught.value), caught.value.message
