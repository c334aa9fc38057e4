"""Who uses the places of a plan, that is the gateway's memory for the tensors of requests of one kind.

Used by `broker.gateway.inference`, on its event loop. A request waits for its place here, and parties take turns, so
that the line of one that asks for more than there is delays nobody else. One place of eight is for others than whoever
has all the rest: another party's request goes to the worker at once, where it has its turn again (`shm.fair_line`).
Requests of a party go on in the order in which they came: party 0 are the steps of sequences. They have plans of their
own, in which no place is kept for others.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final, final

from broker.gateway.timeouts import until
from shm.fair_line import FairLine

FEW: Final = 4  # with fewer places none is kept
KEPT: Final = 8  # one of so many


@final
class _Turn:
    """Who waits. `come`: it may go on."""

    __slots__ = ("client", "come")

    def __init__(self, client: int) -> None:
        self.client = client
        self.come: asyncio.Future[None] = asyncio.get_running_loop().create_future()


@final
class Places:
    """Of one plan. How many there are is told by whoever comes: a plan may get more.

    `_called` were given a place and have not gone on: until the last of them has, whoever comes stands in line, or it
    would overtake them.
    """

    __slots__ = ("_called", "_count", "_inside", "_line", "_of")

    def __init__(self) -> None:
        self._called = 0
        self._count = 0
        self._inside = 0
        self._of: Counter[int] = Counter()
        self._line: FairLine[_Turn] = FairLine()

    async def enter(self, count: int, party: int, deadline_ns: int) -> None:
        """Wait for one of `count` places; `leave` gives it back. Raises InferError UNAVAILABLE at the deadline."""
        self._count = count
        if self._called or self._line or not self._may(party):
            await self._wait(party, deadline_ns)
        else:
            self._line.serve_at_once(party)
            self._inside += 1
            self._of[party] += 1

    def leave(self, party: int) -> None:
        """The request has ended."""
        self._inside -= 1
        self._of[party] -= 1
        if not self._of[party]:
            del self._of[party]
        if self._line:
            self._serve()

    def _may(self, party: int) -> bool:
        kept = max(1, self._count // KEPT) if party and self._count >= FEW else 0
        return self._inside < self._count and self._of[party] < self._count - kept

    async def _wait(self, party: int, deadline_ns: int) -> None:
        turn = _Turn(party)
        self._line.add(turn)
        if not self._called:
            self._serve()
        try:
            async with until(deadline_ns):
                await turn.come
        except BaseException:
            if turn.come.done() and not turn.come.cancelled():
                self._goes_on()
                self.leave(party)  # it could have gone on in the same moment
            else:
                self._line.remove(turn)
            raise
        self._goes_on()

    def _goes_on(self) -> None:
        self._called -= 1
        if not self._called and self._line:
            self._serve()

    def _serve(self) -> None:
        while (turn := self._next()) is not None:
            if turn.come.done():
                continue  # who waited is about to see that it was cancelled
            self._called += 1
            self._inside += 1
            self._of[turn.client] += 1
            turn.come.set_result(None)

    def _next(self) -> _Turn | None:
        """Take the first one that may go on out of the line."""
        for turn in self._line:
            if self._may(turn.client):
                self._line.serve([turn])
                return turn
            if not self._line.shared:
                break
            self._line.pass_over()
        return None
