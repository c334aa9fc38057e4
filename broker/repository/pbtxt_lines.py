"""Which line of a config.pbtxt states what. Lexical only: knows neither the schema nor whether the text is right.

For errors about what a text means, which are found on the parsed configuration, where lines are lost. Used by
`ensemble_advice` and by the loader.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple, final

_TOKEN = re.compile(r"""#[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|[{}<>\[\]:,;]|[^\s{}<>\[\]:,;#"']+""")


@final
class Field(NamedTuple):
    """One field, or one entry of a list. `path`: "input[1].dims[0]", every name with its index.

    `value`: of a scalar, without quotes; "" of a message. `line` counts from 1.
    """

    path: str
    value: str
    line: int


def fields(text: str) -> list[Field]:
    """Every field of `text`, in its order; of a text that is wrong, whatever can be made of it."""
    found: list[Field] = []
    outer: list[tuple[str, Counter[str], str, bool]] = []  # of the messages that are open
    prefix, counts, name, is_list, is_value = "", Counter[str](), "", False, False
    line, at = 1, 0
    for match in _TOKEN.finditer(text):
        line, at, token = line + text.count("\n", at, match.start()), match.start(), match[0]
        if token[0] in "#,;":
            continue
        if token in "{<":
            path = _next(prefix, counts, name)
            found.append(Field(path, "", line))
            outer.append((prefix, counts, name, is_list))
            prefix, counts, name, is_list, is_value = f"{path}.", Counter(), "", False, False
        elif token in "}>":
            if outer:
                prefix, counts, name, is_list = outer.pop()
            is_value = False
        elif token in "[]":
            is_list, is_value = token == "[", False
        elif token == ":":
            is_value = True
        elif is_value or is_list:
            found.append(Field(_next(prefix, counts, name), token.strip("\"'"), line))
            is_value = False
        else:
            name = token
    return found


def _next(prefix: str, counts: Counter[str], name: str) -> str:
    counts[name] += 1
    return f"{prefix}{name}[{counts[name] - 1}]"
