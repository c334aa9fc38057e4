"""Which code an HTTP status means, where the text tells more than the status does."""

from __future__ import annotations

import json

import pytest

from clientlib.remote.http_codec import error_of


@pytest.mark.parametrize(
    ("status", "text", "code"),
    [
        (400, "shared memory region 'a\nb' already in manager", "ALREADY_EXISTS"),
        (400, "the request was cancelled", "CANCELLED"),
        (400, "unexpected shape for input 'x': the request was cancelled", "INVALID_ARG"),
        (400, "unable to parse JSON", "INVALID_ARG"),
        (404, "the request was cancelled", "NOT_FOUND"),
        (418, "teapot", "INVALID_ARG"),
        (600, "what", "UNKNOWN"),
    ],
)
def test_the_text_decides_where_a_status_stands_for_several_codes(status, text, code):
    error = error_of(status, json.dumps({"error": text}).encode())
    assert error.code == code
    assert error.message
