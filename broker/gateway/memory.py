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
from typing import Final, final

LOOK_S: Final = 2.0
WORTH: Final = 64 << 20  # bytes that it must have grown by since the last time, or hold more than ever before
LONGEST: Final = 32  # looks between two trims while it holds them: about a minute

_PAGE: Final = resource.getpagesize()


@final
class Pace:
    """At which looks to trim: at once after growth, and again, ever less often, as long as what grew is still there.
    What made it grow may end much later: a client that does not read its results holds them as long as it likes.
    """

    def __init__(self, private: int) -> None:
        self._before = self._least = private
        self._pause = self._left = 0  # looks; 0: nothing to trim

    def look(self, private: int) -> bool:
        """Trim now, with `private` bytes?"""
        large, grown = private >= self._least + WORTH, private >= self._before + WORTH
        self._before, self._least = private, min(private, self._least)
        if not large:
            self._pause = 0
            return False
        if grown or not self._pause:
            self._pause = self._left = 1
        self._left -= 1
        if self._left:
            return False
        self._left = self._pause
        self._pause = min(2 * self._pause, LONGEST)
        return True


async def keep_trimmed() -> None:
    """For ever: look whether this process has grown, and if so, have the allocator give back what is free."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:  # not glibc's allocator
        return
    loop = asyncio.get_running_loop()
    pace = Pace(private_bytes())
    while True:
        await asyncio.sleep(LOOK_S)
        if pace.look(private_bytes()):
            await loop.run_in_executor(None, trim, 0)  # without the GIL


def trim() -> None:
    """Have the allocator give back what is free, now. Takes a while; for a thread."""
    function = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if function is not None:  # glibc's allocator
        function(0)


def private_bytes() -> int:
    """What this process has in memory that no other shares."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * _PAGE
