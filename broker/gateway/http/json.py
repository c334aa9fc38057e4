"""JSON as Triton reads and writes it: strict types, NaN and Infinity, and rapidjson's texts for what is wrong.

Everything an HTTP body says is read through these functions, so that each wrong type has one text. `place` is where a
value is in the body; without it, the field that `prefix` quotes. msgspec parses (four
times as fast as the standard library); what it refuses goes to the standard library once more, which takes NaN and
Infinity, as Triton's clients send them, and says where an error is. Of duplicate keys the last one counts; `repeated`
finds them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, ParamSpec, TypeVar

import msgspec
import numpy as np

from broker.gateway.http.errors import internal, invalid, too_deep
from broker.gateway.kserve import Buffer
from broker.gateway.placed import Placed
from shm.errors import Code, InferError, shortened

MISSING: Final = object()
UINT64_MAX: Final = 2**64 - 1
INT64_MAX: Final = 2**63 - 1
INT64_MIN: Final = -(2**63)
# An empty array is two bytes of JSON and 56 of memory: without a bound 64 MiB of them would be 2 GB.
MAX_CONTAINERS: Final = 2**20
_COUNT_FROM: Final = 1 << 20  # bytes of JSON; less cannot do harm
_AT_ONCE: Final = 1 << 20  # bytes of JSON that take no longer than others can wait

_QUOTED: Final = re.compile(r"'([^']+)'")
_EXPECTED: Final = {
    "string": "a string",
    "boolean": "true or false",
    "array": "an array",
    "object": "an object",
    "unsigned-integer": "an integer from 0 to 2^64-1",
    "signed-integer": "an integer",
    "double": "a number",
}

P = ParamSpec("P")
T = TypeVar("T")
_thread: Final = ThreadPoolExecutor(1, thread_name_prefix="json")  # one: JSON takes ten times its size while it is read
_decode = msgspec.json.Decoder().decode
_STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NUMBER: Final = re.compile(rf"{_STRING.pattern}|(-?[0-9][0-9.eE+-]*)", re.DOTALL)  # or a string, without a group
_TOO_BIG: Final = object()
_SEARCHED: Final = 2**20  # characters in which a number is looked for that is too big; it takes as long as reading them
_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")
_TEXTS: Final = (
    ("Expecting property name", "Missing a name for object member."),
    ("Expecting ':'", "Missing a colon after a name of object member."),
    ("Extra data", "The document root must not be followed by other values."),
    ("Unterminated string", "Missing a closing quotation mark in string."),
    ("Invalid \\uXXXX", "Incorrect hex digit after \\u escape in string."),
    ("Invalid \\escape", "Invalid escape character in string."),
    ("Invalid control character", "Invalid encoding in string."),
)


async def unhurried(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `work` makes of `size` bytes of JSON, or of tensors to be JSON. Many take seconds: a thread does them."""
    if size <= _AT_ONCE:
        return work(*args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_thread, lambda: work(*args, **kwargs))


def parse(body: Buffer) -> Any:
    """The value in `body`. Raises InferError: INTERNAL with Triton's text, INVALID_ARG for more than we take."""
    if len(body) > _COUNT_FROM:
        _check_containers(body)
    try:
        return _decode(body)
    except RecursionError:
        raise too_deep() from None
    except msgspec.DecodeError:
        pass
    try:
        text = bytes(body).decode()
        value = json.loads(text, parse_float=_finite)
        if _SURROGATE.search(text):  # in pairs they are characters, and msgspec would have taken them
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except RecursionError:
        raise too_deep() from None
    except UnicodeDecodeError as error:
        raise _syntax("Invalid encoding in string.", error.start) from None
    except UnicodeEncodeError:
        raise _syntax("The surrogate pair in string is invalid.", 0) from None
    except json.JSONDecodeError as error:
        raise _syntax(_text_of(error), error.pos) from None
    except ValueError:  # digits without end
        raise _too_big(text) from None


def repeated(body: Buffer, names: Iterable[str]) -> str | None:
    """The first of `names` that `body`, an object which `parse` took, has a second time; a name written with escapes
    counts only beside one without."""
    text = bytes(body)
    wanted = {name for name in names if text.count(msgspec.json.encode(name)) > 1}
    if not wanted:
        return None
    outermost: list[tuple[str, Any]] = []

    def keep(pairs: list[tuple[str, Any]]) -> None:
        outermost[:] = pairs  # an object ends after all those in it

    try:
        json.loads(text, object_pairs_hook=keep)
    except RecursionError:
        raise too_deep() from None
    seen: set[str] = set()
    for name, _ in outermost:
        if name in wanted and name in seen:
            return name
        seen.add(name)
    return None


def dumps(value: Any, *, finite: bool = True) -> bytes:
    """`value` as JSON. `finite` False: it may hold NaN, Infinity, or strings with bytes that are not UTF-8."""
    if finite:
        return msgspec.json.encode(value)
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode(errors="surrogateescape")


def find(value: Any, name: str) -> Any:
    """Member `name` of an object, MISSING if there is none, also when `value` is no object."""
    return value.get(name, MISSING) if type(value) is dict else MISSING


def member(value: Any, name: str, prefix: str = "") -> Any:
    """Member `name`. Raises InferError when there is none."""
    found = find(value, name)
    if found is MISSING:
        text = f"{prefix}attempt to access non-existing object member '{name}'"
        if type(value) is not dict:
            raise Placed(Code.INTERNAL, text, "", f"expected an object, got {shown(value)}")
        raise Placed(Code.INTERNAL, text, name, "it is missing")
    return found


def as_string(value: Any, prefix: str = "", place: str | None = None) -> str:
    """Raises InferError for anything but a string."""
    if type(value) is not str:
        raise not_a("string", prefix, value, place)
    return value


def as_bool(value: Any, prefix: str = "", place: str | None = None) -> bool:
    """True and false; raises InferError for anything else."""
    if type(value) is not bool:
        raise not_a("boolean", prefix, value, place)
    return value


def as_uint(value: Any, prefix: str = "", place: str | None = None) -> int:
    """An integer below 2**64, exactly; raises InferError for true, 1.0, "1" and -1."""
    if type(value) is not int or not 0 <= value <= UINT64_MAX:
        raise not_a("unsigned-integer", prefix, value, place)
    return value


def as_array(value: Any, prefix: str = "", place: str | None = None) -> list[Any]:
    """Raises InferError for anything but an array."""
    if type(value) is not list:
        raise not_a("array", prefix, value, place)
    return value


def as_object(value: Any, prefix: str = "", place: str | None = None) -> dict[str, Any]:
    """Raises InferError for anything but an object."""
    if type(value) is not dict:
        raise not_a("object", prefix, value, place)
    return value


def not_a(kind: str, prefix: str, value: Any, place: str | None = None) -> Placed:
    """`value` is no `kind`, in Triton's words."""
    if place is None:
        quoted = _QUOTED.search(prefix)
        place = quoted[1] if quoted else ""
    text = f"{prefix}attempt to access JSON non-{kind} as {kind}"
    return Placed(Code.INTERNAL, text, place, f"expected {_EXPECTED[kind]}, got {shown(value)}")


def shown(value: Any) -> str:
    """A value of a document, as an error shows it."""
    if type(value) is dict:
        return "an object"
    if type(value) is list:
        return f"an array of {len(value)}"
    if type(value) is str:
        return f"the string {shortened(value)!r}"
    if type(value) in (int, float):
        return f"the number {shortened(str(value))}"
    return "null" if value is None else str(value).lower()


def _syntax(text: str, offset: int) -> InferError:
    return internal(f"failed to parse the request JSON buffer: {text} at {offset}")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(digits)
    return value


def _too_big(text: str) -> Placed:
    """`text` has a number that no double holds: which one. Read once more, for the parser does not say; what is behind
    it may be no JSON.
    """

    def number(digits: str) -> object:
        value = float(digits)
        return _TOO_BIG if math.isinf(value) else value

    found = document = None
    if len(text) <= _SEARCHED:
        found = next((each for each in _NUMBER.finditer(text) if each[1] and number(each[1]) is _TOO_BIG), None)
        with contextlib.suppress(ValueError, RecursionError):
            document = json.loads(text, parse_float=number, parse_int=number)
    at, came = (0, "a greater one") if found is None else (found.start(), shortened(found[1]))
    message = _syntax("Number too big to be stored in double.", at).message
    return Placed(Code.INTERNAL, message, _place_of(document), f"expected a number below 1.8e308, got {came}")


def _place_of(document: Any) -> str:
    """Where _TOO_BIG is in a document; "" if it is nowhere: of two equal keys only the last one's value is kept."""
    levels = [iter((("", document),))]
    while levels:
        for place, value in levels[-1]:
            if value is _TOO_BIG:
                return place.removeprefix(".")
            if type(value) in (list, dict):
                levels.append(_members(place, value))
                break
        else:
            levels.pop()
    return ""


def _members(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    if type(value) is list:
        return ((f"{place}[{index}]", each) for index, each in enumerate(value))
    return ((f"{place}.{shortened(name)}", each) for name, each in value.items())


def _text_of(error: json.JSONDecodeError) -> str:
    for start, text in _TEXTS:
        if error.msg.startswith(start):
            return text
    if error.msg.startswith("Expecting ','"):
        inside = _innermost(error.doc[: error.pos]) if error.pos < _COUNT_FROM else "["
        if inside == "{":
            return "Missing a comma or } after an object member."
        return "Missing a comma or ] after an array element."
    return "The document is empty." if not error.doc.strip() else "Invalid value."


def _innermost(text: str) -> str:
    """The bracket that is open at the end of `text`."""
    opened = []
    for bracket in re.findall(r"[\[\]{}]", _STRING.sub("", text)):
        if bracket in "[{":
            opened.append(bracket)
        elif opened:
            opened.pop()
    return opened[-1] if opened else ""


def _check_containers(body: Buffer) -> None:
    # In pieces, so that the comparison's result stays small. Brackets inside strings count too: a bound, not a parser.
    text = np.frombuffer(body, np.uint8)
    count = 0
    for start in range(0, len(text), _COUNT_FROM):
        piece = text[start : start + _COUNT_FROM] | 0x20  # "[" and "{" differ in this bit alone
        count += int(np.count_nonzero(piece == ord("{")))
    if count > MAX_CONTAINERS:
        raise invalid(f"request JSON has {count} arrays and objects, more than the limit of {MAX_CONTAINERS}")
