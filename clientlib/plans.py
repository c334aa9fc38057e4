"""A prepared request, for threads: `plan.infer()` is the hot path of the library.

Made by `Client.prepare`. What a request needs is bound once per thread (`clientlib.native.Bound`) and found in a
thread-local; a lost broker, a fork or a close replaces that thread-local, so that no request has to ask about them.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, final

import numpy.typing as npt

from clientlib.arena import Bank, Lease
from clientlib.channels import Lane, wake
from clientlib.layout import RoomNeeded
from clientlib.link import Bound, Prepared
from clientlib.overlap import Live, in_use
from clientlib.pending import Pending
from clientlib.process import StaysHere
from clientlib.recipe import Recipe
from clientlib.results import InferResult
from clientlib.submission import NOT_CARRIED, check_all, check_options, deadline_ns_of
from clientlib.waiting import LONGEST_WAIT_S, Waiting
from shm.errors import Code, InferError

if TYPE_CHECKING:
    from clientlib.client import Client

_now = time.monotonic
_now_ns = time.monotonic_ns
LOOK_AGAIN_S = 0.01  # while waiting for a place: other threads may have left requests that nobody reaps
FULL_WAIT_S = 1.0  # without a deadline, how long a request waits for a free slot or place


@final
class Plan(StaysHere):
    """A model, and where its inputs and outputs lie, checked once. Any thread may use it.

    `infer` and `submit` take: `timeout`, the deadline in seconds; `input_slot` and `output_slot`, the positions;
    `rows`, to use fewer than the prepared batch (0: all); `priority`; and the sequence's id and ends. The third verb is
    `release`; what else is here without an underscore is the library's own and may change.
    """

    __slots__ = ("__weakref__", "_client", "_local", "_released", "prepared", "recipe")
    elsewhere = "connect() and prepare() there; region.share() and open_region() bring the memory"

    def __init__(self, client: Client, recipe: Recipe) -> None:
        self._client = client
        self._local = threading.local()
        self._released = False
        self.recipe = recipe
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
        """Run the model and wait. Raises InferError; UNAVAILABLE at the deadline, even if the model runs on."""
        deadline_ns = 0 if timeout is None else deadline_ns_of(timeout)
        try:
            pending = self._start(
                deadline_ns, input_slot, output_slot, rows, priority, sequence_id, sequence_start, sequence_end
            )
            return self._finish(pending)
        except RoomNeeded as needed:
            self._client.grow(self, needed, deadline_ns)
        except NOT_CARRIED:
            check_all(input_slot, output_slot, rows, priority, sequence_id, sequence_start, sequence_end)
            raise
        pending = self._start(
            deadline_ns, input_slot, output_slot, rows, priority, sequence_id, sequence_start, sequence_end
        )
        return self._finish(pending)

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
        """Send the request and return at once. Waits only while every slot of the channel is taken."""
        deadline_ns = 0 if timeout is None else deadline_ns_of(timeout)
        try:
            return self._start(
                deadline_ns, input_slot, output_slot, rows, priority, sequence_id, sequence_start, sequence_end
            )
        except NOT_CARRIED:
            check_all(input_slot, output_slot, rows, priority, sequence_id, sequence_start, sequence_end)
            raise

    def infer_arrays(self, values: Sequence[npt.NDArray[Any]], deadline_ns: int, priority: int) -> InferResult:
        """Copy `values` into a place of the client's own and run. For plans that `Client.infer` makes."""
        try:
            return self._finish(self._start(deadline_ns, 0, None, 0, priority, 0, False, False, values))
        except RoomNeeded as needed:
            self._client.grow(self, needed, deadline_ns)
        return self._finish(self._start(deadline_ns, 0, None, 0, priority, 0, False, False, values))

    def release(self) -> None:
        """Let go, at the broker too, of what the plan holds; without it that comes when nobody refers to the plan.

        A later request raises InferError. Those in flight end as usual, and what they need goes with them or when this
        is called again. Results stay valid.
        """
        self._released = True
        self.unbind()
        prepared = self.prepared
        if prepared is not None:
            _look_at(prepared.layout.ranges.live)
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

    def __del__(self) -> None:
        if self.prepared is not None:
            self._client.native.released(self.prepared)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _bind(self, deadline_ns: int) -> Bound[Lane]:
        local = self._local  # before asking: what replaces it meanwhile must not be undone
        bound = None if self._released else self._client.bind(self, deadline_ns)
        if bound is None or self._released:
            self.release()  # also what was prepared meanwhile
            raise was_released()
        local.bound = bound
        return bound

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
    ) -> Pending:
        try:
            bound = self._local.bound
        except AttributeError:
            bound = self._bind(deadline_ns)
        flags = 0
        if rows or priority or sequence_id or sequence_start or sequence_end:
            flags = check_options(rows, priority, sequence_id, sequence_start, sequence_end)
        lease = None
        if bound.layout.bank is not None:
            bank = bound.layout.bank
            lease = bank.take() or self._lease(bound, bank, deadline_ns)
            if bound.layout.writes:
                input_slot = lease.place
            if bound.layout.owns_outputs:
                if output_slot is not None:
                    raise InferError(
                        Code.INVALID_ARG,
                        "output_slot is for outputs that the caller placed; this plan's have their own",
                    )
                output_slot = lease.place
        if output_slot is None:
            output_slot = 0
        if not (0 <= input_slot < bound.input_positions and 0 <= output_slot < bound.output_positions):
            raise outside(bound, input_slot, output_slot)
        pending = Pending(self, bound.lane, bound.layout, input_slot, output_slot, rows, deadline_ns)
        if lease is not None:
            pending.lease = lease
            if values:
                pending.copied = bound.layout.write(lease.place, values)
        if bound.ranges.rivals is not None or bound.live.setdefault(output_slot, pending) is not pending:
            self._claim(bound, pending)
        try:
            ident = bound.channel.submit(
                pending, bound.word, input_slot, output_slot, rows, deadline_ns, 0, priority, flags, sequence_id
            )
            pending.ident = ident or self._when_free(bound, pending, deadline_ns, priority, flags, sequence_id)
        except BaseException:
            bound.live.pop(output_slot, None)
            raise
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
        return pending.result() if pending.entry is None else pending.take()

    def _claim(self, bound: Bound[Lane], pending: Pending) -> None:
        """Mark the output position where that takes a closer look. Raises InferError when memory is in use."""
        for _ in range(bound.channel.slots + 1):
            overlap, holder = self._try_claim(bound, pending)
            if not overlap:
                return
            # The other request may have ended without anybody having looked.
            if not isinstance(holder, Waiting) or not holder.done():
                break
        raise InferError(Code.INVALID_ARG, overlap)

    def _try_claim(self, bound: Bound[Lane], pending: Pending) -> tuple[str, object]:
        if bound.ranges.rivals is not None:
            return bound.ranges.claim(pending)
        holder = bound.live.setdefault(pending.output_slot, pending)
        return ("", None) if holder is pending else (in_use(bound.ranges, pending), holder)

    def _lease(self, bound: Bound[Lane], bank: Bank, deadline_ns: int) -> Lease:
        """A place of the client's own; waits until the deadline, without one for a second."""
        until = deadline_ns / 1e9 if deadline_ns else _now() + FULL_WAIT_S
        while True:
            # Requests that nobody waits for give their places back only when somebody looks.
            _look_at(bound.live)
            lock = threading.Lock()
            lock.acquire()
            turn = functools.partial(wake, lock)
            bank.waiters.append(turn)
            bank.call_next()
            called = lock.acquire(timeout=max(0.0, min(until - _now(), LOOK_AGAIN_S)))
            if not called:
                with contextlib.suppress(ValueError):
                    bank.waiters.remove(turn)
            if (lease := bank.take_next()) is not None:
                bank.call_next()
                return lease
            if _now() >= until:
                raise InferError(
                    Code.UNAVAILABLE,
                    f"all {bank.places} places of this plan are in use: take the results of its requests, let their "
                    "arrays go, or place the outputs in a region",
                )

    def _when_free(
        self, bound: Bound[Lane], pending: Pending, deadline_ns: int, priority: int, flags: int, sequence_id: int
    ) -> int:
        """Submit as soon as a slot of the channel is free: until the deadline, without one for a second."""
        channel, lane = bound.channel, bound.lane
        until = deadline_ns / 1e9 if deadline_ns else _now() + FULL_WAIT_S
        while True:
            if channel.role.acquire(timeout=max(0.0, until - _now())):
                try:
                    if channel.outstanding == channel.slots:  # else another thread has reaped meanwhile
                        channel.wait(max(0.0, until - _now()))
                        channel.reap()
                    if channel.gone:
                        lane.abandon()
                finally:
                    lane.leave_role()
            if lane.error is not None:
                raise lane.error
            ident = channel.submit(
                pending,
                bound.word,
                pending.input_slot,
                pending.output_slot,
                pending.rows,
                deadline_ns,
                0,
                priority,
                flags,
                sequence_id,
            )
            if ident:
                return ident
            if _now() >= until:
                raise InferError(
                    Code.UNAVAILABLE,
                    f"all {channel.slots} slots of this thread's channel are taken by outstanding requests: wait for "
                    "results, or connect(slots=) with more",
                )


def _look_at(live: Mapping[int, Live]) -> None:
    """Settle those of a plan's requests that have ended without anybody having looked."""
    for lane in {pending.lane for pending in tuple(live.values()) if isinstance(pending, Waiting)}:
        lane.look()


def was_released() -> InferError:
    """The error for a request of a plan that the application has let go."""
    return InferError(Code.UNAVAILABLE, "this plan was released: prepare another one")


def outside(bound: Bound[Any], input_slot: int, output_slot: int) -> InferError:
    """The error for positions that the plan does not have."""
    return InferError(
        Code.INVALID_ARG,
        f"input_slot {input_slot} / output_slot {output_slot}: the plan has {bound.input_positions} input and "
        f"{bound.output_positions} output positions",
    )
