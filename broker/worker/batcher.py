"""Which queued requests run together, and when. Pure: no thread, no clock, no model.

`DynamicBatcher` follows Triton's dynamic batcher; `SingleQueue` is its default scheduler. The loop calls `take` when an
instance is free, and again at `due`. Clients take turns within a priority level (`shm.fair_line`).
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import final

from broker.repository.config import ModelConfig
from broker.repository.scheduling import DynamicBatching, QueuePolicy
from broker.worker import strategies
from broker.worker.levels import Level
from broker.worker.queues import Queue, Row
from shm import statistics
from shm.admission import Request, Verdict
from shm.errors import Code
from shm.fair_line import FairLine

DROPPED = "a newer request took its place: "
MISFITS = 16  # clients passed over for one batch at most, so that a look at the queue stays short


@final
class SingleQueue:
    """First come, first served among a client's requests, one at a time."""

    __slots__ = ("_line", "_ready", "_waiting", "closed_by", "late_at", "pinned")

    def __init__(self) -> None:
        self._line = FairLine[Request]()
        self._ready: list[Request] = []  # set aside
        self._waiting = 0
        self.closed_by = statistics.IDLE
        self.pinned = False
        self.late_at = 0

    def __len__(self) -> int:
        return self._waiting

    def add(self, request: Request, now: int, free: int = 0) -> Verdict | None:
        """Queue behind all others of its client."""
        self._line.add(request)
        self._waiting += 1
        return None

    def set_aside(self, free: int) -> Sequence[Request]:
        """As in `DynamicBatcher`."""
        while len(self._ready) < min(free, self._waiting):
            self._ready.append(self._line.pop())
        return self._ready

    def take(self, now: int, instance: int = 0, most: int = 0) -> Sequence[Row]:
        """The oldest request of the client whose turn it is, or []."""
        if not self._waiting:
            return []
        self._waiting -= 1
        return [self._ready.pop(0) if self._ready else self._line.pop()]

    def wants(self, now: int, instance: int = 0) -> bool:
        """Is anything queued?"""
        return self._waiting > 0

    def due(self) -> int:
        """When the oldest request came: it never waits for others. 0 when nothing is queued."""
        if self._ready:
            return self._ready[0].arrival
        return min((request.arrival for request in self._line.heads()), default=0)

    def done(self, instance: int, batch: Sequence[Row]) -> int:
        """Nothing waits for that."""
        return 0

    def late(self, now: int) -> list[tuple[Request, Verdict]]:
        """Nobody waits too long here."""
        return []

    def remove(self, request: Request) -> bool:
        """Drop one request (cancelled); False when it is not queued any more."""
        if request in self._ready:
            self._ready.remove(request)
            found = True
        else:
            found = self._line.remove(request)
        self._waiting -= found
        return found


@final
class DynamicBatcher:
    """Requests concatenated along the batch dimension.

    A batch is dispatched when it reaches a preferred size, would outgrow all of them, cannot grow (maximum reached, or
    the next request has another signature), or its oldest request has waited `max_queue_delay_microseconds`; with a
    delay of 0 whatever is queued goes as soon as an instance is free. Level 1 comes first; within a level a client's
    order is kept and clients take turns, where one whose request does not fit the batch is passed over and begins the
    next one.

    A limit (`max_queue_size`, `max_queue_bytes`) counts what waits beyond what can start. Where it is reached while
    instances are idle, their batches are closed as they are, also before the queue delay is over, and set aside:
    nothing is refused or dropped that could run. To wait for larger batches instead would cost requests.

    `hold`: no batch before so many requests are queued, once (TRITONSERVER_DELAY_SCHEDULER, for tests).
    """

    __slots__ = ("_default_level", "_delay", "_dropped", "_hold", "_largest_preferred", "_levels", "_max", "_preferred",
                 "_ready", "_single", "_waiting", "closed_by", "late_at", "pinned")  # fmt: skip

    def __init__(self, max_batch_size: int, config: DynamicBatching, hold: int = 0) -> None:
        self._max = max(1, max_batch_size)
        self._preferred = frozenset(config.preferred_batch_size or (self._max,))
        self._largest_preferred = max(self._preferred)
        self._delay = config.max_queue_delay_microseconds * 1000
        levels = max(1, config.priority_levels)
        self._default_level = min(max(1, config.default_priority_level), levels)
        policies, default = config.priority_queue_policy, config.default_queue_policy
        self._levels = [Level(policies.get(level, default)) for level in range(1, levels + 1)]
        plain = len(self._levels) == 1 and not self._levels[0].policy.default_timeout_microseconds
        self._single = (self._levels[0].line,) if plain else None  # the only line there is
        self._dropped: OrderedDict[Request, Verdict] = OrderedDict()  # they leave by `late`
        self._ready: list[list[Request]] = []  # set aside, one batch for each instance that was idle
        self._waiting = 0  # with those set aside, without those dropped
        self._hold = hold
        self.closed_by = statistics.IDLE
        self.pinned = False
        self.late_at = 0

    def __len__(self) -> int:
        return self._waiting + len(self._dropped)

    def add(self, request: Request, now: int, free: int = 0) -> Verdict | None:
        """Queue in the request's priority level (0 or out of range: the default level). FULL where that is full."""
        level = self._level_of(request)
        most = level.policy.max_queue_size
        if most and free and level.size >= most:
            self.set_aside(free)
        if most and level.size >= most:
            if level.policy.drop_oldest:
                self._drop(level, now, f"the queue is full at {most} (max_queue_size, drop_oldest)")
            elif not self._make_room(level, request, now):
                return level.full(request, now)
        level.add(request, now)
        self._waiting += 1
        if level.late_at and (not self.late_at or level.late_at < self.late_at):
            self._look()
        return None

    def set_aside(self, free: int) -> Sequence[Request]:
        """Close the batches that `free` idle instances would take now. Returns all that waits for nothing else."""
        if not self._hold:
            for batch in self._ready:
                self._fill(batch, 0)
            while len(self._ready) < free and self._waiting > sum(map(len, self._ready)):
                self._ready.append([])
                self._fill(self._ready[-1], 0)
        return [request for batch in self._ready for request in batch]

    def _fill(self, batch: list[Request], most: int) -> int:
        """Let what may go along wait for nothing but the batch. Returns why the batch is closed."""
        chosen, rows, preferred, _ = self._choose(batch, most)
        own = chosen[len(batch) : preferred or None]
        self._pop(own)
        self._waiting += len(own)
        batch += own
        return statistics.PREFERRED if preferred and rows < self._max else statistics.FULL

    def let_oldest_go(self, request: Request, now: int, why: str) -> Request | None:
        """The queue has too many bytes for `request`: what goes for it (`drop_oldest`); None: nothing does."""
        level = self._level_of(request)
        if not (level.policy.drop_oldest and level.size):
            return None
        return self._drop(level, now, why)

    def _drop(self, level: Level, now: int, why: str) -> Request:
        """A full queue lets go the oldest of the client that fills it most."""
        oldest = (level.delayed or level.line).oldest_of_the_greediest()
        level.remove(oldest)
        self._waiting -= 1
        self._dropped[oldest] = (Code.UNAVAILABLE, DROPPED + why)
        self.late_at = max(1, now)
        return oldest

    def _make_room(self, level: Level, request: Request, now: int) -> bool:
        """A full queue keeps no client out that has less in it than others: the newest of the greediest is refused."""
        newest = level.line.beyond_its_share(request)
        if newest is None:
            return False
        level.remove(newest)
        self._waiting -= 1
        self._dropped[newest] = level.full(newest, now)
        self.late_at = max(1, now)
        return True

    def take(self, now: int, instance: int = 0, most: int = 0) -> Sequence[Row]:
        """The next batch, of at most `most` requests (0: any number), or [] when it is worth waiting until `due`."""
        if self.late_at and now >= self.late_at:
            self._let_go(now)
        if self._hold:
            if self._waiting < self._hold:
                return []
            self._hold = 0
        if not self._waiting:
            return []
        if self._ready:
            return self._take_ready(most)
        chosen, rows, preferred, closed = self._choose((), most)
        waited = self._delay > 0 and now - min(request.arrival for request in chosen) >= self._delay
        if preferred and not waited:
            is_full = preferred == len(chosen) and (closed or chosen[0].signature is None)
            self.closed_by = statistics.FULL if is_full else statistics.PREFERRED
            return self._leave(chosen[:preferred])
        if closed or waited or not self._delay or rows >= self._largest_preferred or chosen[0].signature is None:
            self.closed_by = self._reason(closed and (rows >= self._max or len(chosen) != most), waited, chosen, rows)
            return self._leave(chosen)
        return []

    def _choose(self, begun: Sequence[Request], most: int) -> tuple[list[Request], int, int, bool]:
        """`begun` and what may go along: all of it, its rows, how many make a preferred size, can nothing be added."""
        chosen = list(begun)
        rows = sum([request.rows or 1 for request in begun])
        signature = chosen[0].signature if chosen else None
        preferred = len(chosen) if rows in self._preferred else 0
        closed = rows >= self._max or 0 < most <= len(chosen)
        for line in () if closed else self._lines():
            misfits = 0
            for request in line:
                size = request.rows or 1
                if chosen and (request.signature is not signature or signature is None or rows + size > self._max):
                    closed = True
                    misfits += 1
                    if misfits > MISFITS or not line.shared:
                        break
                    line.pass_over()
                    continue
                if chosen and not preferred and rows + size > self._largest_preferred:
                    preferred = len(chosen)  # as in Triton: it would be larger than all that are preferred
                signature = request.signature
                rows += size
                chosen.append(request)
                if rows in self._preferred:
                    preferred = len(chosen)
                if rows >= self._max or len(chosen) == most:
                    closed = True
                    break
            if closed:
                break
        return chosen, rows, preferred, closed

    def _take_ready(self, most: int) -> Sequence[Row]:
        """The first batch that was set aside, with what has come since and fits in."""
        batch = self._ready.pop(0)
        self.closed_by = self._fill(batch, most)
        self._waiting -= len(batch)
        self._forget(batch)
        return batch

    def _reason(self, full: bool, waited: bool, batch: list[Request], rows: int) -> int:
        """Why a batch goes that was not cut to a preferred size."""
        if full or batch[0].signature is None:
            return statistics.FULL
        if waited:
            return statistics.DELAY
        return statistics.PREFERRED if rows >= self._largest_preferred else statistics.IDLE

    def wants(self, now: int, instance: int = 0) -> bool:
        """Does what waits make a batch by now? Rows are not counted, so one of large requests may count later."""
        if self._ready:
            return True
        if self._waiting <= (self._hold - 1 if self._hold else 0):
            return False
        return self._waiting >= min(self._preferred) or now >= self.due()

    def due(self) -> int:
        """When the oldest request will have waited long enough; 0 when nothing is queued."""
        if self._hold:
            return 0
        if self._ready:
            return self._ready[0][0].arrival
        heads = (request.arrival for line in self._lines() for request in line.heads())
        return min(heads, default=-self._delay) + self._delay

    def done(self, instance: int, batch: Sequence[Row]) -> int:
        """Nothing waits for that."""
        return 0

    def late(self, now: int) -> list[tuple[Request, Verdict]]:
        """Those that their level's policy lets wait no longer, and those that newer ones took the place of."""
        self._let_go(now)
        late = list(self._dropped.items())
        self._dropped.clear()
        self._look()
        return late

    def _let_go(self, now: int) -> None:
        for level in self._levels:
            if level.late_at and level.late_at <= now:
                for request in level.late(now):
                    self._out_of_ready(request)
                    self._dropped[request] = level.expired(request)
                    self._waiting -= 1
        self._look()

    def _look(self) -> None:
        self.late_at = min((level.late_at for level in self._levels if level.late_at), default=0)
        if self._dropped:
            self.late_at = 1  # at once

    def remove(self, request: Request) -> bool:
        """Drop one request (cancelled); False when it is not queued any more."""
        if self._dropped.pop(request, None) is not None:
            return True
        if self._out_of_ready(request):
            self._forget((request,))
        elif not any(level.remove(request) for level in self._levels):
            return False
        self._waiting -= 1
        return True

    def _out_of_ready(self, request: Request) -> bool:
        """Take it out of what was set aside; False when it is not there."""
        for batch in self._ready:
            if request in batch:
                batch.remove(request)
                if not batch:
                    self._ready.remove(batch)
                return True
        return False

    def _level_of(self, request: Request) -> Level:
        number = request.priority if 1 <= request.priority <= len(self._levels) else self._default_level
        return self._levels[number - 1]

    def _lines(self) -> Sequence[FairLine[Request]]:
        if self._single is not None:
            return self._single
        return [line for level in self._levels for line in (level.line, level.delayed) if line]

    def _leave(self, batch: list[Request]) -> list[Request]:
        """Take out what `take` has chosen."""
        self._pop(batch)
        self._forget(batch)
        return batch

    def _pop(self, batch: list[Request]) -> None:
        """These do not stand in line any more."""
        self._waiting -= len(batch)
        if self._single is not None:
            self._single[0].serve(batch)
            self._levels[0].size -= len(batch)
        else:
            for level in self._levels:
                level.take(batch)

    def _forget(self, batch: Sequence[Request]) -> None:
        """They cannot be late any more."""
        if self._single is None:
            for level in self._levels:
                level.forget(batch)


def queue_for(config: ModelConfig, instances: int) -> Queue:
    """The scheduler that a model's configuration asks for. Raises InferError where there is none."""
    if config.sequence_batching is not None:
        return strategies.queue_for(config, instances)
    batching = config.dynamic_batching
    if batching is None:
        return SingleQueue()
    hold = scheduler_delay()
    limited = config.max_queue_bytes or _limits(policies(batching))
    if config.max_batch_size <= 1 and not (hold or batching.priority_levels or limited):
        return SingleQueue()
    return DynamicBatcher(config.max_batch_size, batching, hold)


def scheduler_delay() -> int:
    """Triton's test hook: a dynamic batcher that is loaded now holds its first batch for so many requests."""
    text = os.environ.get("TRITONSERVER_DELAY_SCHEDULER", "")
    return int(text) if text.isascii() and text.isdigit() else 0


def policies(batching: DynamicBatching) -> tuple[QueuePolicy, ...]:
    """Of all levels."""
    return (batching.default_queue_policy, *batching.priority_queue_policy.values())


def _limits(given: Iterable[QueuePolicy]) -> bool:
    return any(policy.max_queue_size or policy.default_timeout_microseconds for policy in given)


def has_timeouts(config: ModelConfig) -> bool:
    """Do requests leave its queue by themselves?"""
    batching = config.dynamic_batching
    if batching is None or config.max_queue_bytes:
        return bool(config.max_queue_bytes) or config.sequence_batching is not None
    return _limits(policies(batching))
