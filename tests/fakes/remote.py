"""A transport without a wire: one model `double` (x, y: FP32 [-1, n]) that the test answers, or that answers itself."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from clientlib.address import Address
from clientlib.pending import expired
from clientlib.region import Region
from clientlib.remote import transport
from clientlib.remote.client import RemoteClient
from clientlib.remote.plans import RemotePlan
from clientlib.remote.transport import Ended, InferAnswer, InferRequest, OutputTensor, Word, cancelled
from shm.errors import InferError, fresh
from shm.message_values import IndexEntry, ModelMetadata, TensorMetadata

ADDRESS = Address("test://here", "grpc", "here", 1)


def doubled(request: InferRequest) -> InferAnswer:
    tensor = request.inputs[0]
    assert tensor.data is not None
    return answer((np.frombuffer(tensor.data, np.float32) * 2).tobytes(), tensor.shape)


def answer(data: bytes | None, shape: tuple[int, ...], datatype: str = "FP32", name: str = "y") -> InferAnswer:
    return InferAnswer([OutputTensor(name, datatype, shape, data)])


class FakeTransport:
    """`said`: the control words; `requests`: with how to end them. `answers`: ends a request at once, if there is."""

    wire = "test"

    def __init__(self, *, shares_memory: bool = False) -> None:
        self.shares_memory = shares_memory
        self.said: list[Word] = []
        self.requests: list[InferRequest] = []
        self.started: list[Ended] = []
        self.answers: Callable[[InferRequest], InferAnswer | InferError] | None = doubled
        self.refuses: dict[type, InferError] = {}
        self.cancels = 0
        self.closed = False
        self.left = False

    def call(self, word: Word, deadline: float) -> Any:
        assert deadline != math.inf
        self.said.append(word)
        if type(word) in self.refuses:
            raise fresh(self.refuses[type(word)])
        match word:
            case transport.Live():
                return True
            case transport.Index():
                return [IndexEntry(name="double", version="1", state="READY"), IndexEntry(name="never")]
            case transport.Metadata(model, version):
                tensors = [(TensorMetadata(name=name, datatype="FP32", shape=(-1, -1)),) for name in "xy"]
                return ModelMetadata(name=model, version=version or "1", inputs=tensors[0], outputs=tensors[1])
            case transport.Config():
                return {"max_batch_size": 8}
        return None

    def infer(self, request: InferRequest, deadline: float) -> InferAnswer:
        assert not any(tensor.region for tensor in request.inputs)
        self.requests.append(request)
        assert self.answers is not None
        end = self.answers(request)
        if isinstance(end, InferError):
            raise fresh(end)
        return end

    def submit(self, request: InferRequest, deadline: float, ended: Ended) -> Callable[[], None]:
        self.requests.append(request)
        if self.answers is not None:
            ended(self.answers(request))
        else:
            self.started.append(ended)
        return lambda: self._cancel(ended)

    def _cancel(self, ended: Ended) -> None:
        self.cancels += 1
        if not self.shares_memory and ended in self.started:
            self.started.remove(ended)
            ended(cancelled())

    def end(self, end: InferAnswer | InferError) -> None:
        """End the request that was started first."""
        self.started.pop(0)(end)

    def wait(self, event: threading.Event, timeout: float | None) -> bool:
        """As `Transport.wait`: answers come on threads of their own."""
        return event.wait(timeout)

    def close(self) -> None:
        self.closed = True
        for ended in self.started:
            ended(expired())
        self.started.clear()

    def leave_to_parent(self) -> None:
        self.left = True


class AsyncFakeTransport:
    """The same for a loop: `gate` holds requests until it is set; `waiting` counts those that came to it."""

    wire = "test"

    def __init__(self, *, shares_memory: bool = False) -> None:
        self.inner = FakeTransport(shares_memory=shares_memory)
        self.shares_memory = shares_memory
        self.gate: asyncio.Event | None = None
        self.waiting = 0

    async def call(self, word: Word, deadline: float) -> Any:
        return self.inner.call(word, deadline)

    async def infer(self, request: InferRequest, deadline: float) -> InferAnswer:
        if self.gate is not None:
            self.waiting += 1
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                if self.shares_memory:  # the memory is in use until the server says so
                    await self.gate.wait()
                raise
        assert self.inner.answers is not None
        end = self.inner.answers(request)
        if isinstance(end, InferError):
            raise fresh(end)
        return end

    async def close(self) -> None:
        self.inner.close()

    def drop(self) -> None:
        self.inner.closed = True

    def leave_to_parent(self) -> None:
        self.inner.left = True


def client_on(fake: FakeTransport, slots: int = 64) -> RemoteClient:
    client = RemoteClient(ADDRESS, fake, slots)
    client.greet(30)
    return client


def plan_of(client: RemoteClient, slots: Any = 1) -> tuple[Region, RemotePlan]:
    """A region and a plan of `double` on it: x (1, 4) at 0, y (1, 4) from 1024 on."""
    region = client.create_region("r", 4096)
    region.array((1, 4), np.float32)[:] = 1
    x, y = region.tensor((1, 4), "FP32", stride=0), region.tensor((1, 4), "FP32", 1024)
    return region, client.prepare("double", {"x": x}, {"y": y}, slots=slots)
