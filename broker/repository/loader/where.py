"""Which line of a configuration text an error is about, where the error itself does not know.

Called by `load`. Rules are checked on the parsed configuration, which has no lines: what an error quotes is looked for
in the text.
"""

from __future__ import annotations

import re

from broker.repository.pbtxt_lines import fields

_QUOTED = re.compile(r"'([\w./${}-]{1,128}|\{\{ ?[\w.]+ ?\}\})'")
_MOST = 120  # characters of the line that are shown


def located(reason: str, path: str, text: str, model: str, field: str = "", value: str = "") -> str:
    """`reason` with the place in `text`, the file `path`, below its first line; unchanged if it names the file.

    `field`, `value`: as in `ModelError`; else it is where what the reason quotes stands first.
    """
    if path in reason:
        return reason
    first, line_end, rest = reason.partition("\n")
    place = _place_of(field, value, path, text) or _place(reason, path, text, model)
    return f"{first}\n    {place}{line_end}{rest}"


def _place_of(field: str, value: str, path: str, text: str) -> str:
    if not field:
        return ""
    found = (each.line for each in fields(text) if each.path.startswith(field) and value in ("", each.value))
    line = next(found, 0)
    return f"{path}:{line}: {text.split(chr(10))[line - 1].strip()[:_MOST]}" if line else ""


def _place(reason: str, path: str, text: str, model: str) -> str:
    lines = [line.partition("#")[0] for line in text.split("\n")]
    for word in dict.fromkeys(_QUOTED.findall(reason)):
        if word == model:
            continue
        value, field = re.compile(rf'"{re.escape(word)}"'), re.compile(rf"\b{re.escape(word)}\b\s*[:{{\[]")
        for pattern in (value, field):
            for number, line in enumerate(lines, 1):
                if pattern.search(line):
                    return f"{path}:{number}: {line.strip()[:_MOST]}"
    return f"in {path}"
