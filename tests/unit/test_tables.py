"""Tables stay tables whatever their cells hold."""

from __future__ import annotations

import pytest

from broker.tables import MAX_WIDTH, ascii_table, printable


@pytest.mark.parametrize(
    "text",
    ["two\nlines", "a\r\nb", "long " * 60, "x" * 450, "\x1b[31mred\x07\x00", "", "\n\n", "tab\there", "ß …"],
)
def test_every_line_has_the_width_of_the_table(text):
    table = ascii_table(("Model", "Status"), [("m", text), ("n", "READY")])
    lines = table.split("\n")
    assert {len(line) for line in lines} == {len(lines[0])}
    assert len(lines[0]) <= MAX_WIDTH + 20
    assert all(line[0] in "+|" and line.isprintable() for line in lines)


def test_a_text_of_several_lines_continues_in_its_own_column():
    assert ascii_table(("Model", "Status"), [("m", "no\n    fix: this")]).split("\n")[3:5] == [
        "| m     | no            |",
        "|       |     fix: this |",
    ]


def test_control_characters_are_shown_not_sent():
    assert printable("a\x1b[31m\tb\nc") == "a\\x1b[31m\\tb\nc"
