"""Ctrl-C, SIGTERM and SIGHUP as one exception, raised at most once and never between a start and its clean-up."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """The user, or whoever runs the demo, wants it to end. Not an `Exception`: nothing may swallow it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Interrupts:
    """The process's signal handlers from `install` on."""

    def __init__(self) -> None:
        self._held = False
        self._raised = False
        self._pending = 0

    def install(self) -> None:
        """Takes the signals over. To be called once, in the main thread."""
        for number in SIGNALS:
            signal.signal(number, self._arrived)

    def _arrived(self, number: int, _frame: FrameType | None) -> None:
        if self._held:
            self._pending = number
        elif not self._raised:  # the first one started the clean-up, which is bounded
            self._raised = True
            raise Stopped(number)

    def hold(self) -> None:
        """Signals wait from now on: something is being started, or clean-up has begun."""
        self._held = True

    def release(self) -> None:
        """Signals no longer wait. Raises `Stopped` if one came meanwhile."""
        self._held = False
        if self._pending:
            self._arrived(self._pending, None)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Signals wait for the end of the block: for starting something and noting how to stop it."""
        self.hold()
        try:
            yield
        except BaseException:
            self._held = False
            raise
        self.release()
