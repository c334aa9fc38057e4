"""The worker's side of a channel and its ledger: take, start, complete. What publishes lies in `shm.publishing`.

Everything in the channel's memory is written by a process that may be hostile: each thing is read once, the copy is
checked, and only the copy is used. What the worker trusts lies in the ledger, which clients never get.
Used by the worker's loop, by recovery, and by the broker as coroner. Knows nothing of models.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Mapping
from typing import final

from shm.admission import BoundPlan, Request, admit
from shm.errors import Code
from shm.layout import (
    ARMED,
    CANCEL,
    HEAD,
    MARK,
    PARKED,
    RING,
    SENT,
    STARTED,
    SUBMISSION,
    TAIL,
    TAKEN,
)
from shm.publishing import Publisher


@final
class WorkerChannel(Publisher):
    """Maps channel and ledger; borrows the descriptors (the caller closes them after `close`)."""

    __slots__ = (
        "_inline",
        "_parked",
        "_submissions",
        "bell",
        "head",
        "last_traffic",
        "number",
        "plans",
        "refused",
    )

    def __init__(
        self,
        memory_fd: int,
        ledger_fd: int,
        bell_fd: int,
        pipe_fd: int,
        slots: int,
        plans: Mapping[int, BoundPlan],
        number: int = 0,
    ) -> None:
        super().__init__(memory_fd, ledger_fd, pipe_fd, slots)
        self.bell = bell_fd
        self.plans = plans  # plan word → plan, of this channel's session only
        self.number = number
        self._submissions = self._geometry.submissions * 8
        self._inline: list[Request | None] = [None] * slots  # used again and again by `peek`
        self.head = self._ledger[HEAD]
        self._parked = 0  # since when (ns); 0: it is not
        self.refused = 0  # entries that broke a rule
        self.last_traffic = 0

    @property
    def ledger(self) -> memoryview:
        """The trusted words, for recovery."""
        return self._ledger

    @property
    def memory(self) -> mmap.mmap:
        """The channel's bytes, for recovery."""
        return self._memory

    def resume(self, head: int, committed: int) -> None:
        """Continue where a recovery found the ledger."""
        self.head, self._ctail = head, committed
        self.remember_unread()

    def arm(self) -> None:
        """Ask to be rung; a fence and a last look at `pending` must follow before sleeping."""
        self._parked = 0
        self.words[ARMED] = time.monotonic_ns()  # no predecessor can have slept under it

    def park(self, now: int) -> None:
        """No rings wanted: whoever finishes next looks, and before that nothing could begin to run."""
        if not self._parked:
            self._parked = now
            self.words[ARMED] = PARKED

    def _came(self, now: int) -> int:
        """When the latest of what is about to be taken came, as far as its client may be believed."""
        sent, since = self.words[SENT], self._parked
        self._parked = now
        return sent if since <= sent <= now else now

    def disarm(self) -> None:
        """No rings wanted: the worker is looking."""
        self._parked = 0
        self.words[ARMED] = 0

    def published(self) -> int:
        """The client's tail, whatever it is worth."""
        return self.words[TAIL]

    def pending(self) -> bool:
        """Is there anything to take?"""
        return self.words[TAIL] != self.head and not self.broken

    def unreported(self) -> int:
        """Entries refused since this was last asked."""
        count, self.refused = self.refused, 0
        return count

    def take(self, limit: int, now: int, out: list[Request]) -> list[tuple[Request, bool]]:
        """Take up to `limit` entries: admitted requests go to `out`.

        Returns the requests that a cancel concerns or that were not admitted, with "was it admitted earlier": the
        caller completes those not admitted (their ending is set) and drops the others from its queue.
        """
        words, head = self.words, self.head
        count = words[TAIL] - head
        if not 0 < count <= self._geometry.ring_mask + 1:
            if count:
                self.broken = f"published {count} entries in a ring of {self._geometry.ring_mask + 1}"
            return []
        came = self._came(now) if self._parked else now
        notable: list[tuple[Request, bool]] = []
        ring_mask, slots, submissions = self._geometry.ring_mask, self._geometry.slots, self._submissions
        live, ledger, memory, plans = self.live, self._ledger, self._memory, self.plans
        with self.lock:
            head_end = head + min(count, limit)
            for position in range(head, head_end):
                slot = words[RING + (position & ring_mask)]
                if slot >= slots:
                    self._take_cancel(slot, notable)
                    continue
                entry = SUBMISSION.unpack_from(memory, submissions + 64 * slot)
                if entry[0] != position + 1 or live[slot] is not None:
                    self.refused += 1
                    continue
                request = live[slot] = Request(self, slot, entry, plans.get(entry[1]), came)
                ledger[MARK + slot] = (position + 1) << 16 | TAKEN
                verdict = admit(request, entry[12], now)
                if verdict is None:
                    request.plan.busy[request.output_position] = 1  # type: ignore[union-attr]
                    request.started = True  # holds its output position
                    out.append(request)
                else:
                    request.fail(*verdict)
                    request.ended = request.code  # a cancel that follows it in the ring has nothing to end any more
                    notable.append((request, False))
            # One store for all: a taken entry whose mark is stored but not covered by HEAD is found by its mark.
            self.head = ledger[HEAD] = head_end
        return notable

    def _take_cancel(self, word: int, notable: list[tuple[Request, bool]]) -> None:
        slot = word & 0xFFFFFFFF
        if slot >= self._geometry.slots or not word & CANCEL:
            self.refused += 1
            return
        request = self.live[slot]
        cancel = self.words[self._geometry.submissions + 8 * slot + 7]
        if request is not None and cancel == request.position and not request.ended:
            request.ended = Code.CANCELLED
            notable.append((request, True))

    def peek(self, now: int) -> Request | None:
        """The one entry that is there, checked, when nothing about it is unusual; else None. Changes nothing.

        The inline path: `begin` must follow in the same sweep to take it; otherwise `take` reads it anew.
        """
        head = self.head
        geometry = self._geometry
        slot = self.words[RING + (head & geometry.ring_mask)]
        if slot >= geometry.slots or self.live[slot] is not None:
            return None
        entry = SUBMISSION.unpack_from(self._memory, self._submissions + 64 * slot)
        plan = self.plans.get(entry[1])
        if (
            plan is None
            or entry[0] != head + 1
            or not plan.simple
            or entry[4] >= plan.input_positions
            or entry[5] >= plan.output_positions
            or plan.busy[entry[5]]
            or entry[6] > plan.rows
            or entry[12] == head + 1
            or (entry[3] and now >= entry[3])
            or now < plan.refused_until_ns
        ):
            return None
        request = self._inline[slot]
        if request is None or request.code or request.note or request.copied:
            request = self._inline[slot] = Request(self, slot, entry, plan, now)
        else:
            request.plan = plan
            request.entry = entry
            request.position = head + 1
            request.arrival = now
            request.input_position = entry[4]
            request.output_position = entry[5]
            request.rows = entry[6] or plan.rows
            request.deadline = entry[3]
        return request

    def begin(self, request: Request) -> None:
        """Take what `peek` returned and mark it started at once: the model sees it next."""
        slot, ledger = request.slot, self._ledger
        request.started = True
        request.attempts = 1
        with self.lock:
            self.live[slot] = request
            request.plan.busy[request.output_position] = 1  # type: ignore[union-attr]
            ledger[MARK + slot] = request.position << 16 | 1 << 8 | STARTED
            self.head = ledger[HEAD] = request.position

    def close(self) -> None:
        """Ring no more; drop plans and requests (which refer to the channel).

        The mappings go with the last reference. A thread that is publishing an ending may still finish that.
        """
        with self._ringing:
            self._pipe = -1
        self.plans = {}
        self.live = [None] * self._geometry.slots
        self._inline = [None] * self._geometry.slots
