"""The publishing half of the worker's side of a channel: mark what starts, commit endings and responses, ring.

`shm.worker_channel.WorkerChannel` is the whole. Any thread may call what is here. The ledger is stored under `lock`,
but for `start`: the mark of a live request is nobody else's.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence

from shm.admission import Request
from shm.layout import (
    COMPLETION,
    CONSUMED,
    CTAIL,
    DONE,
    FINAL,
    GIVEN,
    LEDGER_CTAIL,
    MARK,
    NOTE_BYTES,
    NOTED,
    RESPONDED,
    STARTED,
    WAITING,
    Geometry,
)
from shm.memory import map_words
from shm.parameters import beside

HOLD_NS = 200_000  # how long a sleeping client may be left asleep because its next requests are about to end


class Publisher:
    """Maps channel and ledger; borrows the descriptors."""

    __slots__ = (
        "_completions",
        "_ctail",
        "_geometry",
        "_ledger",
        "_ledger_memory",
        "_memory",
        "_pipe",
        "_ringing",
        "_rung",
        "_unread",
        "broken",
        "held",
        "live",
        "lock",
        "words",
    )

    def __init__(self, memory_fd: int, ledger_fd: int, pipe_fd: int, slots: int) -> None:
        geometry = self._geometry = Geometry(slots)
        self._memory, self.words = map_words(memory_fd, geometry.channel_bytes)
        self._ledger_memory, self._ledger = map_words(ledger_fd, geometry.ledger_bytes)
        self._pipe = pipe_fd
        self._completions = geometry.completions * 8
        self.live: list[Request | None] = [None] * slots
        self.lock = threading.Lock()  # take and complete: a late DONE must not overwrite a new TAKEN
        self._ctail = self._ledger[LEDGER_CTAIL]
        self._unread: deque[int] = deque()  # completions that are no endings and that the client may not have read
        self._rung = 0  # the last stamp of WAITING that was rung for
        self.held = 0  # since when (arrival of a request) a client that sleeps has not been woken; 0: it has
        self._ringing = threading.Lock()  # ring and close: after it, the pipe's number may be another descriptor's
        self.broken = ""

    @property
    def geometry(self) -> Geometry:
        """The layout both sides agreed on."""
        return self._geometry

    def start(self, requests: Sequence[Request]) -> None:
        """Mark that the model is about to see the requests: `attempts` counts worker lives, not runs."""
        ledger = self._ledger
        for request in requests:
            request.attempts = attempts = request.attempts + 1
            ledger[MARK + request.slot] = request.position << 16 | attempts << 8 | STARTED

    def complete(self, requests: Sequence[Request]) -> None:
        """Publish the endings of `requests` with one store, from any thread. Each must be live on this channel."""
        words, ledger, live, memory = self.words, self._ledger, self.live, self._memory
        mask, completions = self._geometry.completion_mask, self._completions
        with self.lock:
            number = self._ctail
            # An honest client always leaves room: unread finals + outstanding ≤ N, and there are 2N entries.
            if not 0 <= number - words[CONSUMED] <= 2 * self._geometry.slots - len(requests):
                self.broken = self.broken or "does not consume its completions"
            for request in requests:
                slot = request.slot
                COMPLETION.pack_into(
                    memory,
                    completions + 64 * (number & mask),
                    number + 1,
                    request.position << 16 | slot,
                    self._noted(request, number) if request.note else request.code | FINAL,
                    request.queue_ns,
                    request.input_ns,
                    request.infer_ns,
                    request.output_ns,
                    request.copied,
                )
                # Before the commit: the client may reuse slot and range after it.
                live[slot] = None
                if request.started:
                    request.plan.busy[request.output_position] = 0  # type: ignore[union-attr]
                number += 1
            words[CTAIL] = self._ctail = number  # the commit
            for request in requests:
                ledger[MARK + request.slot] = request.position << 16 | request.attempts << 8 | DONE
            ledger[LEDGER_CTAIL] = number
        waiting = words[WAITING]  # the lock's release above is the fence
        if waiting and waiting != self._rung:
            self._rung = waiting
            self.ring()

    def _noted(self, request: Request, number: int) -> int:
        """Write the note beside completion `number`; the status word that says so."""
        start = self._geometry.notes * 8 + NOTE_BYTES * (number & self._geometry.completion_mask)
        if request.parameters:
            self._memory[start : start + NOTE_BYTES] = beside(request.note, request.parameters)
            return request.code | FINAL | NOTED | GIVEN
        self._memory[start : start + NOTE_BYTES] = request.note.ljust(NOTE_BYTES, b"\0")
        return request.code | FINAL | NOTED

    def respond(self, request: Request) -> int:
        """Publish a response of `request`, which goes on: its code and note, as `complete` does with its ending.

        Returns a number for `was_read`, or 0: as many responses as the channel has slots are unread, so that endings
        always find room. The client is not waited for here; ask again when it has read some.
        """
        words, ledger, slot = self.words, self._ledger, request.slot
        with self.lock:
            number, consumed, unread = self._ctail, words[CONSUMED], self._unread
            while unread and unread[0] < consumed:
                unread.popleft()
            if len(unread) >= self._geometry.slots:
                return 0
            if not 0 <= number - consumed < 2 * self._geometry.slots:
                self.broken = self.broken or "does not consume its completions"
            unread.append(number)
            COMPLETION.pack_into(
                self._memory,
                self._completions + 64 * (number & self._geometry.completion_mask),
                number + 1,
                request.position << 16 | slot,
                (self._noted(request, number) if request.note else request.code) & ~FINAL,
                request.queue_ns,
                request.input_ns,
                request.infer_ns,
                request.output_ns,
                request.copied,
            )
            number += 1
            words[CTAIL] = self._ctail = number  # the commit
            ledger[MARK + slot] = request.position << 16 | request.attempts << 8 | RESPONDED
            ledger[LEDGER_CTAIL] = number
        waiting = words[WAITING]  # the lock's release above is the fence
        if waiting and waiting != self._rung:
            self._rung = waiting
            self.ring()
        return number

    def was_read(self, number: int) -> bool:
        """Has the client read the response that `respond` gave this number? Who says so falsely harms himself only."""
        return self.words[CONSUMED] >= number

    def remember_unread(self) -> None:
        """After a recovery: which responses a predecessor left unread is not known, so everything unread counts."""
        consumed = max(self.words[CONSUMED], self._ctail - 2 * self._geometry.slots)
        self._unread = deque(range(consumed, self._ctail))

    def finish(self, request: Request, more: bool = False) -> None:
        """`complete` for one request that `begin` took and that ran well: the inline path's other half.

        `more`: the client has more requests here that will not take long, so it is not woken for each of them. Whoever
        says so calls `ring_held` when he stops running them.
        """
        words, ledger, slot = self.words, self._ledger, request.slot
        position = request.position << 16
        with self.lock:
            number = self._ctail
            if not 0 <= number - words[CONSUMED] < 2 * self._geometry.slots:
                self.broken = self.broken or "does not consume its completions"
            COMPLETION.pack_into(
                self._memory,
                self._completions + 64 * (number & self._geometry.completion_mask),
                number + 1,
                position | slot,
                FINAL,
                0,
                0,
                request.infer_ns,
                0,
                0,
            )
            self.live[slot] = None
            request.plan.busy[request.output_position] = 0  # type: ignore[union-attr]
            number += 1
            words[CTAIL] = self._ctail = number  # the commit
            ledger[MARK + slot] = position | 1 << 8 | DONE
            ledger[LEDGER_CTAIL] = number
        waiting = words[WAITING]  # the lock's release above is the fence
        if waiting and waiting != self._rung:
            if more and request.arrival - (self.held or request.arrival) < HOLD_NS:
                self.held = self.held or request.arrival
                return
            self.held = 0
            self._rung = waiting
            self.ring()

    def ring_held(self) -> None:
        """Wake the client for what `finish` has not woken it for."""
        self.held = 0
        waiting = self.words[WAITING]
        if waiting and waiting != self._rung:
            self._rung = waiting
            self.ring()

    def ring(self) -> None:
        """Wake the client. A full pipe means it has been rung already, a broken one that it is gone."""
        with self._ringing:
            if self._pipe < 0:
                return
            try:
                os.write(self._pipe, b"\1")
            except (BlockingIOError, BrokenPipeError):
                pass
