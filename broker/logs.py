"""The log on stderr (or in a file), in Triton's format: `E0131 10:11:12.345678 4242 server.py:57] "message"`.

Set up by `broker.server` and by gateway processes, and again when the settings change. Messages are JSON strings, so
nothing a client sends can start a line of its own; only tables, which hold nothing but printable characters, are not.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import select
import socket
import stat
import sys
import time
from collections.abc import Callable
from typing import final

from broker.gateway.options import LogOptions

_LETTERS = {logging.DEBUG: "I", logging.INFO: "I", logging.WARNING: "W", logging.ERROR: "E", logging.CRITICAL: "E"}
MAX_MESSAGE = 8192  # characters


@final
class TritonFormatter(logging.Formatter):
    """`style` is "default" or "ISO8601". $TRITON_SERVER_ESCAPE_LOG_MESSAGES=0 leaves messages as they are."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self._iso = style == "ISO8601"
        self._escape = os.environ.get("TRITON_SERVER_ESCAPE_LOG_MESSAGES") != "0"

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        letter = _LETTERS.get(record.levelno, "I")
        moment = time.gmtime(record.created)
        if self._iso:
            start = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', moment)} {letter}"
        else:
            start = f"{letter}{time.strftime('%m%d %H:%M:%S', moment)}.{int(record.created % 1 * 1e6):06d}"
        text = record.getMessage()
        if getattr(record, "is_table", False):
            return f"{start} {record.process} {record.filename}:{record.lineno}] \n{text}"
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        if len(text) > MAX_MESSAGE:
            text = f"{text[:MAX_MESSAGE]}…"
        quoted = json.dumps(text) if self._escape else text
        return f"{start} {record.process} {record.filename}:{record.lineno}] {quoted}"


class _Dropping(logging.Handler):
    """What cannot be written is dropped: Python's way is a traceback on stderr for every line while a disk is full."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Nothing. A log that is whole again has a gap."""


@final
class _FileHandler(_Dropping, logging.FileHandler):
    pass


@final
class StderrHandler(_Dropping):
    """Never waits for whoever reads stderr: a pipe that nobody reads, or a terminal that was stopped by Ctrl-S, would
    stop this process for good.

    How the descriptor waits is not changed, since others write to it as well.
    """

    def __init__(self) -> None:
        super().__init__()
        # Started without a stderr, its number may be anything's by now.
        self._fd = -1 if sys.__stderr__ is None else sys.__stderr__.fileno()
        self._terminal = _terminal(self._fd)
        self._dropped = 0

    def close(self) -> None:
        """The terminal stays open under its other number."""
        terminal, self._terminal = self._terminal, -1
        if terminal >= 0:
            os.close(terminal)
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, or drop it; the next one that there is room for says how many were."""
        try:
            line = f"{self.format(record)}\n"
            if self._dropped:
                line = f"{self._dropped} lines of the log were dropped: nobody reads it, or not fast enough\n{line}"
            if _write(self._fd if self._terminal < 0 else self._terminal, line.encode(errors="replace")):
                self._dropped = 0
            else:
                self._dropped += 1
        except Exception:
            self.handleError(record)


def _terminal(fd: int) -> int:
    """The terminal that `fd` is, by a description of our own, which does not wait. -1: it is none, or not ours to open,
    as after `su`; then writing to it may wait.
    """
    try:
        if fd >= 0 and os.isatty(fd):
            return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        pass
    return -1


def _write(fd: int, data: bytes) -> bool:
    """Write all of it, or nothing if that would take waiting. Raises OSError."""
    kind = os.fstat(fd).st_mode
    if stat.S_ISSOCK(kind):
        with socket.socket(fileno=os.dup(fd)) as line:
            return _begin(lambda part: line.send(part, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL), data)
    if stat.S_ISFIFO(kind):
        return _begin(lambda part: _into_pipe(fd, part), data)
    if not os.get_blocking(fd):
        return _begin(lambda part: os.write(fd, part), data)
    while data:
        data = data[os.write(fd, data) :]
    return True


def _into_pipe(fd: int, data: bytes) -> int:
    try:
        return os.pwritev(fd, [data], -1, os.RWF_NOWAIT)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ESPIPE):
            raise
    # An older kernel. Room for PIPE_BUF bytes, unless somebody else is faster.
    if not select.select([], [fd], [], 0)[1]:
        raise BlockingIOError
    return os.write(fd, data[: select.PIPE_BUF])


def _begin(write: Callable[[bytes], int], data: bytes) -> bool:
    """Of a line that there is room for in part the rest is lost."""
    try:
        if write(data) < len(data):
            write(b"\n")
    except BlockingIOError:
        return False
    return True


def table(log: logging.Logger, text: str) -> None:
    """Log a table of `broker.tables`: a line of its own for each of its lines, as in Triton."""
    log.info("%s", text, extra={"is_table": True}, stacklevel=2)


def set_up(options: LogOptions) -> None:
    """Send the log of this process where the options say, from now on. Raises OSError for a file it cannot write."""
    handler: logging.Handler = _FileHandler(options.log_file) if options.log_file else StderrHandler()
    handler.setFormatter(TritonFormatter(options.log_format))
    verbose = options.log_verbose_level > 0
    wanted = {
        logging.DEBUG: verbose,
        logging.INFO: options.log_info,
        logging.WARNING: options.log_warning,
        logging.ERROR: options.log_error,
        logging.CRITICAL: options.log_error,
    }
    handler.addFilter(lambda record: wanted.get(record.levelno, True))
    logging.basicConfig(level=logging.DEBUG if verbose else logging.INFO, handlers=[handler], force=True)
    logging.getLogger("asyncio").setLevel(logging.INFO)


def say(text: str) -> None:
    """A line on stdout for whoever started us, who may have closed it by now."""
    try:
        print(text, flush=True)
    except OSError:
        drop_stdout()


def drop_stdout() -> None:
    """Nobody reads it. What is left goes nowhere: else the interpreter would fail on it when it exits."""
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
