"""The log of a worker: to the broker, which writes it where and as its own settings say.

Set up by `broker.worker.process`; modules of the worker use `logging` as usual, and so may models and their libraries.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, final

from broker.worker.messages import LinkMessage, Logged, sendable

PER_SECOND: Final = 20  # messages: what clients bring about must not keep the broker busy
_OURS: Final = ("broker.", "shm.", "clientlib.")


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


@final
class Attributed(logging.Formatter):
    """What the worker's own modules say names the model or channel that it is about; of others it is said who they are.

    `worker`: its key.
    """

    def __init__(self, worker: str) -> None:
        super().__init__("%(message)s")
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        """The text of one message."""
        text = super().format(record)
        if record.name.startswith(_OURS):
            return text
        return f"worker '{self._worker}', logger '{record.name}': {text}"


def set_up(send: Callable[[LinkMessage], None], worker: str) -> None:
    """From now on the log of this process, which is a worker of this key, goes to the broker."""
    handler = LinkLog(send)
    handler.setFormatter(Attributed(worker))
    logging.basicConfig(handlers=[handler], force=True)
