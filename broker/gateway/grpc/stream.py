"""ModelStreamInfer: the requests of one stream run concurrently.

The responses of models that have one to each request leave in the order of the requests; those of decoupled models
leave as they come, between the others.

Used by `broker.gateway.grpc.server`. An error is a message like any other and the stream goes on, unless the client
asked for gRPC's own statuses (metadata `triton_grpc_error: true`): then the first error ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from grpc import aio

from broker.gateway.grpc.codec import encode_response, stream_end, stream_error, stream_message
from broker.gateway.grpc.limits import Budget
from broker.gateway.kserve import InferRequest, InferResponse, Responses
from shm.errors import Code, InferError, forget_frames, fresh

MAX_OUTSTANDING: Final = 64  # requests read whose response was not sent: then nothing more is read from the stream
MAX_LASTING: Final = 128  # requests of decoupled models that run, beside those, as `lasting` has it; more wait

# A client that reads nothing for so long is not slow but gone or hostile; what is kept for it is let go.
WRITE_STALL_S: Final = 60.0

# Asks for one request. Fills in the request in the list as soon as it is understood, for the error's message.
Ask = Callable[[bytes, list[InferRequest]], Awaitable[Responses]]


class Stream:
    """One stream. `run` ends when the client has sent everything and got everything, or raises InferError.

    `copied` is told of the bytes of tensors that were copied into messages. `strict`: the first error ends it; `coded`:
    errors in it have a code (`clientlib.details`).
    """

    def __init__(
        self, context: Any, ask: Ask, budget: Budget, copied: Callable[[str, int], None], *, strict: bool, coded: bool
    ) -> None:
        self._context = context
        self._ask = ask
        self._budget = budget
        self._copied = copied
        self._kept = 0  # bytes of requests that run and of messages that were not sent
        self._strict, self._coded = strict, coded
        self._free = asyncio.Semaphore(MAX_OUTSTANDING)
        self._lasting = asyncio.Semaphore(MAX_LASTING)
        self._writing = asyncio.Lock()  # gRPC takes one message at a time
        self._running: asyncio.Queue[asyncio.Task[bytes | InferError | None] | None] = asyncio.Queue()  # by `_free`
        self._open: set[Responses] = set()
        self._group: asyncio.TaskGroup

    async def run(self) -> None:
        """Serve the stream. However it ends, nothing of it goes on."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                group.create_task(self._read())
                while (task := await self._running.get()) is not None:
                    message = await task
                    if message is None:  # it is decoupled, and holds nobody up
                        continue
                    await self._write(message)
                    self._free.release()
        except asyncio.CancelledError as cancelled:
            forget_frames(cancelled)  # the group's own frame holds what it raises, and by that the requests
            raise
        except BaseExceptionGroup as ended:  # the same, for whoever ends the RPC
            raise ended.exceptions[0] from None
        finally:
            for responses in tuple(self._open):  # those whose task was cancelled before it began
                await responses.aclose()
            while not self._running.empty():  # how they ended refers to this stream
                self._running.get_nowait()
            self._count(-self._kept)

    async def _read(self) -> None:
        while True:
            await self._free.acquire()
            raw = await self._context.read()
            if raw is aio.EOF:
                self._running.put_nowait(None)
                return
            self._running.put_nowait(self._group.create_task(self._answer(raw)))

    async def _answer(self, raw: bytes) -> bytes | InferError | None:
        """The one response to a request. None: there are others, and they are on their way."""
        understood: list[InferRequest] = []
        try:
            self._budget.take(len(raw))
        except InferError as error:
            return self._failed(error, None)
        self._kept += len(raw)
        lasts = False
        try:
            responses = await self._ask(raw, understood)
            self._open.add(responses)
            lasts = responses.decoupled
            if lasts:
                self._group.create_task(self._relay(responses, understood[0], len(raw)))
                return None
            try:
                return self._message(await anext(responses), understood[0])
            finally:
                await self._close(responses)
        except InferError as error:
            return self._failed(error, understood[0] if understood else None)
        finally:
            if not lasts:
                self._count(-len(raw))

    async def _relay(self, responses: Responses, request: InferRequest, size: int) -> None:
        """The responses of a decoupled model. The next one is taken when the one before has been written."""
        try:
            async with self._lasting:
                self._free.release()
                final = False
                async for response in responses:
                    final = response.final
                    await self._write(self._message(response, request))
                if request.empty_final and not final:
                    await self._write(self._counted(stream_end(request)))
        finally:
            await self._close(responses)
            self._count(-size)

    async def _close(self, responses: Responses) -> None:
        self._open.discard(responses)
        await responses.aclose()

    def _message(self, response: InferResponse, request: InferRequest) -> bytes | InferError:
        try:
            if response.error is not None:
                raise fresh(response.error)
            message = stream_message(encode_response(response, response.final))
        except InferError as error:
            return self._failed(error, request, final=response.final)
        self._copied("response", 2 * response.byte_size)  # once more, into the message around it
        return self._counted(message)

    def _failed(self, error: InferError, request: InferRequest | None, *, final: bool = True) -> bytes | InferError:
        if self._strict:
            return error
        return self._counted(stream_error(error, request, final=final, coded=self._coded))

    def _counted(self, message: bytes) -> bytes:
        self._count(len(message))
        return message

    def _count(self, size: int) -> None:
        self._kept += size
        self._budget.add(size)

    async def _write(self, message: bytes | InferError) -> None:
        if isinstance(message, InferError):
            raise fresh(message)
        async with self._writing:
            try:
                async with asyncio.timeout(WRITE_STALL_S):
                    await self._context.write(message)
            except TimeoutError:
                raise InferError(
                    Code.UNAVAILABLE, f"the client has read no response for {WRITE_STALL_S:g} s: the stream ends"
                ) from None
        self._count(-len(message))
