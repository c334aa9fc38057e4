"""How thoroughly to measure, and where results go: the command line that all benchmarks share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROUNDS = 7
QUICK_ROUNDS = 1
RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True, slots=True)
class Settings:
    """`scale` shortens every measurement of a quick run; its figures show that the benchmark works, nothing more."""

    rounds: int
    scale: float
    output: Path

    @property
    def quick(self) -> bool:
        return self.scale < 1

    def seconds(self, full: float) -> float:
        """How long to measure what takes `full` seconds in a full run."""
        return full * self.scale


def parse(description: str, arguments: Sequence[str] | None = None) -> Settings:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="one short round: does it work?")
    parser.add_argument("--rounds", type=int, help=f"interleaved rounds (default {ROUNDS}, quick {QUICK_ROUNDS})")
    parser.add_argument("--output", type=Path, default=RESULTS, help="directory of the JSON and the plot")
    given = parser.parse_args(arguments)
    rounds = given.rounds or (QUICK_ROUNDS if given.quick else ROUNDS)
    if rounds < 1:
        parser.error("--rounds must be 1 or more")
    return Settings(rounds, 0.05 if given.quick else 1.0, given.output)
