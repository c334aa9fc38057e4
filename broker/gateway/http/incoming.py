"""A request as it arrives: its head, and how its body is read.

Made by `broker.gateway.http.connection`, for whoever owns the connections.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from typing import Protocol, final

from aiohttp.http import RawRequestMessage
from aiohttp.streams import StreamReader

from broker.gateway.http.codec import HEADER_LENGTH
from broker.gateway.http.errors import invalid, too_large, too_many_chunks
from broker.gateway.http.limits import MAX_CHUNKS
from broker.gateway.kserve import Buffer
from shm.errors import InferError


@final
class BodyError(Exception):
    """A body that does not follow the protocol, or its pace."""


class Peer(Protocol):
    """Whence a request comes: `broker.gateway.http.connection.Connection`."""

    @property
    def transport(self) -> asyncio.Transport | None:
        """None: it is gone."""

    @property
    def limit(self) -> int:
        """Bytes that a body may have."""

    def waiting_for(self, payload: StreamReader, *, expected: bool) -> AbstractContextManager[None]:
        """Meanwhile a body is read."""

    def listen_no_more(self) -> None:
        """Take no further request."""

    def reserve(self, size: int) -> None:
        """Count bytes for the request that is being answered. Raises InferError."""


@final
class Incoming:
    """A request whose head is complete. `path`: without the query."""

    __slots__ = ("connection", "message", "path", "payload")

    def __init__(self, message: RawRequestMessage, payload: StreamReader, connection: Peer) -> None:
        self.message = message
        self.payload = payload
        self.connection = connection
        path = message.path
        if not path.startswith("/"):  # as one asks a proxy: http://host/v2
            path = message.url.raw_path_qs
        self.path = path.partition("?")[0]

    @property
    def transport(self) -> asyncio.Transport | None:
        """None: the peer is gone."""
        return self.connection.transport

    async def body(self, limit: int) -> Buffer:
        """All of it. Raises InferError when it has more than `limit` bytes or is malformed."""
        headers, payload = self.message.headers, self.payload
        length = headers.get("Content-Length")
        if length is not None and int(length) > limit:
            raise too_large(int(length), limit, headers.get(HEADER_LENGTH))
        if payload.is_eof() and not self.message.chunked:
            return payload.read_nowait()
        return await self._read()

    async def _read(self) -> Buffer:
        """A body that is not here yet, or comes in chunks."""
        message, connection = self.message, self.connection
        expected = message.headers.get("Expect", "").lower() == "100-continue"
        with connection.waiting_for(self.payload, expected=expected):
            try:
                if message.chunked:
                    return await self._read_chunks(message.headers.get(HEADER_LENGTH))
                return await self._read_length(int(message.headers["Content-Length"]))
            except BodyError as error:
                raise invalid(f"malformed request body: {error}") from None
            except InferError:
                connection.listen_no_more()
                raise

    async def _read_length(self, length: int) -> Buffer:
        self.connection.reserve(length)
        body = bytearray(length)
        position = 0
        while piece := await self.payload.readany():
            body[position : position + len(piece)] = piece
            position += len(piece)
        return body

    async def _read_chunks(self, header: str | None) -> Buffer:
        body, limit, chunks = bytearray(), self.connection.limit, 0
        while True:
            piece, ends_chunk = await self.payload.readchunk()
            if not piece and not ends_chunk:
                return body
            self.connection.reserve(len(piece))
            body += piece
            chunks += ends_chunk
            if len(body) > limit:
                raise too_large(len(body), limit, header)
            if chunks > MAX_CHUNKS:
                raise too_many_chunks()
