"""What the schedulers of all kinds of models have in common: how `broker.worker.scheduler` asks them for work.

A queue is a pure state machine: no clock, no thread, no memory of tensors. Its caller holds the scheduler's lock. Every
request that `add` accepts leaves it exactly once: by `take`, `remove` or `late`.

    batcher.SingleQueue, batcher.DynamicBatcher     requests that know nothing of each other
    strategies.DirectSequences, OldestSequences     requests that belong to sequences

Every batch is closed for one reason (`closed_by`, counted by the scheduler), the first of these that holds:

    full        it could not grow: the maximum is reached, or what is next in line does not fit in (it has another
                signature or too many rows, or runs alone). Of sequences: each slot of the instance has a step, or the
                batch of the strategy "oldest" has as many as it may
    delay       its oldest request had waited for `max_queue_delay_microseconds`
    preferred   it has a preferred size, or would outgrow all of them with the next request. Of the strategy "direct":
                `minimum_slot_utilization` is reached
    idle        nothing asks it to wait: an instance was free, and all that was queued, or this instance's share of it,
                went along. So it is with every request of a model that forms no batches, or that ran at once
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shm.admission import Request, Verdict

Row = Request | None  # None: an empty slot of a sequence batch, which the model sees with READY off


class Queue(Protocol):
    """One per loaded model version. Times are CLOCK_MONOTONIC in ns."""

    @property
    def pinned(self) -> bool:
        """May `take` have work for one free instance and none for another? Then it is asked for each."""

    @property
    def late_at(self) -> int:
        """When `late` will have something to let go if nothing happens before; 0: never."""

    @property
    def closed_by(self) -> int:
        """Why the batch that `take` gave last was closed: FULL, PREFERRED, DELAY or IDLE of `shm.statistics`."""

    def __len__(self) -> int:
        """Requests that wait here."""

    def add(self, request: Request, now: int, free: int = 0) -> Verdict | None:
        """Take the request in. A verdict: it was not, and ends with that (queue full, a rule of sequences broken).

        `free`: so many instances could begin at once. What they would take does not count for the queue's limits.
        """

    def take(self, now: int, instance: int = 0, most: int = 0) -> Sequence[Row]:
        """The next batch for the free instance with this index in its model, or () when there is none or it is worth
        waiting until `due`. `most`: at most so many requests (0: as many as fit)."""

    def wants(self, now: int, instance: int = 0) -> bool:
        """Would `take` give this instance something? Asked when it may not run yet (`broker.worker.rate_limiter`)."""

    def due(self) -> int:
        """When to ask `take` again although nothing else happens before; 0: nothing will change by itself."""

    def done(self, instance: int, batch: Sequence[Row]) -> int:
        """A batch that `take` gave has ended, however it ended. How many of it wait here again, to run once more?"""

    def remove(self, request: Request) -> bool:
        """Drop a request that waits (cancelled, expired, its client is gone); False when it is not here."""

    def late(self, now: int) -> list[tuple[Request, Verdict]]:
        """Let those go that have waited longer than their policy allows, or whose sequence has timed out."""
