"""The worker's side of a channel and its ledger: take, start, complete.

Everything in the channel's memory is written by a process that may be hostile: each thing is read once, the copy is
checked, and only the copy is used. What the worker trusts lies in the ledger, which clients never get.
Used by the worker's loop, by recovery, and by the broker as coroner. Knows nothing of models.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Protocol, final

from shm.errors import Code
from shm.layout import (
    ARMED,
    CANCEL,
    COMPLETION,
    CONSUMED,
    CTAIL,
    DONE,
    FINAL,
    HEAD,
    LEDGER_CTAIL,
    MARK,
    NOTE_BYTES,
    NOTED,
    RING,
    STARTED,
    SUBMISSION,
    TAIL,
    TAKEN,
    WAITING,
    Geometry,
)
from shm.memory import map_words

Verdict = tuple[Code, str]


class BoundPlan(Protocol):
    """What admission asks of a plan."""

    input_positions: int
    output_positions: int
    rows: int
    retryable: bool
    closed: Verdict | None  # why no request is taken any more
    refused_until_ns: int  # CLOCK_MONOTONIC; 0 = not refused
    signature: object  # equal for requests that may share a batch; None: runs alone
    simple: bool  # open, and no other plan's ranges can overlap this one's: only `busy` and the deadline remain
    busy: bytearray  # one byte per output position: a live request writes there

    def conflict(self, input_position: int, output_position: int) -> str:
        """The overlap with another live request's ranges, in words, or ""."""


@final
class Request:
    """One taken submission. `ended` is set when it must not run any more (cancelled, expired)."""

    __slots__ = (
        "arrival",
        "attempts",
        "channel",
        "code",
        "copied",
        "deadline",
        "ended",
        "flags",
        "infer_ns",
        "input_ns",
        "input_position",
        "note",
        "output_ns",
        "output_position",
        "plan",
        "position",
        "priority",
        "queue_ns",
        "request_id",
        "rows",
        "sequence_id",
        "signature",
        "slot",
        "started",
    )

    plan: BoundPlan | None

    def __init__(
        self, channel: WorkerChannel, slot: int, entry: tuple[int, ...], plan: BoundPlan | None, now: int
    ) -> None:
        self.channel = channel
        self.slot = slot
        self.plan = plan
        self.signature = plan.signature if plan is not None else None
        self.position = entry[0]
        self.request_id = entry[2]
        self.deadline = entry[3]
        self.input_position = entry[4]
        self.output_position = entry[5]
        self.rows = entry[6] or (plan.rows if plan is not None else 0)
        self.sequence_id = entry[7]
        self.flags = entry[8]
        self.priority = entry[9]
        self.arrival = now
        self.attempts = 0
        self.started = False
        self.ended = Code.OK
        self.code = Code.OK
        self.note = b""
        self.queue_ns = self.input_ns = self.infer_ns = self.output_ns = self.copied = 0

    def fail(self, code: Code, message: str) -> None:
        """Give the request its ending; `complete` publishes it."""
        self.code = code
        note = message.encode(errors="replace")
        if len(note) > NOTE_BYTES:
            note = note[:NOTE_BYTES].decode(errors="ignore").encode()  # no half character
        self.note = note


def admit(request: Request, cancel: int, now: int) -> Verdict | None:
    """The one admission check, for new work and for what a recovery finds: why this request must not run, or None."""
    plan = request.plan
    if plan is None:
        return Code.NOT_FOUND, "the request names a plan that is not bound here: prepare it again"
    if plan.closed is not None:
        return plan.closed
    if now < plan.refused_until_ns:
        return Code.UNAVAILABLE, (
            "requests of this client for this model are refused for a minute: two of them ended a worker while running"
            " alone"
        )
    if request.input_position >= plan.input_positions or request.output_position >= plan.output_positions:
        return Code.INVALID_ARG, (
            f"position {request.input_position}/{request.output_position} is outside the plan's"
            f" {plan.input_positions} input and {plan.output_positions} output positions"
        )
    if request.rows > plan.rows:
        return Code.INVALID_ARG, f"{request.rows} rows asked of a plan prepared for {plan.rows}"
    if request.deadline and now >= request.deadline:
        return Code.UNAVAILABLE, "Request timeout expired"
    if cancel == request.position:
        return Code.CANCELLED, "the request was cancelled"
    overlap = plan.conflict(request.input_position, request.output_position)
    if overlap:
        return Code.INVALID_ARG, overlap
    return None


@final
class WorkerChannel:
    """Maps channel and ledger; borrows the descriptors (the caller closes them after `close`)."""

    __slots__ = (
        "_completions",
        "_ctail",
        "_geometry",
        "_ledger",
        "_ledger_memory",
        "_memory",
        "_pipe",
        "_submissions",
        "bell",
        "broken",
        "head",
        "last_traffic",
        "live",
        "lock",
        "number",
        "plans",
        "refused",
        "words",
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
        geometry = self._geometry = Geometry(slots)
        self._memory, self.words = map_words(memory_fd, geometry.channel_bytes)
        self._ledger_memory, self._ledger = map_words(ledger_fd, geometry.ledger_bytes)
        self.bell, self._pipe = bell_fd, pipe_fd
        self.plans = plans  # plan word → plan, of this channel's session only
        self.number = number
        self._submissions = geometry.submissions * 8
        self._completions = geometry.completions * 8
        self.live: list[Request | None] = [None] * slots
        self.lock = threading.Lock()  # take and complete: a late DONE must not overwrite a new TAKEN
        self.head = self._ledger[HEAD]
        self._ctail = self._ledger[LEDGER_CTAIL]
        self.broken = ""
        self.refused = 0  # entries that broke a rule
        self.last_traffic = 0

    @property
    def geometry(self) -> Geometry:
        """The layout both sides agreed on."""
        return self._geometry

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

    def arm(self) -> None:
        """Ask to be rung; a fence and a last look at `pending` must follow before sleeping."""
        self.words[ARMED] = 1

    def disarm(self) -> None:
        """No rings wanted: the worker is looking."""
        self.words[ARMED] = 0

    def published(self) -> int:
        """The client's tail, whatever it is worth."""
        return self.words[TAIL]

    def pending(self) -> bool:
        """Is there anything to take?"""
        return self.words[TAIL] != self.head and not self.broken

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
        notable: list[tuple[Request, bool]] = []
        with self.lock:
            head_end = head + min(count, limit)
            for position in range(head, head_end):
                self._take_one(position, now, out, notable)
            # One store for all: a taken entry whose mark is stored but not covered by HEAD is found by its mark.
            self.head = self._ledger[HEAD] = head_end
        return notable

    def _take_one(self, position: int, now: int, out: list[Request], notable: list[tuple[Request, bool]]) -> None:
        word = self.words[RING + (position & self._geometry.ring_mask)]
        slot = word & 0xFFFFFFFF
        if slot >= self._geometry.slots:
            self.refused += 1
            return
        if word & CANCEL:
            request = self.live[slot]
            cancel = self.words[self._geometry.submissions + 8 * slot + 7]
            if request is not None and cancel == request.position and not request.ended:
                request.ended = Code.CANCELLED
                notable.append((request, True))
            return
        entry = SUBMISSION.unpack_from(self._memory, self._submissions + 64 * slot)
        if entry[0] != position + 1 or self.live[slot] is not None:
            self.refused += 1
            return
        request = Request(self, slot, entry, self.plans.get(entry[1]), now)
        self.live[slot] = request
        self._ledger[MARK + slot] = (position + 1) << 16 | TAKEN
        verdict = admit(request, entry[12], now)
        if verdict is None:
            assert request.plan is not None
            request.plan.busy[request.output_position] = 1
            request.started = True  # holds its output position
            out.append(request)
        else:
            request.fail(*verdict)
            request.ended = request.code  # a cancel that follows it in the ring has nothing to end any more
            notable.append((request, False))

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
        return Request(self, slot, entry, plan, now)

    def begin(self, request: Request) -> None:
        """Take what `peek` returned and mark it started at once: the model sees it next."""
        plan = request.plan
        assert plan is not None
        slot = request.slot
        with self.lock:
            self.live[slot] = request
            plan.busy[request.output_position] = 1
            request.started = True
            request.attempts = 1
            self._ledger[MARK + slot] = request.position << 16 | 1 << 8 | STARTED
            self.head = self._ledger[HEAD] = self.head + 1

    def start(self, request: Request) -> None:
        """Mark that the model is about to see the request: `attempts` counts worker lives, not runs."""
        request.attempts += 1
        self._ledger[MARK + request.slot] = request.position << 16 | request.attempts << 8 | STARTED

    def complete(self, requests: Sequence[Request]) -> None:
        """Publish the endings of `requests` with one store, from any thread. Each must be live on this channel."""
        words, ledger = self.words, self._ledger
        with self.lock:
            number = self._ctail
            # An honest client always leaves room: unread finals + outstanding ≤ N, and there are 2N entries.
            if not 0 <= number - words[CONSUMED] <= 2 * self._geometry.slots - len(requests):
                self.broken = self.broken or "does not consume its completions"
            for request in requests:
                self._publish(request, number)
                number += 1
            words[CTAIL] = self._ctail = number  # the commit
            for request in requests:
                ledger[MARK + request.slot] = request.position << 16 | request.attempts << 8 | DONE
            ledger[LEDGER_CTAIL] = number
        if words[WAITING]:  # the lock's release above is the fence
            self.ring()

    def _publish(self, request: Request, number: int) -> None:
        """Write completion `number`, and let go of slot and range: the client may reuse both after the commit."""
        at = number & self._geometry.completion_mask
        status = request.code | FINAL
        if request.note:
            status |= NOTED
            start = self._geometry.notes * 8 + NOTE_BYTES * at
            self._memory[start : start + NOTE_BYTES] = request.note.ljust(NOTE_BYTES, b"\0")
        COMPLETION.pack_into(
            self._memory,
            self._completions + 64 * at,
            number + 1,
            request.position << 16 | request.slot,
            status,
            request.queue_ns,
            request.input_ns,
            request.infer_ns,
            request.output_ns,
            request.copied,
        )
        self.live[request.slot] = None
        if request.started:
            request.plan.busy[request.output_position] = 0  # type: ignore[union-attr]

    def ring(self) -> None:
        """Wake the client. A full pipe means it has been rung already, a broken one that it is gone."""
        try:
            os.write(self._pipe, b"\1")
        except (BlockingIOError, BrokenPipeError):
            pass

    def close(self) -> None:
        """Drop plans and requests (which refer to the channel); the mappings go with the last reference."""
        self.plans = {}
        self.live = [None] * self._geometry.slots
