"""Where each value of a final configuration comes from, and the configuration as text with that beside it.

Called by `load` when `LoadRequest.explain` asks for it: one `mark` after each step that may add or change values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, final

from tritonclient.grpc import model_config_pb2

FILE, MODEL, DEFAULT, OVERRIDE = "file", "model", "default", "override"
_CONTROL = "inference.ModelSequenceBatching.Control"
_COLUMN = 48  # where the origins stand, unless a line is longer


@final
class Origins:
    """Field path ("input[x].dims") → origin. A value that a later step left alone keeps its own."""

    __slots__ = ("_values", "found")

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self.found: dict[str, str] = {}

    def mark(self, config: model_config_pb2.ModelConfig, origin: str) -> None:
        """Everything that is new or differs since the last call comes from `origin`."""
        self._follow(config)
        values = {path: text for path, text in _leaves(config, "")}
        changed = {path: origin for path, text in values.items() if self._values.get(path) != text}
        self.found = {path: found for path, found in (self.found | changed).items() if path in values}
        self._values = values

    def _follow(self, config: model_config_pb2.ModelConfig) -> None:
        """Groups that had no name, and so were known by their place, may have one by now."""
        for index, group in enumerate(config.instance_group):
            if group.name and f"instance_group[{group.name}].name" not in self._values:
                before, now = f"instance_group[{index}].", f"instance_group[{group.name}]."
                self._values = {_moved(path, before, now): text for path, text in self._values.items()}
                self.found = {_moved(path, before, now): origin for path, origin in self.found.items()}

    def state(self, path: str, origin: str) -> None:
        """For a value that equals the schema's default, which no text shows."""
        self._values.setdefault(path, "")
        self.found[path] = origin

    def annotated(self, config: model_config_pb2.ModelConfig) -> str:
        """config.pbtxt text that parses to `config`, the origin as a comment at the end of every line with a value."""
        lines = list(self._lines(config, "", ""))
        if not config.max_batch_size:
            lines.insert(1, ("max_batch_size: 0", self.found.get("max_batch_size", DEFAULT)))
        return "\n".join(f"{text:<{_COLUMN}}# {origin}" if origin else text for text, origin in lines)

    def _lines(self, message: Any, path: str, indent: str) -> Iterator[tuple[str, str]]:
        for field, where, value in _fields(message, path):
            if not hasattr(value, "ListFields"):
                yield f"{indent}{field.name}: {_text(field, value)}", self.found.get(where, DEFAULT)
            elif not value.ListFields():
                yield f"{indent}{field.name} {{ }}", self.found.get(where, DEFAULT)
            else:
                yield f"{indent}{field.name} {{", ""
                yield from self._lines(value, where, indent + "  ")
                yield f"{indent}}}", ""


def _moved(path: str, before: str, now: str) -> str:
    return now + path[len(before) :] if path.startswith(before) else path


def _leaves(message: Any, path: str) -> Iterator[tuple[str, str]]:
    for field, where, value in _fields(message, path):
        if hasattr(value, "ListFields") and value.ListFields():
            yield from _leaves(value, where)
        else:
            yield where, "{ }" if hasattr(value, "ListFields") else _text(field, value)


def _fields(message: Any, path: str) -> Iterator[tuple[Any, str, Any]]:
    """Every field that is set: descriptor, path, and one message, scalar, or list of scalars."""
    if message.DESCRIPTOR.full_name == _CONTROL and not message.kind:  # the first kind, which says what the rest is of
        yield message.DESCRIPTOR.fields_by_name["kind"], f"{path}.kind", message.kind
    for field, value in message.ListFields():
        where = f"{path}.{field.name}" if path else field.name
        if field.message_type is None:
            yield field, where, list(value) if field.is_repeated else value
        elif field.message_type.GetOptions().map_entry:
            # An entry prints like a message with the fields key and value; sorted, since a map has no order.
            for key in sorted(value):
                yield field, f"{where}[{key}]", field.message_type._concrete_class(key=key, value=value[key])
        elif field.is_repeated:
            for index, item in enumerate(value):
                yield field, f"{where}[{getattr(item, 'name', '') or index}]", item
        else:
            yield field, where, value


def _text(field: Any, value: Any) -> str:
    if isinstance(value, list):
        return "[ " + ", ".join(_text(field, item) for item in value) + " ]"
    if field.enum_type is not None:
        named = field.enum_type.values_by_number.get(value)
        return str(named.name) if named is not None else str(value)
    return json.dumps(value)
