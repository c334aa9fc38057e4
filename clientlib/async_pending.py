"""A request that was submitted on an event loop: awaiting its end.

Made by `clientlib.async_plans`, settled by its lane. The future only says "ended or expired", so that a result which
nobody takes is no unretrieved exception.
"""
# ruff: noqa: ASYNC109 (the arguments are those of `Pending`)

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, final

from clientlib.arena import Lease
from clientlib.arguments import seconds
from clientlib.async_claims import check_loop
from clientlib.async_lane import AsyncLane
from clientlib.failures import NotServed
from clientlib.layout import Layout
from clientlib.link import Bound
from clientlib.pending import expired
from clientlib.process import StaysHere
from clientlib.results import InferResult
from clientlib.submission import CARRIED
from shm.errors import Code, InferError
from shm.layout import CODE_MASK, FINAL

if TYPE_CHECKING:
    from clientlib.async_plans import AsyncPlan


@final
class AsyncPending(StaysHere):
    """A submitted request of an `AsyncPlan`; await it, or `result()`.

    Applications also call `done` and `cancel`; what else is here without an underscore is the library's own and may
    change.
    """

    __slots__ = (
        "_bound",
        "_deadline_ns",
        "_event",
        "_expired",
        "_flags",
        "_future",
        "_left",
        "_priority",
        "_result",
        "_rows",
        "_sequence_id",
        "_timer",
        "client",
        "copied",
        "entry",
        "ident",
        "input_slot",
        "lease",
        "note",
        "output_slot",
        "plan",
    )

    note: bytes
    elsewhere = "send its result's arrays"

    def __init__(
        self,
        plan: AsyncPlan,
        bound: Bound[AsyncLane],
        input_slot: int,
        output_slot: int,
        rows: int,
        deadline_ns: int,
        priority: int,
        flags: int,
        sequence_id: int,
        lease: Lease | None,
        event: int = 0,
        caller: int = 0,
    ) -> None:
        self.plan = plan  # keeps the client, its session and regions
        self._bound = bound
        self.input_slot = input_slot
        self.output_slot = output_slot
        self._rows = rows
        self._deadline_ns = deadline_ns
        self._priority = priority
        self._flags = flags
        self._sequence_id = sequence_id
        self._event = event  # see `shm.admission.Request.wait_event`
        self.client = caller  # of a gateway; 0: this process
        self.lease = lease
        self.copied = 0
        self.ident = 0
        self.entry: tuple[int, ...] | None = None
        self._expired = False
        self._left = False  # by the one coroutine that knew of it
        self._result: InferResult | None = None
        self._future: asyncio.Future[None] = bound.lane.loop.create_future()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def layout(self) -> Layout:
        """Where its tensors lie."""
        return self._bound.layout

    def send(self) -> bool:
        """Put it into the channel; False when that is full. Called by the lane."""
        bound = self._bound
        self.ident = bound.channel.submit(
            self,
            bound.word,
            self.input_slot,
            self.output_slot,
            self._rows,
            self._deadline_ns,
            0,
            self._priority,
            self._flags,
            self._sequence_id,
            self._event,
            self.client,
        )
        return self.ident != 0

    def lasts(self) -> Callable[[], bool]:
        """Says whether its end has not been seen yet. Keeps its result no longer than it has to."""
        return functools.partial(self._bound.channel.holds, self.ident) if self.ident else lambda: self.entry is None

    def check(self) -> None:
        """Raises struct.error for what `send` could not put into the channel."""
        CARRIED.pack(self.input_slot, self.output_slot, self._rows, self._priority, self._sequence_id)

    def expire_at(self, deadline_ns: int) -> None:
        """Answer at the deadline, whatever the worker does."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later((deadline_ns - time.monotonic_ns()) * 1e-9, self._expire)

    def settle(self, entry: tuple[int, ...], note: bytes) -> None:
        """The channel's completion. The output position is free from here on."""
        self.note = note
        layout = self._bound.layout
        if layout.mixed:
            self._result = layout.settled(entry, note, self.output_slot, self._rows, self.copied)
        self._bound.live.pop(self.output_slot, None)
        self.entry = entry
        if self._left:
            self.lease = None
        if self._timer is not None:
            self._timer.cancel()
        if not self._future.done():
            self._future.set_result(None)

    def done(self) -> bool:
        """Has it ended?"""
        return self.entry is not None

    def cancel(self) -> bool:
        """Ask for an early end; False when it has ended already. A request that runs is not interrupted."""
        if self.entry is not None:
            return False
        if self._bound.lane.withdraw(self):
            self.settle((0, 0, Code.CANCELLED | FINAL, 0, 0, 0, 0, 0), b"the request was cancelled")
            return True
        return self._bound.channel.cancel(self.ident)

    async def result(self, timeout: float | None = None) -> InferResult:
        """Await the end. Raises TimeoutError after `timeout` seconds (the request goes on), InferError if it failed."""
        if self.entry is None and not self._expired:
            check_loop(self._future.get_loop())
            patience_s = None if timeout is None else seconds(timeout, now=True)
            waiting = asyncio.shield(self._future)  # whoever else awaits it must not be cancelled with us
            try:
                async with asyncio.timeout(patience_s):
                    await waiting
            except TimeoutError:
                raise TimeoutError(f"no result within {timeout:g} s; the request goes on") from None
        return self.take()

    async def finish(self) -> InferResult:
        """As `result`, for the one coroutine that knows of this request: cancelling it cancels the request."""
        try:
            await self._future
            return self.take()
        except BaseException as error:
            # Who keeps the error keeps this object by its traceback; the place is for others as soon as it is free.
            self._left = True
            if isinstance(error, asyncio.CancelledError):
                self.cancel()
            if self.entry is not None:
                self.lease = None
            raise

    def leave(self) -> None:
        """Nobody will ask for the result, and it is not needed. Any thread, any time."""
        self._left = True
        if self.entry is not None:
            self.lease = None
        elif self.ident and self._bound.lane.error is None:
            self._bound.channel.cancel(self.ident, wait=False)

    def __await__(self) -> Generator[Any, None, InferResult]:
        return self.result().__await__()

    def take(self) -> InferResult:
        """The result of a request that has ended. Raises InferError if it failed or its deadline passed."""
        if self._result is None:
            if self.entry is None:
                raise expired()
            if code := self.entry[2] & CODE_MASK:
                self.lease = None  # who keeps the error keeps this object by its traceback
                raise self._failure(code)
            self._result = self._bound.layout.result(
                self.entry, self.note, self.output_slot, self._rows, self.lease, self.copied
            )
            self.lease = None
        return self._result

    def _failure(self, code: int) -> InferError:
        error = self._bound.layout.failure(code, self.note)
        if isinstance(error, NotServed):
            self.plan.look_again(self._bound.word)
        return error

    def _expire(self) -> None:
        self._timer = None
        self._expired = True
        if self._bound.lane.withdraw(self):
            self.settle((0, 0, Code.UNAVAILABLE | FINAL, 0, 0, 0, 0, 0), expired().message.encode())
        elif not self._future.done():
            self._future.set_result(None)
