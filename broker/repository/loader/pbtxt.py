"""config.pbtxt as text: parsing it, and saying precisely what is wrong with it.

Called by `load`. Knows the schema (Triton's `inference.ModelConfig`), not its meaning: see `validate`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2

from broker.repository.loader.failure import ModelError

MAX_CONFIG = 1 << 20  # bytes; the largest in Triton's own test suites has 40 KB
_MAX_SHOWN = 1000  # characters of a whole configuration in an error
_PLACEHOLDER = re.compile(r"\$\{[^}\n]*\}|\{\{\s*[\w.]+\s*\}\}")  # of shells, and of Jinja and its like
_QUOTED_NUMBER = re.compile(r"Couldn't parse (?:integer|float): [\"'](-?[\d.]+)[\"']")
_PYTHONS_WORDS = (  # protobuf's parser of JSON passes them on
    (re.compile(r"invalid literal for int\(\) with base 10: (.*?)\.?$", re.DOTALL), r"expected a whole number, got \1"),
    (re.compile(r"could not convert string to float: (.*?)\.?$", re.DOTALL), r"expected a number, got \1"),
    (re.compile(r"expected string or bytes-like object.*", re.DOTALL), "expected a string"),
)
_NO_FIELD = re.compile(r'Message type "inference\.([\w.]+)" has no field named "(\w+)"')
_FLOAT = re.compile(r"Couldn't parse integer: (-?\d+)\.0*$")
_NO_STRING = re.compile(r"Expected string but found: '(.*)'")
_CURLY = "\u201c\u201d\u201e\u2018\u2019"  # quotes of word processors
_NO_VALUE = re.compile(r'Enum type "inference\.([\w.]+)" has no value named (\w+)')
_ABSENT = -(2**31)  # no configuration says this: it would be refused as negative

# What people write for a type, where the spelling alone would suggest something else.
_TYPE_ALIASES = {
    "TYPE_FLOAT": "TYPE_FP32",
    "TYPE_FLOAT16": "TYPE_FP16",
    "TYPE_FLOAT32": "TYPE_FP32",
    "TYPE_FLOAT64": "TYPE_FP64",
    "TYPE_DOUBLE": "TYPE_FP64",
    "TYPE_HALF": "TYPE_FP16",
    "TYPE_BFLOAT16": "TYPE_BF16",
    "TYPE_BYTES": "TYPE_STRING",
    "TYPE_INT": "TYPE_INT32",
    "TYPE_LONG": "TYPE_INT64",
}


class Parsed(NamedTuple):
    """`states_max_batch_size`: the text has that line (an explicit 0 is a statement, an absent one is not)."""

    config: model_config_pb2.ModelConfig
    states_max_batch_size: bool
    notes: tuple[str, ...]


def parse(data: bytes, path: str, shown: str = "") -> Parsed:
    """Parse a configuration text. Raises ModelError with path:line:column, the line, and the likely correction.

    `shown`: the text that lines are shown of, if `data` is one that was changed within its lines.
    """
    try:
        text = data.decode("utf-8-sig")  # with the mark that editors put first, as Triton reads it
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ModelError(f"{path}:{line}: is not UTF-8 text (byte {error.start}): save it as UTF-8") from error
    config = model_config_pb2.ModelConfig()
    try:
        text_format.Parse(text, config)
    except text_format.ParseError as error:
        raise ModelError(_explain(error, shown or text, path)) from error
    except RecursionError as error:
        raise ModelError(f"{path}: is nested too deeply") from error
    # proto3 cannot tell an explicit 0 from an absent field; a merge over a sentinel can.
    probe = text_format.Merge(text, model_config_pb2.ModelConfig(max_batch_size=_ABSENT))
    notes: tuple[str, ...] = ()
    if unfilled := placeholders(text):
        notes = (f"{path}: unfilled placeholders {', '.join(unfilled)} are taken literally",)
    return Parsed(config, probe.max_batch_size != _ABSENT, notes)


def parse_override(text: str) -> Parsed:
    """Parse a configuration that a load request brings: Triton's JSON form, as there. Raises ModelError."""
    config = model_config_pb2.ModelConfig()
    if not text.lstrip().startswith("{"):
        raise ModelError(f"Invalid config override: the config is no JSON object{_as_json(text)}")
    try:
        tree = json.loads(text)
        json_format.ParseDict(tree, config, max_recursion_depth=100)
    except (json_format.ParseError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"Invalid config override: {_json_reason(error)}") from error
    return Parsed(config, "max_batch_size" in tree or "maxBatchSize" in tree, ())


def _as_json(text: str) -> str:
    """The fix for who sends config.pbtxt as it is; "" for a text that is no such thing."""
    try:
        tree = json_format.MessageToDict(parse(text.encode(), "").config, preserving_proto_field_name=True)
    except (ModelError, UnicodeError):
        return ""
    shown = json.dumps(tree)
    if not tree:
        return ""
    return ", but config.pbtxt text" + (f"\n    fix: config: {shown}" if len(shown) <= _MAX_SHOWN else "")


def _json_reason(error: Exception) -> str:
    """What protobuf or the JSON parser says, without Python's words and dots that it repeats."""
    if isinstance(error, json.JSONDecodeError):
        return f"the config is no JSON: {error}"
    if isinstance(error, RecursionError):
        return "the config is nested too deeply"
    reason = re.sub(r"\.[.\s]+$", ".", str(error).partition("\n Available Fields")[0])
    for pattern, plain in _PYTHONS_WORDS:
        reason = pattern.sub(plain, reason)
    return (reason[:300] or type(error).__name__) + _json_advice(reason)


def _json_advice(message: str) -> str:
    if match := _NO_FIELD.search(message):
        descriptor = _find(match[1])
        fields = [field.name for field in descriptor.fields] if descriptor else []
        if near := difflib.get_close_matches(match[2], fields, n=1, cutoff=0.5):
            return f"\n    did you mean '{near[0]}'?"
    return ""


def template_advice(unfilled: Sequence[str]) -> str:
    """What to do about placeholders, as a line to add."""
    return f"\n    unfilled placeholders: {', '.join(unfilled[:20])}: fill in this template first"


def placeholders(text: str) -> list[str]:
    """What a template left to fill in, as `${name}` or `{{ name }}`; comments aside."""
    code = "\n".join(line for line in text.split("\n") if not line.lstrip().startswith("#"))
    return list(dict.fromkeys(_PLACEHOLDER.findall(code)))


def _explain(error: text_format.ParseError, text: str, path: str) -> str:
    line, column = error.GetLine(), error.GetColumn()
    # protobuf's own text repeats position and line before the sentence that matters.
    message = re.sub(r"^\d+:\d+ : ('.*': )?", "", str(error), flags=re.DOTALL)
    where = path
    shown = source = ""
    if line is not None and column is not None:
        where = f"{path}:{line}:{column}"
        lines = text.split("\n")
        if 0 < line <= len(lines):
            source = lines[line - 1]
            shown = f"\n    {source[:200]}" + (f"\n    {' ' * (column - 1)}^" if column <= 200 else "")
    return f"{where}: {message[:300]}{shown}{_advice(message, text, source)}"


def _advice(message: str, text: str, source: str) -> str:
    if unfilled := placeholders(text):
        return template_advice(unfilled)
    if match := _NO_FIELD.search(message):
        descriptor = _find(match[1])
        fields = [field.name for field in descriptor.fields] if descriptor else []
        if near := difflib.get_close_matches(match[2], fields, n=1, cutoff=0.5):
            return f"\n    did you mean '{near[0]}'?"
        return f"\n    fields of {match[1]}: {', '.join(fields)}"
    if match := _NO_VALUE.search(message):
        enum = _find_enum(match[1])
        values = [value.name for value in enum.values] if enum else []
        alias = _TYPE_ALIASES.get(match[2]) or _TYPE_ALIASES.get(f"TYPE_{match[2]}")
        whole = [value for value in values if value.endswith(f"_{match[2].upper()}")]  # CPU for KIND_CPU
        near = [alias] if alias else whole or difflib.get_close_matches(match[2], values, 1)
        return f"\n    did you mean '{near[0]}'?" if near else f"\n    values of {match[1]}: {', '.join(values)}"
    if match := _QUOTED_NUMBER.search(message):
        return f"\n    fix: {match[1]}, without quotes"
    if match := _FLOAT.search(message):
        return f"\n    fix: {match[1]}"
    return _about_notation(message, text, source)


def _about_notation(message: str, text: str, source: str) -> str:
    """What the text seems to be, where it is no protobuf text. `source`: the line that is wrong."""
    if text.lstrip().startswith("{"):
        return "\n    this is JSON: config.pbtxt is written without the outer braces and without quotes around names"
    if any(quote in source for quote in _CURLY):
        return '\n    fix: plain quotes, "'
    if source.lstrip().startswith("//"):
        return "\n    fix: comments begin with #"
    if match := _NO_STRING.search(message):
        yaml = "; a list is [ { … }, { … } ], not YAML's -" if re.search(r"^\s*- ", text, re.MULTILINE) else ""
        return f'\n    fix: "{match[1]}", in quotes{yaml}' if re.fullmatch(r"[\w./-]+", match[1]) else ""
    if message.startswith('Expected "{"') and (value := re.search(r'\bvalue\s*:\s*("[^"]*")', source)):
        return f"\n    fix: value {{ string_value: {value[1]} }}"
    if message.startswith('Expected "') and (bracket := _left_open(text)):
        return f"\n    {bracket} is not closed"
    return ""


def _left_open(text: str) -> str:
    """The first bracket that nothing closes, with its line; "" if there is none."""
    opened: list[tuple[str, int]] = []
    for number, line in enumerate(text.split("\n"), 1):
        for char in re.sub(r'"[^"]*"|#.*', "", line):
            if char in "{[":
                opened.append((char, number))
            elif char in "}]" and opened:
                opened.pop()
    return f"the '{opened[-1][0]}' of line {opened[-1][1]}" if opened else ""


def _find(name: str) -> Any:
    """The descriptor of the message `inference.<name>`, nested names included."""
    first, *rest = name.split(".")
    found = model_config_pb2.DESCRIPTOR.message_types_by_name.get(first)
    for part in rest:
        found = found and found.nested_types_by_name.get(part)
    return found


def _find_enum(name: str) -> Any:
    outer, _, last = name.rpartition(".")
    if not outer:
        return model_config_pb2.DESCRIPTOR.enum_types_by_name.get(last)
    message = _find(outer)
    return message and message.enum_types_by_name.get(last)
