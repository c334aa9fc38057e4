"""A prepared request on an event loop. The same verbs as `clientlib.plans.Plan`, awaitable.

Made by `AsyncClient.prepare`; used on the loop that it was made on.
"""
# ruff: noqa: ASYNC109 (the arguments are those of `Plan`)

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, final

import numpy.typing as npt

from clientlib import cuda_order
from clientlib.async_claims import check_loop, claim, elsewhere, take_place, turn
from clientlib.async_lane import AsyncLane
from clientlib.async_pending import AsyncPending
from clientlib.async_streams import AsyncInflow, AsyncSingle, AsyncSource, AsyncStream
from clientlib.failures import NotServed, RoomNeeded
from clientlib.growing import RETRIED, infer_again_async
from clientlib.link import Bound, Prepared, outside
from clientlib.ordered import AsyncOrderedPlan, in_order_async, over
from clientlib.plans import Plan, no_output_slot, was_released
from clientlib.process import StaysHere
from clientlib.recipe import Recipe
from clientlib.results import InferResult
from clientlib.spread import Spread
from clientlib.streams import only_streams
from clientlib.submission import NOT_CARRIED, AnyOptions, check_all, check_options, deadline_ns_of, remaining_s
from shm.errors import InferError
from shm.layout import SEQUENCE_AGAIN

if TYPE_CHECKING:
    from clientlib.async_client import AsyncClient


@final
class AsyncPlan(StaysHere):
    """A model, and where its inputs and outputs lie, checked once. Verbs and arguments are those of `Plan`."""

    __slots__ = (
        "__weakref__",
        "_binding",
        "_bound",
        "_client",
        "_ordered",
        "_released",
        "_spread",
        "_streaming",
        "gpus",
        "prepared",
        "recipe",
    )
    elsewhere = Plan.elsewhere

    def __init__(self, client: AsyncClient, recipe: Recipe) -> None:
        self._client = client
        self._binding = asyncio.Lock()
        self._bound: Bound[AsyncLane] | None = None
        self._streaming: Bound[AsyncLane] | None = None  # instead of it, where requests have any number of responses
        self._ordered: Bound[AsyncLane] | None = None  # instead of `_bound`, on GPU memory
        self._spread: Spread[AsyncLane] | None = None  # instead of any of them, where several workers serve the model
        self._released = False
        self.recipe = recipe
        self.gpus = cuda_order.gpus_of(recipe)
        self.prepared: Prepared[AsyncLane] | None = None

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
        deadline_ns = 0 if timeout is None else deadline_ns_of(timeout)
        options = (rows, priority, sequence_id, sequence_start, sequence_end)
        try:
            return await (await self._start(deadline_ns, input_slot, output_slot, options)).finish()
        except RETRIED as error:
            failure = error.with_traceback(None)
        except NOT_CARRIED:
            check_all(input_slot, output_slot, *options)
            raise
        return await self._infer_again(failure, deadline_ns, input_slot, output_slot, options)

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
    ) -> AsyncPending:
        """Send the request; it queues while every slot of the channel is taken, first come, first served."""
        deadline_ns = 0 if timeout is None else deadline_ns_of(timeout)
        options = (rows, priority, sequence_id, sequence_start, sequence_end)
        try:
            return await self._start(deadline_ns, input_slot, output_slot, options)
        except NOT_CARRIED:
            check_all(input_slot, output_slot, rows, priority, sequence_id, sequence_start, sequence_end)
            raise

    async def infer_arrays(
        self,
        values: Sequence[npt.NDArray[Any]],
        deadline_ns: int,
        priority: int,
        sequence: tuple[int, bool, bool] = (0, False, False),
        queue_timeout_ns: int = 0,
        caller: int = 0,
    ) -> InferResult:
        """Copy `values` into a place of the client's own and run. For plans that `AsyncClient.infer` makes.

        `sequence`: its id, and whether this is its start and its end. `queue_timeout_ns`: CLOCK_MONOTONIC; in place of
        a deadline, what the model's queue makes of Triton's `timeout`. `caller`: for whom a gateway asks, by a number
        of its own; callers take turns.
        """
        options = (0, priority, *sequence, queue_timeout_ns, caller)
        try:
            return await (await self._start(deadline_ns, 0, None, options, values)).finish()
        except RETRIED as error:
            failure = error.with_traceback(None)
        return await self._infer_again(failure, deadline_ns, 0, None, options, values)

    async def _infer_again(
        self,
        failure: RoomNeeded | NotServed,
        deadline_ns: int,
        input_slot: int,
        output_slot: int | None,
        options: AnyOptions,
        values: Sequence[npt.NDArray[Any]] = (),
    ) -> InferResult:
        ran = isinstance(failure, RoomNeeded)

        async def infer() -> InferResult:
            return await (await self._start(deadline_ns, input_slot, output_slot, options, values, ran)).finish()

        return await infer_again_async(failure, lambda needed: self._client.grow(self, needed, deadline_ns), infer)

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
        """A request to iterate over with `async for`: any number of responses of a decoupled model, one of any other.

        It is sent when the stream is first awaited; `timeout` counts from here. As `Plan.stream`.
        """
        deadline_ns = 0 if timeout is None else deadline_ns_of(timeout)
        return self._stream(deadline_ns, input_slot, (rows, priority, sequence_id, sequence_start, sequence_end))

    def stream_arrays(
        self,
        values: Sequence[npt.NDArray[Any]],
        deadline_ns: int,
        priority: int,
        sequence: tuple[int, bool, bool] = (0, False, False),
        queue_timeout_ns: int = 0,
        caller: int = 0,
    ) -> AsyncStream:
        """As `infer_arrays`, with any number of responses. `values` are copied when the stream is first awaited."""
        return self._stream(deadline_ns, 0, (0, priority, *sequence, queue_timeout_ns, caller), values)

    def after(self, stream: object, order: str = "event") -> AsyncOrderedPlan:
        """As `Plan.after`. What is waited for here is waited for on another thread."""
        return AsyncOrderedPlan(self, stream, order)

    async def release(self) -> None:
        """Let go, at the broker too, of what the plan holds. As `Plan.release`."""
        check_loop(self._client.loop)
        self._released = True
        self.unbind()
        prepared = self.prepared
        if prepared is not None and not prepared.layout.ranges.live:
            self.prepared = None
            await self._client.release(prepared)

    async def __aenter__(self) -> AsyncPlan:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.release()

    @property
    def places_byte_size(self) -> int:
        """What the plan takes of the client's own memory."""
        return self.prepared.layout.byte_size if self.prepared is not None else 0

    @property
    def crowded(self) -> bool:
        """Are the places of the client's own nearly all in use, so that requests wait or results are copied?"""
        bank = self.prepared.layout.bank if self.prepared is not None else None
        return bank is not None and not bank.can_spare()

    async def ready(self, deadline_ns: int) -> None:
        """Requests that are made from here on leave in their order: none has to wait for what the first one needs."""
        if self._bound is None and self._streaming is None and self._spread is None:
            await self._bind_once(deadline_ns)

    def unbind(self) -> None:
        """The next request asks for its channel and the plan's word again."""
        self._bound = self._streaming = self._ordered = self._spread = None

    def look_again(self, word: int = 0) -> None:
        """The worker does not serve the model, or has not what `word` names: the next request asks who has.

        Unless `word` is not the plan's any more: another thread has asked meanwhile, and the next request finds that.
        """
        prepared = self.prepared
        if prepared is not None and word in (0, prepared.word):
            prepared.moved = True
        self.unbind()

    def __del__(self) -> None:
        if self.prepared is not None:
            self._client.native.released(self.prepared)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _stream(
        self,
        deadline_ns: int,
        input_slot: int,
        options: AnyOptions,
        values: Sequence[npt.NDArray[Any]] = (),
    ) -> AsyncStream:
        async def begin() -> AsyncSource:
            try:
                return await self.source(deadline_ns, input_slot, options, values)
            except NOT_CARRIED:
                check_all(input_slot, None, *options)
                raise

        async def again(error: InferError) -> AsyncSource | None:
            return await self.regrown(error, deadline_ns, input_slot, options, values)

        return AsyncStream(begin, again)

    async def source(
        self,
        deadline_ns: int,
        input_slot: int,
        options: AnyOptions,
        values: Sequence[npt.NDArray[Any]] = (),
        ran: bool = False,
    ) -> AsyncSource:
        """Send the request of a stream. `values`: as for `infer_arrays`. `ran`: as for `Plan`."""
        bound = self._bound or self._streaming or await self._bind_any(deadline_ns, options)
        check_loop(self._client.loop)
        if not bound.layout.responses:
            return AsyncSingle(await self._start(deadline_ns, input_slot, None, options, values, ran))
        if self.gpus:
            await over(cuda_order.Wait(self.gpus, None, False), deadline_ns)
        if (needed := bound.layout.outgrown) is not None:
            bound.layout.outgrown = None
            with contextlib.suppress(InferError):  # without more room responses go on coming in parts
                await self._client.grow(self, needed, deadline_ns)
            return await self.source(deadline_ns, input_slot, options, values)
        bank = bound.layout.bank
        lease = None if bank is None else bank.take() or await take_place(bank, deadline_ns)
        inflow = AsyncInflow(self, bound, input_slot, options, deadline_ns, lease, values)
        claim(bound, inflow)
        try:
            inflow.submit()
        except BaseException:
            bound.live.pop(inflow.output_slot, None)
            raise
        return inflow

    async def regrown(
        self,
        error: InferError,
        deadline_ns: int,
        input_slot: int,
        options: AnyOptions,
        values: Sequence[npt.NDArray[Any]] = (),
    ) -> AsyncSource | None:
        """The same once more, with more room or elsewhere, if `error` says that this was what it lacked."""
        if isinstance(error, RoomNeeded):
            await self._client.grow(self, error, deadline_ns)
        elif isinstance(error, NotServed):
            self.look_again()
        else:
            return None
        return await self.source(deadline_ns, input_slot, options, values, isinstance(error, RoomNeeded))

    async def _bind(self, deadline_ns: int, options: AnyOptions) -> tuple[Bound[AsyncLane], int]:
        """For requests that have one response. With the event that the request comes after, from 1; 0: none."""
        bound = await self._bind_any(deadline_ns, options)
        if bound.layout.responses:
            raise only_streams(self.recipe.model)
        if not self.gpus:
            return bound, 0
        return await in_order_async(
            self, self._client, bound, deadline_ns, lambda: self._bind_any(deadline_ns, options)
        )

    async def _bind_any(self, deadline_ns: int, options: AnyOptions) -> Bound[AsyncLane]:
        check_loop(self._client.loop)
        bound: Bound[AsyncLane] | None = None
        while bound is None:
            spread = self._spread
            if spread is None and (bound := await self._bind_once(deadline_ns)) is not None:
                break
            if (spread := spread or self._spread) is None:
                continue
            if spread.is_due():  # by itself: no request waits for it, and so none is overtaken
                self._client.bind_missing(spread)
            worker = spread.pick(options[2:5])
            if (bound := spread.bounds.get(worker)) is None:
                async with turn(self._binding, remaining_s(deadline_ns), "binds the same plan"):
                    bound = spread.bounds.get(worker) or await self._client.bind_at(spread, worker, deadline_ns)
        return bound

    async def _bind_once(self, deadline_ns: int) -> Bound[AsyncLane] | None:
        """One question to the broker for all tasks that start requests meanwhile. None: there is a choice."""
        async with turn(self._binding, remaining_s(deadline_ns), "binds the same plan"):
            bound = self._bound or self._streaming or self._ordered
            if bound is None and self._spread is None:
                bound = None if self._released else await self._client.bind(self, deadline_ns)
                if bound is None or self._released:
                    await self.release()  # also what was prepared meanwhile
                    raise was_released()
                if bound.spread is not None:
                    self._spread, bound.spread = bound.spread, None  # together they would keep the channel
                elif bound.layout.responses:
                    self._streaming = bound  # `_start`, which finds no other, must not use it
                elif self.gpus:
                    self._ordered = bound  # likewise
                else:
                    self._bound = bound
            return bound if self._spread is None else None

    async def _start(
        self,
        deadline_ns: int,
        input_slot: int,
        output_slot: int | None,
        options: AnyOptions,
        values: Sequence[npt.NDArray[Any]] = (),
        ran: bool = False,
    ) -> AsyncPending:
        bound, event = (self._bound, 0) if self._bound is not None else await self._bind(deadline_ns, options)
        if asyncio.get_running_loop() is not bound.lane.loop:
            raise elsewhere()
        flags = check_options(*options) if any(options) else 0
        if ran and options[2]:
            flags |= SEQUENCE_AGAIN
        lease = None
        if bound.layout.bank is not None:
            lease = bound.layout.bank.take() or await take_place(bound.layout.bank, deadline_ns)
            if bound.layout.writes:
                input_slot = lease.place
            if bound.layout.owns_outputs:
                if output_slot is not None:
                    raise no_output_slot()
                output_slot = lease.place
        if output_slot is None:
            output_slot = 0
        if not (0 <= input_slot < bound.input_positions and 0 <= output_slot < bound.output_positions):
            raise outside(bound, input_slot, output_slot)
        until, caller = (deadline_ns, 0) if len(options) == 5 else (options[5] or deadline_ns, options[6])
        pending = AsyncPending(
            self, bound, input_slot, output_slot, options[0], until, options[1], flags, options[2], lease, event, caller
        )
        if lease is not None and values:
            pending.copied = bound.layout.write(lease.place, values)
        claim(bound, pending)
        try:
            bound.lane.submit(pending)
        except BaseException:
            bound.live.pop(output_slot, None)
            raise
        if event:
            cuda_order.sent(pending.lasts())
        if deadline_ns:
            pending.expire_at(deadline_ns)
        return pending
