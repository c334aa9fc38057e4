"""The live view: one line for each camera, one for the batches of each model.

On a terminal the lines are redrawn in place; elsewhere they are printed every few seconds.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from typing import TextIO

from examples.demo.tally import Tally, percentile

TERMINAL_SECONDS = 0.5
PLAIN_SECONDS = 5.0

Batches = Mapping[str, Mapping[int, int]]
"""For each model: how many executions had which batch size."""

HEADER = (
    f"{'camera':<8} {'clip':<13} {'frames/s':>8} {'frame ms p50/p99':>17} {'request ms p50/p99':>19}"
    f" {'copied B/request':>17} {'faces':>7} {'dropped':>8}"
)


def milliseconds(values: Sequence[int]) -> str:
    """`p50 / p99` of microseconds."""
    return f"{percentile(values, 0.5) / 1000:.1f} / {percentile(values, 0.99) / 1000:.1f}"


def camera_line(tally: Tally) -> str:
    """The live figures of one camera."""
    line = (
        f"{tally.name:<8} {tally.clip:<13} {tally.recent_rate():>8.1f} {milliseconds(tally.recent_frames()):>17}"
        f" {milliseconds(tally.recent_requests()):>19} {tally.copied_per_request:>17,.0f} {tally.faces:>7}"
        f" {tally.dropped:>8}"
    )
    return line + (f"  {tally.errors} errors: {tally.error}" if tally.errors else "")


def batch_line(model: str, sizes: Mapping[int, int]) -> str:
    """A model's executions by batch size, the most frequent sizes first."""
    executions = sum(sizes.values())
    if not executions:
        return f"{model}: no batch yet"
    mean = sum(size * count for size, count in sizes.items()) / executions
    common = sorted(sizes.items(), key=lambda item: -item[1])[:6]
    shares = "  ".join(f"{size}: {count / executions:.0%}" for size, count in sorted(common))
    return f"{model}: {executions} executions, {mean:.1f} rows each on average   by rows  {shares}"


class Dashboard:
    """Shows the tallies on `output` until `close`."""

    def __init__(self, output: TextIO, title: str, seconds: float) -> None:
        self._output = output
        self._title = title
        self._seconds = seconds
        self._started = time.monotonic()
        self._live = output.isatty()
        self._drawn = 0
        self._due = 0.0

    def update(self, tallies: Sequence[Tally], batches: Batches) -> None:
        """Draws, if it is time to."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + (TERMINAL_SECONDS if self._live else PLAIN_SECONDS)
        lines = [
            f"{self._title}   {now - self._started:.0f} of {self._seconds:.0f} s",
            HEADER,
            *map(camera_line, tallies),
            *(batch_line(model, sizes) for model, sizes in batches.items()),
        ]
        if self._live:
            columns = shutil.get_terminal_size().columns
            up = f"\x1b[{self._drawn}A" if self._drawn else ""
            # A line longer than the terminal would wrap and the next redraw would begin a line too low.
            self._output.write(up + "".join(f"\r\x1b[2K{line[: columns - 1]}\n" for line in lines))
            self._drawn = len(lines)
        else:
            self._output.write("\n".join(lines) + "\n\n")
        self._output.flush()
