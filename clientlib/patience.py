"""How long what a request needs of the broker may take: beyond its deadline, if that is short.

Held by the clients of the native transport. A plan and a channel take a few milliseconds, once per kind of request and
once per thread. If they were given up at the deadline of the request that needs them first, requests with a shorter one
would ask for them for ever, and none would be answered.
"""

from __future__ import annotations

import time
from typing import TypeVar, final

from clientlib.session import Procedure
from clientlib.sync_session import SyncSession
from shm.errors import InferError

T = TypeVar("T")
SETUP_S = 1.0  # for preparing a plan, for binding it, and for each answer of a broker that is reached again
AGAIN_S = 5.0  # where that was in vain, requests keep their deadlines for so long


@final
class Patience:
    """Of one client. Any thread; times are those of the caller's clock, in seconds."""

    __slots__ = ("_again",)

    def __init__(self) -> None:
        self._again = float("-inf")

    def until(self, deadline: float, now: float) -> float:
        """When to give up what a request needs that has this deadline."""
        return deadline if now < self._again else max(deadline, now + SETUP_S)

    def given_up(self, deadline: float, until: float, now: float) -> None:
        """It failed. If that was for want of an answer, nobody waits beyond a deadline for a while."""
        if deadline < until <= now:
            self._again = now + AGAIN_S


def drive(session: SyncSession, procedure: Procedure[T], deadline: float, patience: Patience | None) -> T:
    """Run `procedure` until `deadline` (time.monotonic), or as long beyond as `patience` allows. Raises InferError."""
    until = deadline if patience is None else patience.until(deadline, time.monotonic())
    try:
        return session.drive(procedure, until)
    except InferError:
        if patience is not None:
            patience.given_up(deadline, until, time.monotonic())
        raise
