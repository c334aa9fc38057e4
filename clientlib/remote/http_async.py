"""The HTTP transport for event loops, on aiohttp's client.

aiohttp notices at once when a server closes a connection that lies idle, and sends only reads again that failed on one.
What `clientlib.remote.http_transport` says of inferences holds here too.
"""

from __future__ import annotations

import asyncio
import math
import ssl
import time
from collections.abc import AsyncIterator
from typing import Any, final

import aiohttp
from yarl import URL

from clientlib.address import Address
from clientlib.pending import expired
from clientlib.remote import http_codec
from clientlib.remote.http_codec import HEADER_LENGTH, HttpCall
from clientlib.remote.http_connections import CONNECT_S, reason_of
from clientlib.remote.transport import InferAnswer, InferRequest, Word, late, lost, unreachable

CONNECTIONS = 128  # in use at once; further requests wait for one
MAX_JOINED = 1 << 16  # bytes of a body that goes out in one piece


def connect_async(address: Address) -> AsyncHttpTransport:
    """For the running event loop. Connects when it is first used."""
    return AsyncHttpTransport(address)


@final
class AsyncHttpTransport:
    """A server over HTTP, for one event loop."""

    wire = "HTTP"
    shares_memory = False

    def __init__(self, address: Address) -> None:
        self._address = address
        self._loop = asyncio.get_running_loop()
        self._origin = f"{address.scheme}://{address.target}"
        tls: ssl.SSLContext | bool = ssl.create_default_context() if address.secure else True
        self._connector = aiohttp.TCPConnector(limit=CONNECTIONS, ssl=tls)
        self._session = aiohttp.ClientSession(
            connector=self._connector,
            auto_decompress=False,
            headers={"Accept-Encoding": "identity", **dict(address.headers)},
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def call(self, word: Word, deadline: float) -> Any:
        """As `AsyncTransport.call`."""
        call = http_codec.encode(self._address, word)
        try:
            _, body = await self._exchange(call, deadline)
        except TimeoutError:
            raise late(self._address, word) from None
        return call.read(body)

    async def infer(self, request: InferRequest, deadline: float) -> InferAnswer:
        """As `AsyncTransport.infer`."""
        try:
            header, body = await self._exchange(http_codec.encode_infer(self._address, request), deadline)
        except TimeoutError:
            raise expired() from None
        return http_codec.decode_infer(header, body)

    async def close(self) -> None:
        """As `AsyncTransport.close`."""
        await self._session.close()

    def drop(self) -> None:
        """As `AsyncTransport.drop`."""
        if self._session.closed:
            return
        if self._loop.is_closed():
            self._connector._close()
        else:
            self._loop.call_soon_threadsafe(self._connector._close)

    def leave_to_parent(self) -> None:
        """As `Transport.leave_to_parent`: the loop and its sockets are the parent's."""

    async def _exchange(self, call: HttpCall, deadline: float) -> tuple[str | None, bytes]:
        """The Inference-Header-Content-Length and the body of a 200. Raises TimeoutError, or InferError."""
        remaining = None if deadline == math.inf else deadline - time.monotonic()
        if remaining is not None and remaining <= 0:
            raise TimeoutError
        length = sum(len(part) for part in call.parts)
        # A body in one piece of more than a mebibyte makes aiohttp warn of a blocked loop.
        body = b"".join(call.parts) if length <= MAX_JOINED else _pieces(call)
        headers = {**call.headers, "Content-Length": str(length)} if call.parts else call.headers
        try:
            async with self._session.request(
                call.method,
                URL(self._origin + call.path, encoded=True),
                data=body if call.parts else None,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=remaining, sock_connect=CONNECT_S),
                allow_redirects=False,
            ) as response:
                answer = await response.read()
                if response.status != 200:
                    raise http_codec.error_of(response.status, answer, call.word)
                return response.headers.get(HEADER_LENGTH), answer
        except aiohttp.ClientConnectorError as error:
            raise unreachable(self._address, reason_of(error.os_error)) from None
        except aiohttp.ConnectionTimeoutError:
            if remaining is not None and time.monotonic() >= deadline:
                raise
            raise unreachable(self._address, f"no connection within {CONNECT_S:g} s") from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise lost(self._address, reason_of(error)) from None
        except RuntimeError as error:  # "Session is closed"
            raise lost(self._address, error) from None


async def _pieces(call: HttpCall) -> AsyncIterator[bytes | bytearray | memoryview]:
    for part in call.parts:
        yield part
