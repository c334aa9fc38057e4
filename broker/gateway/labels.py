"""The class names of models' outputs, for the classification extension. Used by `broker.gateway.inference`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final, final

from clientlib.async_client import AsyncClient
from shm.gateway_messages import Config, GetConfig

KNOWN_S: Final = 1.0  # a reload by others is seen as late as that


@final
class Labels:
    """On one event loop; the broker is asked where nothing is known, or nothing new enough."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._known: dict[tuple[str, str], tuple[Mapping[str, Sequence[bytes]], float]] = {}  # and when it was heard

    async def of(self, model: str, version: str) -> Mapping[str, Sequence[bytes]]:
        """By output. Raises InferError."""
        labels, heard = self._known.get((model, version), ({}, float("-inf")))
        if time.monotonic() - heard > KNOWN_S:
            reply, _ = await self._client.call(GetConfig(model=model, version=version))
            assert isinstance(reply, Config)
            labels = {name: text.split(b"\n") for name, text in reply.labels.items()}
            self._known[model, version] = labels, time.monotonic()
        return labels

    def forget(self, model: str) -> None:
        """It was loaded or unloaded here."""
        self._known = {key: known for key, known in self._known.items() if key[0] != model}
