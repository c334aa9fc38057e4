"""Content codings: which one is chosen, and what a bomb costs."""

from __future__ import annotations

import asyncio
import gzip
import tracemalloc
import zlib

import pytest

from broker.gateway.http.compression import coding_of, compress, decompress, preferred
from shm.errors import InferError


@pytest.mark.parametrize(
    ("accepted", "coding"),
    [
        (None, "identity"),
        ("", "identity"),
        ("gzip", "gzip"),
        ("deflate", "deflate"),
        ("gzip, deflate", "gzip"),
        ("deflate, gzip", "deflate"),
        ("gzip;q=0.5, deflate;q=0.8", "deflate"),
        ("identity, gzip", "identity"),
        ("gzip;q=0", "identity"),
        ("br, zstd", "identity"),
        ("br, gzip;q=0.1", "gzip"),
        ("gzip;q=x, deflate;q=0.1", "deflate"),
        (";q=1, ,gzip", "gzip"),
        ("*", "identity"),
    ],
)
def test_preferred(accepted: str | None, coding: str) -> None:
    assert preferred(accepted) == coding


def test_codings_of_requests() -> None:
    assert [coding_of(each) for each in (None, "", "identity", "gzip", "deflate")] == ["identity"] * 3 + [
        "gzip",
        "deflate",
    ]
    with pytest.raises(InferError) as caught:
        coding_of("br")
    assert (caught.value.code, caught.value.message) == ("UNSUPPORTED", "Unsupported compression type")


@pytest.mark.parametrize("size", [0, 10, 100_000])
def test_there_and_back(size: int) -> None:
    data = b"x" * size + b"end"

    async def check() -> None:
        assert gzip.decompress(await compress((data, b"!"), "gzip")) == data + b"!"
        assert zlib.decompress(await compress((data, b"!"), "deflate")) == data + b"!"
        assert bytes(await decompress(gzip.compress(data), len(data))) == data
        assert bytes(await decompress(zlib.compress(data), len(data))) == data

    asyncio.run(check())


def test_a_bomb_is_stopped_at_the_limit() -> None:
    bomb = gzip.compress(bytes(64 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(InferError) as caught:
            asyncio.run(decompress(bomb, 1 << 20))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.code == "INVALID_ARG"
    assert caught.value.message.startswith("Decompressed data size exceeds the maximum allowed value of 1048576 bytes.")
    assert peak < 4 << 20


@pytest.mark.parametrize(("body", "code"), [(b"", "INVALID_ARG"), (b"not compressed", "INTERNAL")])
def test_what_is_not_compressed(body: bytes, code: str) -> None:
    with pytest.raises(InferError) as caught:
        asyncio.run(decompress(body, 100))
    assert caught.value.code == code
