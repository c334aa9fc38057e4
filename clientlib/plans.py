"""A prepared request, for threads: `plan.infer()` is the hot path of the library.

Made by `Client.prepare`. What a request needs is bound once per thread (`clientlib.native.Bound`) and found in a
thread-local; a lost broker, a fork or a close replaces that thread-local, so that no request has to ask about them.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, final

import numpy.typing as npt

from clientlib import cuda_order
from clientlib.channels import Lane
from clientlib.claims import claim, look_at, submit_when_free, take_place
from clientlib.failures import NotServed, RoomNeeded
from clientlib.growing import RETRIED, infer_again
from clientlib.link import Bound, Prepared, outside
from clientlib.ordered import OrderedPlan, in_order
from clientlib.pending import Pending
from clientlib.process import StaysHere
from clientlib.recipe import Recipe
from clientlib.results import InferResult
from clientlib.spread import Spread
from clientlib.streams import Single, Source, Stream, only_streams, start
from clientlib.submission import NOT_CARRIED, Options, Route, check_all, check_options, deadline_ns_of
from clientlib.waiting import LONGEST_WAIT_S
from shm.errors import Code, InferError
from shm.layout import SEQUENCE_AGAIN

if TYPE_CHECKING:
    from clientlib.client import Client

_now = time.monotonic
_now_ns = time.monotonic_ns


@final
class Plan(StaysHere):
    """A model, and where its inputs and outputs lie, checked once. Any thread may use it.

    `infer`, `submit` and `stream` take: `timeout`, the deadline in seconds; `input_slot` and `output_slot`, the
    positions; `rows`, to use fewer than the prepared batch (0: all); `priority`; and the sequence's id and ends. The
    other verbs are `release`, and `after` for GPU memory; what else is here without an underscore is the library's own
    and may change. A decoupled model has `stream` alone, and outputs without a position.
    """

    __slots__ = ("__weakref__", "_client", "_local", "_released", "gpus", "prepared", "recipe")
    elsewhere = "connect() and prepare() there; region.share() and open_region() bring the memory"

    def __init__(self, client: Client, recipe: Recipe) -> None:
        self._client = client
        self._local = threading.local()
        self._released = False
        self.recipe = recipe
        self.gpus = cuda_order.gpus_of(recipe)
        self.prepared: Prepared[Lane] | None = None

    def infer(
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
        """Run the model and wait. Raises InferError; UNAVAILABLE at the deadline, even if the model runs on.

        What interrupts it, a KeyboardInterrupt or a signal handler's exception, does not end the run either: until that
        has ended, requests with the same positions are refused.
        """
        deadline_ns = 0 if timeout is None else deadline_ns_of(timeout)
        try:
            pending = self._start(
                deadline_ns, input_slot, output_slot, rows, priority, sequence_id, sequence_start, sequence_end
            )
            return self._finish(pending)
        except RETRIED as error:
            failure = error.with_traceback(None)
        except NOT_CARRIED:
            check_all(input_slot, output_slot, rows, priority, sequence_id, sequence_start, sequence_end)
            raise
        options = (rows, priority, sequence_id, sequence_start, sequence_end)
        return self._infer_again(failure, deadline_ns, input_slot, output_slot, options)

    def submit(
        self,
        timeout: float | None = None,
        input_slot: int = 0,
        output_slot: int | None = None,
        rows: int = 0,
        priority: int = 0,
        sequence_id: int = 0,
        sequence_start: bool = False,
        sequence_end: bool = False,
    ) -> Pending:
        """Send the request and return at once. Waits only while every slot of the channel is taken.

        `infer` sends a request again that its worker did not begin because the model is elsewhere, or another one, by
        now; of a `Pending` the `result` says so (UNAVAILABLE or NOT_FOUND, once), and `submit` finds the model again.
        """
        deadline_ns = 0 if timeout is None else deadline_ns_of(timeout)
        try:
            return self._start(
                deadline_ns, input_slot, output_slot, rows, priority, sequence_id, sequence_start, sequence_end
            )
        except NOT_CARRIED:
            check_all(input_slot, output_slot, rows, priority, sequence_id, sequence_start, sequence_end)
            raise

    def stream(
        self,
        timeout: float | None = None,
        input_slot: int = 0,
        rows: int = 0,
        priority: int = 0,
        sequence_id: int = 0,
        sequence_start: bool = False,
        sequence_end: bool = False,
    ) -> Stream:
        """Send the request; iterate over what comes: any number of responses of a decoupled model, one of any other.

        `timeout` is for all of it, in seconds: at the deadline the iteration raises InferError UNAVAILABLE and the
        request is cancelled. The arrays of a decoupled model's responses are copied out of shared memory as they come.
        """
        deadline_ns = 0 if timeout is None else deadline_ns_of(timeout)
        options = (rows, priority, sequence_id, sequence_start, sequence_end)

        def again(error: InferError) -> Source | None:
            return self.regrown(error, deadline_ns, input_slot, options)

        try:
            return Stream(self.source(deadline_ns, input_slot, options), again)
        except NOT_CARRIED:
            check_all(input_slot, None, *options)
            raise

    def after(self, stream: object, order: str = "event") -> OrderedPlan:
        """`infer` and `submit` for requests that come after what `stream` has to do by then, on a plan on GPU memory.

        `stream`: of torch, cupy, numba or cuda.core, or its address; None: the caller knows that everything is done.
        `order`: "event", for which the worker waits, 1 s at most; "synchronize": the caller waits for the stream. Where
        no event can be had (all 64 are under way, memory of several GPUs), it is "synchronize". A request without
        `after` waits for all that this process has enqueued on the GPUs, whatever the stream: that is always right, and
        the slowest. What is waited for here counts against the request's `timeout`: past it, UNAVAILABLE is raised and
        nothing is sent. Work that reads an output's place counts, too: the model writes there.
        """
        return OrderedPlan(self, stream, order)

    def source(
        self,
        deadline_ns: int,
        input_slot: int,
        options: Options,
        values: Sequence[npt.NDArray[Any]] = (),
        ran: bool = False,
    ) -> Source:
        """Send the request of a stream. `values`: as for `infer_arrays`. `ran`: as for `_start`."""
        local = self._local
        bound = getattr(local, "bound", None) or getattr(local, "streaming", None)
        bound = bound or self._bind_any(deadline_ns, options[2:])
        if not bound.layout.responses:
            return Single(self._start(deadline_ns, input_slot, None, *options, values, ran, True))
        if self.gpus:
            cuda_order.Wait(self.gpus, None, False).now(deadline_ns)
        if (needed := bound.layout.outgrown) is not None:
            bound.layout.outgrown = None
            with contextlib.suppress(InferError):  # without more room responses go on coming in parts
                self._client.grow(self, needed, deadline_ns)
            return self.source(deadline_ns, input_slot, options, values)
        return start(self, bound, deadline_ns, input_slot, options, values)

    def regrown(
        self,
        error: InferError,
        deadline_ns: int,
        input_slot: int,
        options: Options,
        values: Sequence[npt.NDArray[Any]] = (),
    ) -> Source | None:
        """The same once more, with more room or elsewhere, if `error` says that this was what it lacked."""
        if isinstance(error, RoomNeeded):
            self._client.grow(self, error, deadline_ns)
        elif isinstance(error, NotServed):
            self.look_again()
        else:
            return None
        return self.source(deadline_ns, input_slot, options, values, isinstance(error, RoomNeeded))

    def infer_arrays(self, values: Sequence[npt.NDArray[Any]], deadline_ns: int, priority: int) -> InferResult:
        """Copy `values` into a place of the client's own and run. For plans that `Client.infer` makes."""
        try:
            return self._finish(self._start(deadline_ns, 0, None, 0, priority, 0, False, False, values))
        except RETRIED as error:
            failure = error.with_traceback(None)
        return self._infer_again(failure, deadline_ns, 0, None, (0, priority, 0, False, False), values)

    def _infer_again(
        self,
        failure: RoomNeeded | NotServed,
        deadline_ns: int,
        input_slot: int,
        output_slot: int | None,
        options: Options,
        values: Sequence[npt.NDArray[Any]] = (),
    ) -> InferResult:
        ran = isinstance(failure, RoomNeeded)

        def infer() -> InferResult:
            return self._finish(self._start(deadline_ns, input_slot, output_slot, *options, values, ran))

        return infer_again(failure, lambda needed: self._client.grow(self, needed, deadline_ns), infer)

    def release(self) -> None:
        """Let go, at the broker too, of what the plan holds; without it that comes when nobody refers to the plan.

        A later request raises InferError. Those in flight end as usual, and what they need goes with them or when this
        is called again. Results stay valid.
        """
        self._released = True
        self.unbind()
        prepared = self.prepared
        if prepared is not None:
            look_at(prepared.layout.ranges.live)
            if not prepared.layout.ranges.live:  # else the plan's end is that of the last `Pending`, which refers to it
                self.prepared = None
                self._client.release(prepared)

    def __enter__(self) -> Plan:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    @property
    def places_byte_size(self) -> int:
        """What the plan takes of the client's own memory."""
        return self.prepared.layout.byte_size if self.prepared is not None else 0

    def unbind(self) -> None:
        """The next request of every thread asks for its channel and the plan's word again."""
        self._local = threading.local()

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

    def _bind(self, deadline_ns: int, route: Route) -> tuple[Bound[Lane], int]:
        """For requests that have one response. With the event that the request comes after, from 1; 0: none."""
        bound = self._bind_any(deadline_ns, route)
        if bound.layout.responses:
            raise only_streams(self.recipe.model)
        if not self.gpus:
            return bound, 0
        return in_order(self, self._client, bound, deadline_ns, lambda: self._bind_any(deadline_ns, route))

    def _bind_any(self, deadline_ns: int, route: Route) -> Bound[Lane]:
        local = self._local  # before asking: what replaces it meanwhile must not be undone
        if (known := getattr(local, "ordered", None)) is not None:
            return known  # type: ignore[no-any-return]
        if (spread := getattr(local, "spread", None)) is not None:
            return self._choose(spread, deadline_ns, route)
        bound = None if self._released else self._client.bind(self, deadline_ns)
        if bound is None or self._released:
            self.release()  # also what was prepared meanwhile
            raise was_released()
        if (spread := bound.spread) is not None:  # `_start`, which finds no other, has to come here each time
            bound.spread = None  # which has it, too: together they would keep the channel
            local.spread = spread
            return self._choose(spread, deadline_ns, route)
        if bound.layout.responses:
            local.streaming = bound  # `_start`, which finds no other, must not use it
        elif self.gpus:
            local.ordered = bound  # likewise
        else:
            local.bound = bound
        return bound

    def _choose(self, spread: Spread[Lane], deadline_ns: int, route: Route) -> Bound[Lane]:
        """Several workers serve the model: the one for this request."""
        if spread.is_due():
            self._client.bind_missing(spread, deadline_ns)
        worker = spread.pick(route)
        bound = spread.bounds.get(worker) or self._client.bind_at(spread, worker, deadline_ns)
        return bound or self._bind_any(deadline_ns, route)

    def _start(
        self,
        deadline_ns: int,
        input_slot: int,
        output_slot: int | None,
        rows: int,
        priority: int,
        sequence_id: int,
        sequence_start: bool,
        sequence_end: bool,
        values: Sequence[npt.NDArray[Any]] = (),
        ran: bool = False,
        stays: bool = False,
    ) -> Pending:
        """`ran`: it did, and there was too little room for its result. A sequence must not take that step twice.
        `stays`: as for `take_place`.
        """
        event = 0
        bound = getattr(self._local, "bound", None)
        if bound is None:  # not while AttributeError is handled: what fails would hold that, and it this frame
            bound, event = self._bind(deadline_ns, (sequence_id, sequence_start, sequence_end))
        flags = 0
        if rows or priority or sequence_id or sequence_start or sequence_end:
            flags = check_options(rows, priority, sequence_id, sequence_start, sequence_end)
            if ran and sequence_id:
                flags |= SEQUENCE_AGAIN
        lease = None
        if bound.layout.bank is not None:
            bank = bound.layout.bank
            lease = bank.take() or take_place(bound, bank, deadline_ns, stays=stays)
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
        pending = Pending(self, bound, input_slot, output_slot, rows, deadline_ns)
        if lease is not None:
            pending.lease = lease
            if values:
                pending.copied = bound.layout.write(lease.place, values)
        if bound.ranges.rivals is not None or bound.live.setdefault(output_slot, pending) is not pending:
            claim(bound, pending)
        try:
            ident = bound.channel.submit(
                pending, bound.word, input_slot, output_slot, rows, deadline_ns, 0, priority, flags, sequence_id, event
            )
            pending.ident = ident or submit_when_free(bound, pending, deadline_ns, priority, flags, sequence_id, event)
        except BaseException:
            bound.live.pop(output_slot, None)
            raise
        if event:
            cuda_order.sent(functools.partial(bound.channel.holds, pending.ident))
        return pending

    def _finish(self, pending: Pending) -> InferResult:
        lane = pending.lane
        channel = lane.channel
        if channel.role.acquire(False):
            # The common case of `Pending.result`: nobody else waits here, and the completion comes soon.
            try:
                if pending.entry is None:  # a thread that shares the channel may have settled it
                    deadline_ns = pending.deadline_ns
                    channel.wait(max((deadline_ns - _now_ns()) * 1e-9, 0.0) if deadline_ns else LONGEST_WAIT_S)
                    channel.reap()
            finally:
                channel.role.release()
                if lane.waiters:
                    lane.pass_on()
        try:
            return pending.result() if pending.entry is None else pending.take()
        except BaseException:
            pending.leave()
            raise


def was_released() -> InferError:
    """The error for a request of a plan that the application has let go."""
    return InferError(Code.UNAVAILABLE, "this plan was released: prepare another one")


def no_output_slot() -> InferError:
    """The error for a position where the plan's outputs have none."""
    text = "output_slot is for outputs that the caller placed; this plan's have their own"
    return InferError(Code.INVALID_ARG, text)
