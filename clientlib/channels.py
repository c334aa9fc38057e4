"""Channels of a client that is used by threads: one per thread and worker, handed on when its thread ends.

A channel shared by threads costs ten times one of the thread's own, so sharing starts only at the broker's limit, when
no thread that has ended has left one that could be given back.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from typing import Protocol, final

from shm.client_channel import ClientChannel
from shm.errors import Code, ForkedError, InferError
from shm.layout import FINAL

GONE = "the broker went away while the request was outstanding: whether it ran is not known"
CLOSED = "the client was closed while the request was outstanding"


@final
class Lane:
    """A channel and the threads that wait on it.

    Whoever holds `channel.role` reaps for all. Who finds it taken leaves a lock in `waiters` and sleeps on it; it is
    released when the request ends, or when the role is free and somebody must take it.
    """

    __slots__ = ("__weakref__", "_left", "channel", "error", "number", "waiters", "worker")

    def __init__(self, worker: str, channel: ClientChannel, left: Left) -> None:
        self.worker = worker
        self.channel = channel
        self.number = 0
        self.waiters: list[threading.Lock] = []
        self.error: InferError | None = None  # set when nobody may wait here any more: closed, or forked
        self._left = left

    def look(self) -> None:
        """Settle what has ended, unless another thread is doing that."""
        if self.channel.role.acquire(blocking=False):
            try:
                if not self.channel.reap() and self.error is None:
                    self.channel.drain_pipe()  # tells whether broker and worker are still there
                if self.channel.gone:
                    self.abandon()
            finally:
                self.leave_role()

    def abandon(self) -> None:
        """End what is outstanding after `channel.gone`: nobody will, and nobody writes to its memory any more.

        The caller holds the role.
        """
        self.channel.reap()  # what was completed before the end
        text = self.error.message if self.error is not None else CLOSED if self._left.closed else GONE
        for pending in self.channel.abandoned():
            pending.settle((0, 0, Code.UNAVAILABLE | FINAL, 0, 0, 0, 0, 0), text.encode())
        self._left.channel_gone()

    def leave_role(self) -> None:
        """Let the role go, and wake somebody who waits for it."""
        self.channel.role.release()
        if self.waiters:
            self.pass_on()

    def pass_on(self) -> None:
        """Wake one thread that waits: it takes the role, or finds its request ended and wakes the next."""
        with contextlib.suppress(IndexError):
            wake(self.waiters.pop(0))

    @property
    def is_busy(self) -> bool:
        """Is something outstanding here, as far as can be told without settling what has ended?"""
        return self.channel.outstanding > 0 and not self.channel.unread

    def close_unused(self) -> bool:
        """Close it if nothing is outstanding here and nobody is looking; else False. Nobody may be about to submit."""
        if not self.channel.role.acquire(blocking=False):
            return False
        try:
            self.channel.reap()  # what ended after its thread
            if self.channel.outstanding:
                return False
            self.error = InferError(
                Code.UNAVAILABLE, f"the channel to worker '{self.worker}' was given back: try again"
            )
            self.channel.close()
        finally:
            self.leave_role()
        return True

    def close(self) -> None:
        """Nobody may wait here any more. The descriptors are closed unless a thread is using them right now."""
        self.error = InferError(Code.UNAVAILABLE, CLOSED)
        if self.channel.role.acquire(timeout=1.0):
            try:
                self.channel.close()
            finally:
                self.channel.role.release()
        for lock in tuple(self.waiters):
            wake(lock)

    def leave_to_parent(self) -> None:
        """The channel is the parent's."""
        self.error = ForkedError()

    def __del__(self) -> None:
        self.channel.close()


class Left(Protocol):
    """Whom to tell that broker and worker of a channel are gone."""

    closed: bool  # it is the client that was closed

    def channel_gone(self) -> None:
        """The session is gone too; the next call reconnects."""


def wake(lock: threading.Lock) -> None:
    """Release a lock that somebody sleeps on; it may have been released already."""
    with contextlib.suppress(RuntimeError):
        lock.release()


@final
class _Held:
    """The lanes of one thread, and others' that it uses too. Dies with the thread, which returns them."""

    __slots__ = ("_lanes", "by_worker", "shared")

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self.by_worker: dict[str, Lane] = {}
        self.shared: list[Lane] = []

    def __del__(self) -> None:
        for lane in self.by_worker.values():
            self._lanes.give_back(lane)
        for lane in self.shared:
            self._lanes.leave_shared(lane)


@final
class Lanes:
    """All lanes of one session; `limit` is how many channels the broker gives it.

    Without a lock: a thread may end, and return its lanes, anywhere in this code, even in the middle of a statement.
    Each step on a list is atomic: who removes a lane has it.
    """

    __slots__ = ("_all", "_ended", "_free", "_limit", "_local", "_shared", "_turn")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ended = False
        self._all: list[Lane] = []
        self._free: list[Lane] = []  # of threads that have ended, in that order
        self._shared: list[Lane] = []  # once for each thread that uses it and does not own it
        self._local = threading.local()
        self._turn = itertools.count()

    def mine(self, worker: str) -> Lane | None:
        """This thread's lane to `worker`; None: open a channel and `add` it."""
        held = self._held()
        lane = held.by_worker.get(worker)
        if lane is not None:
            return lane
        for lane in reversed(tuple(self._free)):
            if lane.worker == worker and _removed(self._free, lane):
                held.by_worker[worker] = lane
                return lane
        return self.shared(worker) if len(self._all) >= self._limit and not self._free else None

    def add(self, worker: str, channel: ClientChannel, left: Left) -> Lane:
        """A new channel is this thread's."""
        lane = Lane(worker, channel, left)
        self._all.append(lane)
        self._held().by_worker[worker] = lane
        if self._ended:
            self.end()
        return lane

    def keep(self, worker: str, channel: ClientChannel, number: int, left: Left) -> bool:
        """A new channel is that of the next thread that needs one. False: one to this worker is free already."""
        if any(lane.worker == worker for lane in tuple(self._free)):
            channel.close()
            return False
        lane = Lane(worker, channel, left)
        lane.number = number
        self._all.append(lane)
        self._free.append(lane)
        if self._ended:
            self.end()
        return True

    def give_back(self, lane: Lane) -> None:
        """A thread has ended; requests of it that are still outstanding are settled by the next."""
        if not self._ended:
            self._free.append(lane)

    def leave_shared(self, lane: Lane) -> None:
        """A thread that shared it has ended."""
        _removed(self._shared, lane)

    def give_up(self) -> Lane | None:
        """The lane of the thread that ended first, closed. None: each may be used by a thread, or has a request."""
        for lane in tuple(self._free):
            if lane in self._shared or lane.is_busy or not _removed(self._free, lane):
                continue  # not out of the lists even for a moment: who is refused a channel may share it
            _removed(self._all, lane)  # then look who shares it; `shared` does the reverse, so one of the two sees it
            if lane not in self._shared and lane.close_unused():
                return lane
            self._all.append(lane)
            self._free.append(lane)
        return None

    def all(self) -> list[Lane]:
        """Every lane, whoever holds it."""
        return list(self._all)

    def end(self) -> None:
        """The session has ended: each lane goes, with its descriptors, when the last request on it does.

        Every lane refers to its link, and that to this object: without this they would wait for Python's collector.
        """
        self._ended = True
        self._local = threading.local()  # drops what every thread holds
        self._all.clear()
        self._free.clear()
        self._shared.clear()

    def shared(self, worker: str) -> Lane | None:
        """A lane that others use too; each call the next one."""
        held = self._held()
        while lanes := [lane for lane in self._all if lane.worker == worker]:
            lane = lanes[next(self._turn) % len(lanes)]
            if lane in held.shared:
                return lane
            self._shared.append(lane)
            if lane in self._all:
                held.shared.append(lane)
                return lane
            _removed(self._shared, lane)  # it was given up at this moment
        return None

    def _held(self) -> _Held:
        try:
            held: _Held = self._local.held
        except AttributeError:
            held = self._local.held = _Held(self)
        return held


def _removed(lanes: list[Lane], lane: Lane) -> bool:
    """Was it there until now?"""
    try:
        lanes.remove(lane)
    except ValueError:
        return False
    return True
