"""Prepared and submitted requests of a remote client on an event loop. The same verbs as `clientlib.async_plans`.

Made by `AsyncRemoteClient.prepare`. A submitted request is a task that awaits the transport.
"""
# ruff: noqa: ASYNC109 (the arguments are those of `Plan`)

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, final

from clientlib.arguments import seconds
from clientlib.async_claims import check_loop
from clientlib.async_pending import AsyncPending
from clientlib.async_plans import AsyncPlan
from clientlib.async_streams import AsyncStream
from clientlib.pending import expired
from clientlib.plans import was_released
from clientlib.process import StaysHere
from clientlib.remote.core import Remote, closed
from clientlib.remote.layout import Layout, Position
from clientlib.remote.plans import ended_result
from clientlib.remote.transport import InferAnswer, cancelled
from clientlib.results import InferResult
from clientlib.submission import deadline_ns_of, remaining_s
from shm.errors import Code, InferError, fresh

if TYPE_CHECKING:
    from clientlib.remote.async_client import AsyncRemoteClient


@final
class AsyncRemotePlan(StaysHere):
    """A model, and where its inputs and outputs lie, checked once. Verbs and arguments are those of `Plan`."""

    __slots__ = ("__weakref__", "_client", "_layout", "_released")
    elsewhere = AsyncPlan.elsewhere

    def __init__(self, client: AsyncRemoteClient, layout: Layout) -> None:
        self._client = client
        self._layout = layout
        self._released = False

    async def infer(
        self,
        timeout: float | None = None,
        input_slot: int = 0,
        output_slot: int | None = None,
        rows: int = 0,
        priority: int = 0,
        sequence_id: int = 0,
        sequence_start: bool = False,
        sequence_end: bool = False,
    ) -> InferResult:
        """Run the model. Raises InferError; UNAVAILABLE when the deadline passes, even if the model runs on."""
        self._check()
        deadline_ns = 0 if timeout is None else deadline_ns_of(timeout)
        options = (rows, priority, sequence_id, sequence_start, sequence_end)
        return await self._client.run(self._layout, deadline_ns, input_slot, output_slot, options)

    async def submit(
        self,
        timeout: float | None = None,
        input_slot: int = 0,
        output_slot: int | None = None,
        rows: int = 0,
        priority: int = 0,
        sequence_id: int = 0,
        sequence_start: bool = False,
        sequence_end: bool = False,
    ) -> AsyncRemotePending:
        """Send the request; it queues while every slot of the client is taken, first come, first served."""
        self._check()
        deadline_ns = 0 if timeout is None else deadline_ns_of(timeout)
        options = (rows, priority, sequence_id, sequence_start, sequence_end)
        return await self._client.start(self, self._layout, deadline_ns, input_slot, output_slot, options)

    def stream(
        self,
        timeout: float | None = None,
        input_slot: int = 0,
        rows: int = 0,
        priority: int = 0,
        sequence_id: int = 0,
        sequence_start: bool = False,
        sequence_end: bool = False,
    ) -> AsyncStream:
        """A request to iterate over with `async for`. As `AsyncPlan.stream`, and `RemoteClient.stream`."""
        self._check()
        deadline_ns = 0 if timeout is None else deadline_ns_of(timeout)
        options = (rows, priority, sequence_id, sequence_start, sequence_end)
        return AsyncStream(lambda: self._client.source(self, self._layout, deadline_ns, input_slot, options))

    async def release(self) -> None:
        """A later request raises InferError. Those in flight end as usual, results stay valid."""
        self._released = True

    async def __aenter__(self) -> AsyncRemotePlan:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.release()

    def _check(self) -> None:
        self._client.check()
        if self._released:
            raise was_released()


@final
class AsyncRemotePending(StaysHere):
    """A submitted request of an `AsyncRemotePlan`; await it, or `result()`. Verbs are those of `AsyncPending`."""

    __slots__ = (
        "_at",
        "_copied",
        "_end",
        "_expired",
        "_freed",
        "_future",
        "_layout",
        "_owner",
        "_remote",
        "_task",
        "_timer",
    )
    elsewhere = AsyncPending.elsewhere

    def __init__(
        self,
        owner: object,
        remote: Remote,
        layout: Layout,
        at: Position,
        copied: int,
        deadline_ns: int,
        task: asyncio.Task[InferAnswer],
        freed: Callable[[], None],
    ) -> None:
        self._owner = owner  # keeps the client, the plan and with it its regions
        self._remote, self._layout, self._at, self._copied = remote, layout, at, copied
        self._freed = freed
        self._end: InferResult | InferError | None = None
        self._expired = False
        loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] = loop.create_future()
        remaining = remaining_s(deadline_ns)
        self._timer = None if remaining is None else loop.call_later(remaining, self._expire)
        self._task = task
        task.add_done_callback(self._ended)

    def done(self) -> bool:
        """Has it ended?"""
        self._remote.check_process()
        return self._end is not None

    def cancel(self) -> bool:
        """Ask for an early end; False when it has ended already."""
        if self.done():
            return False
        self._give_up(cancelled())
        return True

    async def result(self, timeout: float | None = None) -> InferResult:
        """Await the end. Raises TimeoutError after `timeout` seconds (the request goes on), InferError if it failed."""
        self._remote.check_process()
        if not self._future.done():
            check_loop(self._future.get_loop())
            patience_s = None if timeout is None else seconds(timeout, now=True)
            waiting = asyncio.shield(self._future)  # whoever else awaits it must not be cancelled with us
            try:
                async with asyncio.timeout(patience_s):
                    await waiting
            except TimeoutError:
                raise TimeoutError(f"no result within {timeout:g} s; the request goes on") from None
        return self._take()

    async def finish(self) -> InferResult:
        """As `result`, for the one coroutine that knows of this request: cancelling it cancels the request."""
        try:
            await self._future
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self._take()

    def __await__(self) -> Generator[Any, None, InferResult]:
        return self.result().__await__()

    def _take(self) -> InferResult:
        if self._expired and not isinstance(self._end, InferResult):
            raise expired()
        assert self._end is not None
        if isinstance(self._end, InferError):
            raise fresh(self._end)
        return self._end

    def _expire(self) -> None:
        self._timer = None
        self._expired = True
        self._give_up(expired())
        if not self._future.done():
            self._future.set_result(None)

    def _give_up(self, why: InferError) -> None:
        """Nobody waits for the answer any more. Where the server shares no memory the ranges are free at once."""
        if not self._layout.shared:
            self._settle(why)
        self._task.cancel()

    def _ended(self, task: asyncio.Task[InferAnswer]) -> None:
        end: InferAnswer | InferError
        if task.cancelled():
            end = closed() if self._remote.closed else cancelled()
        elif (error := task.exception()) is not None:
            end = fresh(error) if isinstance(error, InferError) else InferError(Code.INTERNAL, repr(error))
        else:
            end = task.result()
        self._settle(end)
        self._freed()

    def _settle(self, end: InferAnswer | InferError) -> None:
        if self._end is None:
            self._end = ended_result(self._layout, self._at, self._copied, end)
            if self._timer is not None:
                self._timer.cancel()
            if not self._future.done():
                self._future.set_result(None)
