"""Allocating the pages of system shared memory, in threads: a missing page kills the worker that touches it (SIGBUS).

Used by `broker.registry`. posix_fallocate costs about 0.13 s per GiB, which the event loop cannot wait for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from typing import final

from shm import regions
from shm.errors import Code, InferError

TIMEOUT_S = 30.0
THREADS = 2


@final
class Reservations:
    """A few threads that allocate."""

    __slots__ = ("_threads",)

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="reserve")

    async def reserve(self, fd: int, offset: int, byte_size: int) -> None:
        """Returns when all pages of the range exist. Raises InferError with the numbers."""
        # The thread's own: ours may be closed, and its number reused, before the thread starts. Whoever pops it closes
        # it: what `submit` raises for want of a thread leaves the work in the queue, for a thread that starts later.
        duplicate = [os.dup(fd)]
        try:
            done = self._threads.submit(_reserve_and_close, duplicate, offset, byte_size)
        except RuntimeError as error:
            _close(duplicate)
            text = f"the {byte_size} bytes of this shared memory cannot be allocated: {error}"
            raise InferError(Code.UNAVAILABLE, text) from error
        try:
            await asyncio.wait_for(asyncio.wrap_future(done), TIMEOUT_S)
        except TimeoutError:
            raise InferError(
                Code.UNAVAILABLE,
                f"allocating the {byte_size} bytes of this shared memory took longer than {TIMEOUT_S:.0f} s; "
                "write to it once before registering it",
            ) from None
        finally:
            if done.cancelled():  # it never ran
                _close(duplicate)

    def close(self, *, wait: bool = False) -> None:
        """Begin nothing any more; `wait` for what runs."""
        self._threads.shutdown(wait=wait, cancel_futures=True)


def _reserve_and_close(owned: list[int], offset: int, byte_size: int) -> None:
    try:
        fd = owned.pop()
    except IndexError:
        return  # nobody waits for it any more
    try:
        regions.reserve(fd, offset, byte_size)
    finally:
        os.close(fd)


def _close(owned: list[int]) -> None:
    with contextlib.suppress(IndexError):
        os.close(owned.pop())
