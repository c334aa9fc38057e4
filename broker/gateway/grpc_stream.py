"""ModelStreamInfer: requests of one stream run concurrently, their responses leave in the order of the requests.

Used by `broker.gateway.grpc_server`. An error is a message like any other and the stream goes on, unless the client
asked for gRPC's own statuses (metadata `triton_grpc_error: true`): then the first error ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from grpc import aio

from broker.gateway.grpc_codec import stream_error
from broker.gateway.grpc_limits import Budget
from broker.gateway.kserve import InferRequest
from shm.errors import Code, InferError

MAX_OUTSTANDING: Final = 64  # requests read whose response was not sent: then nothing more is read from the stream

# A client that reads nothing for so long is not slow but gone or hostile; what is kept for it is let go.
WRITE_STALL_S: Final = 60.0

# Runs one request. Fills in the request in the list as soon as it is understood, for the error's message.
Run = Callable[[bytes, list[InferRequest]], Awaitable[bytes]]


class Stream:
    """One stream. `run` ends when the client has sent everything and got everything, or raises InferError."""

    def __init__(self, context: Any, run: Run, budget: Budget, *, strict: bool) -> None:
        self._context = context
        self._run = run
        self._budget = budget
        self._unsent = 0  # bytes of responses
        self._strict = strict
        self._free = asyncio.Semaphore(MAX_OUTSTANDING)
        self._running: asyncio.Queue[asyncio.Task[bytes] | None] = asyncio.Queue()  # bounded by `_free`
        self._tasks: set[asyncio.Task[bytes]] = set()

    async def run(self) -> None:
        """Serve the stream. However it ends, nothing of it goes on."""
        reader = asyncio.create_task(self._read())
        try:
            while (task := await self._running.get()) is not None:
                message = await task
                await self._write(message)
                self._count(-len(message))
                self._tasks.discard(task)
                self._free.release()
            await reader
        finally:
            for each in (reader, *self._tasks):
                each.cancel()
            await asyncio.gather(reader, *self._tasks, return_exceptions=True)
            self._count(-self._unsent)

    async def _read(self) -> None:
        try:
            while True:
                await self._free.acquire()
                raw = await self._context.read()
                if raw is aio.EOF:
                    return
                task = asyncio.create_task(self._answer(raw))
                self._tasks.add(task)
                self._running.put_nowait(task)
        finally:
            self._running.put_nowait(None)

    async def _answer(self, raw: bytes) -> bytes:
        understood: list[InferRequest] = []
        try:
            message = await self._run(raw, understood)
        except InferError as error:
            if self._strict:
                raise
            message = stream_error(error, understood[0] if understood else None)
        self._count(len(message))
        return message

    def _count(self, size: int) -> None:
        self._unsent += size
        self._budget.add(size)

    async def _write(self, message: bytes) -> None:
        try:
            async with asyncio.timeout(WRITE_STALL_S):
                await self._context.write(message)
        except TimeoutError:
            raise InferError(
                Code.UNAVAILABLE, f"the client has read no response for {WRITE_STALL_S:g} s: the stream ends"
            ) from None
