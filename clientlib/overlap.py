"""No output may be written where another live request of this process reads or writes (and none over its own inputs).

Most plans share no byte with any other: `Ranges.enter` finds that out once, and their requests only mark their output
position as taken. Plans that do meet others are rivals of each other; their requests look at the rivals' live ones,
under one lock for the process. The worker repeats the check for what other processes do.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, final

from clientlib import process
from clientlib.interrupted import Turn
from shm import views
from shm.views import Placement


class Span(NamedTuple):
    """A tensor's positions: `place` is counted from the start of the memory that `memory` (device, inode) names."""

    name: str
    memory: tuple[int, int]
    place: Placement


class Live(Protocol):
    """A request that has not ended."""

    input_slot: int
    output_slot: int


@final
class Ranges:
    """What one plan reads and writes. `live` maps output positions to the requests that write there now."""

    __slots__ = ("__weakref__", "inputs", "live", "outputs", "rivals")

    def __init__(self, inputs: Sequence[Span], outputs: Sequence[Span]) -> None:
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.live: dict[int, Live] = {}
        self.rivals: weakref.WeakSet[Ranges] | None = None

    def enter(self) -> None:
        """Make this plan and all living plans that share memory with it rivals of each other."""
        _turn.run(self._enter)

    def _enter(self) -> None:
        with _lock:
            neighbours = {other for span in (*self.inputs, *self.outputs) for other in _by_memory.get(span.memory, ())}
            for other in (self, *neighbours):
                if _meet(self.outputs, (*other.inputs, *other.outputs)) or _meet(other.outputs, self.inputs):
                    self._add_rival(other)
                    other._add_rival(self)
            for memory in {span.memory for span in (*self.inputs, *self.outputs)}:
                _by_memory.setdefault(memory, weakref.WeakSet()).add(self)
            for memory in [memory for memory, ranges in _by_memory.items() if not ranges]:
                del _by_memory[memory]

    def claim(self, request: Live) -> tuple[str, Live | None]:
        """Mark the request's output position, or say what it would overlap, and with which live request (None: itself).

        For plans with rivals; others need only `live.setdefault`.
        """
        return _turn.run(lambda: self._claim(request))

    def _claim(self, request: Live) -> tuple[str, Live | None]:
        with _lock:
            overlap = self._overlap(request)
            if not overlap[0]:
                self.live[request.output_slot] = request
            return overlap

    def _add_rival(self, other: Ranges) -> None:
        if self.rivals is None:
            self.rivals = weakref.WeakSet()
        self.rivals.add(other)

    def _overlap(self, request: Live) -> tuple[str, Live | None]:
        holder = self.live.get(request.output_slot)
        if holder is not None:
            return in_use(self, request), holder
        i, k = request.input_slot, request.output_slot
        if (clash := _touch(self.outputs, k, self.inputs, i)) or (clash := _touch_each_other(self.outputs, k)):
            return f"output '{clash[0]}' overlaps '{clash[1]}' of the same request", None
        for rival in tuple(self.rivals or ()):
            for other in tuple(rival.live.values()):
                clash = (
                    _touch(self.outputs, k, rival.outputs, other.output_slot)
                    or _touch(self.outputs, k, rival.inputs, other.input_slot)
                    or _touch(self.inputs, i, rival.outputs, other.output_slot)
                )
                if clash:
                    return f"'{clash[0]}' overlaps '{clash[1]}' of a request that has not ended: {_OWN}", other
        return "", None


def in_use(ranges: Ranges, request: Live) -> str:
    """The words for an output position that another request writes to."""
    names = ", ".join(f"'{span.name}'" for span in ranges.outputs)
    return (
        f"output position {request.output_slot} ({names}) overlaps that of a request that has not ended: wait for it, "
        "or prepare the plan with more output positions (slots=)"
    )


def _meet(outputs: Iterable[Span], others: Sequence[Span]) -> bool:
    for span in outputs:
        for other in others:
            # A tensor's own positions are kept apart by `live`.
            if span is not other and span.memory == other.memory and views.meets(span.place, other.place):
                return True
    return False


def _touch(a: Iterable[Span], i: int, b: Sequence[Span], j: int) -> tuple[str, str] | None:
    for span in a:
        for other in b:
            if span.memory == other.memory and views.touches(span.place, i, other.place, j):
                return span.name, other.name
    return None


def _touch_each_other(outputs: Sequence[Span], k: int) -> tuple[str, str] | None:
    for index, span in enumerate(outputs):
        if clash := _touch((span,), k, outputs[:index], k):
            return clash
    return None


_OWN = "wait for it, or give the requests memory of their own"
_lock = threading.Lock()
_turn = Turn()  # before the lock, which a signal handler must not find held below it
_by_memory: dict[tuple[int, int], weakref.WeakSet[Ranges]] = {}


class _Fresh:
    def leave_to_parent(self) -> None:
        """The lock may have been held by another thread of the parent."""
        global _lock
        _lock = threading.Lock()
        _by_memory.clear()


_fresh = _Fresh()
process.tell_after_fork(_fresh)
