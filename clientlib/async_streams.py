"""A request whose responses come one by one, on an event loop: `async for` over it.

Made by `AsyncPlan.stream`. The twin of `clientlib.streams`: `AsyncStream` is the application's, `AsyncInflow` the
channel's until the request has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, final

import numpy.typing as npt

from clientlib.arena import Lease
from clientlib.async_claims import check_loop
from clientlib.async_lane import AsyncLane
from clientlib.growing import Tries
from clientlib.link import Bound, outside
from clientlib.process import StaysHere
from clientlib.responses import Assembler, Inbox
from clientlib.results import InferResult
from clientlib.streams import Stream, expired, note_outgrown
from clientlib.submission import CARRIED, AnyOptions, check_options
from shm.errors import Code, InferError, fresh
from shm.layout import FINAL

if TYPE_CHECKING:
    from clientlib.async_pending import AsyncPending
    from clientlib.async_plans import AsyncPlan


class AsyncSource(Protocol):
    """Where the responses of a stream come from. `final`, `unread_bytes`: as `AsyncStream` has them."""

    @property
    def final(self) -> bool:
        """Nothing follows what `next` gave last."""

    @property
    def unread_bytes(self) -> int:
        """Of the responses that wait."""

    async def next(self) -> InferResult | None:
        """Await the next response; None: that was the last. Raises the InferError that comes in its place."""

    def cancel(self) -> bool:
        """Ask for an early end; False when it has ended already."""

    def close(self) -> None:
        """Nobody reads any more."""

    def let_go(self) -> None:
        """The same, when the stream is collected: any thread, any time; waits for no lock."""


Begin = Callable[[], Awaitable[AsyncSource]]
AsyncAgain = Callable[[InferError], Awaitable[AsyncSource | None]]


@final
class AsyncStream(StaysHere):
    """The responses of one request: an asynchronous iterator of `InferResult`, and a context manager. As `Stream`.

    The request is sent when the stream is first awaited: by `async for`, by `async with`, or by `await stream`, which
    gives the stream itself; arrays must not change before that. Cancelling a task that awaits the next response
    cancels the request.
    """

    __slots__ = ("__weakref__", "_again", "_begin", "_beginning", "_closed", "_loop", "_source")
    elsewhere = Stream.elsewhere

    def __init__(self, begin: Begin, again: AsyncAgain | None = None) -> None:
        """`begin` sends the request. `again`: as for `Stream`."""
        self._begin = begin
        self._again = again
        self._beginning = asyncio.Lock()
        self._source: AsyncSource | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # where it is read
        self._closed = False

    def __await__(self) -> Generator[Any, None, AsyncStream]:
        return self._started().__await__()

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> InferResult:
        source = await self._sent()
        if source is None:
            raise StopAsyncIteration
        again, self._again = self._again, None
        try:
            try:
                result = await source.next()
            except InferError as error:
                result = await self._try_again(error, again)
        except asyncio.CancelledError:
            self.close()
            raise
        if result is None:
            raise StopAsyncIteration
        return result

    async def _try_again(self, failure: InferError, again: AsyncAgain | None) -> InferResult | None:
        tries = Tries()
        while again is not None and tries.allow(failure) and (source := await again(failure)) is not None:
            self._source = source
            if self._closed:  # meanwhile
                source.close()
            try:
                return await source.next()
            except InferError as error:
                failure = error.with_traceback(None)  # which would hold on to this try, and that to it
        raise fresh(failure) from None

    @property
    def final(self) -> bool:
        """Did what came last, a response or an error, say that nothing follows? The end may also come by itself."""
        return self._closed if self._source is None else self._source.final

    @property
    def unread_bytes(self) -> int:
        """Of the responses that wait to be read."""
        return 0 if self._source is None else self._source.unread_bytes

    def cancel(self) -> bool:
        """Ask for an early end; False when it has ended already, or was not sent. As `Stream.cancel`."""
        return self._source is not None and self._source.cancel()

    def close(self) -> None:
        """Cancel what still runs and drop what was not read. Does not wait. May be called again."""
        self._closed = True
        self._again = None
        if self._source is not None:
            self._source.close()

    async def __aenter__(self) -> AsyncStream:
        return await self._started()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self._source is not None:
            self._source.let_go()

    async def _started(self) -> AsyncStream:
        await self._sent()
        return self

    async def _sent(self) -> AsyncSource | None:
        """Where to read, once the request was sent; None when nobody may read any more."""
        if self._source is None and not self._closed:
            async with self._beginning:
                if self._source is None and not self._closed:
                    try:
                        source = await self._begin()
                    except BaseException:
                        self._closed = True
                        raise
                    self._source, self._loop = source, asyncio.get_running_loop()
                    if self._closed:
                        source.close()
        if self._loop is not None:
            check_loop(self._loop)
        return None if self._closed else self._source


@final
class AsyncInflow:
    """A submitted request to a decoupled model. `lease` is its place, given back at its end."""

    __slots__ = (
        "__weakref__",
        "_arguments",
        "_bound",
        "_cancelled",
        "_come",
        "_deadline_ns",
        "_ended",
        "_ident",
        "_inbox",
        "_is_held",
        "_lease",
        "_loop",
        "_plan",
        "_timer",
        "client",
        "input_slot",
        "output_slot",
    )

    def __init__(
        self,
        plan: AsyncPlan,
        bound: Bound[AsyncLane],
        input_slot: int,
        options: AnyOptions,
        deadline_ns: int,
        lease: Lease | None,
        values: Sequence[npt.NDArray[Any]],
    ) -> None:
        """`values` are copied to its place."""
        rows, priority, sequence_id = options[:3]
        flags = check_options(*options) if any(options) else 0
        layout = bound.layout
        self._plan = plan  # keeps the client, its session and regions
        self._bound = bound
        self.input_slot = input_slot if lease is None or not layout.writes else lease.place
        self.output_slot = 0 if lease is None or not layout.owns_outputs else lease.place
        if not (0 <= self.input_slot < bound.input_positions and self.output_slot < bound.output_positions):
            raise outside(bound, self.input_slot, self.output_slot)
        until, self.client = (deadline_ns, 0) if len(options) == 5 else (options[5] or deadline_ns, options[6])
        self._arguments = (
            *(self.input_slot, self.output_slot, rows, until, 0, priority, flags, sequence_id, 0, self.client),
        )
        self._deadline_ns = deadline_ns
        self._lease = lease
        self._ended = False
        self._ident = 0
        self._cancelled = False
        self._is_held = False  # by the lane, as enough is here to read
        self._loop = asyncio.get_running_loop()
        self._come = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        copied = layout.write(self.input_slot, values) if values else 0
        assembler = Assembler(layout.outputs, self.output_slot, layout.responses, raw=layout.raw)
        self._inbox = Inbox(assembler, layout.failure, copied)

    def submit(self) -> None:
        """Send it, or queue it where the channel is full."""
        self._bound.lane.submit(self)
        if self._deadline_ns:
            remaining_s = (self._deadline_ns - time.monotonic_ns()) * 1e-9
            self._timer = self._loop.call_later(remaining_s, self._expire)

    def send(self) -> bool:
        """Put it into the channel; False when that is full. Called by the lane."""
        if self._inbox.deaf:  # while it was queued
            self._end()
            return True
        self._ident = self._bound.channel.submit(self, self._bound.word, *self._arguments)
        return self._ident != 0

    def check(self) -> None:
        """Raises struct.error for what `send` could not put into the channel."""
        input_slot, output_slot, rows, _, _, priority, _, sequence_id, *_ = self._arguments
        CARRIED.pack(input_slot, output_slot, rows, priority, sequence_id)

    def settle(self, entry: tuple[int, ...], note: bytes) -> None:
        """A completion of the channel: a part, an error, the end."""
        inbox = self._inbox
        inbox.put(entry, note)
        if entry[2] & FINAL:
            note_outgrown(self._bound.layout, inbox)
            self._end()
        elif inbox.deaf:
            self._let_come()
            self._bound.channel.cancel(entry[1])
        elif inbox.enough and not self._cancelled:
            self._bound.lane.hold(self)
            self._is_held = True
        if inbox.ready:
            self._come.set()

    @property
    def final(self) -> bool:
        """See `AsyncSource`."""
        return self._inbox.final

    @property
    def unread_bytes(self) -> int:
        """See `AsyncSource`."""
        return self._inbox.unread_bytes

    async def next(self) -> InferResult | None:
        """Await the next response. See `AsyncSource`."""
        inbox = self._inbox
        while True:
            try:
                result = inbox.take()
            finally:
                if self._is_held and not inbox.enough:
                    self._let_come()
            if result is not None:
                return result
            if inbox.over:
                return None
            self._come.clear()
            await self._come.wait()

    def cancel(self) -> bool:
        """Ask for an early end."""
        if self._ended:
            return False
        if self._bound.lane.withdraw(self):
            self.settle((0, 0, Code.CANCELLED | FINAL, 0, 0, 0, 0, 0), b"the request was cancelled")
            return True
        self._cancelled = True
        self._let_come()
        return self._bound.channel.cancel(self._ident)

    def close(self) -> None:
        """Nobody reads any more."""
        self.let_go()
        self._come.set()
        self._let_come()

    def let_go(self) -> None:
        """The same from any thread."""
        self._inbox.close()
        if not self._ended and self._ident and self._bound.lane.error is None:
            self._bound.channel.cancel(self._ident, wait=False)  # else with the next part
            if self._is_held:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._let_come)

    def _end(self) -> None:
        self._bound.live.pop(self.output_slot, None)
        self._lease = None
        self._ended = True
        self._let_come()
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self) -> None:
        self._timer = None
        self._inbox.fail(expired())
        self._come.set()
        if self._bound.lane.withdraw(self):
            self._end()
        elif not self._ended and self._bound.lane.error is None:
            self._let_come()
            self._bound.channel.cancel(self._ident)

    def _let_come(self) -> None:
        if self._is_held:
            self._is_held = False
            self._bound.lane.let_come(self)


@final
class AsyncSingle:
    """The one response of a model that is not decoupled, as the stream of a request."""

    __slots__ = ("_pending", "_taken")

    def __init__(self, pending: AsyncPending) -> None:
        self._pending = pending
        self._taken = False

    @property
    def final(self) -> bool:
        """See `AsyncSource`."""
        return self._taken

    @property
    def unread_bytes(self) -> int:
        """See `AsyncSource`."""
        return 0

    async def next(self) -> InferResult | None:
        """See `AsyncSource`."""
        if self._taken:
            return None
        self._taken = True
        return await self._pending.finish()

    def cancel(self) -> bool:
        """See `AsyncSource`."""
        return self._pending.cancel()

    def close(self) -> None:
        """See `AsyncSource`."""
        self._taken = True
        self._pending.leave()

    let_go = close
