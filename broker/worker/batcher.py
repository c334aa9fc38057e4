"""Which queued requests run together, and when. Pure: no thread, no clock, no model.

`DynamicBatcher` follows Triton's dynamic batcher; `SingleQueue` is its default scheduler. The loop calls `take` when an
instance is free, and again at `due`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import final

from broker.repository.config import ModelConfig
from broker.repository.scheduling import DynamicBatching
from broker.worker import sequences
from broker.worker.queues import Queue, Row
from shm.admission import Request, Verdict

# First in, first out, and quick to take one from the middle: cancelling thousands must cost nobody else anything.
Line = OrderedDict[Request, None]


@final
class SingleQueue:
    """First come, first served, one request at a time."""

    __slots__ = ("_queue", "late_at", "pinned")

    def __init__(self) -> None:
        self._queue: Line = OrderedDict()
        self.pinned = False
        self.late_at = 0

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, request: Request, now: int) -> Verdict | None:
        """Queue behind all others."""
        self._queue[request] = None
        return None

    def take(self, now: int, instance: int = 0, most: int = 0) -> Sequence[Row]:
        """The oldest request, or []."""
        return [self._queue.popitem(last=False)[0]] if self._queue else []

    def due(self) -> int:
        """When the oldest request came: it never waits for others. 0 when nothing is queued."""
        return _oldest(self._queue).arrival if self._queue else 0

    def done(self, instance: int, batch: Sequence[Row]) -> None:
        """Nothing waits for that."""

    def late(self, now: int) -> list[tuple[Request, Verdict]]:
        """Nobody waits too long here."""
        return []

    def remove(self, request: Request) -> bool:
        """Drop one request (cancelled); False when it is not queued any more."""
        return _remove(self._queue, request)


@final
class DynamicBatcher:
    """Requests concatenated along the batch dimension.

    A batch is dispatched when it reaches a preferred size, cannot grow (maximum reached, or the next request has
    another signature), or its oldest request has waited `max_queue_delay_microseconds`; with a delay of 0 whatever is
    queued goes as soon as an instance is free. Order is kept within a priority level; level 1 comes first.
    """

    __slots__ = ("_default_level", "_delay", "_largest_preferred", "_levels", "_max", "_preferred", "late_at", "pinned")

    def __init__(self, max_batch_size: int, config: DynamicBatching) -> None:
        self._max = max_batch_size
        self._preferred = frozenset(config.preferred_batch_size or (max_batch_size,))
        self._largest_preferred = max(self._preferred)
        self._delay = config.max_queue_delay_microseconds * 1000
        levels = max(1, config.priority_levels)
        self._default_level = min(max(1, config.default_priority_level), levels)
        self.pinned = False
        self.late_at = 0
        self._levels: list[Line] = [OrderedDict() for _ in range(levels)]

    def __len__(self) -> int:
        return sum(map(len, self._levels))

    def add(self, request: Request, now: int) -> Verdict | None:
        """Queue in the request's priority level (0 or out of range: the default level)."""
        level = request.priority if 1 <= request.priority <= len(self._levels) else self._default_level
        self._levels[level - 1][request] = None
        return None

    def take(self, now: int, instance: int = 0, most: int = 0) -> Sequence[Row]:
        """The next batch, of at most `most` requests (0: any number), or [] when it is worth waiting until `due`."""
        count = rows = preferred = 0
        closed = False
        signature: object = None
        oldest = now
        for request in self._queued():
            if count and (request.signature is not signature or signature is None or rows + request.rows > self._max):
                closed = True
                break
            signature = request.signature
            oldest = min(oldest, request.arrival)
            rows += request.rows
            count += 1
            if rows in self._preferred:
                preferred = count
            if rows >= self._max or count == most:
                closed = True
                break
        if not count:
            return []
        waited = self._delay > 0 and now - oldest >= self._delay
        if preferred and not waited:
            return self._pop(preferred)
        if closed or waited or not self._delay or rows >= self._largest_preferred or signature is None:
            return self._pop(count)
        return []

    def due(self) -> int:
        """When the oldest request will have waited long enough; 0 when nothing is queued."""
        return min((_oldest(queue).arrival for queue in self._levels if queue), default=-self._delay) + self._delay

    def done(self, instance: int, batch: Sequence[Row]) -> None:
        """Nothing waits for that."""

    def late(self, now: int) -> list[tuple[Request, Verdict]]:
        """Nobody waits too long here."""
        return []

    def remove(self, request: Request) -> bool:
        """Drop one request (cancelled); False when it is not queued any more."""
        return any(_remove(queue, request) for queue in self._levels)

    def _queued(self) -> Iterator[Request]:
        for queue in self._levels:
            yield from queue

    def _pop(self, count: int) -> list[Request]:
        batch: list[Request] = []
        for queue in self._levels:
            if len(queue) <= count - len(batch):
                batch += queue
                queue.clear()
            while queue and len(batch) < count:
                batch.append(queue.popitem(last=False)[0])
        return batch


def queue_for(config: ModelConfig, instances: int) -> Queue:
    """The scheduler that a model's configuration asks for. Raises InferError where there is none."""
    if config.sequence_batching is not None:
        return sequences.queue_for(config, instances)
    if config.dynamic_batching is None or config.max_batch_size <= 1:
        return SingleQueue()
    return DynamicBatcher(config.max_batch_size, config.dynamic_batching)


def _oldest(queue: Line) -> Request:
    return next(iter(queue))


def _remove(queue: Line, request: Request) -> bool:
    if request not in queue:
        return False
    del queue[request]
    return True
