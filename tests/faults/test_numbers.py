"""Rows M-01 and M-03: odd numbers, and values of every other type, in every field of every session message."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgpack
import msgspec

from shm import messages
from tests.fakes.broker import pool, tensor
from tests.faults import raw
from tests.faults.lab import Lab, scaled

# --- M-03: odd numbers in every numeric field ----------------------------------------------------------------------

ODD = (-1, -(2**63), 2**63, 2**64 - 1, True, float("nan"), float("inf"), 1.0, 1.5, "64", b"64", None, [], {}, [1], [[]])
VALID: dict[str, dict[str, Any]] = {
    "Hello": {"protocol": 1},
    "GetModel": {"model": "add1"},
    "RegisterPool": {"name": "pool", "byte_size": 4096},
    "RegisterSystem": {"name": "system", "key": "/none", "byte_size": 4096},
    "ShareRegion": {"name": "r"},
    "OpenRegion": {"name": "opened", "token": "0" * 32},
    "Unregister": {"name": "nobody's"},
    "Prepare": {
        "model": "add1",
        "inputs": [tensor("x", "r", (2, 4))],
        "outputs": [tensor("y", "r", (2, 4), offset=1024)],
    },
    "Release": {"index": 0, "generation": 1},
    "OpenChannel": {"worker": "cpu/default", "slots": 2},
    "CloseChannel": {"channel": 1},
    "LoadModel": {"model": "add1"},
    "UnloadModel": {"model": "add1"},
}


def _number_fields(struct_type: type, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths to every field of whole numbers, those of tensors and the dimensions of shapes included."""
    for name, hint in get_type_hints(struct_type, include_extras=True).items():
        inner = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        if inner is int:
            yield (*path, name)
        elif get_origin(inner) is tuple:
            element = get_args(inner)[0]
            element = get_args(element)[0] if get_origin(element) is Annotated else element
            if element is int:
                yield (*path, name, "0")
            elif isinstance(element, type) and issubclass(element, msgspec.Struct):
                yield from _number_fields(element, (*path, name, "0"))


def _all_number_fields() -> list[tuple[str, ...]]:
    found = []
    for request in get_args(messages.Request):
        found += [(request.__name__, *path) for path in _number_fields(request)]
    return found


def _with(message: Any, path: tuple[str, ...], value: Any) -> Any:
    """A copy of `message` with `value` at `path`."""
    key: Any = int(path[0]) if path[0].isdigit() else path[0]
    inner = value if len(path) == 1 else _with(message[key], path[1:], value)
    if isinstance(message, dict):
        return {**message, key: inner}
    return [*message[:key], inner, *message[key + 1 :]]


def _say_odd_numbers(fields: list[list[str]]) -> list[Any]:
    client = raw.session()
    region = raw.Region(client)
    fd = pool(4096)
    unexpected = []
    for kind, *path in fields:
        base = {"type": kind, "id": 9, **VALID.get(kind, {})}
        for value in ODD:
            data = msgpack.packb(_with(base, tuple(path), value))
            client.send_raw(data, [fd] if kind == "RegisterPool" else [])
            reply = client.receive()
            code, text = raw.outcome(reply)
            allowed = code == "INVALID_ARG" and text and "Traceback" not in text
            echoed = reply is not None and reply["id"] == 9
            if not allowed or (path != ["id"] and not echoed):
                unexpected.append([kind, path, repr(value), code, text])
            assert client.ask("ListRegions")["regions"][0]["name"] == region.name
    return unexpected


def test_m03_odd_numbers_in_every_number_of_every_message(lab: Lab) -> None:
    """[M-03] negative, too large, bool, float, text, nothing: INVALID_ARG with the request's id, each time."""
    fields = _all_number_fields()
    assert ("Prepare", "inputs", "0", "shape", "0") in fields
    assert len(fields) > 30
    assert lab.offend(_say_odd_numbers, fields=fields) == []
    lab.settled()


def _say_wrong_types(turns: int) -> list[Any]:
    """Every field of every message, with values of every type."""
    client = raw.session()
    chance = random.Random(3)
    unexpected = []
    values = [None, True, 0, -1, 2**64 - 1, 1.5, "", "\x00", "x" * 5000, b"\xff\xfe", [], [[]], {}, {"a": 1}]
    for _ in range(turns):
        for request in get_args(messages.Request):
            kind = request.__name__
            base = {"type": kind, "id": 5, **VALID.get(kind, {})}
            for field in base:
                if field == "type" or kind in ("LoadModel", "UnloadModel", "Hello"):
                    continue
                client.send_raw(msgpack.packb({**base, field: chance.choice(values)}))
                reply = client.receive()
                code, text = raw.outcome(reply)
                if code == "hung up" or "Traceback" in text or code in ("INTERNAL", "UNKNOWN"):
                    unexpected.append([kind, field, code, text])
    return unexpected


def test_m01_wrong_types_in_every_field(lab: Lab) -> None:
    """[M-01] values of every type in every field: an answer each, none of them INTERNAL."""
    assert [row for row in lab.offend(_say_wrong_types, turns=scaled(5, 100)) if row[0] != "RegisterSystem"] == []
    lab.settled()
