"""Counters that all processes of a stress run share.

Every process has a block of its own, written by nobody else, so that what it counted outlives its being killed.
"""

from __future__ import annotations

import os
from typing import Any, final

from shm.memory import map_words, sealed_memfd

NAMES = (
    "submitted",
    "answered",
    "died",
    "refused",
    "expired",
    "cancelled",
    # What must stay 0:
    "lost",
    "duplicated",
    "wrong",
    "late_writes",
    "reordered",
    "lost_wakeups",
    # How soon the endings of what could not run twice came, after the kill:
    "died_within_100ms",
    "died_later",
    "reconnects",
    "hangups",
    "attacks",
)
MUST_BE_ZERO = ("lost", "duplicated", "wrong", "late_writes", "reordered", "lost_wakeups", "lost_wakeups_of_worker")
BLOCKS = 4096
_WORDS = 32
_STOP, _KILLED_AT = 0, 1
_INDEX = {name: index for index, name in enumerate(NAMES)}


@final
class Tally:
    """One process's block."""

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def add(self, name: str, count: int = 1) -> None:
        self._words[_INDEX[name]] += count

    def __getitem__(self, name: str) -> int:
        return int(self._words[_INDEX[name]])


@final
class Counters:
    """The page: `Counters()` makes it, `Counters(fd)` opens it in a child."""

    def __init__(self, fd: int | None = None) -> None:
        size = (BLOCKS + 1) * _WORDS * 8
        self.fd = sealed_memfd("stress-counters", size) if fd is None else fd
        _, self._words = map_words(self.fd, size)
        self._taken = 0

    def next_block(self) -> int:
        """The number of a block nobody has."""
        self._taken += 1
        assert self._taken <= BLOCKS, "too many client processes"
        return self._taken

    def tally(self, block: int) -> Tally:
        return Tally(self._words[block * _WORDS : (block + 1) * _WORDS])

    def totals(self) -> dict[str, int]:
        tallies = [self.tally(block) for block in range(1, self._taken + 1)]
        return {name: sum(tally[name] for tally in tallies) for name in NAMES}

    @property
    def stopping(self) -> bool:
        """Clients submit nothing new and leave when all they have submitted has ended."""
        return bool(self._words[_STOP])

    def stop(self) -> None:
        self._words[_STOP] = 1

    @property
    def killed_at_ns(self) -> int:
        """When the worker was killed last (CLOCK_MONOTONIC)."""
        return int(self._words[_KILLED_AT])

    @killed_at_ns.setter
    def killed_at_ns(self, value: int) -> None:
        self._words[_KILLED_AT] = value

    def close(self) -> None:
        os.close(self.fd)


def rows_of(facts: dict[str, Any]) -> list[str]:
    """A table of two columns."""
    width = max(map(len, facts))
    return [f"  {name:<{width}}  {value}" for name, value in facts.items()]
