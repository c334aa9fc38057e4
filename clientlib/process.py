"""Which process is this? What a client made belongs to the process that made it, not to its forked children.

Channels are written by one process and sessions are one process's: after a fork every object of the parent's clients
must refuse to work in the child. Objects that are asked rarely remember the `generation` they were made in and
`check` it; those on the hot path are told by `leave_to_parent`, so that they need not ask.
"""

from __future__ import annotations

import os
import weakref
from typing import ClassVar, NoReturn, Protocol

from shm.errors import ForkedError


class Inherited(Protocol):
    """Something that a forked child finds in its memory."""

    def leave_to_parent(self) -> None:
        """Called in the child, by its only thread. Must take no lock: another thread of the parent may have held it."""


class StaysHere:
    """Something that works in the process that made it alone. `elsewhere` says what other processes do instead."""

    __slots__ = ()
    elsewhere: ClassVar[str]

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled, it belongs to the process that made it: "
            f"{self.elsewhere}"
        )


generation = 0
_inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()


def tell_after_fork(thing: Inherited) -> None:
    """Call `thing.leave_to_parent()` in every child forked while `thing` lives."""
    _inherited.add(thing)


def check(made_in: int) -> None:
    """Raises ForkedError unless `made_in` is this process's generation."""
    if made_in != generation:
        raise ForkedError


def _after_fork_in_child() -> None:
    global generation
    generation += 1
    for thing in list(_inherited):
        thing.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork_in_child)
