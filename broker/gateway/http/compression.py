"""Content codings by Triton's rules, with bounded memory. Used by `broker.gateway.http.inference`."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Sequence
from typing import Final

from broker.gateway.http.errors import RAISE_LIMIT, internal, invalid
from broker.gateway.kserve import Buffer
from shm.errors import Code, InferError

CODINGS: Final = ("gzip", "deflate")
GZIP_BITS: Final = {"gzip": 31, "deflate": 15}  # "deflate" is zlib's format (RFC 9110 8.4.1.2)
_EITHER: Final = 47
_PIECE: Final = 256 << 10
_IN_LINE: Final = 32 << 10  # bytes that take less time than asking a thread
_WEIGHT: Final = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)")


def preferred(accept_encoding: str | None) -> str:
    """How to code a response: the accepted one of the highest weight, the first of equals; "identity" for none."""
    best, best_weight = "identity", 0.0
    for part in (accept_encoding or "").split(","):
        name, _, weight_text = part.lstrip(" ").partition(";q=")
        weight = 1.0
        if weight_text:
            found = _WEIGHT.match(weight_text)
            if found is None:
                continue
            weight = float(found[0])
        if name in ("identity", *CODINGS) and weight > best_weight:
            best, best_weight = name, weight
    return best


def coding_of(content_encoding: str | None) -> str:
    """How a request's body is coded. Raises InferError for codings other than Triton's."""
    if content_encoding in CODINGS:
        return content_encoding
    if content_encoding in (None, "", "identity"):
        return "identity"
    raise InferError(Code.UNSUPPORTED, "Unsupported compression type")


async def decompress(body: Buffer, limit: int) -> Buffer:
    """The body that was compressed, at most `limit` bytes of it; both of Triton's codings are recognised by themselves.

    Raises InferError. Larger ones are done by a thread: zlib lets the event loop go on.
    """
    if len(body) <= _IN_LINE:
        return _inflate(body, limit)
    return await asyncio.get_running_loop().run_in_executor(None, _inflate, body, limit)


async def compress(parts: Sequence[Buffer], coding: str) -> bytes:
    """`parts`, one after the other, compressed."""
    if sum(map(len, parts)) <= _IN_LINE:
        return _deflate(parts, coding)
    return await asyncio.get_running_loop().run_in_executor(None, _deflate, parts, coding)


def _inflate(body: Buffer, limit: int) -> Buffer:
    if not body:
        raise invalid("nothing to be decompressed")
    stream = zlib.decompressobj(_EITHER)
    result = bytearray()
    rest: Buffer = body
    try:
        while not stream.eof:
            piece = stream.decompress(rest, _PIECE)
            result += piece
            if len(result) > limit:
                raise invalid(
                    f"Decompressed data size exceeds the maximum allowed value of {limit} bytes. {RAISE_LIMIT}"
                )
            rest = stream.unconsumed_tail
            if not piece and not rest:
                break
    except zlib.error as error:
        raise internal(f"encountered inconsistent stream state during decompression: {error}") from None
    return result


def _deflate(parts: Sequence[Buffer], coding: str) -> bytes:
    stream = zlib.compressobj(wbits=GZIP_BITS[coding])
    return b"".join([*(stream.compress(part) for part in parts), stream.flush()])
