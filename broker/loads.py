"""Loads that are under way, so that an unload, or the end of the broker, can end one that does not end by itself.

Used by `broker.models`. What it takes to end a load in a worker is `broker.desired_state`'s.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Collection, Coroutine
from typing import Any, TypeVar, final

from shm.errors import Code, InferError

PATIENCE_S = 10.0  # an unload lets loads of that model end by themselves for so long: most take less

_log = logging.getLogger(__name__)

T = TypeVar("T")


@final
class Loads:
    """By model. A load that waits for its turn is under way as well."""

    __slots__ = ("_stopping", "_tasks")

    def __init__(self) -> None:
        self._tasks: dict[str, set[asyncio.Task[Any]]] = {}
        self._stopping = False

    async def run(self, model: str, work: Coroutine[Any, Any, T]) -> T:
        """Do `work`, a load of `model`. Raises InferError UNAVAILABLE when it was ended from outside."""
        if self._stopping:
            work.close()
            raise InferError(Code.UNAVAILABLE, f"failed to load '{model}': the broker is stopping")
        task = asyncio.create_task(work, name=f"load {model}")
        under_way = self._tasks.setdefault(model, set())
        under_way.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            why = "the broker is stopping" if self._stopping else "it was unloaded, or its files changed, meanwhile"
            raise InferError(Code.UNAVAILABLE, f"failed to load '{model}': {why}") from None
        finally:
            under_way.discard(task)
            if not under_way and self._tasks.get(model) is under_way:
                del self._tasks[model]

    async def end(self, model: str) -> None:
        """Returns when the loads of `model` that are under way now have ended, of themselves or not."""
        tasks = tuple(self._tasks.get(model, ()))
        if tasks:
            await asyncio.wait(tasks, timeout=PATIENCE_S)
            await cancel(tasks)

    async def stop(self) -> None:
        """End all that are under way, and let none begin any more."""
        self._stopping = True
        await cancel(tuple(task for tasks in self._tasks.values() for task in tasks))


@final
class Unawaited:
    """Loads and unloads that follow from something, and that nobody waits for."""

    __slots__ = ("_tasks",)

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """What goes wrong is logged."""
        task = asyncio.create_task(_told(work), name="loads that nobody waits for")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def stop(self) -> None:
        """Returns when all have ended."""
        await cancel(tuple(self._tasks))


@final
class Turns:
    """Loads and unloads of one model take turns, also of names that there is no model of."""

    __slots__ = ("_locks",)

    def __init__(self) -> None:
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    def of(self, model: str) -> asyncio.Lock:
        """Whoever holds it has the turn."""
        lock = self._locks.get(model)
        if lock is None:
            lock = self._locks[model] = asyncio.Lock()
        return lock

    def taken(self, model: str) -> bool:
        """Is it being loaded or unloaded now?"""
        return self.of(model).locked()


async def _told(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except InferError as error:
        _log.error("%s", error.message)
    except Exception:
        _log.exception("a load failed by a defect of the broker")


async def cancel(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Returns when they have ended."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
