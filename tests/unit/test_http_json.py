"""JSON as HTTP bodies have it: what is taken, what is refused, and with which text."""

from __future__ import annotations

import json
import math
import threading
from typing import Any

import msgspec
import pytest

from broker.gateway.http import json as http_json
from broker.gateway.http.json import as_bool, as_string, as_uint, dumps, find, member, parse, repeated
from shm.errors import InferError
from tests.fakes.http_endpoints import Asker


def error_of(body: bytes) -> InferError:
    with pytest.raises(InferError) as caught:
        parse(body)
    return caught.value


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "The document is empty. at 0"),
        (b"  ", "The document is empty."),
        (b"{", "Missing a name for object member. at 1"),
        (b'{"a" 1}', "Missing a colon after a name of object member."),
        (b'{"a":1 "b":2}', "Missing a comma or } after an object member."),
        (b'{"a":"}" "b":2}', "Missing a comma or } after an object member."),
        (b'{"a":[1 2]}', "Missing a comma or ] after an array element."),
        (b'{"a":tru}', "Invalid value. at 5"),
        (b"{} {}", "The document root must not be followed by other values. at 3"),
        (b'"abc', "Missing a closing quotation mark in string."),
        (b'"\\x"', "Invalid escape character in string."),
        (b'"\\u12"', "Incorrect hex digit after \\u escape in string."),
        (b'"\xff"', "Invalid encoding in string. at 1"),
        (b'"\\ud800"', "The surrogate pair in string is invalid."),
        (b"[1e999]", "Number too big to be stored in double."),
        (b"[NaN,1e999]", "Number too big to be stored in double."),
        (b"[" + b"1" * 5000 + b"]", "Number too big to be stored in double."),
        (b"[1e999, }", "Number too big to be stored in double. at 1"),
        (b'[NaN,1e999, "abc', "Number too big to be stored in double. at 5"),
        (b"[1e999," + b"[" * 100_000, "Number too big to be stored in double. at 1"),
        (b"[1," + b" " * 2**20 + b"1e999]", "Number too big to be stored in double. at 0"),
    ],
)
def test_what_is_no_json_says_why_and_where(body: bytes, text: str) -> None:
    error = error_of(body)
    assert error.code == "INTERNAL"
    assert error.message.startswith("failed to parse the request JSON buffer: ")
    assert text in error.message


def test_every_prefix_of_a_request_is_refused() -> None:
    body = b'{"id":"7","inputs":[{"name":"x","shape":[1,4],"data":[1.5,-2e3,null,true,"\\u00e4"]}]}'
    assert parse(body)["id"] == "7"
    for end in range(len(body)):
        assert error_of(body[:end]).code == "INTERNAL"


def test_nan_and_infinity_go_in_and_out() -> None:
    values = parse(b"[NaN,Infinity,-Infinity,1.5]")
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf, 1.5]
    assert dumps(values, finite=False) == b"[NaN,Infinity,-Infinity,1.5]"


def test_pairs_of_surrogates_are_characters() -> None:
    assert parse(b'["\\ud83d\\ude00",NaN]')[0] == "\U0001f600"


def test_strings_that_are_no_utf8_go_out_as_they_are() -> None:
    assert dumps([b"a\xff".decode(errors="surrogateescape")], finite=False) == b'["a\xff"]'


@pytest.mark.parametrize("depth", [101, 500])
def test_nesting_is_left_to_those_who_read_it(depth: int) -> None:
    assert parse(b"[" * depth + b"]" * depth)


def test_nesting_without_end_is_refused() -> None:
    error = error_of(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    assert error.code == "INVALID_ARG"
    assert error.message == "JSON nesting depth exceeds maximum allowed limit (100)"


def test_arrays_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_json, "_COUNT_FROM", 16)
    monkeypatch.setattr(http_json, "MAX_CONTAINERS", 20)
    assert parse(b"[" + b"{}," * 18 + b"[]]")
    assert "more than the limit of 20" in error_of(b"[" + b"[]," * 19 + b"{}]").message


def test_numbers_are_exact() -> None:
    assert as_uint(parse(b"18446744073709551615")) == 2**64 - 1
    assert as_uint(parse(b"0")) == 0


@pytest.mark.parametrize(
    "body", [b"NaN", b"1e3", b"true", b"1.0", b'"64"', b"18446744073709551616", b"-1", b"null", b"[]", b"{}"]
)
def test_what_is_no_unsigned_integer(body: bytes) -> None:
    with pytest.raises(InferError) as caught:
        as_uint(parse(body), "Unable to parse 'shape': ")
    expected = "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer"
    assert (caught.value.code, caught.value.message) == ("INTERNAL", expected)


def test_other_types_and_missing_members() -> None:
    with pytest.raises(InferError, match="attempt to access JSON non-boolean as boolean"):
        as_bool(1)
    with pytest.raises(InferError, match="attempt to access JSON non-string as string"):
        as_string(1)
    with pytest.raises(InferError, match="attempt to access non-existing object member 'x'"):
        member([], "x")
    assert find({"x": None}, "x") is None
    assert find({}, "x") is http_json.MISSING


def test_duplicate_keys_are_found_where_they_count() -> None:
    names = ["a", "b"]
    assert repeated(b'{"a":1,"b":2}', names) is None
    assert repeated(b'{"a":1,"b":2,"a":3}', names) == "a"
    assert repeated(b'{"a":1,"b":2, "b" : 2,"a":3}', names) == "b", "the one that comes first for the second time"
    assert repeated(b'{"a":1,"b":NaN,"b":{"a":1}}', names) == "b"
    assert repeated(b'{"a":"a","b":{"a":1,"a":2}}', names) is None, "as text, and in another object"
    assert repeated(b'{"c":1,"c":2}', names) is None
    assert repeated(bytearray(b'{"\\u0061":1,"a":2,"a":3}'), names) == "a"


def test_the_last_of_duplicate_keys_counts_with_either_parser() -> None:
    assert parse(b'{"a":1,"a":2}') == {"a": 2}
    assert parse(b'{"a":1,"a":2,"b":NaN}')["a"] == 2


@pytest.mark.parametrize("path", ["/v2/models/add1/infer", "/v2/models/add1/generate", "/v2/logging"])
def test_much_json_is_read_and_written_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """A request of the largest size is seconds of work, in which nobody else would be served."""
    threads: dict[int, set[str]] = {}

    def decode(body: Any) -> Any:
        threads.setdefault(len(body), set()).add(threading.current_thread().name)
        return msgspec.json.decode(body)

    monkeypatch.setattr(http_json, "_decode", decode)
    rows: list[float] = [1.5] * (1 << 20)
    for values in (rows[:4], rows):
        document: dict[str, Any] = {"x": values}
        if path.endswith("infer"):
            document = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [len(values) // 4, 4], "data": values}]}
        reply = Asker().ask("POST", path, document)
        assert reply.status == 200
        if path.endswith("infer"):
            (output,) = json.loads(reply.parts[0])["outputs"]
            assert output["data"] == [2.5] * len(values)
    small, large = (threads[size] for size in sorted(threads))
    assert small == {threading.current_thread().name}
    assert large == {"json_0"}
