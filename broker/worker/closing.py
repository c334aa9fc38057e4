"""Ends of models, each in a thread of its own: a backend's `close` may take long, or never return.

Used by `broker.worker.loop`, whose control thread has others to answer. How long it may take is the broker's to judge.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import final

from broker.worker.load_threads import LoadThreads

_log = logging.getLogger(__name__)


@final
class Closing:
    """Those that are under way. False when there are none."""

    __slots__ = ("_threads", "_under_way")

    def __init__(self) -> None:
        self._threads = LoadThreads("close")
        self._under_way: set[Callable[[], None]] = set()

    def __bool__(self) -> bool:
        return bool(self._under_way)

    def begin(self, work: Callable[[], None]) -> None:
        """Do `work`."""

        def body() -> None:
            try:
                work()
            except Exception:  # as if it had been closed: there is nothing left to do with it
                _log.exception("a model could not be closed")
            finally:
                self._under_way.discard(body)

        self._under_way.add(body)
        try:
            self._threads.run(body)
        except RuntimeError:  # no thread is left for it
            body()
