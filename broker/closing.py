"""Closing regions' descriptors: in a thread where it may take long, for whoever closes memory last frees its pages.

Used by `broker.registry`. Freeing takes up to 0.4 s per GiB, which the event loop cannot wait for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, final

from broker.records import RegionEntry

LARGE: Final = 16 << 20  # bytes; what is smaller is closed at once
MAX_WAITING: Final = 256  # descriptors; beyond that the event loop closes them itself

_Waiting = tuple[int, "asyncio.Future[None]", asyncio.AbstractEventLoop]


@final
class Closer:
    """One thread, while it has something to close. It is a daemon: the broker's end frees all and does not wait."""

    def __init__(self, close: Callable[[int], None] = os.close) -> None:
        self._close = close
        self._lock = threading.Lock()
        self._waiting: deque[_Waiting] = deque()
        self._working = False

    def __call__(self, entry: RegionEntry) -> asyncio.Future[None] | None:
        """Close its descriptor. Returns what ends when that is done; None: it is. Event loop, for large ones."""
        is_last = entry.source is None  # what was opened from another one goes before that
        if entry.fd < 0 or not is_last or max(entry.byte_size, entry.file_size) < LARGE:
            entry.close()
            return None
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        with self._lock:
            if len(self._waiting) < MAX_WAITING and self._start():
                self._waiting.append((entry.fd, done, loop))
                entry.fd = -1  # the thread's from here on
                return done
        entry.close()
        return None

    def _start(self) -> bool:
        """Is there a thread that will look once more at what waits? Caller: with the lock."""
        if not self._working:
            with contextlib.suppress(RuntimeError):  # there is no thread to be had
                threading.Thread(target=self._work, name="close", daemon=True).start()
                self._working = True
        return self._working

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._working = False
                    return
                fd, done, loop = self._waiting.popleft()
            try:
                with contextlib.suppress(OSError):  # it is closed even so
                    self._close(fd)
            finally:
                with contextlib.suppress(RuntimeError):  # the event loop has ended
                    loop.call_soon_threadsafe(_end, done)


def _end(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
