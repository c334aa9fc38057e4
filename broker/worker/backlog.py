"""How long a worker will be at what it has, told to clients that may choose another one: a number in their channels.

Kept by `broker.worker.loop`, which tells it before and after runs that are not short, before it sleeps if there is
anything to tell, and every 10 ms while there is traffic. Clients weigh it in `clientlib.spread`, workers with steps of
ensembles elsewhere in `broker.worker.ensembles.remote`. It goes where only the client that reads it can write
(`shm.layout.AHEAD`), it is all that a client learns of others, and it is coarse. A worker that nobody asks (ASKS)
counts nothing, and for lone requests that run at once nothing is counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, final

from broker.worker.model import Instance, LoadedModel
from shm import statistics
from shm.layout import AHEAD, ASKS
from shm.worker_channel import WorkerChannel

SMALLEST_NS = 1 << 16  # what is over sooner is no reason to go elsewhere


class Models(Protocol):
    """What a worker has (`broker.worker.scheduler`), and what of it has something to do."""

    serving: tuple[LoadedModel, ...]
    retired: list[LoadedModel]
    queued: list[LoadedModel]
    running: list[Instance]


@final
class Backlog:
    """`asked`: the channels of those that want to be told."""

    __slots__ = ("_models", "_others", "_told", "asked")

    def __init__(self, models: Models) -> None:
        self._models = models
        self._told = 0
        self._others: tuple[LoadedModel, ...] = ()  # at work on what the scheduler does not list
        self.asked: tuple[WorkerChannel, ...] = ()

    def look(self, channels: Iterable[WorkerChannel], now: int, overdue: bool = False) -> None:
        """Find who asks, of all there are, and tell them. `overdue`: a run that a leader took for short is not over."""
        self.asked = tuple(channel for channel in channels if channel.words[ASKS])
        if not self.asked:
            self._others = ()  # they may be unloaded meanwhile
            return
        models = (*self._models.serving, *self._models.retired)
        self._others = tuple(model for model in models if model.streams or (overdue and _runs_any(model)))
        # Always written: some of them may not know, and of two threads that told at once the slower one may have
        # written last what it had counted first.
        self._told = -1
        self.tell(now)

    def has_news(self) -> bool:
        """Is there, or was there when it was last told, anything to do? Asked where lone requests go by."""
        return bool(self._told or self._models.queued or self._models.running)

    def tell(self, now: int) -> None:
        """Write what there is to do, where that has changed. Any thread. `now`: CLOCK_MONOTONIC ns.

        Only models at work are looked at: of hundreds that are loaded, few are.
        """
        running = (instance.model for instance in tuple(self._models.running))
        ahead = coarse(ahead_ns(dict.fromkeys((*self._models.queued, *running, *self._others)), now))
        if ahead != self._told:
            self._told = ahead
            for channel in self.asked:
                channel.words[AHEAD] = ahead


def coarse(ns: int) -> int:
    """The power of two at or below; 0 for what is too short to matter."""
    return 0 if ns < SMALLEST_NS else 1 << ns.bit_length() - 1


def ahead_ns(models: Iterable[LoadedModel], now: int) -> int:
    """Requests that wait and batches that run, each for as long as such ones usually take.

    Read without locks while others write: it is no more than a hint.
    """
    total = 0
    for model in models:
        instances = model.instances
        if not instances:
            continue
        runs = [_runs(instance, now) for instance in instances]
        work = sum(runs)
        if model.streams is not None:
            work = max(work, len(model.streams) * _mean(instances[0]))
        if waiting := model.pending():
            # Where none has ended well yet, each takes as long as those have taken that run.
            work += waiting * (next(filter(None, map(_each, instances)), 0) or max(runs))
        total += work // len(instances)
    return total


def _runs(instance: Instance, now: int) -> int:
    """What the batch that runs takes: as long as such ones usually do, or as it has run where that is longer."""
    rows = instance.block[statistics.BATCH]
    if not rows:
        return 0
    typical = instance.typical
    return max(typical.get(rows) or typical.get(0, 0), now - instance.block[statistics.STARTED])


def _runs_any(model: LoadedModel) -> bool:
    return any(instance.block[statistics.BATCH] for instance in model.instances)


def _each(instance: Instance) -> int:
    """What a request that waits takes, in the batches that take least per row."""
    block = instance.block
    rows = max(1, block[statistics.INFERENCES] // max(1, block[statistics.SUCCESS]))
    return rows * min((ns // (rows or 1) for rows, ns in list(instance.typical.items())), default=_mean(instance))


def _mean(instance: Instance) -> int:
    """What requests took that have ended, each as long as its batch."""
    return instance.block[statistics.INFER_NS] // max(1, instance.block[statistics.SUCCESS])
