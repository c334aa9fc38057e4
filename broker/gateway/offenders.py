"""Whose requests ended workers: refused for a while, and nobody else's.

Used by `broker.gateway.inference`. To the broker a gateway is one session, so it leaves it to the gateway to tell the
callers apart: by their principal, or by the remote host where there is none. The rule is the broker's own for native
clients (`broker.supervision.Offenders`): two requests for a model that ended a worker while running alone, within 60 s.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, final

from broker.gateway.kserve import Caller, Identity
from shm.admission import refused
from shm.errors import InferError
from shm.recovery import to_blame

WINDOW_NS: Final = 60_000_000_000
KEPT: Final = 1024  # pairs; those that are remembered longest go first

_Pair = tuple[Identity, str]  # who, and which model


@final
class Offenders:
    """Costs nothing, not even the question who asks, while no request has ended a worker."""

    __slots__ = ("_clock", "_once", "_refused")

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self._once: OrderedDict[_Pair, int] = OrderedDict()  # when
        self._refused: OrderedDict[_Pair, int] = OrderedDict()  # until when

    def check(self, caller: Caller, model: str) -> None:
        """Raises InferError UNAVAILABLE while the caller is refused."""
        if not self._refused:
            return
        pair = caller.identity, model
        until = self._refused.get(pair, 0)
        if (left_ns := until - self._clock()) > 0:
            raise InferError(*refused(model, left_ns))
        self._refused.pop(pair, None)

    def ended(self, error: InferError, caller: Caller, model: str) -> None:
        """A request of `caller` failed. What counts is whether it has ended a worker."""
        if not to_blame(error.message):
            return
        pair, now = (caller.identity, model), self._clock()
        if now - self._once.pop(pair, now - WINDOW_NS - 1) <= WINDOW_NS:
            self._refused[pair] = now + WINDOW_NS
        else:
            self._once[pair] = now
        for pairs in (self._once, self._refused):
            while len(pairs) > KEPT:
                pairs.popitem(last=False)
