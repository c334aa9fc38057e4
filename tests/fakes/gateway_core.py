"""The gateway's core in the test's own process, on a real broker: `GatewayService` on a session of its own."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import posix_ipc
import pytest

from broker.gateway.kserve import Caller, InferRequest, InferResponse, InputTensor, RequestedOutput
from broker.gateway.options import GatewayOptions
from broker.gateway.service import GatewayService
from clientlib.async_client import AsyncClient
from shm.datatypes import datatype_of, numpy_dtype
from shm.errors import InferError
from shm.gateway_messages import Serving
from shm.message_values import Principal
from tests.fakes.lender import Lending

SIZE = 8192  # bytes of a region
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


def served(broker: Lending, test: Callable[[GatewayService], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Run `test(service)`; afterwards nobody has a region."""

    async def main() -> None:
        async with core(broker, **options) as service:
            try:
                await test(service)
            finally:
                if options.get("allow_client_shm", True):
                    for caller in (LOCAL, OTHER):
                        await service.unregister(caller, "system", "")

    asyncio.run(main())


@contextlib.contextmanager
def posix_memory() -> Iterator[Callable[..., tuple[str, int, np.ndarray]]]:
    """`make(name)`: POSIX shared memory of `SIZE` bytes: its key, its descriptor, an array of FP32 on it."""
    made = []

    def make(name: str = "in") -> tuple[str, int, np.ndarray]:
        key = f"/test-gateway-{os.getpid()}-{name}"
        shm = posix_ipc.SharedMemory(key, posix_ipc.O_CREX, size=SIZE)
        made.append((key, shm))
        return key, shm.fd, np.frombuffer(mmap.mmap(shm.fd, SIZE), np.float32)

    try:
        yield make
    finally:
        for key, shm in made:
            shm.close_fd()
            posix_ipc.unlink_shared_memory(key)


def asked(
    model: str = "add1",
    x: int = 0,
    y: int = 4096,
    columns: int = 4,
    room: int | None = None,
    region: str = "r",
    target: str | None = None,
) -> InferRequest:
    """x (1, columns) at `x` of `region` in, y at `y` of `target` out."""
    size = 4 * columns
    return InferRequest(
        model,
        inputs=[InputTensor("x", "FP32", (1, columns), region=region, offset=x, byte_size=size)],
        outputs=[RequestedOutput("y", region=target or region, offset=y, byte_size=size if room is None else room)],
    )


def refused(code: str, message: str) -> Any:
    """The whole of an error; `message` is a regular expression."""
    return pytest.raises(InferError, match=rf"^\[{code}\] {message}$")


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
