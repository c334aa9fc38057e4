"""Promise 1, over all clients of this worker: no output range overlaps memory that a live request reads or writes.

Most plans share no byte with any other; `Crowds` finds that out when a plan is bound, and admission then only looks at
one byte per output position. Plans that do meet others are crowded: their requests are compared with the live requests
of crowded plans. Memory is compared by (device, inode), whoever registered it under whatever name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, final

from shm import views
from shm.admission import Request
from shm.views import Placement

Identity = tuple[int, int]
LiveRequests = Callable[[], Iterable[Request]]
MAX_COMPARED = (
    1024  # live requests of crowded plans: beyond it a client pays with refusals, not its neighbours with time
)
LOOK_AGAIN = 64  # plans in one memory among which a plan that leaves may have been the only one in the way


class Placed(Protocol):
    """A tensor of a plan on mapped memory."""

    name: str

    def span(self) -> tuple[Identity, Placement]:
        """The memory, and the place counted from the start of its file."""


class Crowdable(Protocol):
    """A plan, as far as overlaps go."""

    crowded: bool

    @property
    def inputs(self) -> Sequence[Placed]:
        """Where it reads."""

    @property
    def outputs(self) -> Sequence[Placed]:
        """Where it writes."""

    def simplify(self) -> None:
        """Called when `crowded` has changed."""


@final
class Crowds:
    """All bound plans, by the memory they use. Used by the control thread."""

    __slots__ = ("_by_memory",)

    def __init__(self) -> None:
        self._by_memory: dict[Identity, set[Crowdable]] = {}

    def enter(self, plan: Crowdable) -> None:
        """Mark the plan and those it meets as crowded."""
        plan.crowded = meet(plan.outputs, plan.inputs)
        for other in self._neighbours(plan):
            if not (plan.crowded and other.crowded) and _conflict(plan, other):
                plan.crowded = True
                if not other.crowded:
                    other.crowded = True
                    other.simplify()
        for memory in _memories(plan):
            self._by_memory.setdefault(memory, set()).add(plan)
        plan.simplify()

    def leave(self, plan: Crowdable) -> None:
        """Forget the plan; those it was in the way of are free again, as far as that is quickly seen."""
        for memory in _memories(plan):
            plans = self._by_memory.get(memory, set())
            plans.discard(plan)
            if not plans:
                self._by_memory.pop(memory, None)
        neighbours = self._neighbours(plan) if plan.crowded else set()
        if len(neighbours) > LOOK_AGAIN:
            return
        for other in neighbours:
            if other.crowded and not meet(other.outputs, other.inputs):
                other.crowded = any(third is not other and _conflict(other, third) for third in neighbours)
                other.simplify()

    def _neighbours(self, plan: Crowdable) -> set[Crowdable]:
        return {other for memory in _memories(plan) for other in self._by_memory.get(memory, ())}


def scan(plan: Crowdable, input_position: int, output_position: int, live: Iterable[Request]) -> str:
    """What output position of a crowded plan would overlap, in words, or ""."""
    if name := _touching(plan.outputs, output_position, plan.inputs, input_position):
        return f"output '{name}' overlaps an input of the same request"
    compared = 0
    for request in live:
        other: Crowdable = request.plan  # type: ignore[assignment]
        if not request.started or not other.crowded:
            continue
        compared += 1
        if compared > MAX_COMPARED:
            return f"more than {MAX_COMPARED} requests are in flight on plans whose memory overlaps: wait for some"
        name = (
            _touching(plan.outputs, output_position, other.inputs, request.input_position)
            or _touching(plan.outputs, output_position, other.outputs, request.output_position)
            or _touching(other.outputs, request.output_position, plan.inputs, input_position)
        )
        if name:
            return f"output '{name}' overlaps memory that a request still in flight reads or writes"
    return ""


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


def _touching(a: Iterable[Placed], i: int, b: Sequence[Placed], j: int) -> str:
    for tensor in a:
        identity, place = tensor.span()
        for other in b:
            other_identity, where = other.span()
            if identity == other_identity and views.touches(place, i, where, j):
                return tensor.name
    return ""
