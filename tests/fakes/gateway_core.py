"""The gateway's core in the test's own process, on a real broker: `GatewayService` on a session of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np

from broker.gateway.kserve import Caller, InferRequest, InferResponse, InputTensor, RequestedOutput
from broker.gateway.options import GatewayOptions
from broker.gateway.service import GatewayService
from clientlib.async_client import AsyncClient
from shm.datatypes import datatype_of, numpy_dtype
from shm.gateway_messages import Serving
from shm.message_values import Principal
from tests.fakes.lender import Lending

REMOTE = Caller("http", None, "a test's")
LOCAL = Caller("http", Principal(uid=os.getuid(), scope="kserve"))
OTHER = Caller("zmq", Principal(uid=os.getuid(), scope="zmq:other"))


class Anybody:
    """A policy that restricts nothing."""

    def check(self, category: str, caller: Caller) -> None:
        """May."""


@contextlib.asynccontextmanager
async def core(broker: Lending, **options: Any) -> AsyncIterator[GatewayService]:
    """A service for one event loop, on a session that a gateway of `broker` has lent."""
    with broker.session() as session:
        client = await AsyncClient.adopt(session.dup())
        try:
            async with asyncio.timeout(120):
                await client.call(Serving())
                yield GatewayService(client, GatewayOptions(**options), Anybody())
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
