"""Samples of one call, what is left of them, and rounds that interleave all rows."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Generic, NamedTuple, TypeVar

import numpy as np

LEAST = 5  # calls, however long they take
WARM_UP = 0.1  # of the measured time; at least 2 calls: the worker's first is its estimate
_now = time.perf_counter

C = TypeVar("C")


class Spread(NamedTuple):
    """Latencies in microseconds, and calls per second."""

    p50: float
    p90: float
    p99: float
    rate: float


@dataclass(slots=True)
class Row(Generic[C]):
    """One line of a table: what is measured, and the figures of every round."""

    name: str
    case: C
    rounds: list[dict[str, float]] = field(default_factory=list)

    def median(self, key: str) -> float | None:
        """None: this row has no such figure."""
        values = [figures[key] for figures in self.rounds if key in figures]
        return median(values) if values else None


def interleave(rows: Sequence[Row[C]], rounds: int, measure: Callable[[C, int], dict[str, float]]) -> None:
    """`measure(case, round)` for every row in every round, forwards and backwards in turn: no place is better."""
    began = time.monotonic()
    for number in range(rounds):
        for at, row in enumerate(rows if number % 2 == 0 else reversed(rows)):
            if sys.stderr.isatty():
                print(f"\r\x1b[Kround {number + 1}/{rounds}, {at + 1}/{len(rows)}: {row.name}", end="", file=sys.stderr)
            row.rounds.append(measure(row.case, number))
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    print(f"{rounds} rounds in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def sample(call: Callable[[], object], seconds: float, pause_s: float = 0.0, least: int = LEAST) -> list[float]:
    """How long each call took, in seconds; calls before, for caches and the worker's estimates, are left out."""
    _sample(call, seconds * WARM_UP, pause_s, min(least, 2))
    return _sample(call, seconds, pause_s, least)


def _sample(call: Callable[[], object], seconds: float, pause_s: float, least: int) -> list[float]:
    samples: list[float] = []
    end = _now() + seconds
    while True:
        if pause_s:
            time.sleep(pause_s)
        began = _now()
        call()
        ended = _now()
        samples.append(ended - began)
        if ended >= end and len(samples) >= least:
            return samples


def sample_threads(calls: Sequence[Callable[[], object]], seconds: float) -> list[list[float]]:
    """`sample` of every call at once, each on a thread of its own."""
    taken: list[list[float]] = [[] for _ in calls]
    barrier = threading.Barrier(len(calls))

    def run(at: int) -> None:
        _sample(calls[at], seconds * WARM_UP, 0.0, 2)
        barrier.wait(60)
        taken[at] = _sample(calls[at], seconds, 0.0, LEAST)

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not all(taken):
        raise RuntimeError("a measuring thread failed")
    return taken


def spread(*samples: Iterable[float]) -> Spread:
    """Of one sequence of calls, or of several that ran at once."""
    parts = [np.asarray(part) for part in samples]
    p50, p90, p99 = np.percentile(np.concatenate(parts) * 1e6, [50, 90, 99])
    return Spread(float(p50), float(p90), float(p99), float(sum(len(part) / part.sum() for part in parts)))


def against(own: Spread, floor: Spread, *, paused: bool) -> dict[str, float]:
    """The figures of one row in one round. With pauses between the calls a rate would mean nothing."""
    figures = {
        "p50": own.p50,
        "p90": own.p90,
        "p99": own.p99,
        "floor p50": floor.p50,
        "floor p99": floor.p99,
        "ratio": own.p50 / floor.p50,
        "above": own.p50 - floor.p50,
        "above p99": own.p99 - floor.p99,
    }
    return figures if paused else {**figures, "rate": own.rate}


@contextlib.contextmanager
def busy_thread(wanted: bool) -> Iterator[None]:
    """Another thread of this process that computes in Python without a break."""
    if not wanted:
        yield
        return
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            sum(range(100))

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
