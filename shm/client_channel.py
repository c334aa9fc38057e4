"""The client's side of a channel: submit, cancel, reap, wait.

Owned by `clientlib`; one per thread or event loop and worker. Knows slots and words, not plans or tensors. Any thread
may submit (short lock); whoever holds `role` reaps for all.
"""

from __future__ import annotations

import ctypes
import os
import select
import threading
import time
from typing import Protocol, final

from shm.errors import Code
from shm.fence import FENCE_IS_FULL
from shm.layout import (
    AHEAD,
    ARMED,
    ASKS,
    AWAY,
    CANCEL,
    CODE_MASK,
    COMPLETION,
    CONSUMED,
    CTAIL,
    FINAL,
    GIVEN,
    NOTE_BYTES,
    NOTED,
    PARKED,
    REPLACED,
    RING,
    SENT,
    SUBMISSION,
    TAIL,
    WAITING,
    Geometry,
)
from shm.memory import map_words
from shm.parameters import end_of

SLEEP_MS = 50  # longest sleep while requests are outstanding: bounds what a lost wake-up could cost
LATE_MS = 300  # what was completed is not rung for yet: the worker may have died before it, then the broker rings
SLOW_NS = 200_000  # what takes longer is slept for
LONGER = 3  # times the spin, beyond it, while requests take that long: being woken costs as much as they do
BESIDE_THREADS = 5  # times the spin: losing the GIL to another thread costs 100 times what waking a worker costs
OWN_FAULT = (Code.INVALID_ARG, Code.CANCELLED)  # these say nothing of the worker that a request went to
_perf = time.perf_counter

# os.sched_yield and os.eventfd_write release the GIL, and a busy thread of this process then keeps it for its whole
# switch interval (5 to 8 ms measured); these keep it. Neither can block: the eventfd is non-blocking.
_libc = ctypes.PyDLL(None)
_yield_keeping_gil = _libc.sched_yield
_eventfd_write = _libc.eventfd_write
_eventfd_write.argtypes = (ctypes.c_int, ctypes.c_uint64)


class Settles(Protocol):
    """What a submission leaves behind in its slot."""

    def settle(self, entry: tuple[int, ...], note: bytes) -> None:
        """Called once per completion by the thread that reaps. `entry` is laid out as `shm.layout.COMPLETION`, with the
        packed parameters of a response that has some behind it.
        """


@final
class ClientChannel:
    """Takes ownership of the descriptors. `spin_s` 0 means: never spin, always sleep."""

    __slots__ = (
        "_bell",
        "_consumed",
        "_failed",
        "_free",
        "_geometry",
        "_lock",
        "_memory",
        "_pending",
        "_poller",
        "_positions",
        "_ran",
        "_ran_at",
        "_ring_mask",
        "_rung",
        "_sleeps",
        "_spin",
        "_submissions",
        "_tail",
        "_took",
        "_words",
        "gone",
        "lost_wakeups",
        "pipe_fd",
        "role",
        "strays",
    )

    def __init__(self, memory_fd: int, bell_fd: int, pipe_fd: int, slots: int, spin_s: float) -> None:
        geometry = self._geometry = Geometry(slots)
        self._memory, self._words = map_words(memory_fd, geometry.channel_bytes)
        os.close(memory_fd)
        self._bell, self.pipe_fd = bell_fd, pipe_fd
        self._spin = spin_s if FENCE_IS_FULL else 0.0
        self._took = 0  # ns, of the last completion
        self._ran = self._ran_at = 0  # see `ran`, and how many completions it has seen
        self._failed = False  # see `failed`
        self._free = list(range(slots - 1, -1, -1))
        self._pending: list[Settles | None] = [None] * slots
        self._positions = [0] * slots
        self._submissions = geometry.submissions * 8
        self._ring_mask = geometry.ring_mask
        self._tail, self._consumed = self._words[TAIL], self._words[CONSUMED]
        self._sleeps = self._rung = 0  # the stamp of the last sleep; the last one of ARMED that was rung for
        # Submit and cancel; its release is the fence between TAIL and ARMED. Nothing is called under it: CPython runs
        # signal handlers (and other threads) after calls and jumps, and one that submits must not find it held below.
        self._lock = threading.Lock()
        self.role = threading.Lock()  # who reaps and waits
        self._poller = select.poll()
        self._poller.register(pipe_fd, select.POLLIN)
        self.gone = False
        self.lost_wakeups = 0
        self.strays = 0  # completions that named no pending request

    @property
    def slots(self) -> int:
        """How many requests fit."""
        return self._geometry.slots

    @property
    def outstanding(self) -> int:
        """Requests submitted whose final completion has not been reaped."""
        return self._geometry.slots - len(self._free)

    @property
    def ran(self) -> int:
        """How long the request ran that ended well last, without what it waited for (ns); 0: none has.

        What failed may never have run: a worker that fails everything at once must not look like the fastest.
        Completions are looked at here, once each, and not where they are reaped: most clients never ask.
        """
        words, geometry, upto = self._words, self._geometry, self._consumed
        for number in range(upto, max(self._ran_at, upto - geometry.completion_mask - 1), -1):
            at = geometry.completions + 8 * (number - 1 & geometry.completion_mask)
            if words[at] == number and words[at + 2] & FINAL:
                code = words[at + 2] & CODE_MASK
                if not code:
                    self._ran = max(1, sum(words[at + 4 : at + 7]))
                    break
                self._failed = self._failed or code not in OWN_FAULT
        self._ran_at = upto
        return self._ran

    @property
    def failed(self) -> bool:
        """Have requests failed here, and none ended well, when `ran` was last asked for?"""
        return self._failed and not self._ran

    def ahead(self) -> int:
        """How long (ns, coarse) the worker will be at what it has, of all clients, as it said last; asks it to say so.

        For clients with a choice of workers: who never calls this costs the worker nothing.
        """
        words = self._words
        if not words[ASKS]:
            words[ASKS] = 1
        return words[AHEAD]

    @property
    def completed(self) -> int:
        """Completions that the worker has published, read by now or not."""
        return self._words[CTAIL]

    @property
    def away(self) -> bool:
        """Is the worker being replaced, or does it not respond? What is submitted waits."""
        return bool(self._words[AWAY])

    @property
    def replaced(self) -> bool:
        """Is it being replaced? Then the sequences that it had are lost."""
        return self._words[AWAY] == REPLACED

    def submit(
        self,
        pending: Settles,
        plan_word: int,
        input_position: int,
        output_position: int,
        rows: int,
        deadline_ns: int,
        request_id: int = 0,
        priority: int = 0,
        flags: int = 0,
        sequence_id: int = 0,
        wait_event: int = 0,
        caller: int = 0,
    ) -> int:
        """Publish one request; returns its ident, or 0 when every slot is taken. `wait_event`: as `Request` has it.
        Raises struct.error when a field is out of its range (see `SUBMISSION`).
        """
        words = self._words
        try:
            slot = self._free.pop()
        except IndexError:
            return 0
        tail = self._tail
        position = tail + 1
        try:
            SUBMISSION.pack_into(
                self._memory,
                self._submissions + 64 * slot,
                position,
                plan_word,
                request_id,
                deadline_ns,
                input_position,
                output_position,
                rows,
                sequence_id,
                flags,
                priority,
                wait_event,
                caller,
                0,
            )
            with self._lock:  # no call in it: see `_lock`
                if tail != self._tail:  # another thread was faster
                    tail = self._tail
                    words[self._submissions // 8 + 8 * slot] = position = tail + 1
                self._pending[slot] = pending
                self._positions[slot] = position
                words[RING + (tail & self._ring_mask)] = slot
                self._tail = position
                words[TAIL] = position
        except BaseException:  # a field out of range, a signal handler's exception: it must not cost a slot
            if self._positions[slot] != position:
                self._free.append(slot)
            raise
        armed = words[ARMED]
        if armed and armed != self._rung:
            self._ring(armed)
        return position << 16 | slot

    def holds(self, ident: int) -> bool:
        """Has the end of this request not been seen yet?"""
        slot = ident & 0xFFFF
        return self._positions[slot] == ident >> 16 and self._pending[slot] is not None

    def cancel(self, ident: int, wait: bool = True) -> bool:
        """Ask the worker to drop the request; False when it has ended already. It still gets its one ending.

        `wait` False: give up where another thread, or this one below, submits or cancels just now.
        """
        slot, position = ident & 0xFFFF, ident >> 16
        words = self._words
        if not wait and self._lock.locked():
            return False
        with self._lock:  # no call in it
            if self._positions[slot] != position or self._pending[slot] is None:
                return False
            at = self._geometry.submissions + 8 * slot + 7
            if words[at] == position:
                return True  # a second entry would tell nothing new, and many would fill the ring
            words[at] = position
            tail = self._tail
            words[RING + (tail & self._ring_mask)] = slot | CANCEL
            self._tail = tail + 1
            words[TAIL] = tail + 1
        armed = words[ARMED]
        if armed and armed != self._rung:
            self._ring(armed)
        return True

    def _ring(self, armed: int) -> None:
        if armed == PARKED:  # all the worker lacks is the time: it will look before it runs anything else
            self._words[SENT] = time.monotonic_ns()
            return
        self._rung = armed
        _eventfd_write(self._bell, 1)  # fails when the counter is full: the worker has been rung often enough

    def reap(self) -> int:
        """Settle what has been completed; the caller holds `role`. Returns how many completions there were."""
        words, consumed = self._words, self._consumed
        upto = words[CTAIL]
        if upto == consumed:
            return 0
        geometry, memory, pending = self._geometry, self._memory, self._pending
        base, mask = geometry.completions * 8, geometry.completion_mask
        count = 0
        while consumed < upto:
            entry = COMPLETION.unpack_from(memory, base + 64 * (consumed & mask))
            note, code = b"", entry[2]
            if code & NOTED:
                start = geometry.notes * 8 + NOTE_BYTES * (consumed & mask)
                note = memory[start : start + NOTE_BYTES]
                if code & GIVEN:
                    entry = (*entry, end_of(note))
            consumed += 1
            slot = entry[1] & 0xFFFF
            owner = pending[slot]
            # A completion that names no pending request is dropped: the ending of a request that was ended before.
            if entry[0] == consumed and owner is not None and self._positions[slot] == entry[1] >> 16:
                if code & FINAL:
                    pending[slot] = None
                    self._free.append(slot)
                owner.settle(entry, note)
                count += 1
            else:
                self.strays += 1
        # Spinning for what takes far longer than the spin only heats the core that the worker may need.
        self._took = entry[3] + entry[4] + entry[5] + entry[6]
        self._consumed = consumed
        words[CONSUMED] = consumed
        return count

    def wait(self, timeout_s: float) -> None:
        """Return when completions are there, or after `timeout_s` (at most 50 ms while requests are outstanding).

        The caller holds `role`. Spins first, while spinning has been paying off, then sleeps on the pipe.
        """
        words, consumed = self._words, self._consumed
        if words[CTAIL] != consumed:
            return
        if self._spin and self._took <= SLOW_NS:
            # At once, before looking at clocks and threads: on a shared core the worker runs now.
            _yield_keeping_gil()
            if words[CTAIL] != consumed:
                return
            alone = threading.active_count() == 1
            spin = self._spin if alone else self._spin * BESIDE_THREADS
            pause = os.sched_yield if alone else _yield_keeping_gil
            end = _perf() + min(spin + min(2e-9 * self._took, LONGER * self._spin), timeout_s)
            while _perf() < end:
                pause()
                if words[CTAIL] != consumed:
                    return
        self._sleeps += 1
        words[WAITING] = self._sleeps
        with self._lock:  # fence: the worker either sees WAITING or we see its CTAIL
            pass
        if words[CTAIL] == consumed:
            self._sleep(timeout_s)
        words[WAITING] = 0

    def _sleep(self, timeout_s: float) -> None:
        limit = SLEEP_MS if self.outstanding else 1000 * 3600
        timed_out = timeout_s * 1000 > limit
        events = self._poller.poll(min(timeout_s * 1000, limit))
        if not events and timed_out and self._words[CTAIL] != self._consumed:
            events = self._poller.poll(LATE_MS)
            self.lost_wakeups += not events
        if events and events[0][1] & select.POLLIN:
            self.drain_pipe()
        elif events and events[0][1] & (select.POLLHUP | select.POLLERR | select.POLLNVAL):
            self.gone = True

    @property
    def unread(self) -> bool:
        """Is there something to reap?"""
        return self._words[CTAIL] != self._consumed

    def rest(self) -> bool:
        """Ask to be rung (asyncio, before it goes quiet). True: completions are there already."""
        self._sleeps += 1
        self._words[WAITING] = self._sleeps
        with self._lock:  # fence, as in wait()
            pass
        return self.unread

    def stir(self) -> None:
        """No rings wanted: the caller polls."""
        self._words[WAITING] = 0

    def drain_pipe(self) -> None:
        """Empty the pipe; sets `gone` when its other end is closed: broker and worker are no more."""
        try:  # a context manager here would cost who sleeps a microsecond
            self.gone = not os.read(self.pipe_fd, 4096) or self.gone
        except BlockingIOError:
            pass

    def abandoned(self) -> list[Settles]:
        """Take back everything outstanding, after `gone` (nobody writes any more): the caller ends them."""
        none: list[Settles | None] = [None] * self.slots
        with self._lock:  # no call in it
            left, self._pending = self._pending, none
        self._free += [slot for slot, owner in enumerate(left) if owner is not None]  # not those being filled just now
        return [owner for owner in left if owner is not None]

    def close(self) -> None:
        """Close the descriptors. The memory goes with the last reference."""
        bell, self._bell = self._bell, -1
        pipe, self.pipe_fd = self.pipe_fd, -1
        if bell >= 0:
            os.close(bell)
            os.close(pipe)
