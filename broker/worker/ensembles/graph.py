"""The data flow of an ensemble: which steps a request needs, and which can begin. Pure; no memory, no thread.

`broker.worker.ensembles.ensemble` asks for a set of requested outputs (`Graph.needed`), its runs once per request
(`Progress`). `Gates` bound how many requests may be at one step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple, final

from broker.repository.scheduling import Ensemble, Step
from shm.admission import Request

MAX_KNOWN = 64  # sets of requested outputs; clients choose them


class Needed(NamedTuple):
    """The part of an ensemble that some requested outputs need.

    `steps`: their numbers, ascending. `waits`: step → the tensors it waits for that other steps write. `readers`:
    tensor → the steps that wait for it. `wanted`: the tensors that somebody reads, requested outputs among them.
    """

    steps: tuple[int, ...]
    waits: dict[int, frozenset[str]]
    readers: dict[str, tuple[int, ...]]
    wanted: frozenset[str]


@final
class Graph:
    """An ensemble's steps. The loader has checked that every tensor has one writer and that there is no cycle."""

    __slots__ = ("_known", "_writer", "steps")

    def __init__(self, ensemble: Ensemble) -> None:
        self.steps: tuple[Step, ...] = ensemble.step
        self._known: dict[frozenset[str], Needed] = {}
        self._writer = {tensor: at for at, step in enumerate(self.steps) for tensor in step.output_map.values()}

    def needed(self, requested: Iterable[str]) -> Needed:
        """The steps without which `requested` (ensemble tensors) cannot be made, and no others."""
        asked = frozenset(requested)
        found = self._known.get(asked)
        if found is None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            found = self._known[asked] = self._find(asked)
        return found

    def _find(self, asked: frozenset[str]) -> Needed:
        wanted = set(asked)
        unseen = list(wanted)
        steps: set[int] = set()
        while unseen:
            at = self._writer.get(unseen.pop())
            if at is None or at in steps:
                continue
            steps.add(at)
            new = set(self.steps[at].input_map.values()) - wanted
            wanted |= new
            unseen.extend(new)
        waits = {
            at: frozenset(t for t in self.steps[at].input_map.values() if t in self._writer) for at in sorted(steps)
        }
        readers: dict[str, tuple[int, ...]] = {}
        for at, tensors in waits.items():
            for tensor in tensors:
                readers[tensor] = (*readers.get(tensor, ()), at)
        return Needed(tuple(sorted(steps)), waits, readers, frozenset(wanted))


@final
class Progress:
    """How far one request has come. Each needed step is returned by `begin` or one `wrote`, once."""

    __slots__ = ("_missing", "_needed")

    def __init__(self, needed: Needed) -> None:
        self._needed = needed
        self._missing = {at: len(tensors) for at, tensors in needed.waits.items()}

    def copy(self) -> Progress:
        """As it is now."""
        copy = Progress(self._needed)
        copy._missing = self._missing.copy()
        return copy

    def begin(self) -> list[int]:
        """The steps that need nothing from others."""
        return [at for at, missing in self._missing.items() if not missing]

    def wrote(self, tensors: Iterable[str]) -> list[int]:
        """These exist now: the steps that waited for nothing else."""
        ready = []
        for tensor in tensors:
            for at in self._needed.readers.get(tensor, ()):
                self._missing[at] -= 1
                if not self._missing[at]:
                    ready.append(at)
        return ready


@final
class Gates:
    """`max_inflight_requests`: at each step, at most so many requests of all runs are queued or running.

    The others wait in the order in which they came. Whoever enters leaves once. The caller holds a lock.
    """

    __slots__ = ("_inside", "_limit", "_waiting")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._inside: dict[int, set[Request]] = {}
        self._waiting: dict[int, OrderedDict[Request, None]] = {}

    def enter(self, step: Request) -> bool:
        """May it go on? False: it waits, until `leave` gives it back or `remove` takes it."""
        inside = self._inside.setdefault(step.slot, set())
        if len(inside) < self._limit:
            inside.add(step)
            return True
        self._waiting.setdefault(step.slot, OrderedDict())[step] = None
        return False

    def leave(self, step: Request) -> Request | None:
        """It has ended, or was never in. The one that may go on in its place, if one waits."""
        inside = self._inside.get(step.slot, set())
        if step not in inside:
            return None
        inside.remove(step)
        waiting = self._waiting.get(step.slot)
        if not waiting:
            return None
        following, _ = waiting.popitem(last=False)
        inside.add(following)
        return following

    def remove(self, step: Request) -> bool:
        """Take it back while it waits; False when it does not."""
        waiting = self._waiting.get(step.slot, OrderedDict())
        found = step in waiting
        waiting.pop(step, None)
        return found
