"""Which URLs name a server behind a wire, and what is said of those that do not."""

from __future__ import annotations

from pathlib import Path

import pytest

import clientlib
from clientlib.address import MAX_HEADERS, wire_of, with_headers
from clientlib.remote.transport import Load, plain
from shm.errors import InferError


@pytest.mark.parametrize(
    ("url", "scheme", "target", "path"),
    [
        ("grpc://host:8001", "grpc", "host:8001", ""),
        ("grpcs://[::1]:443", "grpcs", "[::1]:443", ""),
        ("http://127.0.0.1:8000/", "http", "127.0.0.1:8000", ""),
        ("https://host:443/v1/models/", "https", "host:443", "/v1/models"),
    ],
)
def test_servers(url, scheme, target, path):
    address = wire_of(url)
    assert (address.scheme, address.target, address.path) == (scheme, target, path)
    assert address.secure == scheme.endswith("s")
    assert address.url == url.rstrip("/")


def test_a_run_directory_behind_zeromq():
    address = wire_of("zmq+ipc:///run//there/")
    assert (address.scheme, address.path) == ("zmq+ipc", "/run/there")


@pytest.mark.parametrize(
    "url", [None, "/run", "ipc:///run", Path("/run"), "ftp://x:1", "", 5, "host:8001", "httpx://a:1"]
)
def test_what_is_none_of_them(url):
    assert wire_of(url) is None


@pytest.mark.parametrize(
    "url",
    [
        "grpc://host",
        "grpc://:8001",
        "grpc://host:port",
        "grpc://host:99999",
        "grpc://host:8001/path",
        "http://user:secret@host:8000",
        "http://host:8000?x=1",
        "http://host:8000#x",
        "http://ho st:8000",
        "http://host:8000/\r\nx",
        "zmq+ipc://relative",
    ],
)
def test_what_is_not_complete(url):
    with pytest.raises(InferError, match="cannot connect to") as caught:
        wire_of(url)
    assert caught.value.code == "INVALID_ARG"
    assert url.partition("://")[0] in caught.value.message


def test_zeromq_stays_on_the_host():
    with pytest.raises(InferError, match="run directory") as caught:
        wire_of("zmq+tcp://host:5555")
    assert caught.value.code == "UNSUPPORTED"


def test_headers_are_sent_in_lower_case_and_shown_to_nobody():
    address = with_headers(wire_of("http://host:1"), {"X-Key": "a b=c", "authorization": "t"})
    assert address.headers == (("x-key", "a b=c"), ("authorization", "t"))
    assert "a b=c" not in repr(address)
    assert with_headers(wire_of("grpc://host:1"), None) == with_headers(wire_of("grpc://host:1"), {})


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ({"a b": "x"}, "headers: 'a b' cannot be sent: a name has 1 to 256 letters, digits"),
        ({"": "x"}, "headers: '' cannot be sent"),
        ({5: "x"}, "headers: 5 (int) cannot be sent"),
        ({"key-bin": "x"}, "headers: 'key-bin' cannot be sent"),
        ({"grpc-timeout": "1S"}, "headers: 'grpc-timeout' cannot be sent"),
        ({"Content-Length": "0"}, "headers: 'Content-Length' cannot be sent"),
        ({"key\n": "x"}, "headers: 'key\\n' cannot be sent"),
        ({"key": "secret\r\nHost: x"}, "headers: the value of 'key' must be a string of 1 to 4096 printable ASCII"),
        ({"key": " secret"}, "headers: the value of 'key' must be"),
        ({"key": ""}, "headers: the value of 'key' must be"),
        ({"key": b"secret"}, "headers: the value of 'key' must be"),
        (["key"], "headers must map at most 16 names to values"),
        ({f"key{number}": "x" for number in range(MAX_HEADERS + 1)}, "headers must map at most 16 names to values"),
    ],
)
def test_headers_that_cannot_be_sent(headers, says):
    with pytest.raises(InferError) as refused:
        clientlib.connect("grpc://127.0.0.1:1", headers=headers)
    assert refused.value.code == "INVALID_ARG"
    assert refused.value.message.startswith(says)
    assert "secret" not in refused.value.message


def test_headers_for_a_run_directory(tmp_path):
    with pytest.raises(InferError, match="leave them out, nothing is restricted"):
        clientlib.connect(tmp_path, headers={"key": "x"})


def test_a_model_that_was_unloaded_is_told_with_the_remedy():
    text = "Request for unknown model: 'm' has no available versions"
    remedy = "client.load('m') loads it, if it is in the repository"
    assert plain(f"[request id: <id_unknown>] {text}: unloaded") == f"{text}: unloaded; {remedy}"
    assert plain(f"{text}: no such file") == f"{text}: no such file"
    assert plain(text) == text, "of a server that does not say why, nobody knows what helps"


def test_what_is_restricted_is_told_with_the_remedy():
    text = "This API is restricted, expecting header 'x-key'"
    remedy = "clientlib.connect(url, headers={'x-key': value})"
    assert plain(text) == f"{text} with its value for 'inference': {remedy}"
    assert plain(f"[request id: 5] {text}", Load("m")) == f"{text} with its value for 'model-repository': {remedy}"
    assert plain(f"{text} or not") == f"{text} or not"
