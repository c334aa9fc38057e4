"""A request that was submitted: waiting for its end, from any thread.

Made by `clientlib.plans`, settled by whoever reaps the channel. The end is `entry`, set last: a thread that sees it
sees everything else.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, final

from clientlib.arena import Lease
from clientlib.arguments import seconds
from clientlib.channels import Lane
from clientlib.failures import NotServed
from clientlib.link import Bound
from clientlib.results import InferResult
from clientlib.waiting import Waiting
from shm.errors import Code, InferError, fresh
from shm.layout import CODE_MASK

if TYPE_CHECKING:
    from clientlib.plans import Plan

_now = time.monotonic


@final
class Pending(Waiting):
    """A submitted request of a `Plan`. `input_slot` and `output_slot` say which positions it uses.

    Applications call `result`, `done` and `cancel`; what else is here without an underscore is the library's own and
    may change.
    """

    __slots__ = (
        "_left",
        "_result",
        "bound",
        "copied",
        "deadline_ns",
        "entry",
        "ident",
        "lease",
        "note",
        "plan",
    )

    note: bytes
    elsewhere = "send its result's arrays"

    def __init__(
        self, plan: Plan, bound: Bound[Lane], input_slot: int, output_slot: int, rows: int, deadline_ns: int
    ) -> None:
        self.plan = plan  # keeps the client, its session and regions
        self.bound = bound
        self.lane = bound.lane
        self.input_slot = input_slot
        self.output_slot = output_slot
        self.rows = rows
        self.deadline_ns = deadline_ns  # CLOCK_MONOTONIC, 0: none
        self.ident = 0
        self.copied = 0
        self.lease: Lease | None = None
        self.entry: tuple[int, ...] | None = None
        self._wakes = None
        self._left = False
        self._result: InferResult | None = None

    def settle(self, entry: tuple[int, ...], note: bytes) -> None:
        """The channel's completion. The output position is free from here on."""
        self.note = note
        bound = self.bound
        if bound.layout.mixed:
            self._result = bound.layout.settled(entry, note, self.output_slot, self.rows, self.copied)
        bound.live.pop(self.output_slot, None)
        self.entry = entry
        if self._wakes is not None:
            self._wake_all()

    def done(self) -> bool:
        """Has it ended? Never waits."""
        if self.entry is None:
            error = self.lane.error
            if error is not None and self.entry is None:  # one that is given back has settled everything before
                raise fresh(error)
            self.lane.look()
        return self.entry is not None

    def cancel(self) -> bool:
        """Ask for an early end; False when it has ended already. A request that runs is not interrupted."""
        return not self.done() and self.lane.channel.cancel(self.ident)

    def result(self, timeout: float | None = None) -> InferResult:
        """Wait for the end. Raises TimeoutError after `timeout` seconds (the request goes on), InferError if it failed.

        At the request's own deadline it raises InferError UNAVAILABLE, even if the model runs on. May be called
        again, from any thread, for the same result.
        """
        if self.entry is None:
            ends = self.deadline_ns / 1e9 if self.deadline_ns else math.inf
            patience = math.inf if timeout is None else _now() + seconds(timeout, now=True)
            if not self.wait(min(ends, patience)):
                if ends <= patience:
                    raise expired()
                raise TimeoutError(f"no result within {timeout:g} s; the request goes on")
        return self.take()

    def take(self) -> InferResult:
        """The result of a request that has ended. Raises InferError if it failed."""
        if self._result is None:
            entry = self.entry
            assert entry is not None
            if code := entry[2] & CODE_MASK:
                self.lease = None  # who keeps the error keeps this object by its traceback
                raise self._failure(code)
            self._result = self.bound.layout.result(
                entry, self.note, self.output_slot, self.rows, self.lease, self.copied
            )
            self.lease = None
        return self._result

    def leave(self) -> None:
        """For the one caller that knew of it: its place is for others as soon as it has ended."""
        self._left = True
        if self._wakes is None:
            self._wakes = []  # so that `settle` looks
        if self.entry is not None:
            self.lease = None

    def _wake_all(self) -> None:
        super()._wake_all()
        if self._left:
            self.lease = None

    def _failure(self, code: int) -> InferError:
        error = self.bound.layout.failure(code, self.note)
        if isinstance(error, NotServed):
            self.plan.look_again(self.bound.word)
        return error


def expired() -> InferError:
    """What a caller gets whose deadline passed."""
    return InferError(
        Code.UNAVAILABLE,
        "Request timeout expired: no result at the deadline. A request that runs is not interrupted: its slot and its "
        "memory stay in use until it ends",
    )
