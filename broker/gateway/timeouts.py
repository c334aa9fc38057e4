"""What the `timeout` of a request is: a deadline over ZeroMQ, over HTTP and gRPC Triton's.

In CLOCK_MONOTONIC ns, 0: none. Used by `inference` and `turns`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

from broker.gateway.kserve import Caller, InferRequest
from clientlib.submission import deadline_ns_of, remaining_s
from shm.errors import Code, InferError

EXPIRED: Final = "Request timeout expired"


def deadline_of(request: InferRequest, caller: Caller) -> int:
    """When the caller is answered whatever happens; 0: never. Triton's `timeout` is no such thing."""
    if request.timeout_us <= 0 or caller.transport != "zmq":
        return 0
    return deadline_ns_of(request.timeout_us / 1e6)


def queue_timeout_of(request: InferRequest, deadline_ns: int) -> int:
    """Until when the model's queue may keep it, if its policy lets requests say so; 0: no matter."""
    return 0 if deadline_ns or request.timeout_us <= 0 else deadline_ns_of(request.timeout_us / 1e6)


@contextlib.asynccontextmanager
async def until(deadline_ns: int) -> AsyncIterator[None]:
    """What takes longer raises InferError UNAVAILABLE."""
    try:
        async with asyncio.timeout(remaining_s(deadline_ns)):
            yield
    except TimeoutError:
        raise InferError(Code.UNAVAILABLE, EXPIRED) from None
