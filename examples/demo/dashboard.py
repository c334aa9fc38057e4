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
    f"{'':<5} {'clip':<12} {'frames/s':>8} {'frame ms':>11} {'request ms':>11}"
    f" {'copied/req':>10} {'faces':>6} {'dropped':>7}"
)


def milliseconds(values: Sequence[int]) -> str:
    """`p50 / p99` of microseconds."""
    return " / ".join(f"{ms:.1f}" if ms < 100 else f"{ms:.0f}" for ms in _median_and_tail(values))


def _median_and_tail(values: Sequence[int]) -> tuple[float, float]:
    return percentile(values, 0.5) / 1000, percentile(values, 0.99) / 1000


def camera_line(tally: Tally) -> str:
    """The live figures of one camera; it fits into 80 columns unless something failed."""
    line = (
        f"{tally.name:<5} {tally.clip:<12} {tally.recent_rate():>8.1f} {milliseconds(tally.recent_frames()):>11}"
        f" {milliseconds(tally.recent_requests()):>11} {tally.copied_per_request / 1000:>7,.0f} kB {tally.faces:>6}"
        f" {tally.dropped:>7}"
    )
    return line + (f"  {tally.errors} errors: {tally.error}" if tally.errors else "")


def batch_line(sizes: Mapping[int, int]) -> str:
    """A model's executions by batch size; of many sizes the most frequent ones."""
    executions = sum(sizes.values())
    if not executions:
        return "no batch yet"
    mean = sum(size * count for size, count in sizes.items()) / executions
    common = sorted(sizes.items(), key=lambda item: -item[1])[:6]
    shares = "  ".join(f"{size}: {count / executions:.0%}" for size, count in sorted(common))
    return f"{executions} batches of {mean:.1f} rows   {shares}"


class Dashboard:
    """Shows the tallies on `output` until `close`."""

    def __init__(self, output: TextIO, title: str, seconds: float) -> None:
        self._output = output
        self._title = title
        self._seconds = seconds
        self._started = time.monotonic()
        self._live = output.isatty()
        self._drawn = 0
        self._due = self._started + (0 if self._live else PLAIN_SECONDS)

    def update(self, tallies: Sequence[Tally], batches: Batches) -> None:
        """Draws, if it is time to."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + (TERMINAL_SECONDS if self._live else PLAIN_SECONDS)
        lines = [
            f"{self._title}, {now - self._started:.0f} of {self._seconds:.0f} s   (ms: p50 / p99)",
            HEADER,
            *map(camera_line, tallies),
            *(f"{model:<5} {batch_line(sizes)}" for model, sizes in batches.items()),
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
