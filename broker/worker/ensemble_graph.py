"""The data flow of an ensemble: which steps a request needs, and which can begin. Pure; no memory, no thread.

`broker.worker.ensemble` asks it once per set of requested outputs (`Graph.needed`) and once per request (`Progress`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, final

from broker.repository.scheduling import Ensemble, Step


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

    __slots__ = ("_writer", "steps")

    def __init__(self, ensemble: Ensemble) -> None:
        self.steps: tuple[Step, ...] = ensemble.step
        self._writer = {tensor: at for at, step in enumerate(self.steps) for tensor in step.output_map.values()}

    def needed(self, requested: Iterable[str]) -> Needed:
        """The steps without which `requested` (ensemble tensors) cannot be made, and no others."""
        wanted = set(requested)
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
