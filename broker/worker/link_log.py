"""The log of a worker: to the broker, which writes it where and as its own settings say.

Set up by `broker.worker.control`; modules of the worker use `logging` as usual.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, final

from broker.worker.messages import LinkMessage, Logged, sendable

PER_SECOND: Final = 20  # messages: what clients bring about must not keep the broker busy


@final
class LinkLog(logging.Handler):
    """`send` is the link's. What exceeds `PER_SECOND` is counted, and the next message says how much that was."""

    def __init__(self, send: Callable[[LinkMessage], None], clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.WARNING)
        self._send = send
        self._clock = clock
        self._second, self._sent, self._dropped = -1, 0, 0

    def emit(self, record: logging.LogRecord) -> None:
        """Called with the handler's lock."""
        second = int(self._clock())
        if second != self._second:
            self._second, self._sent = second, 0
        if self._sent >= PER_SECOND:
            self._dropped += 1
            return
        self._sent += 1
        text = sendable(self.format(record))
        if self._dropped:
            text, self._dropped = f"{text} ({self._dropped} messages before it were dropped)", 0
        self._send(Logged(level=record.levelno, text=text))


def set_up(send: Callable[[LinkMessage], None]) -> None:
    """From now on the log of this process goes to the broker."""
    logging.basicConfig(handlers=[LinkLog(send)], format="%(message)s", force=True)
