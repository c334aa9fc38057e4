"""What do the steps of an ensemble cost over calling its members one after another?

    python -m bench.ensembles [--quick] [--rounds N] [--output DIR]

Chains of identity models in one worker, prepared plans, back to back. Beside each stand the same members called one
after another by a native client, and the floor: the same calls in the client's own process, measured just before in
the same round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import clientlib
from bench.in_process import InProcess
from bench.measure import Row, against, interleave, sample, spread
from bench.models import Model, chain, identity
from bench.processes import SAME, SPLIT, UNPINNED, Broker, Placement, placed
from bench.report import Column, Goal, Table, machine, plot, publish
from bench.settings import Settings, parse

KIB, MIB = 1 << 10, 1 << 20
STEPS = (2, 3)
MEASURE_S = 0.5


@dataclass(frozen=True, slots=True)
class Case:
    """A chain of `steps` identities on tensors of `byte_size` bytes."""

    steps: int
    byte_size: int = KIB
    placement: Placement = UNPINNED


CASES = {
    **{
        f"{steps} steps, {placement.name}": Case(steps, placement=placement)
        for steps in STEPS
        for placement in (UNPINNED, SPLIT, SAME)
    },
    **{f"{steps} steps, 1 MiB": Case(steps, MIB, SPLIT) for steps in STEPS},
}
COLUMNS = (
    Column("p50 µs", "p50"),
    Column("p99", "p99"),
    Column("floor p50", "floor p50"),
    Column("p50 above", "above", "+.1f"),
    Column("above per step", "step", "+.1f"),
    Column("one by one p50", "one by one"),
    Column("ratio to that", "to one by one", ".2f"),
    Column("copied B/request", "copied", ".0f"),
)


class Chain:
    """Memory for the tensors of one case, and the three ways through it."""

    def __init__(self, client: clientlib.Client, member: InProcess, case: Case) -> None:
        elements = case.byte_size // 4
        region = client.create_region(f"bench {case.steps} {case.byte_size}", (case.steps + 3) * case.byte_size)
        *places, asked, answered = [at * case.byte_size for at in range(case.steps + 3)]
        arrays = [region.array((1, elements), np.float32, offset=place) for place in places]
        refs = [region.tensor((1, elements), "FP32", offset=place) for place in places]
        own = [region.tensor((1, elements), "FP32", offset=place) for place in (asked, answered)]
        for array in arrays:
            array[:] = 1
        self.ensemble: Callable[[], object] = client.prepare(f"chain_{case.steps}", {"x": own[0]}, {"y": own[1]}).infer
        pairs = range(case.steps)
        plans = [client.prepare("identity", {"x": refs[at]}, {"y": refs[at + 1]}) for at in pairs]
        self.one_by_one = _all([plan.infer for plan in plans])
        self.floor = _all([member.bind(arrays[at], arrays[at + 1]) for at in pairs])


class Bench:
    """What all rows share."""

    def __init__(self, broker: Broker, client: clientlib.Client, settings: Settings) -> None:
        self._settings = settings
        self._worker = broker.worker()
        self._client = client
        member = InProcess(identity(KIB // 4))
        kinds = {(case.steps, case.byte_size): case for case in CASES.values()}
        self._chains = {kind: Chain(client, member, case) for kind, case in kinds.items()}

    def measure(self, case: Case, _round: int) -> dict[str, float]:
        seconds = self._settings.seconds(MEASURE_S)
        chained = self._chains[case.steps, case.byte_size]
        with placed(case.placement, self._worker):
            floor = spread(sample(chained.floor, seconds))
            one_by_one = spread(sample(chained.one_by_one, seconds))
            before, requests = self._copied(case)
            own = spread(sample(chained.ensemble, seconds))
            after, ended = self._copied(case)
        return {
            **against(own, floor, paused=False),
            "step": (own.p50 - floor.p50) / case.steps,
            "one by one": one_by_one.p50,
            "to one by one": own.p50 / one_by_one.p50,
            "copied": (after - before) / max(1, ended - requests),
        }

    def _copied(self, case: Case) -> tuple[int, int]:
        """Tensor bytes copied so far, by the ensemble and its members, and requests of the ensemble that ended."""
        copied = 0
        for name in (f"chain_{case.steps}", "identity"):
            (counters,) = self._client.statistics(name)
            copied += sum(counters["copied_bytes"].values())
        (counters,) = self._client.statistics(f"chain_{case.steps}")
        return copied, counters["inference_stats"]["success"]["count"]


def _all(calls: list[Callable[[], object]]) -> Callable[[], object]:
    def one_after_another() -> None:
        for call in calls:
            call()

    return one_after_another


def goals(rows: list[Row[Case]]) -> list[Goal]:
    by_name = {row.name: row for row in rows}
    return [
        Goal(
            f"{name}: p50 at most 30 µs above the same calls in-process",
            by_name[name].median("above"),
            lambda value: value <= 30,
        )
        for name in ("3 steps, unpinned", "3 steps, split cores")
    ]


def main() -> None:
    settings = parse("Latency of an ensemble, against its members one after another")
    facts = machine()
    print(facts, flush=True)
    rows = [Row(name, case) for name, case in CASES.items()]
    models: list[Model] = [identity(KIB // 4), *(chain(steps) for steps in STEPS)]
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(Broker(models))
        client = stack.enter_context(clientlib.connect(broker.url))
        bench = Bench(broker, client, settings)
        interleave(rows, settings.rounds, bench.measure)
    table = Table("Latency of a chain of identities, prepared plan, back to back; medians over rounds", rows, COLUMNS)
    publish("ensembles", settings, facts, {"ensembles": table}, goals(rows))
    plot("ensembles", settings, [(table, "p50", {"floor p50": "floor p50", "one by one": "one by one"})], "µs")


if __name__ == "__main__":
    main()
