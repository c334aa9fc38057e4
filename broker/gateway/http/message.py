"""A request with its whole body, and the reply to it: what endpoints get and give. No sockets here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, final

from broker.gateway.http.errors import REASONS, body_of, status_of
from broker.gateway.http.json import dumps, parse, unhurried
from broker.gateway.kserve import Buffer, Caller, Trace
from broker.gateway.placed import DETAIL, Placed
from shm.errors import InferError

JSON: Final = "application/json"
OCTETS: Final = "application/octet-stream"
EVENTS: Final = "text/event-stream; charset=utf-8"
CHUNKED: Final = -1  # how long a body is whose end is marked
UNTIL_CLOSED: Final = -2  # the same for HTTP/1.0, which has no marks


@final
@dataclass(slots=True)
class Request:
    """`headers`: looked up in any case. `raw_headers`: as they came. `body`: as it came, not decoded;
    a bytearray where it was put together from pieces. `reserve`: counts bytes made of it, until it is answered, with
    those of all bodies; raises InferError when they are too many. `received`: when it began to come and when it was
    here, in nanoseconds of the monotonic clock, while anything is traced.
    """

    headers: Mapping[str, str]
    raw_headers: tuple[tuple[bytes, bytes], ...]
    body: Buffer
    caller: Caller
    reserve: Callable[[int], None]
    received: tuple[int, int] = (0, 0)

    async def json(self) -> Any:
        """What the body says. Raises InferError."""
        return await unhurried(len(self.body), parse, self.body)


class Rest(Protocol):
    """What comes after the beginning of a body that is sent while it is made."""

    def __aiter__(self) -> Rest:
        """Itself."""

    async def __anext__(self) -> Buffer:
        """A piece, not empty. Cancelled when the peer is gone."""

    async def aclose(self) -> None:
        """No more of it is wanted. Called in any case, also after the end."""


@final
@dataclass(slots=True)
class Reply:
    """`parts`: the body, in pieces that need not be joined. `headers`: beyond Content-Type and Content-Length.

    `rest`: the body goes on; `parts` are sent at once, and each piece as it comes.
    """

    status: int = 200
    parts: tuple[Buffer, ...] = ()
    content_type: str = JSON
    headers: tuple[tuple[str, str], ...] = ()
    rest: Rest | None = None
    trace: Trace | None = None  # of the request, to be written when the reply is sent


def json_reply(value: Any) -> Reply:
    """200 with `value`."""
    return Reply(parts=(dumps(value),))


def error_reply(error: InferError) -> Reply:
    """What `error` looks like in this protocol."""
    reply = text_reply(status_of(error), error.message)
    if isinstance(error, Placed):
        reply.headers = ((DETAIL, error.detail),)
    return reply


def text_reply(status: int, message: str) -> Reply:
    """An error without a code, or with another status than its code has."""
    return Reply(status, (body_of(message),))


def head(reply: Reply, length: int, connection: str) -> bytes:
    """Status line and headers. `connection`: what to say in that header, "" for nothing. `length`: of the body, or
    UNTIL_CLOSED or CHUNKED.
    """
    lines = [f"HTTP/1.1 {reply.status} {REASONS.get(reply.status, '')}\r\nContent-Type: {reply.content_type}\r\n"]
    lines += [f"{name}: {value}\r\n" for name, value in reply.headers]
    if connection:
        lines.append(f"Connection: {connection}\r\n")
    if length == CHUNKED:
        lines.append("Transfer-Encoding: chunked\r\n\r\n")
    else:
        lines.append("\r\n" if length == UNTIL_CLOSED else f"Content-Length: {length}\r\n\r\n")
    return "".join(lines).encode("latin-1")
