"""Is a request as fast as it was? Two states of this repository, measured in turns of a tenth of a second.

    python -m bench.before REVISION|DIRECTORY [--quick] [--rounds N] [--output DIR]

Figures of two runs of `bench.latency` one after the other differ by more than most changes: a host has faster and
slower minutes. Here each state has its broker and its client beside the other's, all idle but the one that is measured,
and what counts is the median over the pairs of neighbouring turns.
"""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.latency import KIB, MODELS, Case, Client
from bench.measure import Row, interleave, sample, spread
from bench.models import chain, identity
from bench.processes import SAME, SPLIT, UNPINNED, Broker, Companion, placed
from bench.report import Column, Goal, Table, machine, publish
from bench.settings import parse

HERE = Path(__file__).resolve()
ROOT = HERE.parents[1]
TURN_S = 0.1
TURNS = 10  # of each state, per round
MOST = 1.02  # times what it was: less is not told from nothing
PLACEMENTS = {placement.name: placement for placement in (UNPINNED, SPLIT, SAME)}


@dataclass(frozen=True, slots=True)
class Turn:
    """`client`: "hybrid" spins before it sleeps, "block" never. `placement`: one of PLACEMENTS."""

    client: str
    placement: str
    model: str = "identity"


ROWS = {
    "hybrid, unpinned": Turn("hybrid", UNPINNED.name),
    "hybrid, split cores": Turn("hybrid", SPLIT.name),
    "hybrid, same core": Turn("hybrid", SAME.name),
    "always block, unpinned": Turn("block", UNPINNED.name),
    "always block, split cores": Turn("block", SPLIT.name),
    "ensemble of three, unpinned": Turn("hybrid", UNPINNED.name, "chain_3"),
    "ensemble of three, split cores": Turn("hybrid", SPLIT.name, "chain_3"),
}
COLUMNS = (
    Column("before p50 µs", "before", ".2f"),
    Column("now p50", "now", ".2f"),
    Column("ratio", "ratio", ".3f"),
    Column("more", "more", "+.2f"),
    Column("before p99", "before p99"),
    Column("now p99", "now p99"),
)


def serve() -> None:
    """One state: a broker and a client, which measures when told to. Runs on the modules of its own directory."""
    models = [make(KIB // 4) for make in MODELS.values()]
    MODELS["chain_3"] = identity  # as far as its tensors are concerned
    with Broker([*models, chain(3)]) as broker, contextlib.ExitStack() as stack:
        clients = {"hybrid": Client(broker.url, 50), "block": Client(broker.url, 0)}
        for client in clients.values():
            stack.callback(client.client.close)
        worker = broker.worker()
        print("ready", flush=True)
        for line in sys.stdin:
            name, placement, model, seconds = line.rstrip("\n").split(",")
            with placed(PLACEMENTS[placement], worker):
                taken = spread(sample(clients[name].infer(Case(model)), float(seconds)))
            print(taken.p50, taken.p99, flush=True)


class State(Companion):
    """`serve` on the modules in `directory`, by this file's text: an older state has none of its own."""

    def __init__(self, directory: Path) -> None:
        super().__init__(str(HERE), "--serve", root=directory)

    def turn(self, turn: Turn, seconds: float) -> tuple[float, float]:
        """p50 and p99, in µs."""
        self.tell(f"{turn.client},{turn.placement},{turn.model},{seconds}")
        p50, p99 = map(float, self.hear().split())
        return p50, p99


@contextlib.contextmanager
def directory_of(state: str) -> Iterator[Path]:
    """A directory as it is, or a revision's files in one of their own."""
    if Path(state, "clientlib").is_dir():
        yield Path(state).resolve()
        return
    git = ["git", "-C", str(ROOT), "archive", "--format=tar", state]
    told = subprocess.run(git, capture_output=True)
    if told.returncode:
        raise SystemExit(f"neither a directory with this project nor a revision of it: {state}\n{told.stderr.decode()}")
    with tempfile.TemporaryDirectory(prefix="tensorbroker-before-") as directory:
        with tarfile.open(fileobj=io.BytesIO(told.stdout)) as files:
            files.extractall(directory, filter="data")
        yield Path(directory)


def goals(rows: list[Row[Turn]]) -> list[Goal]:
    """Of every row."""
    return [
        Goal(f"{row.name}: p50 at most {MOST} times what it was", row.median("ratio"), lambda ratio: ratio <= MOST)
        for row in rows
    ]


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise SystemExit(f"usage: python -m bench.before REVISION|DIRECTORY [options]\n\n{__doc__}")
    settings = parse("Latency of a request, against an earlier state", sys.argv[2:])
    facts = machine()
    print(facts, flush=True)
    rows = [Row(name, turn) for name, turn in ROWS.items()]
    with contextlib.ExitStack() as stack:
        earlier = stack.enter_context(directory_of(sys.argv[1]))
        states = [stack.enter_context(State(path)) for path in (earlier, ROOT)]
        for state in states:
            state.hear()

        def measure(turn: Turn, number: int) -> dict[str, float]:
            order = states if number % 2 else states[::-1]
            taken = {state: state.turn(turn, settings.seconds(TURN_S)) for state in order}
            (before, before_p99), (now, now_p99) = (taken[state] for state in states)
            return {
                "before": before,
                "now": now,
                "ratio": now / before,
                "more": now - before,
                "before p99": before_p99,
                "now p99": now_p99,
            }

        interleave(rows, settings.rounds * TURNS, measure)
    title = f"Latency of a request, now and at {sys.argv[1]}, 1 KiB; medians over {settings.rounds * TURNS} pairs"
    publish("before", settings, facts, {"before": Table(title, rows, COLUMNS)}, goals(rows))


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["--serve"] else main()
