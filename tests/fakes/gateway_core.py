"""The gateway's core in the test's own process, on a real broker: `GatewayService` on a session of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from broker.gateway.kserve import Caller, InferRequest, InferResponse, InputTensor, RequestedOutput
from broker.gateway.options import GatewayOptions
from broker.gateway.service import GatewayService
from clientlib.async_client import AsyncClient
from shm import sockets
from shm.datatypes import datatype_of, numpy_dtype
from shm.run_directory import SOCKET

REMOTE = Caller("http", None, "a test's")


class Anybody:
    """A policy that restricts nothing."""

    def check(self, category: str, caller: Caller) -> None:
        """May."""


@contextlib.asynccontextmanager
async def core(directory: Path, **options: Any) -> AsyncIterator[GatewayService]:
    """A service for one event loop, on an ordinary session: everything but shared memory works."""
    sock = sockets.seqpacket()
    sock.connect(str(directory / SOCKET))
    client = await AsyncClient.adopt(sock)
    try:
        async with asyncio.timeout(120):
            yield GatewayService(client, GatewayOptions(directory=str(directory), broker_uid=0, **options), Anybody())
    finally:
        await client.close()


def request(
    model: str, inputs: Mapping[str, np.ndarray], outputs: Sequence[RequestedOutput] | None = None, **fields: Any
) -> InferRequest:
    """A request with inline tensors; their datatypes are those of the arrays."""

    tensors = [
        InputTensor(name, datatype_of(array.dtype), array.shape, data=array.tobytes()) for name, array in inputs.items()
    ]
    return InferRequest(model, inputs=tensors, outputs=None if outputs is None else list(outputs), **fields)


def arrays(response: InferResponse) -> dict[str, np.ndarray]:
    """The inline outputs of a response."""

    return {
        output.name: np.frombuffer(output.data, numpy_dtype(output.datatype)).reshape(output.shape)
        for output in response.outputs
        if output.data is not None
    }
