"""What Triton's `response_stats` tell of each response of a decoupled model, by its index in its request.

A response is computed from the end of the one before it, or from the start of the run, until the model says that it is
(`Stream.computed`) or sends it; then it is output. Kept by `broker.worker.answers` for each request.
"""

from __future__ import annotations

import threading
from typing import final

from shm import statistics

SUCCESS, FAIL, EMPTY, CANCEL = range(0, 8, 2)  # words of an index: count and ns of each; then compute and output ns
INFER_NS, OUTPUT_NS = 8, 9


@final
class ResponseClock:
    """Times the responses of one request; adds them to the block of the instance that runs it, under `lock`."""

    __slots__ = ("_block", "_cancelled", "_computed", "_index", "_lock", "_since")

    def __init__(self, block: memoryview, lock: threading.Lock, now: int) -> None:
        self._block = block
        self._lock = lock
        self._index = 0
        self._since = now
        self._computed = 0
        self._cancelled = 0

    def computed(self, now: int) -> None:
        """What follows until the response is sent is output."""
        self._computed = now

    def cancelled(self, now: int) -> None:
        """The model has been told that nobody wants responses any more."""
        self._cancelled = self._cancelled or now

    def sent(self, what: int, now: int) -> None:
        """A response has been sent: SUCCESS, FAIL or EMPTY; or, with CANCEL, the model has given up for its client."""
        since = self._cancelled or now if what == CANCEL else self._since
        computed = self._computed or now
        with self._lock:
            at = statistics.RESPONSES + statistics.RESPONSE_WORDS * min(self._index, statistics.RESPONSE_INDICES - 1)
            block = self._block
            block[at + what] += 1
            block[at + what + 1] += now - since
            if what != CANCEL:
                block[at + INFER_NS] += (now if what == EMPTY else computed) - since
                block[at + OUTPUT_NS] += 0 if what == EMPTY else now - computed
        self._index += 1
        self._since, self._computed = now, 0
