"""A request whose responses come one by one, for threads: iterate over it.

Made by `Plan.stream`. `Stream` is what the application holds; when it lets go, the request is cancelled. `Inflow` is
what the channel holds until the request has ended. A model that is not decoupled has one response: `_Single`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, final

import numpy.typing as npt

from clientlib import process
from clientlib.arena import Lease
from clientlib.channels import Lane
from clientlib.claims import claim, submit_when_free, take_place
from clientlib.failures import RoomNeeded
from clientlib.growing import Tries
from clientlib.interrupted import Interrupted
from clientlib.layout import Layout
from clientlib.link import Bound, outside
from clientlib.process import StaysHere
from clientlib.responses import Assembler, Inbox
from clientlib.results import InferResult
from clientlib.submission import Options, check_options
from clientlib.waiting import Waiting
from shm.errors import Code, InferError, fresh
from shm.layout import FINAL

if TYPE_CHECKING:
    from clientlib.pending import Pending
    from clientlib.plans import Plan

_now_ns = time.monotonic_ns


class Source(Protocol):
    """Where the responses of a stream come from."""

    def next(self) -> InferResult | None:
        """Wait for the next response; None: that was the last. Raises the InferError that comes in its place."""

    def cancel(self) -> bool:
        """Ask for an early end; False when it has ended already."""

    def close(self) -> None:
        """Nobody reads any more."""

    def let_go(self) -> None:
        """The same, when the stream is collected: any thread, any time; waits for no lock."""


Again = Callable[[InferError], Source | None]


@final
class Stream(StaysHere):
    """The responses of one request: an iterator of `InferResult`, and a context manager.

    Each result has the outputs of one response, which may be fewer than the model's; its arrays own their memory and
    have the shapes that the model gave this response. Any thread may call `next`: each response goes to one of them.

    An InferError in the place of a response is raised by `next`, once. After one that ended the request the iteration
    is over, after any other it can be continued with `next`. At the deadline it is UNAVAILABLE, and so when responses
    that nobody reads have more than 64 MiB; the request is cancelled then. Leaving the `with` block, `close`, or
    letting the stream go cancels what still runs; what was not read is dropped.
    """

    __slots__ = ("__weakref__", "_again", "_closed", "_source")
    elsewhere = "send its results' arrays"

    def __init__(self, source: Source, again: Again | None = None) -> None:
        """`again`: where to read on when the first thing that comes is this error; None: nowhere, it is raised. It is
        asked again when that begins with an error, too, as far as `Tries` goes.
        """
        self._source = source
        self._again = again
        self._closed = False

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> InferResult:
        again, self._again = self._again, None
        try:
            result = self._source.next()
        except InferError as error:
            result = self._try_again(error, again)
        if result is None:
            raise StopIteration
        return result

    def _try_again(self, failure: InferError, again: Again | None) -> InferResult | None:
        tries = Tries()
        while again is not None and tries.allow(failure) and (source := again(failure)) is not None:
            self._source = source
            if self._closed:  # meanwhile, by another thread
                source.close()
            try:
                return source.next()
            except InferError as error:
                failure = error.with_traceback(None)  # which would hold on to this try, and that to it
        raise fresh(failure) from None

    def cancel(self) -> bool:
        """Ask for an early end; False when it has ended already. What the model sends meanwhile can still be read.

        The model is not interrupted: the request ends with its next response, in InferError CANCELLED.
        """
        return self._source.cancel()

    def close(self) -> None:
        """Cancel what still runs and drop what was not read. May be called again."""
        self._closed = True
        self._again = None
        self._source.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self._source.let_go()


@final
class Inflow(Waiting):
    """A submitted request to a decoupled model. `lease` is its place, given back at its end."""

    __slots__ = (
        "_deadline_ns",
        "_ended",
        "_inbox",
        "_layout",
        "_lease",
        "_made_in",
        "_plan",
        "ident",
    )
    elsewhere = Stream.elsewhere

    def __init__(
        self,
        plan: Plan,
        bound: Bound[Lane],
        input_slot: int,
        rows: int,
        deadline_ns: int,
        lease: Lease | None,
        values: Sequence[npt.NDArray[Any]],
    ) -> None:
        """`values` are copied to its place."""
        layout = bound.layout
        self._plan = plan  # keeps the client, its session and regions
        self.lane = bound.lane
        self._wakes: list[threading.Lock] | None = None
        self._layout = layout
        self.input_slot = input_slot if lease is None or not layout.writes else lease.place
        self.output_slot = 0 if lease is None or not layout.owns_outputs else lease.place
        if not (0 <= self.input_slot < bound.input_positions and self.output_slot < bound.output_positions):
            raise outside(bound, self.input_slot, self.output_slot)
        self.rows = rows
        self._deadline_ns = deadline_ns
        self._lease = lease
        self._ended = False
        self._made_in = process.generation
        self.ident = 0
        copied = layout.write(self.input_slot, values) if values else 0
        assembler = Assembler(layout.outputs, self.output_slot, layout.responses, raw=layout.raw)
        self._inbox = Inbox(assembler, layout.failure, copied)

    @property
    def entry(self) -> object:
        """None while there is nothing to take."""
        return self._inbox if self._inbox.ready else None

    def done(self) -> bool:
        """Has the request ended, whatever was read of it?"""
        if not self._ended and self.lane.error is None:
            self.lane.look()
        return self._ended

    def settle(self, entry: tuple[int, ...], note: bytes) -> None:
        """A completion of the channel: a part, an error, the end."""
        inbox = self._inbox
        inbox.put(entry, note)
        if entry[2] & FINAL:
            note_outgrown(self._layout, inbox)
            self._layout.ranges.live.pop(self.output_slot, None)
            self._lease = None
            self._ended = True
        elif inbox.deaf:
            self.lane.channel.cancel(entry[1])
        if self._wakes is not None and inbox.ready:
            self._wake_all()

    def next(self) -> InferResult | None:
        """Wait for the next response. See `Source`."""
        inbox = self._inbox
        if not inbox.over:
            process.check(self._made_in)  # also of what came before the fork
        ends = self._deadline_ns
        while True:
            if ends and not inbox.ended and _now_ns() >= ends:
                self._give_up(expired())
            result = inbox.take()
            if result is not None:
                return result
            if inbox.over:
                return None
            try:
                self.wait(ends / 1e9 if ends else math.inf)
            except Interrupted:
                raise
            except InferError as error:  # closed, or another process: nothing will come
                inbox.fail(error)

    def cancel(self) -> bool:
        """Ask for an early end."""
        return not self.done() and self.lane.error is None and self.lane.channel.cancel(self.ident)

    def close(self) -> None:
        """Nobody reads any more."""
        self._inbox.close()
        if not self._ended and self.lane.error is None:
            self.lane.channel.cancel(self.ident, wait=False)  # else with the next part
            self._wake_all()

    let_go = close

    def _give_up(self, error: InferError) -> None:
        self._inbox.fail(error)
        if not self._ended and self.lane.error is None:
            self.lane.channel.cancel(self.ident)


@final
class Single:
    """The one response of a model that is not decoupled, as the stream of a request."""

    __slots__ = ("_pending", "_taken")

    def __init__(self, pending: Pending) -> None:
        self._pending = pending
        self._taken = False

    def next(self) -> InferResult | None:
        """See `Source`."""
        if self._taken:
            return None
        self._taken = True
        return self._pending.result()

    def cancel(self) -> bool:
        """See `Source`."""
        return self._pending.cancel()

    def close(self) -> None:
        """See `Source`."""
        self._taken = True
        pending = self._pending
        if pending.entry is None and pending.lane.error is None:
            pending.lane.channel.cancel(pending.ident, wait=False)

    let_go = close


def start(
    plan: Plan,
    bound: Bound[Lane],
    deadline_ns: int,
    input_slot: int,
    options: Options,
    values: Sequence[npt.NDArray[Any]],
) -> Inflow:
    """Send a request of a decoupled model."""
    flags = check_options(*options) if any(options) else 0
    bank = bound.layout.bank
    lease = None if bank is None else bank.take() or take_place(bound, bank, deadline_ns, stays=True)
    rows, priority, sequence_id = options[:3]
    inflow = Inflow(plan, bound, input_slot, rows, deadline_ns, lease, values)
    claim(bound, inflow)
    try:
        inflow.ident = bound.channel.submit(
            inflow,
            bound.word,
            inflow.input_slot,
            inflow.output_slot,
            rows,
            deadline_ns,
            0,
            priority,
            flags,
            sequence_id,
        ) or submit_when_free(bound, inflow, deadline_ns, priority, flags, sequence_id)
    except BaseException:
        bound.live.pop(inflow.output_slot, None)
        raise
    return inflow


def note_outgrown(layout: Layout, inbox: Inbox) -> None:
    """Remember for the next stream that a response came in many parts."""
    if (outgrown := inbox.outgrown) is not None:
        name, byte_size = outgrown
        layout.outgrown = RoomNeeded(Code.INVALID_ARG, f"responses outgrow the room of '{name}'", name, byte_size)


def expired() -> InferError:
    """What the reader of a stream gets at its deadline."""
    return InferError(
        Code.UNAVAILABLE, "Request timeout expired: the stream had not ended at its deadline; the request was cancelled"
    )


def only_streams(model: str) -> InferError:
    """The error for `infer` and `submit` of a decoupled model."""
    return InferError(
        Code.INVALID_ARG,
        f"model '{model}' is decoupled: a request may have several responses or none; use stream(), which iterates "
        "over them",
    )
