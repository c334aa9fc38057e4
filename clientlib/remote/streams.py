"""Streams of the remote clients: what a transport brings, as `clientlib.streams` and its twin read it.

Made by the clients' `stream`. One response comes as that of any other request; several need a transport that `Streams`.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, final

from clientlib import process
from clientlib.remote.async_plans import AsyncRemotePending
from clientlib.remote.core import Remote, closed
from clientlib.remote.layout import Layout, Position
from clientlib.remote.plans import RemotePending
from clientlib.remote.transport import Answers, AsyncAnswers
from clientlib.responses import not_placed
from clientlib.results import InferResult
from shm.errors import Code, InferError

if TYPE_CHECKING:
    from clientlib.remote.client import RemoteClient


def check_layout(layout: Layout, wire: str, *, streams: bool) -> None:
    """Raises InferError for a decoupled model's request that cannot be asked."""
    if not streams:
        raise InferError(
            Code.UNSUPPORTED,
            f"model '{layout.model}' is decoupled: a request may have several responses or none, which {wire} does not "
            "carry; connect by grpc://…, or by ipc://… on the broker's host",
        )
    for name in layout.placed:
        raise not_placed(name)


@final
class RemoteInflow:
    """The answers to a request of a decoupled model. `owner` keeps the client and the plan."""

    __slots__ = ("_answers", "_copied", "_layout", "_over", "_owner", "_remote")

    def __init__(
        self, owner: tuple[RemoteClient, object], remote: Remote, layout: Layout, answers: Answers, copied: int
    ) -> None:
        self._owner = owner
        self._remote = remote
        self._layout = layout
        self._answers = answers
        self._copied = copied  # bytes of inputs, for the first response to report
        self._over = False

    def next(self) -> InferResult | None:
        """See `clientlib.streams.Source`."""
        self._remote.check_process()
        if self._over:
            return None
        try:
            answer = self._owner[0].turn.run(self._answers.next)
        except InferError as error:
            raise closed() if self._remote.closed else error from None
        if answer is None or self._over:
            return None
        copied, self._copied = self._copied, 0
        return self._layout.result(answer, Position(0, 0), copied, partial=True)

    def cancel(self) -> bool:
        """See `clientlib.streams.Source`."""
        self._remote.check_process()
        return self._answers.cancel()

    def close(self) -> None:
        """See `clientlib.streams.Source`."""
        self._over = True
        self.let_go()

    def let_go(self) -> None:
        """See `clientlib.streams.Source`."""
        if self._remote.made_in == process.generation:
            self._answers.cancel()


@final
class RemoteSingle:
    """The one response of a model that is not decoupled."""

    __slots__ = ("_pending", "_taken")

    def __init__(self, pending: RemotePending) -> None:
        self._pending = pending
        self._taken = False

    def next(self) -> InferResult | None:
        """See `clientlib.streams.Source`."""
        if self._taken:
            return None
        self._taken = True
        return self._pending.result()

    def cancel(self) -> bool:
        """See `clientlib.streams.Source`."""
        return self._pending.cancel()

    def close(self) -> None:
        """See `clientlib.streams.Source`."""
        self._taken = True
        self._pending.cancel()

    def let_go(self) -> None:
        """It ends by itself: a transport's cancel takes locks."""


@final
class AsyncRemoteInflow:
    """The answers to a request of a decoupled model, on an event loop. `owner` keeps the client and the plan."""

    __slots__ = ("_answers", "_copied", "_layout", "_loop", "_over", "_owner", "_remote")

    def __init__(self, owner: object, remote: Remote, layout: Layout, answers: AsyncAnswers, copied: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._owner = owner
        self._remote = remote
        self._layout = layout
        self._answers = answers
        self._copied = copied
        self._over = False

    @property
    def final(self) -> bool:
        """See `clientlib.async_streams.AsyncSource`."""
        return self._answers.final

    @property
    def unread_bytes(self) -> int:
        """See `clientlib.async_streams.AsyncSource`: they wait at the server."""
        return 0

    async def next(self) -> InferResult | None:
        """See `clientlib.async_streams.AsyncSource`."""
        if self._over:
            return None
        try:
            answer = await self._answers.next()
        except InferError as error:
            raise closed() if self._remote.closed else error from None
        if answer is None or self._over:
            return None
        copied, self._copied = self._copied, 0
        return self._layout.result(answer, Position(0, 0), copied, partial=True)

    def cancel(self) -> bool:
        """See `clientlib.async_streams.AsyncSource`."""
        return self._answers.cancel()

    def close(self) -> None:
        """See `clientlib.async_streams.AsyncSource`."""
        self._over = True
        self._answers.cancel()

    def let_go(self) -> None:
        """See `clientlib.async_streams.AsyncSource`."""
        if self._remote.made_in == process.generation:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._answers.cancel)


@final
class AsyncRemoteSingle:
    """The one response of a model that is not decoupled, on an event loop."""

    __slots__ = ("_loop", "_made_in", "_pending", "_taken")

    def __init__(self, pending: AsyncRemotePending) -> None:
        self._pending = pending
        self._taken = False
        self._loop = asyncio.get_running_loop()
        self._made_in = process.generation

    @property
    def final(self) -> bool:
        """See `clientlib.async_streams.AsyncSource`."""
        return self._taken

    @property
    def unread_bytes(self) -> int:
        """See `clientlib.async_streams.AsyncSource`."""
        return 0

    async def next(self) -> InferResult | None:
        """See `clientlib.async_streams.AsyncSource`."""
        if self._taken:
            return None
        self._taken = True
        return await self._pending.finish()

    def cancel(self) -> bool:
        """See `clientlib.async_streams.AsyncSource`."""
        return self._pending.cancel()

    def close(self) -> None:
        """See `clientlib.async_streams.AsyncSource`."""
        self._taken = True
        self._pending.cancel()

    def let_go(self) -> None:
        """See `clientlib.async_streams.AsyncSource`."""
        if self._made_in == process.generation:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._pending.cancel)
