"""What a request on an event loop may have to wait for before it is sent: a place, its turn to ask the broker.

Used by `clientlib.async_plans` and `clientlib.async_client`; the counterpart of `clientlib.claims`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from clientlib.arena import Bank, Lease
from clientlib.pending import expired
from clientlib.submission import remaining_s
from shm.errors import Code, InferError


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
