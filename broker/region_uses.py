"""Regions that one worker has retired and that requests accepted before still use; and whether a region was used.

Kept by `broker.logical_worker`: the worker's process says in its acknowledgement that a region is in use, and later
that it is not. What a dead process had taken runs again only where its region is still there, so a death ends all uses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import final

from broker.worker.messages import IN_USE, USED, AskRegion
from broker.worker_process import ProcessDied, WorkerProcess

Identity = tuple[int, int]  # region, generation


async def used(process: WorkerProcess, region: Identity, limit_s: float) -> bool:
    """Has a request used it since this was last asked? If the process cannot say in time, it may have."""
    try:
        async with asyncio.timeout(limit_s):
            return await process.request(AskRegion(region=region[0], generation=region[1])) == USED
    except (ProcessDied, TimeoutError):
        return True


@final
class RegionUses:
    """By (region, generation): a future that is done when no request uses the region any more."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: dict[Identity, asyncio.Future[None]] = {}

    async def retire(self, region: Identity, acknowledged: Awaitable[str]) -> asyncio.Future[None] | None:
        """Await the acknowledgement; None when it says that the region is idle."""
        # Before it: what is said right after an acknowledgement may be read in the same turn of the event loop.
        last = self._last[region] = asyncio.get_running_loop().create_future()
        try:
            if await acknowledged == IN_USE:
                return last
        except BaseException:
            self.idle(region)
            raise
        self.idle(region)
        return None

    def idle(self, region: Identity) -> None:
        """No request uses it any more."""
        last = self._last.pop(region, None)
        if last is not None and not last.done():
            last.set_result(None)

    def died(self) -> None:
        """The process ended, and with it every use."""
        for region in list(self._last):
            self.idle(region)
