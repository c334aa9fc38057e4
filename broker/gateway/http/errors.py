"""Errors as HTTP sends them: the status of each code, and the texts that Triton's JSON reader and router have.

The one table of this protocol; used by every module of `broker.gateway.http`.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

import msgspec

from broker.gateway.access import Restricted
from broker.gateway.http.limits import MAX_CHUNKS, MAX_DEPTH
from shm.errors import Code, InferError

# Triton's own choice, not REST's: 409, 499 and 504 never occur.
STATUS: Final[dict[str, int]] = {
    Code.UNKNOWN.name: 400,
    Code.INTERNAL.name: 500,
    Code.NOT_FOUND.name: 404,
    Code.INVALID_ARG.name: 400,
    Code.UNAVAILABLE.name: 503,
    Code.UNSUPPORTED.name: 501,
    Code.ALREADY_EXISTS.name: 400,
    Code.CANCELLED.name: 400,
}
REASONS: Final[dict[int, str]] = {status.value: status.phrase for status in HTTPStatus}

NOT_FOUND: Final = "Not Found"
METHOD_NOT_ALLOWED: Final = "Method Not Allowed"
EXITING: Final = "Server exiting"
SHM_DISABLED: Final = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
RAISE_LIMIT: Final = "Use --http-max-input-size to increase the limit."


def status_of(error: InferError) -> int:
    """The HTTP status of `error`."""
    return 403 if isinstance(error, Restricted) else STATUS.get(error.code, 500)


def body_of(message: str) -> bytes:
    """The body of every error."""
    try:
        return msgspec.json.encode({"error": message})
    except UnicodeEncodeError:  # it quotes bytes of a request that are no UTF-8
        return msgspec.json.encode({"error": message.encode(errors="replace").decode()})


def invalid(message: str) -> InferError:
    """400."""
    return InferError(Code.INVALID_ARG, message)


def internal(message: str) -> InferError:
    """500: what Triton says of JSON that it cannot read."""
    return InferError(Code.INTERNAL, message)


def too_deep() -> InferError:
    """400: nested arrays beyond MAX_DEPTH."""
    return invalid(f"JSON nesting depth exceeds maximum allowed limit ({MAX_DEPTH})")


def too_large(size: int, limit: int, header_length: str | None) -> InferError:
    """400: a body of `size` bytes or more. `header_length`: the request's Inference-Header-Content-Length."""
    if header_length is not None and header_length.strip() == "0":
        what = f"Raw input has a byte_size ({size} bytes) that exceeds the maximum allowed value of {limit} bytes"
    else:
        what = f"request JSON size of {size} bytes exceeds the maximum allowed input size of {limit} bytes"
    return invalid(f"{what}. {RAISE_LIMIT}")


def too_many_chunks() -> InferError:
    """400: see MAX_CHUNKS."""
    return invalid(
        f"Chunked request body exceeds maximum of {MAX_CHUNKS} non-empty chunks. Send fewer or larger HTTP chunks."
    )
