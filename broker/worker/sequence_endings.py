"""What became of sequences: for backends that keep the state themselves, and for whoever goes on with one that is over.

Kept by `broker.worker.sequences`, under the scheduler's lock. A backend is told by `tell`, on the thread that runs the
instance and before its next batch, if the object that its `load` returned has a method `sequence_ended`.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, final

from broker.worker.messages import Predecessor
from broker.worker.sequence import Key
from broker.worker.tracebacks import complain
from shm.errors import forget_frames

if TYPE_CHECKING:
    from broker.worker.backends import RuntimeModel
    from broker.worker.model import Instance

END, START, IDLE, CANCELLED, EXPIRED = "end", "start", "idle", "cancelled", "expired"
CLIENT_GONE, UNLOAD = "client_gone", "unload"
MAX_PAST: Final = 1024  # sequences of a model of which it is known how they ended; the oldest ending goes first
MAX_MODELS: Final = 64  # of which that is known
MAX_HOW: Final = 160  # characters, of how a process ended
LOST_NS: Final = 60_000_000_000  # for so long at least it is told that a process has ended, and its sequences with it
_PAST: Final = {
    END: "it has had its END",
    IDLE: "nothing of it came for max_sequence_idle_microseconds ({idle})",
    CANCELLED: "a step of it was cancelled",
    EXPIRED: "its time-out passed while it waited for a free slot",
    UNLOAD: "the model was unloaded, or replaced, and its state went with it",
}
_TOLD_ALL: Final = (IDLE, UNLOAD)  # which no client has asked for; of the rest Triton's clients get its own text alone


class Ending(NamedTuple):
    """`which`: the slot of the instance (strategy "direct"), or the correlation id ("oldest")."""

    which: int | str
    reason: str


@final
class Past:
    """How sequences of one model have ended, over its reloads. `before`: the worker's process before this one."""

    __slots__ = ("_before", "_reasons")

    def __init__(self, before: Predecessor | None = None) -> None:
        self._before = before
        self._reasons: OrderedDict[Key, str] = OrderedDict()

    def note(self, key: Key, reason: str) -> None:
        """The sequence takes no more steps."""
        self._reasons.pop(key, None)
        self._reasons[key] = reason
        if len(self._reasons) > MAX_PAST:
            self._reasons.popitem(last=False)

    def of(self, key: Key, idle_us: int, now: int) -> str:
        """How the latest sequence of that id ended, or may have, as the end of a sentence; "": nobody knows.

        A process takes along what it knew of its sequences: of those that nothing is known of it is told when it ended,
        for as long as they would have lasted. `idle_us`: `max_sequence_idle_microseconds`.
        """
        reason = self._reasons.get(key, "")
        if reason in _PAST and (key[0] or reason in _TOLD_ALL):
            return f"; the sequence of this id is over: {_PAST[reason].format(idle=idle_us)}"
        before = self._before
        if reason or before is None or now - before.ended_ns > max(idle_us * 1000, LOST_NS):
            return ""
        ago = f"{max(0, now - before.ended_ns) / 1e9:.1f} s ago"
        lost = f"its state was lost when its worker ended, {ago} ({before.how[:MAX_HOW]})"
        return f"; if it had begun, it must begin again: {lost}"


@final
class Pasts:
    """Those of all models of a worker, by name. A model that was loaded long before others is forgotten first."""

    __slots__ = ("_before", "_pasts")

    def __init__(self, before: Predecessor | None = None) -> None:
        self._before = before
        self._pasts: OrderedDict[str, Past] = OrderedDict()

    def of(self, model: str) -> Past:
        """The one of a model that is being loaded."""
        past = self._pasts.pop(model, None) or Past(self._before)
        self._pasts[model] = past
        if len(self._pasts) > MAX_MODELS:
            self._pasts.popitem(last=False)
        return past


@final
class Endings:
    """`wanted`: the model is told. Then there is at most one untold ending per sequence that has run."""

    __slots__ = ("_untold", "past", "wanted")

    def __init__(self, instances: int) -> None:
        self.wanted = False
        self.past = Past()
        self._untold: list[list[Ending]] = [[] for _ in range(instances)]

    def __len__(self) -> int:
        return sum(map(len, self._untold))

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
            except BaseException as error:
                complain(instance.model.config, error)
                forget_frames(error)
    finally:
        instance.end(1, 0)
