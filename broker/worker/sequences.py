"""Sequences of requests: slots, backlog, time-outs. Which of them run together is `broker.worker.strategies`.

Pure state machines as `broker.worker.queues` says; its caller there holds the lock.
"""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict
from collections.abc import Sequence as Rows
from typing import Final

from broker.repository.scheduling import SequenceBatching
from broker.worker import sequence_endings as endings
from broker.worker.queues import Row
from broker.worker.sequence import Key, Line, Sequence
from broker.worker.undelivered import Kept, Undelivered, lost
from shm import statistics
from shm.admission import Request, Verdict
from shm.errors import Code
from shm.layout import SEQUENCE_AGAIN, SEQUENCE_END, SEQUENCE_START

CANCELLED: Final[Verdict] = (Code.CANCELLED, "a step of its sequence was cancelled")
EXPIRED: Final[Verdict] = (Code.UNAVAILABLE, "timeout of the corresponding sequence has been expired")
STOPPING: Final[Verdict] = (
    Code.UNAVAILABLE,
    "Server is stopping, scheduler for model has stopped accepting new inference requests",
)

NOBODY: Final = -1  # whose sequences are that have no id

_log = logging.getLogger(__name__)


class Sequences:
    """Slots, backlog and time-outs, the same in both strategies."""

    pinned = True
    by_slot = False  # do models know their sequences by slots? else by ids

    def __init__(
        self, name: str, config: SequenceBatching, instances: int, slots: int, delay: int = 0, backlog_delay: int = 0
    ) -> None:
        self._name = name
        self._config = config
        self._idle = config.max_sequence_idle_microseconds * 1000
        self._wait = config.max_queue_delay_microseconds * 1000
        self._slots: list[list[Line | None]] = [[None] * slots for _ in range(instances)]
        self._live: dict[Key, Line] = {}  # those whose END has not come
        self._lines: dict[Request, Line] = {}  # of requests that wait or run
        self._backlog: OrderedDict[Line, None] = OrderedDict()
        self._patience: dict[Line, int] = {}  # when those in the backlog end that have a request with a deadline
        self._quiet: OrderedDict[Line, None] = OrderedDict()  # those that can time out, the longest idle first
        self._dropped: dict[Request, Verdict] = {}  # they leave by `late`
        self._again: set[Request] = set()  # those that wait to run once more: they have begun, and leave by `done` only
        self._undelivered: Undelivered[Kept] = Undelivered()
        self._asked: dict[Request, Line | None] = {}  # for what was undelivered: that is their `sequence`; they wait
        self.endings = endings.Endings(instances)
        self._waiting = 0
        self._until = 0  # draining: when it is over
        self.late_at = 0
        self.closed_by = statistics.IDLE
        self._numbers = itertools.count(1 << 63)  # ids of sequences that are one request without an id
        self._hold = (delay, backlog_delay)  # TRITONSERVER_DELAY_SCHEDULER, TRITONSERVER_BACKLOG_DELAY_SCHEDULER

    def __len__(self) -> int:
        waiting = self._waiting + len(self._asked) + len(self._dropped)
        return waiting + len(self.endings)  # until the model knows of them, too

    def add(self, request: Request, now: int, free: int = 0) -> Verdict | None:
        """Take the request into its sequence's line; a verdict in Triton's words when it breaks a rule."""
        if self._undelivered or request.flags & SEQUENCE_AGAIN:
            lacking = self._asked_again(request, now)
            if lacking is not None or request in self._asked:
                return lacking
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        number, key = request.sequence_id, _key(request)
        alone = not number
        if alone:
            number = next(self._numbers)
            key = (NOBODY, number)  # clients may have the same number for a sequence of their own
        line = self._live.get(key)
        if request.flags & SEQUENCE_START or alone:
            record = Sequence(number)
            if line is None:
                line = self._live[key] = Line(key, record)
                if self.endings.wanted and not self.by_slot:
                    line.behind = next((each for each in reversed(self._lines.values()) if each.key == key), None)
                if not self._place(line):
                    self._backlog[line] = None
            else:
                _log.warning(
                    "sequence %d for model '%s' has a conflict. The previous sequence did not end before this sequence"
                    " start. Previous sequence will be terminated early.",
                    number,
                    self._name,
                )
                line.record = record
        assert line is not None
        request.sequence = line.record
        line.queue[request] = None
        self._lines[request] = line
        self._waiting += 1
        until = request.deadline or request.queue_timeout
        if line.slot is None and until:
            self._patience[line] = min(until, self._patience.get(line, until))
        if alone:
            line.own = SEQUENCE_START
        if request.flags & SEQUENCE_END or alone:
            line.ended, line.why = True, endings.END
            del self._live[key]
            if not alone:
                self.endings.past.note(key, endings.END)
        self._touch(line, now)
        self._look()
        return None

    def _asked_again(self, request: Request, now: int) -> Verdict | None:
        kept = self._undelivered.take(_key(request))
        if not request.flags & SEQUENCE_AGAIN:
            return None  # something newer came
        if kept is None:
            if request.flags & SEQUENCE_START:
                return None
            return lost(self._name, request.sequence_id, self._undelivered.why(_key(request)))
        request.sequence = kept
        line = self._asked[request] = self._live.get(_key(request))
        if line is not None:  # its states are there with the answer: steps that come now wait for that
            line.running = request
            self._touch(line, now)
            self._look()
        return None

    def _asked_for(self) -> list[Request]:
        """A batch of its own, on any instance: there is nothing to run."""
        request, line = next(iter(self._asked.items()))
        del self._asked[request]
        if line is not None:
            self._lines[request] = line
        self.closed_by = statistics.IDLE
        return [request]

    def _refusal(self, request: Request) -> Verdict | None:
        to_model = f"to model '{self._name}' must specify"
        if request.rows > 1:
            return Code.INVALID_ARG, (
                f"inference request {to_model} batch-size 1 due to requirements of sequence batcher"
            )
        if not request.sequence_id and not self._config.iterative_sequence:
            return Code.INVALID_ARG, f"inference request {to_model} a non-zero or non-empty correlation ID"
        if request.sequence_id and not request.flags & SEQUENCE_START:
            if _key(request) in self._live:
                return None
            text = f"inference request for sequence {request.sequence_id} {to_model} the START flag on the first"
            text += " request of the sequence"
            idle_us = self._config.max_sequence_idle_microseconds
            return Code.INVALID_ARG, text + self.endings.past.of(_key(request), idle_us, request.arrival)
        if self._until:
            return STOPPING
        return None

    def drain(self, until: int) -> None:
        """New sequences are refused from now on; those that run may continue until END, time-out, or `until`."""
        self._until = until
        for key in self._live:  # until something else ends them; the model in its place may not be able to go on
            self.endings.past.note(key, endings.UNLOAD)

    def continues(self, request: Request) -> bool:
        """Is it a further step of a sequence that runs here, while this is draining?"""
        if request.flags & SEQUENCE_START:
            return False
        return request.arrival < self._until and _key(request) in self._live

    def goes_on(self, now: int) -> bool:
        """May sequences continue here although this is draining?"""
        return now < self._until and bool(self._live)

    def due(self) -> int:
        """When a batch that waits for more requests goes as it is."""
        return min((request.arrival + self._wait for request in self._heads()), default=0) if self._wait else 0

    def _look(self) -> None:
        """Set `late_at`: the next time-out; 1 (at once) when `late` has something to hand out."""
        times = [1] if self._dropped else []
        times += [next(iter(self._quiet)).last + self._idle] if self._quiet else []
        times += self._patience.values()
        times += [self._undelivered.until] if self._undelivered else []
        self.late_at = min(times, default=0)

    def wants(self, now: int, instance: int = 0) -> bool:
        """Would `take` give this instance something?"""
        return bool(self._asked or self._next(now, instance))

    def _next(self, now: int, instance: int, most: int = 0) -> list[Line]:
        """The lines of this instance whose requests run now."""
        raise NotImplementedError

    def done(self, instance: int, batch: Rows[Row]) -> int:
        """Those that ran leave their sequences; one whose END has run frees its slot."""
        again = 0
        for row in batch:
            if row is None:
                continue
            line = self._lines.get(row)
            behind = line is not None and line.queue
            if isinstance(row.sequence, Kept) and row.code and not (row.ended or behind):
                self._undelivered.keep(_key(row), row.sequence, _ended(row))  # another output lacks room
            if line is None:
                continue
            line.running = None
            record = row.sequence
            if isinstance(record, Sequence) and record.again:
                record.again = False
                line.queue[row] = None
                line.queue.move_to_end(row, last=False)
                self._again.add(row)
                self._waiting += 1
                again += 1
                continue
            if isinstance(record, Sequence) and isinstance(record.kept, Kept):
                # Those behind it may run before it could be asked for; for what has ended meanwhile, nobody asks.
                if line.queue or row.ended or line.key[0] == NOBODY:
                    self._undelivered.skip(line.key)
                else:
                    self._undelivered.keep(line.key, record.kept, _ended(row))
                record.kept = None
            del self._lines[row]
            line.last = max(line.last, _ended(row))
            self._settle(line)
        self._look()
        return again

    def remove(self, request: Request) -> bool:
        """Drop a request that waits. A sequence ends with its START, and as in Triton with a step that is cancelled."""
        if self._dropped.pop(request, None) is not None:
            self._look()
            return True
        if request in self._asked:
            line = self._asked.pop(request)
            if line is None:
                return True
            line.running = None
        else:
            line = self._lines.get(request)
            if line is None or line.running is request or request in self._again:
                return False
            del line.queue[request], self._lines[request]
            self._waiting -= 1
        if request.ended == Code.CANCELLED:
            self._end(line, CANCELLED, endings.CANCELLED)
        elif request.flags & SEQUENCE_START:
            self._end(line, EXPIRED, endings.EXPIRED)
        else:
            self._settle(line)
        self._look()
        return True

    def miss(self, request: Request) -> None:
        """A step was cancelled before it came here; those behind it may have come by now."""
        key = _key(request)
        line = self._live.get(key)
        if line is None:
            line = next((line for line in self._lines.values() if line.key == key), None)
        if line is not None:
            self._end(line, CANCELLED, endings.CANCELLED)
            self._look()

    def gone(self, owner: int) -> None:
        """The client is gone: nobody goes on with its sequences."""
        for line in [line for key, line in self._live.items() if key[0] == owner]:
            self._end(line, CANCELLED, endings.CLIENT_GONE)
        self._undelivered.drop(owner)
        self._look()

    def unload(self, instance: int) -> list[endings.Ending]:
        """What the model is still to be told when this instance of it goes, and with it the model."""
        for key in self._live:
            self.endings.past.note(key, endings.UNLOAD)
        for index, line in enumerate(self._slots[instance]):
            if line is not None and line.seen is not None:
                self.endings.add(instance, self._which(line.seen, index), line.why or endings.UNLOAD)
        return self.endings.take(instance)

    def late(self, now: int) -> list[tuple[Request, Verdict]]:
        """End idle sequences, and those in the backlog with a request whose time-out has passed."""
        self._undelivered.expire(now)
        for line in [line for line, until in self._patience.items() if until <= now]:
            self._end(line, EXPIRED, endings.EXPIRED)
        while self._quiet:
            line = next(iter(self._quiet))
            if now - line.last < self._idle:
                break
            self._end(line, EXPIRED, endings.IDLE)
        dropped, self._dropped = self._dropped, {}
        self._look()
        return list(dropped.items())

    def _heads(self) -> list[Request]:
        lines = [line for slots in self._slots for line in slots if line is not None and line.ready()]
        return [next(iter(line.queue)) for line in lines]

    def _held(self) -> bool:
        delay, backlog = self._hold
        if not (delay or backlog):
            return False
        behind = sum(len(line.queue) for line in self._backlog)
        if self._waiting - behind < delay or behind < backlog:  # of those with a slot, and of the others
            return True
        self._hold = (0, 0)
        return False

    def _start(self, line: Line, now: int) -> Request:
        request, _ = line.queue.popitem(last=False)
        self._waiting -= 1
        line.running = request
        record = request.sequence
        assert isinstance(record, Sequence)
        if line.seen is not None and line.seen is not record and line.slot is not None:
            self.endings.add(line.slot[0], self._which(line.seen, line.slot[1]), endings.START)
        line.seen = record
        record.flags = request.flags | line.own
        if self._config.iterative_sequence:
            record.run_flags = record.flags = 0 if request in self._again else record.flags
            self._again.discard(request)
            request.arrival = now  # should it run again, others have their turn before
        record.started = bool(record.flags & SEQUENCE_START)
        self._touch(line, now)
        return request

    def _touch(self, line: Line, now: int) -> None:
        line.last = now
        self._quiet.pop(line, None)

    def _settle(self, line: Line) -> None:
        if line.queue or line.running is not None:
            return
        if line.ended:
            self._release(line)
        elif line not in self._quiet:
            self._quiet[line] = None

    def _which(self, record: Sequence, index: int) -> int | str:
        return index if self.by_slot else record.text or record.id

    def _end(self, line: Line, verdict: Verdict, why: str) -> None:
        """The sequence is over; what runs of it frees the slot when it ends."""
        for request in [request for request in line.queue if request not in self._again]:
            del line.queue[request], self._lines[request]
            self._dropped[request] = verdict
            self._waiting -= 1
        if self._live.get(line.key) is line:
            del self._live[line.key]
            self.endings.past.note(line.key, why)
        line.ended, line.why = True, why
        self._quiet.pop(line, None)
        self._settle(line)

    def _release(self, line: Line) -> None:
        self._quiet.pop(line, None)
        self._backlog.pop(line, None)
        self._patience.pop(line, None)
        line.over = True
        if line.slot is None:
            return
        instance, index = line.slot
        if line.seen is not None:
            self.endings.add(instance, self._which(line.seen, index), line.why)
        self._slots[instance][index] = None
        line.slot = None
        while self._backlog:
            follower, _ = self._backlog.popitem(last=False)
            if not self._place(follower):
                self._backlog[follower] = None
                self._backlog.move_to_end(follower, last=False)
                return

    def _place(self, line: Line) -> bool:
        """The lowest free slot of the instance with most room, so that batches stay short."""
        instance = max(range(len(self._slots)), key=lambda i: (self._slots[i].count(None), -i))
        if None not in self._slots[instance]:
            return False
        index = self._slots[instance].index(None)
        self._slots[instance][index] = line
        line.slot = (instance, index)
        self._patience.pop(line, None)
        return True


def _key(request: Request) -> Key:
    return (0 if request.plan is None else request.plan.owner, request.sequence_id)


def _ended(request: Request) -> int:
    """When its run ended: what took long in the model is no idleness of the client."""
    return request.arrival + request.queue_ns + request.input_ns + request.infer_ns + request.output_ns
