"""How much memory each model takes: the growth of its workers while it loaded, and at least the size of its files.

A worker grows less than that where it takes memory that a model which was just unloaded has not given back yet.

Kept by `broker.version_life`, which loads; asked by `broker.model_memory`, status and metrics. Host memory only: what a
model has on a GPU shows nowhere here. Loads that overlap in a worker share its growth by the size of their files; while
something is unloaded there nothing can be measured, and what was known stays. Of files that are mapped (large weights
are; so are libraries, which the first model brings in) at most the model's own count.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, final

Version = tuple[str, int]  # model and number


class Resident(NamedTuple):
    """Bytes that a process has in memory: its own, and of files that it has mapped."""

    own: int
    mapped: int


@final
@dataclass(slots=True)
class _Size:
    files: int
    grown: dict[str, int] = field(default_factory=dict)  # by worker


@final
@dataclass(slots=True)
class _Loads:
    """Those of one worker that overlap. `before`: bytes when the first began, None once they tell nothing."""

    pid: int | None
    before: Resident | None
    under_way: int = 0
    loaded: list[Version] = field(default_factory=list)


@final
class ModelSizes:
    """In bytes. A model that is loaded again from files of the same size is as large as it ever was."""

    __slots__ = ("_loads", "_sizes")

    def __init__(self) -> None:
        self._sizes: dict[Version, _Size] = {}
        self._loads: dict[str, _Loads] = {}

    def of(self, model: str, version: int) -> int:
        """0 for what was never seen, and for ensembles."""
        size = self._sizes.get((model, version))
        if size is None:
            return 0
        return max(size.files, sum(size.grown.values()))

    def note(self, model: str, files: Mapping[int, int]) -> int:
        """These versions are to be loaded, from files of so many bytes. Returns what they will take together."""
        for number, byte_size in files.items():
            size = self._sizes.get((model, number))
            if size is None or size.files != byte_size:
                self._sizes[model, number] = _Size(byte_size)
        return sum(self.of(model, number) for number in files)

    def begin(self, worker: str, pid: int | None, resident: Resident | None) -> None:
        """A load begins in a worker whose process `pid` has so much memory (None: unknown)."""
        loads = self._loads.get(worker)
        if loads is None:
            loads = self._loads[worker] = _Loads(pid, resident)
        elif loads.pid != pid or resident is None:
            loads.before = None
        loads.under_way += 1

    def disturb(self, worker: str) -> None:
        """Something is unloaded there: its growth says nothing of what loads meanwhile."""
        if worker in self._loads:
            self._loads[worker].before = None

    def end(self, worker: str, version: Version | None, pid: int | None, resident: Resident | None) -> None:
        """A load has ended. `version`: what is loaded now; None: it failed, and what it took is given back sometime."""
        loads = self._loads[worker]
        loads.under_way -= 1
        if version is not None:
            loads.loaded.append(version)
        if version is None or resident is None or pid != loads.pid:
            loads.before = None
        if loads.under_way:
            return
        del self._loads[worker]
        measured = [each for each in loads.loaded if each in self._sizes]
        if loads.before is None or resident is None or not measured:
            return
        shares = [self._sizes[each].files + 1 for each in measured]
        growth = resident.own - loads.before.own + min(resident.mapped - loads.before.mapped, sum(shares))
        if growth <= 0:
            return
        for each, share in zip(measured, shares, strict=True):
            grown = self._sizes[each].grown
            grown[worker] = max(grown.get(worker, 0), growth * share // sum(shares))


def resident(pid: int | None) -> Resident | None:
    """Of a process now; shared memory is somebody else's. None: unknown."""
    found = resident_bytes(pid, "RssAnon", "RssFile")
    return None if found is None else Resident(*found)


def resident_bytes(pid: int | None, *kinds: str) -> list[int] | None:
    """What a process has in memory now of each of these kinds, which are fields of /proc/PID/status. None: unknown."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            words = dict(line.split(":", 1) for line in file if line.startswith("Rss"))
        return [int(words[kind].split()[0]) << 10 for kind in kinds]
    except (OSError, ValueError, KeyError):
        return None


def files_size(directory: str) -> int:
    """Bytes of all files below; what cannot be read counts nothing."""
    total = 0
    for path, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(path, name)).st_size
            except OSError:
                continue
    return total
