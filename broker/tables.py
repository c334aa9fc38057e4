"""Triton's ASCII tables, for the log and the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def ascii_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Rows of cells under a header, all columns as wide as their widest cell; no line break at the end."""
    lines = [tuple(header), *(tuple(str(cell) for cell in row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    rule = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    cells = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    return "\n".join((rule, cells[0], rule, *cells[1:], rule))
