"""The asynchronous clients made to block, so that one test says what both kinds do."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from clientlib.async_client import AsyncClient
from clientlib.async_pending import AsyncPending
from clientlib.async_plans import AsyncPlan
from clientlib.async_streams import AsyncStream
from clientlib.callable_model import AsyncModel
from clientlib.region import AsyncRegion
from clientlib.remote.async_client import AsyncRemoteClient
from clientlib.remote.async_plans import AsyncRemotePending, AsyncRemotePlan

KINDS = (
    AsyncClient,
    AsyncPlan,
    AsyncPending,
    AsyncModel,
    AsyncStream,
    AsyncRemoteClient,
    AsyncRemotePlan,
    AsyncRemotePending,
)


class Blocking:
    """An object of the async library, whose coroutines run on `runner` until they are done."""

    def __init__(self, wrapped: Any, runner: asyncio.Runner) -> None:
        self.wrapped, self.runner = wrapped, runner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.wrapped, name)
        return self._blocking(value) if callable(value) else value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._blocking(self.wrapped)(*args, **kwargs)

    def __iter__(self) -> Blocking:
        return self

    def __next__(self) -> Any:
        async def run() -> list[Any]:
            async for value in self.wrapped:
                return [value]
            return []

        if not (values := self.runner.run(run())):
            raise StopIteration
        return values[0]

    def _blocking(self, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            async def run() -> Any:
                value = function(*args, **kwargs)
                return await value if isinstance(value, Coroutine) else value

            value = self.runner.run(run())
            return Blocking(value, self.runner) if isinstance(value, KINDS) else value

        return call


def share(client: Any, region: Any) -> str:
    """A region's token, from either kind of client."""
    token: str = client.share(region) if isinstance(region, AsyncRegion) else region.share()
    return token
