"""Lines of the log on a stderr that takes them, takes none, or is not there."""

from __future__ import annotations

import errno
import logging
import os
import pty
import sys
import termios
from collections.abc import Iterator

import pytest

from broker import logs


class Stderr:
    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)

    def fileno(self) -> int:
        return self.writer

    def told(self) -> str:
        try:
            return os.read(self.reader, 1 << 20).decode()
        except BlockingIOError:
            return ""


@pytest.fixture(params=[True, False], ids=["now", "poll"])
def stderr(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stderr]:
    """A pipe; kernels before 6.4 cannot be told by write not to wait."""
    if not request.param:

        def unsupported(*_: object) -> int:
            raise OSError(errno.EOPNOTSUPP, "not for pipes")

        monkeypatch.setattr(os, "pwritev", unsupported)
    stderr = Stderr()
    monkeypatch.setattr(sys, "__stderr__", stderr)
    yield stderr
    os.close(stderr.reader)
    os.close(stderr.writer)


def say(handler: logging.Handler, text: str) -> None:
    handler.handle(logging.LogRecord("test", logging.INFO, "file.py", 1, text, None, None))


def test_lines_that_nobody_reads_are_dropped_and_counted(stderr: Stderr) -> None:
    handler = logs.StderrHandler()
    for number in range(10_000):
        say(handler, f"{number} {'x' * 50}")
    first = stderr.told().splitlines()
    assert 100 < len(first) < 9_000
    assert [line.split()[0] for line in first[:-1]] == [str(number) for number in range(len(first) - 1)]
    say(handler, "again")
    told = stderr.told().splitlines()
    assert told[-1] == "again"
    assert told[-2].endswith("lines of the log were dropped: nobody reads it, or not fast enough")
    assert abs(int(told[-2].split()[0]) + len(first) - 10_000) <= 1
    say(handler, "and again")
    assert stderr.told() == "and again\n"


def test_a_terminal_that_is_stopped_or_not_read_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with open(ours, "rb", 0) as screen, open(theirs, "wb", 0) as terminal:
        monkeypatch.setattr(sys, "__stderr__", terminal)
        handler = logs.StderrHandler()
        say(handler, "x" * 1000)
        told = b""
        while not told.endswith(b"\r\n"):
            told += screen.read(2000)
        assert told == b"x" * 1000 + b"\r\n"
        termios.tcflow(terminal, termios.TCOOFF)
        for number in range(5000):
            say(handler, str(number))
        termios.tcflow(terminal, termios.TCOON)
        say(handler, "again")
        assert screen.read(1000).startswith(b"5000 lines of the log were dropped: ")
        for number in range(5000):  # nobody looks at the screen
            say(handler, f"{number} {'x' * 100}")
        assert os.get_blocking(theirs), "others write there, too"
        handler.close()


def test_without_a_stderr_nothing_else_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "__stderr__", None)
    say(logs.StderrHandler(), "lost")
