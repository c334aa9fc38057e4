"""Allocating the pages of system shared memory, in threads: a missing page kills the worker that touches it (SIGBUS).

Used by `broker.registry`. posix_fallocate costs about 0.13 s per GiB, which the event loop cannot wait for.
"""

from __future__ import annotations

import asyncio
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
        duplicate = os.dup(fd)  # the thread's own: ours may be closed, and its number reused, before the thread starts
        try:
            done = self._threads.submit(_reserve_and_close, duplicate, offset, byte_size)
        except BaseException:
            os.close(duplicate)
            raise
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
                os.close(duplicate)

    def close(self, *, wait: bool = False) -> None:
        """Begin nothing any more; `wait` for what runs."""
        self._threads.shutdown(wait=wait, cancel_futures=True)


def _reserve_and_close(fd: int, offset: int, byte_size: int) -> None:
    try:
        regions.reserve(fd, offset, byte_size)
    finally:
        os.close(fd)
