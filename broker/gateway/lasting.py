"""The requests of decoupled models that run in a gateway: how many may, whose, and what they may keep unread.

Used by `broker.gateway.streaming`, one for all of a gateway's, on its event loop. Such a request may last for as long
as its model and its client like, so places are shared out when they are taken: no connection has more than a quarter
of them, and no owner (all connections of one principal, or of one remote host) more than three. Whoever may have no
more waits, and holds up nobody else.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Hashable
from typing import Final, NamedTuple, Protocol, final

from shm.capacity import memory_limit
from shm.errors import Code, InferError

RUNNING: Final = 512  # requests, half of those that a worker takes of a gateway
OF_CONNECTION: Final = 1 / 4
OF_OWNER: Final = 3 / 4
MEMORY_SHARE: Final = 4
LOOK_S: Final = 0.25


class Holder(NamedTuple):
    """Whose a request is. `owner`: the same for all connections of one principal, or of one remote host."""

    connection: Hashable
    owner: Hashable


class Held(Protocol):
    """A request that has a place."""

    holder: Holder

    @property
    def unread_bytes(self) -> int:
        """Of the responses that wait for whoever takes them."""

    def cut(self, error: InferError) -> None:
        """Cancel it and drop what waits; whoever comes for the next response gets `error`."""


@final
class Lasting:
    """See the module. Each request keeps at most what the client library allows (64 MiB); `unread` bounds all."""

    def __init__(self, running: int = RUNNING, unread: int = 0) -> None:
        """`unread`: bytes, 0 for a quarter of the memory there is."""
        self._free = running
        self._of_connection = max(1, int(running * OF_CONNECTION))
        self._of_owner = max(1, int(running * OF_OWNER))
        self._limit = unread or memory_limit() // MEMORY_SHARE
        self._connections: Counter[Hashable] = Counter()
        self._owners: Counter[Hashable] = Counter()
        self._waiting: dict[Holder, dict[asyncio.Future[None], None]] = {}  # both in order
        self._running: set[Held] = set()
        self._looking: asyncio.TimerHandle | None = None

    async def enter(self, responses: Held) -> None:
        """One more; waits for its turn. Whoever enters leaves."""
        holder = responses.holder
        if self._has_place(holder):  # then nobody waits who could have it
            self._count(holder, 1)
        else:
            await self._turn(holder)
        self._running.add(responses)
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def leave(self, responses: Held) -> None:
        """It has ended. Nothing for one that has not entered."""
        if responses in self._running:
            self._running.discard(responses)
            self._give_back(responses.holder)

    # --- places ----------------------------------------------------------------------------------------------------

    def _has_place(self, holder: Holder) -> bool:
        return (
            self._free > 0
            and self._connections[holder.connection] < self._of_connection
            and self._owners[holder.owner] < self._of_owner
        )

    def _count(self, holder: Holder, places: int) -> None:
        self._free -= places
        for counter, key in ((self._connections, holder.connection), (self._owners, holder.owner)):
            counter[key] += places
            if not counter[key]:
                del counter[key]

    async def _turn(self, holder: Holder) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(holder, {})[turn] = None
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._wait_no_more(holder, turn)
            else:  # it became ours in the same moment
                self._give_back(holder)
            raise

    def _wait_no_more(self, holder: Holder, turn: asyncio.Future[None]) -> None:
        turns = self._waiting[holder]
        del turns[turn]
        if not turns:
            del self._waiting[holder]

    def _give_back(self, holder: Holder) -> None:
        """Those who wait take turns by holder, in each the one who has waited longest."""
        self._count(holder, -1)
        for other in tuple(self._waiting):
            turn = next((turn for turn in self._waiting[other] if not turn.done()), None)
            if turn is not None and self._has_place(other):
                self._wait_no_more(other, turn)
                self._count(other, 1)
                turn.set_result(None)
                if (turns := self._waiting.pop(other, None)) is not None:
                    self._waiting[other] = turns  # behind the others

    # --- memory ----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        self._looking = None
        unread = {responses: responses.unread_bytes for responses in self._running}
        total = sum(unread.values())
        while total > self._limit:
            last = max(unread, key=unread.__getitem__)
            size = unread.pop(last)
            total -= size
            last.cut(
                InferError(
                    Code.UNAVAILABLE,
                    f"responses that wait for their readers took more than {self._limit} bytes, {size} of them this "
                    "request's: it was cancelled; read faster",
                )
            )
        if self._running:
            self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look)
