"""Promise 1, over all clients of this worker: no output range overlaps memory that a live request reads or writes.

Most plans share no byte with any other; `Crowds` finds that out when a plan is bound, and admission then only looks at
one byte per output position. Plans that do meet others are crowded: their requests are compared with the live requests
of crowded plans in the same memory. Memory is compared by (device, inode), whoever registered it under whatever name.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, final

from shm import views
from shm.admission import Request
from shm.views import Placement

Identity = tuple[int, int]
LiveRequests = Callable[[], Iterable[Request]]
MAX_COMPARED = 1024  # live requests of rivals in one memory: beyond it, refusals cost less than looking
LOOK = 32  # neighbours of a plan that are compared exactly; with more it counts as crowded without being so


class Placed(Protocol):
    """A tensor of a plan on mapped memory."""

    name: str

    def span(self) -> tuple[Identity, Placement]:
        """The memory, and the place counted from the start of its file."""


class Crowdable(Protocol):
    """A plan, as far as overlaps go."""

    crowded: bool
    busy: bytearray  # one byte per output position: a live request writes there
    reads: dict[int, int]  # of a crowded plan: output position → input position of the request that last had it

    @property
    def inputs(self) -> Sequence[Placed]:
        """Where it reads."""

    @property
    def outputs(self) -> Sequence[Placed]:
        """Where it writes."""

    def simplify(self) -> None:
        """Called when `crowded` has changed."""


@final
class Spans:
    """What lies where in one memory, found without looking at all of it.

    By size class, each sorted by start: a span that reaches a place begins less than its class's size before it.
    """

    __slots__ = ("_classes",)

    def __init__(self) -> None:
        self._classes: dict[int, list[tuple[int, int, int, Crowdable]]] = {}

    def __bool__(self) -> bool:
        return bool(self._classes)

    def add(self, start: int, end: int, plan: Crowdable) -> None:
        """A span that is not there yet."""
        bisect.insort(self._classes.setdefault((end - start).bit_length(), []), (start, end, id(plan), plan))

    def remove(self, start: int, end: int, plan: Crowdable) -> None:
        """A span that is there."""
        size = (end - start).bit_length()
        entries = self._classes[size]
        del entries[bisect.bisect_left(entries, (start, end, id(plan)))]
        if not entries:
            del self._classes[size]

    def around(self, start: int, end: int) -> Iterator[Crowdable]:
        """Whoever has a byte of [start, end) in its span."""
        for size, entries in self._classes.items():
            for at in range(bisect.bisect_left(entries, (start - (1 << size),)), len(entries)):
                begins, ends, _, plan = entries[at]
                if begins >= end:
                    break
                if ends > start:
                    yield plan


@final
class Crowds:
    """All bound plans, by the memory they use, and the live requests of those that are crowded.

    `enter` and `leave` are the control thread's. `claim` comes from whoever admits: the leader, or a recovery.
    """

    __slots__ = ("_live", "_live_requests", "_lock", "_spans")

    def __init__(self, live_requests: LiveRequests) -> None:
        self._live_requests = live_requests
        self._lock = threading.Lock()  # `crowded`, `reads` and `_live`
        self._live: dict[Identity, dict[Crowdable, None]] = {}  # crowded plans that may have live requests
        self._spans: dict[tuple[Identity, bool, bool], Spans] = {}  # by memory, written or read, crowded or not

    def enter(self, plan: Crowdable) -> None:
        """Mark the plan and those it meets as crowded."""
        free = list(dict.fromkeys(self._rivals(plan, crowded=False)))
        met = [other for looked, other in enumerate(free) if looked >= LOOK or _conflict(plan, other)]
        for other in met:
            self._mark(other, True)
        plan.crowded = bool(met) or self._meets(plan)
        self._add(plan)
        plan.simplify()

    def leave(self, plan: Crowdable) -> None:
        """Forget the plan; those it was in the way of are free again, as far as that is quickly seen."""
        self._remove(plan)
        with self._lock:
            self._unlist(plan)
        neighbours = list(itertools.islice(self._rivals(plan, crowded=True), LOOK + 1)) if plan.crowded else []
        if len(neighbours) > LOOK:
            return
        for other in dict.fromkeys(neighbours):
            if not self._meets(other):
                self._mark(other, False)

    def claim(self, plan: Crowdable, input_position: int, output_position: int) -> str:
        """Take an output position of a crowded plan for a request, or say in words what it would overlap."""
        if name := _touching(plan.outputs, output_position, plan.inputs, input_position):
            return f"output '{name}' overlaps an input of the same request"
        memories = _memories(plan)
        with self._lock:
            if not plan.crowded:
                return ""  # not any more
            for memory in memories:
                if text := self._in_the_way(plan, input_position, output_position, memory):
                    return text
            plan.reads[output_position] = input_position
            plan.busy[output_position] = 1
            for memory in memories:
                self._live.setdefault(memory, {})[plan] = None
        return ""

    def _in_the_way(self, plan: Crowdable, input_position: int, output_position: int, memory: Identity) -> str:
        compared = 0
        for other in list(self._live.get(memory, ())):
            taken = other.busy.find(1)
            if taken < 0:
                self._unlist(other)
                continue
            # Output positions of one plan lie apart: beside itself it is a rival only where it writes what it reads.
            rivals = meet(plan.outputs, plan.inputs) if other is plan else _conflict(plan, other)
            while taken >= 0:
                compared += 1
                if compared > MAX_COMPARED:
                    return f"more than {MAX_COMPARED} requests are in flight on plans that share memory: wait for some"
                if not rivals:
                    break
                name = (
                    _touching(plan.outputs, output_position, other.outputs, taken)
                    or _touching(other.outputs, taken, plan.inputs, input_position)
                    or _touching(plan.outputs, output_position, other.inputs, self._read_for(other, taken))
                )
                if name:
                    return f"output '{name}' overlaps memory that a request still in flight reads or writes"
                taken = other.busy.find(1, taken + 1)
        return ""

    def _read_for(self, plan: Crowdable, output_position: int) -> int | None:
        """The input position of the live request that has an output position. None: it has just ended."""
        if output_position not in plan.reads:
            # Admitted before its plan was crowded. All that were are found at once, so this is seldom.
            for request in self._live_requests():
                other: Crowdable = request.plan  # type: ignore[assignment]
                if request.started and other.crowded:
                    other.reads.setdefault(request.output_position, request.input_position)
        return plan.reads.get(output_position)

    def _unlist(self, plan: Crowdable) -> None:
        for memory in _memories(plan):
            plans = self._live.get(memory, {})
            plans.pop(plan, None)
            if not plans:
                self._live.pop(memory, None)
        plan.reads.clear()

    def _meets(self, plan: Crowdable) -> bool:
        """Does the plan meet itself or a crowded one?"""
        if meet(plan.outputs, plan.inputs):
            return True
        for looked, other in enumerate(self._rivals(plan, crowded=True)):
            if other is not plan and (looked >= LOOK or _conflict(plan, other)):
                return True
        return False

    def _rivals(self, plan: Crowdable, crowded: bool) -> Iterator[Crowdable]:
        """Plans one of whose spans may not be shared with one of this plan's; some of them several times."""
        for written, identity, start, end in _spans(plan):
            for theirs in (False, True) if written else (True,):
                spans = self._spans.get((identity, theirs, crowded))
                if spans is not None:
                    yield from spans.around(start, end)

    def _mark(self, plan: Crowdable, crowded: bool) -> None:
        self._remove(plan)
        with self._lock:
            plan.crowded = crowded
            self._unlist(plan)
            if crowded:
                for memory in _memories(plan):
                    self._live.setdefault(memory, {})[plan] = None
            plan.simplify()
        self._add(plan)

    def _add(self, plan: Crowdable) -> None:
        for written, identity, start, end in _spans(plan):
            self._spans.setdefault((identity, written, plan.crowded), Spans()).add(start, end, plan)

    def _remove(self, plan: Crowdable) -> None:
        for written, identity, start, end in _spans(plan):
            spans = self._spans[identity, written, plan.crowded]
            spans.remove(start, end, plan)
            if not spans:
                del self._spans[identity, written, plan.crowded]


def meet(a: Iterable[Placed], b: Iterable[Placed]) -> bool:
    """Can any position of a tensor of `a` share a byte with any of `b`?"""
    spans = [tensor.span() for tensor in b]
    for tensor in a:
        identity, place = tensor.span()
        if any(identity == other and views.meets(place, where) for other, where in spans):
            return True
    return False


def _conflict(a: Crowdable, b: Crowdable) -> bool:
    return meet(a.outputs, b.inputs) or meet(a.outputs, b.outputs) or meet(b.outputs, a.inputs)


def _memories(plan: Crowdable) -> set[Identity]:
    return {tensor.span()[0] for tensor in (*plan.inputs, *plan.outputs)}


def _spans(plan: Crowdable) -> set[tuple[bool, Identity, int, int]]:
    """(written?, memory, start, end) of everything that a plan reads or writes."""
    found = set()
    for written, tensors in ((False, plan.inputs), (True, plan.outputs)):
        for tensor in tensors:
            identity, place = tensor.span()
            if place.byte_size:
                found.add((written, identity, place.offset, place.end))
    return found


def _touching(a: Iterable[Placed], i: int, b: Sequence[Placed], j: int | None) -> str:
    if j is None:
        return ""
    for tensor in a:
        identity, place = tensor.span()
        for other in b:
            other_identity, where = other.span()
            if identity == other_identity and views.touches(place, i, where, j):
                return tensor.name
    return ""
