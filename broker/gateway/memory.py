"""Memory that large requests leave with the allocator goes back to the system. Used by `broker.gateway.process`.

gRPC takes a message apart into small blocks, in whichever of the allocator's arenas its thread has. When they are freed
the arena keeps them, and the next large message is put into another one: after a few, a gateway held ten times the
largest of them. One call gives it all back, in about 0.1 s for each GiB.
"""

from __future__ import annotations

import asyncio
import ctypes
import resource
from pathlib import Path
from typing import Final

LOOK_S: Final = 2.0
WORTH: Final = 64 << 20  # bytes that it must have grown by since the last time
TRIMS: Final = 2  # at as many looks: what made it grow may not have ended at the first

_PAGE: Final = resource.getpagesize()


async def keep_trimmed() -> None:
    """For ever: look whether this process has grown, and if so, have the allocator give back what is free."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:  # not glibc's allocator
        return
    loop = asyncio.get_running_loop()
    before, trims = private_bytes(), 0
    while True:
        await asyncio.sleep(LOOK_S)
        if private_bytes() >= before + WORTH:
            trims = TRIMS
        if trims:
            await loop.run_in_executor(None, trim, 0)  # without the GIL
            trims -= 1
        before = private_bytes()


def private_bytes() -> int:
    """What this process has in memory that no other shares."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * _PAGE
