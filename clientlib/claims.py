"""What a request of a plan may have to wait for before it is sent: its ranges, a place, a slot of the channel.

For threads; used by `clientlib.plans` and `clientlib.streams` where the first try fails.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Mapping

from clientlib.arena import Bank, Lease
from clientlib.channels import Lane, wake
from clientlib.failures import Crowded
from clientlib.interrupted import is_below
from clientlib.link import Bound
from clientlib.overlap import Live, in_use
from clientlib.waiting import Waiting
from shm.errors import Code, InferError, fresh

_now = time.monotonic
LOOK_AGAIN_S = 0.01  # while waiting for a place: other threads may have left requests that nobody reaps
FULL_WAIT_S = 1.0  # without a deadline, how long a request waits for a free slot, or a place that no request has


def claim(bound: Bound[Lane], request: Waiting) -> None:
    """Mark the output position where that takes a closer look. Raises InferError when memory is in use."""
    for _ in range(bound.channel.slots + 1):
        overlap, holder = _try_claim(bound, request)
        if not overlap:
            return
        # The other request may have ended without anybody having looked.
        if not isinstance(holder, Waiting) or not holder.done():
            break
    raise InferError(Code.INVALID_ARG, overlap)


def _try_claim(bound: Bound[Lane], request: Waiting) -> tuple[str, object]:
    if bound.ranges.rivals is not None:
        return bound.ranges.claim(request)
    holder = bound.live.setdefault(request.output_slot, request)
    return ("", None) if holder is request else (in_use(bound.ranges, request), holder)


def take_place(bound: Bound[Lane], bank: Bank, deadline_ns: int, *, stays: bool = False) -> Lease:
    """A place of the client's own; waits until the deadline, without one while requests have the places.

    What arrays hold may never come back, nor what streams hold that this thread reads, nor requests that it looks after
    in what it has interrupted: then it waits for a second.
    Raises Crowded where another plan has more places, or should have them, unless the request `stays`.
    """
    if not stays and bank.crowd():
        raise Crowded(bank)
    until = deadline_ns / 1e9 if deadline_ns else _now() + FULL_WAIT_S
    lock = threading.Lock()
    lock.acquire()
    turn = bank.wait(functools.partial(wake, lock))
    try:
        while True:
            # Requests that nobody waits for give their places back only when somebody looks.
            look_at(bound.live)
            ends = not (deadline_ns or bound.layout.responses) and _will_end(bound.live)
            if lock.acquire(timeout=LOOK_AGAIN_S if ends else max(0.0, min(until - _now(), LOOK_AGAIN_S))):
                break
            if bank.outgrown and not stays:
                raise Crowded(bank)
            if ends:
                until = _now() + FULL_WAIT_S
            elif _now() >= until:
                break
    finally:
        lease = bank.leave(turn)
    if lease is None:
        raise InferError(
            Code.UNAVAILABLE,
            f"all {bank.places} places of this plan are in use: take the results of its requests, let their "
            "arrays go, or place the outputs in a region",
        )
    return lease


def submit_when_free(
    bound: Bound[Lane], request: Waiting, deadline_ns: int, priority: int, flags: int, sequence_id: int, event: int = 0
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
            raise fresh(lane.error)
        ident = channel.submit(
            request,
            bound.word,
            request.input_slot,
            request.output_slot,
            request.rows,
            deadline_ns,
            0,
            priority,
            flags,
            sequence_id,
            event,
        )
        if ident:
            return ident
        if _now() >= until:
            raise InferError(
                Code.UNAVAILABLE,
                f"all {channel.slots} slots of this thread's channel are taken by outstanding requests: wait for "
                "results, or connect(slots=) with more",
            )


def look_at(live: Mapping[int, Live]) -> None:
    """Settle those of a plan's requests that have ended without anybody having looked."""
    for lane in _lanes(live):
        lane.look()


def _will_end(live: Mapping[int, Live]) -> bool:
    """Is there a request whose end can be seen while this thread waits?"""
    return any(not is_below(lane) for lane in _lanes(live))


def _lanes(live: Mapping[int, Live]) -> set[Lane]:
    return {pending.lane for pending in tuple(live.values()) if isinstance(pending, Waiting)}
