"""Every field and value of a configuration text that the schema does not have: protobuf's parser stops at the first.

Used by `further`: what the parser stopped at is taken out of the text, or put right where it is clear what was meant,
and the rest is parsed again.
"""

from __future__ import annotations

import re
from typing import NamedTuple, final

from google.protobuf import text_format

from broker.repository.loader.failure import ModelError
from broker.repository.loader.pbtxt import Parsed, parse

MOST = 16  # errors of one text
_NO_FIELD = re.compile(r'has no field named "(\w+)"')
_NO_VALUE = re.compile(r'Enum type "inference\.[\w.]+" has no value named (\w+)')
_MEANT = re.compile(r"did you mean '(\w+)'\?$")
_QUOTES = "\"'"
_NEXT = re.compile(r"""\s+|#[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|[{}<>\[\]:,;]|[^\s{}<>\[\]:,;#"']+""")


@final
class _Edit(NamedTuple):
    """In place of text[start:end]: `blank`, as long as that, to find the next error; `right`: what was meant."""

    start: int
    end: int
    blank: str
    right: str


def parse_all(data: bytes, path: str) -> tuple[Parsed | None, list[ModelError]]:
    """What the text says once all that is wrong is put right; None if that is not clear. And what is wrong."""
    errors: list[ModelError] = []
    edits: list[_Edit] = []
    text = data.decode("utf-8-sig", "replace")
    blanked = text
    while len(errors) < MOST:
        try:
            parse(blanked.encode() if edits else data, path, text)
        except ModelError as error:
            errors.append(error)
            edit = _edit(error, blanked, text)
            if edit is None:
                return None, errors
            edits.append(edit)
            blanked = blanked[: edit.start] + edit.blank + blanked[edit.end :]
        else:
            break
    try:
        return parse(_righted(text, edits).encode() if edits else data, path), errors
    except ModelError:
        return None, errors


def _righted(text: str, edits: list[_Edit]) -> str:
    """With every edit made, the last one first; what was not understood makes it no text."""
    for edit in sorted(edits, reverse=True):
        text = text[: edit.start] + (edit.right or "?") + text[edit.end :]
    return text


def _edit(error: ModelError, blanked: str, text: str) -> _Edit | None:
    cause, meant = error.__cause__, _MEANT.search(str(error))
    if not isinstance(cause, text_format.ParseError) or cause.GetLine() is None or cause.GetColumn() is None:
        return None
    lines = blanked.split("\n")
    start = sum(len(line) + 1 for line in lines[: cause.GetLine() - 1]) + cause.GetColumn() - 1
    field, value = _NO_FIELD.search(str(cause)), _NO_VALUE.search(str(cause))
    if field and blanked.startswith(field[1], start):
        end = _end_of_field(blanked, start + len(field[1]))
        blank = re.sub(r"[^\n]", " ", blanked[start:end])
        return _Edit(start, end, blank, meant[1] + text[start + len(field[1]) : end] if meant else "")
    if value and blanked.startswith(value[1], start):
        end = start + len(value[1])
        return _Edit(start, end, "0".ljust(end - start), meant[1] if meant else "")  # every enum has a 0
    return None


def _end_of_field(text: str, at: int) -> int:
    """Behind the value of the field whose name ends at `at`."""
    depth, end = 0, at
    while match := _NEXT.match(text, end):
        token = match[0]
        if token in tuple("{<["):
            depth += 1
        elif token in tuple("}>]"):
            depth -= 1
            if depth < 0:
                return end
        end = match.end()
        if not (depth or token.isspace() or token[0] in "#:,;"):
            return end if token[0] not in _QUOTES else _end_of_strings(text, end)
    return end


def _end_of_strings(text: str, at: int) -> int:
    """Strings that follow each other are one value."""
    end = at
    while (match := _NEXT.match(text, at)) and (match[0].isspace() or match[0][0] in _QUOTES + "#"):
        at = match.end()
        end = at if match[0][0] in _QUOTES else end
    return end
