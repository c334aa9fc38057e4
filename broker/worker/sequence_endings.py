"""What became of sequences: for backends that keep the state themselves, and for whoever goes on with one that is over.

Kept by `broker.worker.sequences`, under the scheduler's lock. A backend is told by `tell`, on the thread that runs the
instance and before its next batch, if the object that its `load` returned has a method `sequence_ended`.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, final

from broker.worker.sequence import Key
from broker.worker.tracebacks import complain

if TYPE_CHECKING:
    from broker.worker.backends import RuntimeModel
    from broker.worker.model import Instance

END, START, IDLE, CANCELLED, EXPIRED = "end", "start", "idle", "cancelled", "expired"
CLIENT_GONE, UNLOAD = "client_gone", "unload"
MAX_PAST: Final = 1024  # sequences of which it is known how they ended; the oldest ending goes first
_PAST: Final = {
    END: "it has had its END",
    IDLE: "nothing of it came for max_sequence_idle_microseconds",
    CANCELLED: "a step of it was cancelled",
    EXPIRED: "its time-out passed while it waited for a free slot",
}


class Ending(NamedTuple):
    """`which`: the slot of the instance (strategy "direct"), or the correlation id ("oldest")."""

    which: int | str
    reason: str


@final
class Endings:
    """`wanted`: the model is told. Then there is at most one untold ending per sequence that has run."""

    __slots__ = ("_past", "_untold", "wanted")

    def __init__(self, instances: int) -> None:
        self.wanted = False
        self._untold: list[list[Ending]] = [[] for _ in range(instances)]
        self._past: OrderedDict[Key, str] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._untold))

    def note(self, key: Key, reason: str) -> None:
        """The sequence takes no more steps."""
        self._past.pop(key, None)
        self._past[key] = reason
        if len(self._past) > MAX_PAST:
            self._past.popitem(last=False)

    def past(self, key: Key) -> str:
        """How the latest sequence of that id ended, as a part of a sentence; "": nobody knows."""
        return _PAST.get(self._past.get(key, ""), "")

    def add(self, instance: int, which: int | str, reason: str) -> None:
        """One that an instance has seen is over: it is told before its next batch."""
        if self.wanted:
            self._untold[instance].append(Ending(which, reason))

    def waiting(self, instance: int) -> bool:
        """Is there something to tell it?"""
        return bool(self._untold[instance])

    def take(self, instance: int) -> list[Ending]:
        """What is to be told now."""
        found, self._untold[instance] = self._untold[instance], []
        return found


def wants(runtime: RuntimeModel) -> bool:
    """Does the model ask to be told?"""
    return callable(getattr(runtime, "sequence_ended", None))


def tell(instance: Instance, endings: Sequence[Ending]) -> None:
    """On the thread that has the instance. What the method raises is logged and changes nothing."""
    ended = getattr(instance.runtime, "sequence_ended", None)
    if ended is None:
        return
    instance.begin(1, time.monotonic_ns())  # it may hang like a run
    try:
        for each in endings:
            try:
                ended(each.which, each.reason)
            except Exception as error:
                complain(instance.model.config, error)
    finally:
        instance.end(1, 0)
