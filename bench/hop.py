"""What do the transports between two processes cost by themselves?

    python -m bench.hop [--quick] [--rounds N] [--output DIR]

Round trips of 64 bytes between two Python processes, without a broker or a model. The floor of each row is the cheapest
that is safe against losing a wake-up: shared words, a short spin, then the channel's doorbells.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from bench.measure import Row, Spread, against, interleave, sample, spread
from bench.processes import SAME, SPLIT, UNPINNED, Placement, die_with_parent, placed
from bench.report import Column, Table, machine, plot, publish
from bench.settings import parse
from bench.transports import TRANSPORTS, Transport
from shm.sockets import close_all

FLOOR = "shared words, spin then doorbell"
MEASURE_S = 0.3
COLUMNS = (
    Column("p50 µs", "p50"),
    Column("p90", "p90"),
    Column("p99", "p99"),
    Column("trips/s", "rate", ",.0f"),
    Column("floor p50", "floor p50"),
    Column("ratio", "ratio", ".2f"),
    Column("p50 above", "above", "+.1f"),
)


@dataclass(frozen=True, slots=True)
class Case:
    transport: str
    placement: Placement = UNPINNED
    pause_s: float = 0.0


def cases() -> dict[str, Case]:
    found = {}
    for placement in (UNPINNED, SPLIT, SAME):
        for name in TRANSPORTS:
            found[f"{placement.name}: {name}"] = Case(name, placement)
    for name in TRANSPORTS:
        found[f"1 ms pauses: {name}"] = Case(name, pause_s=1e-3)
    return found


@contextlib.contextmanager
def answered(transport: Transport) -> Iterator[int]:
    """A child that serves; its pid."""

    def died(number: int, frame: object) -> NoReturn:
        raise RuntimeError("the process that answers has died")  # whatever we were waiting for will not come

    before = signal.signal(signal.SIGCHLD, died)
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            die_with_parent()
            transport.serve()
        finally:
            os._exit(1)
    try:
        yield pid
    finally:
        signal.signal(signal.SIGCHLD, before)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def measure(case: Case, seconds: float) -> dict[str, float]:
    floor = trips(FLOOR, case, seconds)
    return against(trips(case.transport, case, seconds), floor, paused=bool(case.pause_s))


def trips(name: str, case: Case, seconds: float) -> Spread:
    transport = TRANSPORTS[name]()
    try:
        with answered(transport) as pid, placed(case.placement, pid):
            return spread(sample(transport.client(), seconds, case.pause_s))
    finally:
        close_all(transport.descriptors)


def main() -> None:
    settings = parse("Round trips between two processes")
    facts = machine()
    print(facts, flush=True)
    rows = [Row(name, case) for name, case in cases().items()]
    interleave(rows, settings.rounds, lambda case, _: measure(case, settings.seconds(MEASURE_S)))
    table = Table("Round trips of 64 bytes between two processes; medians over rounds", rows, COLUMNS)
    publish("hop", settings, facts, {"hop": table})
    plot("hop", settings, [(table, "p50", {"floor p50": "floor p50", "p99": "p99"})], "µs")


if __name__ == "__main__":
    main()
