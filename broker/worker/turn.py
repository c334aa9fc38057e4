"""Whose turn it is to hold the channels: leader and followers.

The leader looks at the channels, schedules, and runs short batches itself: no hand-off on the hot path. Before a long
batch it steps down and a follower leads. A batch that was expected to be short and is not would leave the channels
unwatched: `depose` takes the lead away from a leader that has been inside one for too long.
"""

from __future__ import annotations

import enum
import threading
from typing import final


class Inline(enum.Enum):
    """What became of a leader's attempt to run the only request itself."""

    DONE = enum.auto()
    NOT_POSSIBLE = enum.auto()
    DEPOSED = enum.auto()


@final
class Turn:
    """A lock that a third party may take away. A term is the number of one thread's lead."""

    __slots__ = ("_entered", "_guard", "_inline_since", "_lead", "_overdue", "_term")

    def __init__(self) -> None:
        self._lead = threading.Lock()
        self._guard = threading.Lock()  # the others below, for an instant
        self._term = 0
        self._entered = False
        self._inline_since = 0
        self._overdue = 0  # deposed leaders that are still inside their batch

    def take(self) -> int:
        """Wait to lead; returns the term."""
        self._lead.acquire()
        with self._guard:
            self._term += 1
            self._inline_since = 0
            return self._term

    def step_down(self, term: int) -> None:
        """Let a follower lead. Nothing happens if this term was ended by `depose`."""
        with self._guard:
            if self._term != term:
                return
            self._term += 1
            self._inline_since = 0
        self._lead.release()

    def enter(self) -> None:
        """The leader is about to run a short batch itself. It keeps the lead until `commit`."""
        self._entered = True

    def commit(self, now: int) -> None:
        """The batch is the leader's own from here on, whoever leads."""
        self._inline_since = now

    def inside(self) -> bool:
        """Is the leader running a batch itself, or one that was deposed?"""
        return bool(self._entered or self._overdue)

    @property
    def overdue(self) -> bool:
        """Is a leader that was deposed still inside its batch?"""
        return self._overdue > 0

    def leave(self, term: int) -> bool:
        """The batch is over. False: this term was ended meanwhile, another thread leads."""
        with self._guard:
            if self._term != term:
                self._overdue -= 1
                return False
            self._inline_since = 0
            self._entered = False
            return True

    def depose(self, now: int, limit_ns: int) -> bool:
        """End the term of a leader that has been inside a batch for more than `limit_ns`."""
        since = self._inline_since
        if not since or now - since <= limit_ns:
            return False
        with self._guard:
            if not self._inline_since or now - self._inline_since <= limit_ns:
                return False
            self._term += 1
            self._overdue += 1  # before the next stores: `inside` may look in between
            self._inline_since = 0
            self._entered = False
        self._lead.release()  # a Lock may be released by a thread that did not acquire it
        return True
