"""Which URLs name a server behind a wire, and what is said of those that do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from clientlib.address import wire_of
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
