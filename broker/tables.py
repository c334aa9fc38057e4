"""Triton's ASCII tables, for the log and the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from itertools import zip_longest

MAX_WIDTH = 100  # of a cell; longer texts go on below


def printable(text: str) -> str:
    """`text` with every control character but the line break escaped: files of others may hold any."""
    return "".join(
        char if char == "\n" or char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def ascii_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Rows of cells under a header, all columns as wide as their widest cell; no line break at the end.

    Texts of several lines, or too long, take several lines of their own column.
    """
    lines = [tuple(header)]
    for row in rows:
        lines += zip_longest(*(_lines(str(cell)) for cell in row), fillvalue="")
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    rule = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    cells = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    return "\n".join((rule, cells[0], rule, *cells[1:], rule))


def _lines(cell: str) -> list[str]:
    return [
        part
        for line in printable(cell).splitlines()
        for part in textwrap.wrap(line, MAX_WIDTH, drop_whitespace=False, break_on_hyphens=False) or [""]
    ] or [""]
