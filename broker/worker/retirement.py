"""When a model that was unloaded or replaced may be closed, and its end. Used by `broker.worker.scheduler`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from broker.worker.model import Instance, LoadedModel, not_loaded
from broker.worker.sequences import Sequences
from broker.worker.trim import trim
from shm.admission import Request

Begin = Callable[[Callable[[], None]], None]


def here(work: Callable[[], None]) -> None:
    """Do it in this thread."""
    work()


def needed(model: LoadedModel, now: int) -> bool:
    """Does it have work, or will it have? Under the scheduler's lock, like what follows up to `close`."""
    queue = model.queue
    return bool(len(queue) or model.pins or model.held or (isinstance(queue, Sequences) and queue.goes_on(now)))


def claim(model: LoadedModel) -> bool:
    """Take all instances, so that nothing can begin to run any more; False when one is at work."""
    if model.streams:
        return False
    taken = []
    with contextlib.suppress(IndexError):  # the leader's inline path takes and returns without the lock
        while model.free:
            taken.append(model.free.pop())
    if len(taken) < len(model.instances):
        model.free.extend(taken)
        return False
    model.closed = not_loaded(model.name)
    return True


def predecessor(retired: Iterable[LoadedModel], request: Request, model: LoadedModel) -> LoadedModel | None:
    """The one of `retired` that `model` replaced, if this request goes on with a sequence there."""
    wanted = plans_of(model)
    for old in retired:
        if isinstance(old.queue, Sequences) and old.queue.continues(request) and plans_of(old) == wanted:
            return old
    return None


def plans_of(model: LoadedModel) -> object:
    """Equal for models that take each other's plans."""
    config = model.config
    return config.name, model.version, config.input, config.output, config.max_batch_size, config.decoupled


def close(models: Sequence[LoadedModel], surplus: Sequence[Instance], begin: Begin) -> None:
    """Give back what these take. `begin` is given the work, one for each model: a backend's `close` may never return.

    That it goes on shows in the statistics page before this returns.
    """
    fewer: dict[LoadedModel, list[Instance]] = {}
    for instance in surplus:
        fewer.setdefault(instance.model, []).append(instance)
    for instances in fewer.values():
        _begin(instances, partial(_close_each, instances), begin)
    for model in models:
        _begin(model.instances, model.close, begin)


def _begin(leaving: Sequence[Instance], end: Callable[[], None], begin: Begin) -> None:
    def work() -> None:
        try:
            end()
        except BaseException:  # then nothing goes on that would be worth the worker
            for instance in leaving:
                instance.has_left()
            raise
        trim()

    for instance in leaving[:1]:
        instance.leaves()
    begin(work)


def _close_each(instances: Sequence[Instance]) -> None:
    for instance in instances:
        instance.flush()
        instance.close()
