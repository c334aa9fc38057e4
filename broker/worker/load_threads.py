"""Threads that load models, or close them: one that has loaded is used again for the next load.

Used by `broker.worker.control` and `broker.worker.loop`. A load may take minutes, or never end, so it has a thread of
its own; the same goes for the end of a model. A new thread for each would be given another of the allocator's arenas,
and each arena keeps some megabytes of large models that were loaded in it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import final

_Work = Callable[[], None]


@final
class LoadThreads:
    """As many as there have ever been loads at the same time. `name`: of each."""

    __slots__ = ("_idle", "_lock", "_name")

    def __init__(self, name: str = "load") -> None:
        self._name = name
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[_Work]] = []

    def run(self, work: _Work) -> None:
        """Do `work`, which raises nothing, in one of them."""
        with self._lock:
            mailbox = self._idle.pop() if self._idle else None
        if mailbox is None:
            mailbox = SimpleQueue()
            threading.Thread(target=self._serve, args=(mailbox,), name=self._name, daemon=True).start()
        mailbox.put(work)

    def _serve(self, mailbox: SimpleQueue[_Work]) -> None:
        while True:
            work = mailbox.get()
            work()
            del work  # it holds on to the model
            with self._lock:
                self._idle.append(mailbox)
