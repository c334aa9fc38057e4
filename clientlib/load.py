"""What this process has under way at each worker, over all channels of a session.

Held by `clientlib.link.Link`, looked at by `clientlib.spread` before each request of a model that several workers
serve. With many channels (one per thread and worker) counting takes longer than the choice is worth, so what was
counted serves everybody for a moment; what is sent meanwhile is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, final

from shm.client_channel import ClientChannel

FEW = 8  # channels that are counted each time
FRESH_NS = 200_000  # for how long a count of more serves


class Lane(Protocol):
    """As much of a `clientlib.link.Lane` as is counted."""

    worker: str
    channel: ClientChannel


class Lanes(Protocol):
    """Where the channels are."""

    def all(self) -> Sequence[Lane]:
        """Every lane there is."""


@final
class AtWorker:
    """Requests of this process at one worker. `since`: when one of them was last seen to end, or none was there."""

    __slots__ = ("completed", "outstanding", "since")

    def __init__(self, now: int) -> None:
        self.outstanding = self.completed = 0
        self.since = now


@final
class Load:
    """Any thread; without a lock: two that count at once find the same, and a choice need not be exact."""

    __slots__ = ("_counted_ns", "_found", "_lanes", "_serves")

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._found: dict[str, AtWorker] = {}
        self._counted_ns = 0
        self._serves = False  # what was counted is used again

    def look(self, now: int) -> dict[str, AtWorker]:
        """By worker. Whoever sends a request adds it to `outstanding`. `now`: CLOCK_MONOTONIC ns."""
        if self._serves and now - self._counted_ns < FRESH_NS:
            return self._found
        lanes = self._lanes.all()
        found: dict[str, AtWorker] = {}
        for lane in lanes:
            channel = lane.channel
            at = found.get(lane.worker)
            if at is None:
                at = found[lane.worker] = AtWorker(now)
            at.outstanding += channel.outstanding
            at.completed += channel.completed
        before = self._found
        for worker, at in found.items():
            known = before.get(worker)
            if at.outstanding and known is not None and known.completed == at.completed:
                at.since = known.since
        self._found, self._counted_ns, self._serves = found, now, len(lanes) > FEW
        return found
