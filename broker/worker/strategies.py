"""Which requests of sequences run together, and when: Triton's strategies "direct" and "oldest".

What both have in common is `broker.worker.sequences`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence as Rows
from typing import final

from broker.repository.config import ModelConfig
from broker.repository.scheduling import SequenceBatching
from broker.worker.queues import Queue, Row
from broker.worker.sequence import Line
from broker.worker.sequences import Sequences
from shm import statistics


@final
class DirectSequences(Sequences):
    """A sequence keeps one row of one instance's batches; rows that have nothing to do are None."""

    by_slot = True

    def take(self, now: int, instance: int = 0, most: int = 0) -> Rows[Row]:
        """Rows up to the highest occupied slot, when one of them has a request."""
        if self._asked:
            return self._asked_for()
        ready = self._next(now, instance)
        if not ready:
            return ()
        slots = self._slots[instance]
        chosen = set(ready[: most or None])
        highest = max(index for index, line in enumerate(slots) if line is not None)
        return [self._start(line, now) if line in chosen else None for line in slots[: highest + 1]]

    def _next(self, now: int, instance: int, most: int = 0) -> list[Line]:
        slots = self._slots[instance]
        ready = [line for line in slots if line is not None and line.ready()]
        if not ready or self._held():
            return []
        least = self._config.minimum_slot_utilization if self._wait else 0
        waited = self._wait > 0 and now - min(next(iter(line.queue)).arrival for line in ready) >= self._wait
        if len(ready) < least * len(slots) and not waited:
            return []
        if len(ready) == len(slots):
            self.closed_by = statistics.FULL
        elif waited:
            self.closed_by = statistics.DELAY
        else:
            self.closed_by = statistics.PREFERRED if least else statistics.IDLE
        return ready


@final
class OldestSequences(Sequences):
    """Requests of different candidate sequences of an instance share batches, the oldest first."""

    def __init__(
        self,
        name: str,
        config: SequenceBatching,
        instances: int,
        slots: int,
        delay: int = 0,
        backlog_delay: int = 0,
        batch: int = 1,
    ) -> None:
        super().__init__(name, config, instances, slots, delay, backlog_delay)
        self._batch = batch

    def take(self, now: int, instance: int = 0, most: int = 0) -> Rows[Row]:
        """Up to the batch size; a smaller batch than preferred waits for the queue delay."""
        if self._asked:
            return self._asked_for()
        return [self._start(line, now) for line in self._next(now, instance, most)]

    def _next(self, now: int, instance: int, most: int = 0) -> list[Line]:
        ready = [line for line in self._slots[instance] if line is not None and line.ready()]
        if not ready or self._held():
            return []
        ready.sort(key=lambda line: next(iter(line.queue)).arrival)
        heads = [next(iter(line.queue)) for line in ready]
        signature = heads[0].signature
        fitting = [line for line, head in zip(ready, heads, strict=True) if head.signature is signature]
        most = min(most or self._batch, self._batch)
        count = min(len(fitting), most) if signature is not None else 1
        waited = now - heads[0].arrival >= self._wait
        preferred = max((size for size in self._config.preferred_batch_size if size <= count), default=0)
        if not waited and count < most and not preferred and signature is not None:
            return []
        taken = fitting[: count if waited or not preferred else preferred]
        if signature is None or len(taken) == most or (len(taken) == len(fitting) < len(ready)):
            self.closed_by = statistics.FULL
        elif waited:
            self.closed_by = statistics.DELAY if self._wait else statistics.IDLE
        else:
            self.closed_by = statistics.PREFERRED
        return taken


def queue_for(config: ModelConfig, instances: int) -> Queue:
    """The scheduler of a model with `sequence_batching`."""
    batching = config.sequence_batching
    assert batching is not None
    delay = _number("TRITONSERVER_DELAY_SCHEDULER")
    backlog = _number("TRITONSERVER_BACKLOG_DELAY_SCHEDULER")
    batch = max(1, config.max_batch_size)
    if not batching.oldest:
        return DirectSequences(config.name, batching, instances, batch, delay, backlog)
    candidates = max(1, batching.max_candidate_sequences)
    return OldestSequences(config.name, batching, instances, candidates, delay, backlog, batch)


def _number(variable: str) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else 0
