"""What a request on an event loop needs before it is sent: the right loop, its ranges, a place, its turn to ask the
broker.

Used by `clientlib.async_plans` and `clientlib.async_client`; the counterpart of `clientlib.claims`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from clientlib.arena import Bank, Lease
from clientlib.async_lane import AsyncLane
from clientlib.failures import RangeInUse
from clientlib.link import Bound
from clientlib.overlap import Live, in_use
from clientlib.pending import expired
from clientlib.submission import remaining_s
from shm.errors import Code, InferError


def check_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Raises InferError INVALID_ARG on any other loop."""
    if asyncio.get_running_loop() is not loop:
        raise elsewhere()


def elsewhere() -> InferError:
    """The error for another loop than the client's: nothing that is awaited there would ever come."""
    text = "this client lives on another event loop: connect_async() on this one"
    return InferError(Code.INVALID_ARG, text)


async def take_place(bank: Bank, deadline_ns: int) -> Lease:
    """Await a place, first come, first served."""
    loop = asyncio.get_running_loop()
    called = asyncio.Event()

    def call() -> None:  # called from any thread, wherever an array was collected
        if not loop.is_closed():
            loop.call_soon_threadsafe(called.set)

    turn = bank.wait(call)
    try:
        async with asyncio.timeout(remaining_s(deadline_ns)):
            await called.wait()
    except BaseException as error:
        bank.leave(turn)
        del turn  # a task that was cancelled keeps this frame, which must not keep a place
        if isinstance(error, TimeoutError):
            raise expired() from None
        raise
    lease = bank.leave(turn)
    assert lease is not None
    return lease


def claim(bound: Bound[AsyncLane], pending: Live) -> None:
    """Mark the output position. Raises InferError when memory is in use."""
    for _ in range(2):
        if bound.ranges.rivals is not None:
            overlap, holder = bound.ranges.claim(pending)
        else:
            holder = bound.live.setdefault(pending.output_slot, pending)
            overlap = "" if holder is pending else in_use(bound.ranges, pending)
        if not overlap:
            return
        bound.channel.reap()  # the other request may have ended since the last look
    raise (InferError if holder is None else RangeInUse)(Code.INVALID_ARG, overlap)


@contextlib.asynccontextmanager
async def turn(lock: asyncio.Lock, patience_s: float | None, what: str) -> AsyncIterator[None]:
    """Hold `lock`. Raises InferError UNAVAILABLE when another task, which does `what`, has it for too long."""
    try:
        async with asyncio.timeout(patience_s):
            await lock.acquire()
    except TimeoutError:
        raise InferError(Code.UNAVAILABLE, f"timeout expired while another task {what}") from None
    try:
        yield
    finally:
        lock.release()
