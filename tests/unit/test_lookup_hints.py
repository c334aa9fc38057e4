"""What a native client reads behind Triton's text when a model is not there."""

from __future__ import annotations

import pytest

from broker.lookup_hints import hinted
from shm.errors import InferError
from shm.messages import ModelMetadata

KNOWN = [
    ModelMetadata(name="b", version="10"),
    ModelMetadata(name="b", version="2"),
    ModelMetadata(name="a", version=""),
]
UNKNOWN = "Request for unknown model: "


@pytest.mark.parametrize(
    ("text", "explicit", "hint"),
    [
        ("'x' is not found", True, "; client.load('x') loads it, if it is in the repository"),
        ("'x' is not found", False, "; models: a, b"),
        ("'b' version 3 is not found", True, "; its versions: 2, 10"),
        ("'b' version 3 is not found", False, "; its versions: 2, 10"),
        (
            "'a' has no available versions: unloaded",
            True,
            "; client.load('a') loads it, if it is in the repository",
        ),
        ("'a' has no available versions: no such file", False, ""),
        ("'b' version 2 is not at ready state: unloaded", True, ""),
        ("'a\nb' is not found", True, ""),
    ],
)
def test_what_there_is_or_how_it_comes_there(text: str, explicit: bool, hint: str) -> None:
    error = hinted(InferError("NOT_FOUND", UNKNOWN + text), lambda: KNOWN, explicit=explicit)
    assert (error.code, error.message) == ("NOT_FOUND", UNKNOWN + text + hint)


def test_other_errors_stay_what_they_are() -> None:
    error = InferError("INTERNAL", "no room")
    assert hinted(error, list, explicit=True) is error


def test_long_lists_end() -> None:
    known = [ModelMetadata(name=f"m{number:03}", version="1") for number in range(100)]
    text = hinted(InferError("INVALID_ARG", f"{UNKNOWN}'x' is not found"), lambda: known, explicit=False).message
    assert text.endswith("m014, m015 and 84 more")
