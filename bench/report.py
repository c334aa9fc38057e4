"""What a benchmark leaves: tables on standard output, a JSON document with every round, and a plot."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime

from bench.measure import Row
from bench.settings import Settings

QUIET_LOAD = 0.3  # runnable processes per core, beside the benchmark
QUIET_BUSY = 0.05
LOOK_S = 0.5
LOG_FROM = 30  # largest over smallest value of a plot with a logarithmic axis


class Column(NamedTuple):
    """A figure by its key in `Row.rounds`, under a title."""

    title: str
    key: str
    form: str = ".1f"


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    rows: Sequence[Row[Any]]
    columns: Sequence[Column]


class Goal(NamedTuple):
    """What a figure should reach, and what it is."""

    text: str
    value: float | None
    met: Callable[[float], bool]


# --- the machine --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the figures come from. `busy` is the share of all cores that was used just before the start."""

    cores: int
    cpu: str
    kernel: str
    python: str
    numpy: str
    onnxruntime: str
    load_average: float
    busy: float

    @property
    def quiet(self) -> bool:
        return self.load_average <= QUIET_LOAD * self.cores and self.busy <= QUIET_BUSY

    def __str__(self) -> str:
        lines = [
            f"{self.cores} cores of {self.cpu}, Linux {self.kernel}, Python {self.python}, numpy {self.numpy}, "
            f"onnxruntime {self.onnxruntime}",
        ]
        if not self.quiet:
            lines.append(
                f"NOT QUIET: load average {self.load_average:.2f}, {self.busy:.0%} of the cores busy before the start. "
                "Compare only ratios, and tails not at all."
            )
        return "\n".join(lines)


def machine() -> Machine:
    """Facts of this moment; takes half a second to see what else runs."""
    before = _idle_and_total()
    time.sleep(LOOK_S)
    idle, total = (after - earlier for after, earlier in zip(_idle_and_total(), before, strict=True))
    cpus = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        cpu=cpus[0].partition(":")[2].strip() if cpus else platform.machine(),
        kernel=platform.release(),
        python=platform.python_version(),
        numpy=np.__version__,
        onnxruntime=onnxruntime.__version__,
        load_average=os.getloadavg()[0],
        busy=round(1 - idle / max(total, 1), 3),
    )


def _idle_and_total() -> tuple[int, int]:
    ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


# --- what is shown ------------------------------------------------------------------------------------------------


def aligned(table: Table) -> str:
    """Medians over rounds, a row per line."""
    header = ["", *(column.title for column in table.columns)]
    lines = [[row.name, *(_cell(row.median(c.key), c.form) for c in table.columns)] for row in table.rows]
    widths = [max(len(line[at]) for line in [header, *lines]) for at in range(len(header))]
    shown = [
        "  ".join(
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in [header, *lines]
    ]
    return "\n".join([table.title, shown[0], "-" * (sum(widths) + 2 * len(widths) - 2), *shown[1:]])


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def goals_text(goals: Sequence[Goal]) -> str:
    lines = []
    for goal in goals:
        if goal.value is None:
            lines.append(f"  not measured  {goal.text}")
        else:
            lines.append(f"  {'met   ' if goal.met(goal.value) else 'MISSED'} {goal.value:12,.2f}  {goal.text}")
    return "\n".join(["Goals", *lines])


def publish(
    name: str, settings: Settings, facts: Machine, tables: Mapping[str, Table], goals: Sequence[Goal] = ()
) -> dict[str, Any]:
    """Prints the tables, writes NAME.json; returns the document."""
    for table in tables.values():
        print(f"\n{aligned(table)}")
    if goals:
        print(f"\n{goals_text(goals)}")
    document = {
        "machine": {**asdict(facts), "quiet": facts.quiet},
        "quick": settings.quick,
        "rounds": settings.rounds,
        "tables": {key: _plain(table) for key, table in tables.items()},
        "goals": [
            {"goal": goal.text, "value": goal.value, "met": goal.value is not None and goal.met(goal.value)}
            for goal in goals
        ],
    }
    settings.output.mkdir(parents=True, exist_ok=True)
    path = settings.output / f"{name}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"\nwritten: {path}")
    return document


def _plain(table: Table) -> dict[str, Any]:
    keys = dict.fromkeys(key for row in table.rows for figures in row.rounds for key in figures)
    return {
        "title": table.title,
        "rows": [
            {"name": row.name, "median": {key: row.median(key) for key in keys}, "rounds": row.rounds}
            for row in table.rows
        ],
    }


def plot(
    name: str,
    settings: Settings,
    panels: Sequence[tuple[Table, str, Mapping[str, str]]],
    axis: str,
) -> None:
    """NAME.png: a panel of horizontal bars for each (table, key of the bar, label → key of marks)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    heights = [len(table.rows) for table, _, _ in panels]
    figure, places = pyplot.subplots(
        len(panels), 1, figsize=(11, 1.5 * len(panels) + 0.34 * sum(heights)), height_ratios=heights, squeeze=False
    )
    for (table, bar, marks), place in zip(panels, places[:, 0], strict=True):
        at = np.arange(len(table.rows))
        place.barh(at, [row.median(bar) or 0 for row in table.rows], color="#4878a8", height=0.6, label=bar)
        for (label, key), marker, color in zip(marks.items(), "|x", ("#202020", "#c04030"), strict=False):
            place.scatter(
                [row.median(key) or np.nan for row in table.rows], at, marker=marker, s=90, color=color, label=label
            )
        place.set_yticks(at, [row.name for row in table.rows], fontsize=8)
        place.invert_yaxis()
        shown = [value for row in table.rows for key in (bar, *marks.values()) if (value := row.median(key))]
        if max(shown) > LOG_FROM * min(shown):
            place.set_xscale("log")
        place.set_xlabel(axis)
        place.set_title(table.title, fontsize=10, loc="left")
        place.grid(axis="x", which="both", alpha=0.25)
        place.legend(fontsize=8)
    figure.tight_layout()
    path = settings.output / f"{name}.png"
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    print(f"written: {path}")
