"""Waiting, from any thread, for what a channel brings: shared by requests with one answer and with many.

One of the threads that wait on a channel reaps for all (see `clientlib.channels.Lane`); the others sleep on locks.
"""

from __future__ import annotations

import contextlib
import threading
import time

from clientlib.channels import Lane, wake
from clientlib.interrupted import interrupted, is_below
from clientlib.process import StaysHere
from shm.errors import fresh

_now = time.monotonic
LONGEST_WAIT_S = 3600.0  # of one wait; whoever waits looks again after it


class Waiting(StaysHere):
    """A request on `lane`. Subclasses set all attributes."""

    __slots__ = ("_wakes", "input_slot", "lane", "output_slot", "rows")

    lane: Lane
    input_slot: int  # the positions that it uses
    output_slot: int
    rows: int
    _wakes: list[threading.Lock] | None  # None until somebody sleeps here

    @property
    def entry(self) -> object:
        """None while there is nothing to take. It is set last: a thread that sees it sees everything else."""
        raise NotImplementedError

    def settle(self, entry: tuple[int, ...], note: bytes) -> None:
        """A completion of the channel. Called by whoever reaps."""
        raise NotImplementedError

    def done(self) -> bool:
        """Has the request ended? Never waits."""
        raise NotImplementedError

    def wait(self, deadline: float) -> bool:
        """Wait until there is something to take or until `deadline` (time.monotonic); was the former the case?"""
        lane = self.lane
        role = lane.channel.role
        try:
            while self.entry is None:
                error = lane.error
                if error is not None and self.entry is None:  # one that is given back has settled everything before
                    raise fresh(error)
                remaining = deadline - _now()
                if remaining <= 0:
                    lane.look()
                    return self.entry is not None
                if role.acquire(blocking=False):
                    try:
                        self._reap_until(deadline)
                    finally:
                        role.release()
                else:
                    self._sleep(min(remaining, LONGEST_WAIT_S))
        finally:
            if lane.waiters and not role.locked():
                lane.pass_on()
        return True

    def _wake_all(self) -> None:
        """Whoever sleeps here looks at `entry`."""
        if self._wakes is not None:
            for lock in tuple(self._wakes):
                wake(lock)

    def _reap_until(self, deadline: float) -> None:
        """Settle for all who share the channel, until there is something to take here."""
        lane = self.lane
        channel = lane.channel
        while self.entry is None and lane.error is None:
            remaining = deadline - _now()
            if remaining <= 0:
                return
            channel.wait(min(remaining, LONGEST_WAIT_S))
            channel.reap()
            if channel.gone:
                lane.abandon()

    def _sleep(self, timeout_s: float) -> None:
        """Another thread has the role: sleep until there is something to take or the role is free."""
        lane = self.lane
        if is_below(lane):  # it is this thread, which goes on when we have returned
            raise interrupted()
        lock = threading.Lock()
        lock.acquire()
        if self._wakes is None:
            self._wakes = []
        self._wakes.append(lock)
        lane.waiters.append(lock)
        try:
            # Only now, because what happened before the lock was in place woke nobody.
            if self.entry is None and lane.error is None and lane.channel.role.locked():
                lock.acquire(timeout=timeout_s)
        finally:
            self._wakes.remove(lock)
            with contextlib.suppress(ValueError):
                lane.waiters.remove(lock)
