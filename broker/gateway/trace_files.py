"""Trace files: JSON arrays that are whole after every write, written by a thread of their own.

With `log_frequency`, or a `trace_count`, each file has so many traces and the name PATH.0, PATH.1, …; else all go to
PATH. Files are made, and emptied, when their first trace comes; a gateway that replaces another one goes on with what
that one left. Used by `broker.gateway.tracing`.
"""

from __future__ import annotations

import logging
import os
import queue
import stat
import threading
import time
from typing import Final, Protocol, final

WAITING: Final = 4096  # traces that were not written yet; more are dropped
CLOSE_S: Final = 2.0
COMPLAIN_S: Final = 1.0
_log = logging.getLogger(__name__)


class Text(Protocol):
    """A trace."""

    def text(self) -> str:
        """JSON objects with commas between them."""


class Part(Protocol):
    """Traces of the same settings. `per_file`: 0: they have no files of their own."""

    per_file: int
    part: NumberedPart


@final
class NumberedPart:
    """The numbered file that traces of one setting go to. Used by the writing thread alone."""

    def __init__(self) -> None:
        self.file: _File | None = None
        self.traces = 0


@final
class TraceFiles:
    """All files of one path. `put` may be called from one thread."""

    def __init__(self, path: str, began: int, waiting: int = WAITING) -> None:
        """Files that were written after `began`, in their own clock's ns, are kept."""
        self.path = path
        self._began = began
        self._queue: queue.Queue[tuple[Text, Part] | None] = queue.Queue(waiting)
        self._thread: threading.Thread | None = None
        self._whole: _File | None = None
        self._next = 0  # the number of a file
        self._dropped = 0
        self._complained = 0.0

    def goes_on(self) -> bool:
        """Is there something of a gateway before?"""
        return any(_is_kept(path, self._began) for path in (self.path, f"{self.path}.0"))

    def part(self) -> NumberedPart:
        """What traces of a new setting go to."""
        return NumberedPart()

    def put(self, trace: Text, part: Part) -> None:
        """Have it written. Never waits: a disk that is too slow loses traces."""
        try:
            self._need_thread()
            self._queue.put_nowait((trace, part))
        except RuntimeError as error:
            self._complain(f"failed writing traces: {error}")
        except queue.Full:
            self._dropped += 1
            self._complain(f"{self._dropped} traces were dropped: they come faster than they can be written")

    def close(self) -> None:
        """Write what waits, for `CLOSE_S` seconds at most."""
        if self._thread is not None:
            until = time.monotonic() + CLOSE_S
            try:
                self._queue.put(None, timeout=CLOSE_S)
            except queue.Full:
                return
            self._thread.join(max(0.0, until - time.monotonic()))

    def _need_thread(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._write_all, name="traces", daemon=True)
            thread.start()
            self._thread = thread

    def _write_all(self) -> None:
        while (item := self._queue.get()) is not None:
            trace, part = item
            try:
                self._write(trace.text().encode(), part)
            except OSError as error:
                self._complain(f"failed creating trace file: {error}")

    def _write(self, text: bytes, part: Part) -> None:
        if not part.per_file:
            if self._whole is None:
                self._whole = _File(self.path, self._began)
            self._whole.append(text)
            return
        numbered = part.part
        if numbered.file is None:
            while _is_kept(f"{self.path}.{self._next}", self._began):
                self._next += 1
            numbered.file, numbered.traces = _File(f"{self.path}.{self._next}", self._began), 0
            self._next += 1
        numbered.file.append(text)
        numbered.traces += 1
        if numbered.traces >= part.per_file:
            numbered.file = None

    def _complain(self, text: str) -> None:
        """In the log, once a second at most."""
        if (now := time.monotonic()) - self._complained >= COMPLAIN_S:
            self._complained = now
            _log.error("%s", text)


def _is_kept(path: str, began: int) -> bool:
    try:
        found = os.stat(path)
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size > 0 and found.st_mtime_ns >= began


@final
class _File:
    """One array. Closed when it is let go."""

    def __init__(self, path: str, began: int) -> None:
        self._fd = -1
        keep = _is_kept(path, began)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY
        self._fd = os.open(path, flags if keep else flags | os.O_TRUNC, 0o640)
        self._size = os.fstat(self._fd).st_size if keep else 0
        if keep and os.pread(self._fd, 1, self._size - 1) != b"]":  # no array to go on with
            os.ftruncate(self._fd, 0)
            self._size = 0

    def append(self, text: bytes) -> None:
        """Put it before the closing bracket. Raises OSError, and the file is as it was."""
        data = memoryview(b"".join((b"," if self._size else b"[", text, b"]")))
        start = position = max(0, self._size - 1)
        try:
            while data:
                written = os.pwrite(self._fd, data, position)
                position, data = position + written, data[written:]
        except OSError:
            os.ftruncate(self._fd, self._size)
            os.pwrite(self._fd, b"]" if self._size else b"", start)
            raise
        self._size = position

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
