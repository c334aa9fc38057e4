"""Calls by code that interrupted another call of the same thread: a signal handler, a destructor.

What such a call waits for may be what the interrupted one would do when it went on: read the answer, free a slot. So it
is told, here, instead of waiting for ever. On the hot path nobody asks: who finds the role of reaping taken does
(`clientlib.waiting`), everybody else where calls are no short ones (`Turn`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TypeVar, final

from shm.errors import Code, InferError

T = TypeVar("T")


@final
class Interrupted(InferError):
    """The client was called by code that interrupted a call of the same thread, and would have waited for that."""


def interrupted() -> Interrupted:
    """What such a caller gets."""
    return Interrupted(
        Code.UNSUPPORTED,
        "the client was called by a signal handler, or a destructor, that interrupted a call of the same thread, which "
        "cannot go on before it returns: let the handler set a flag, or have another thread call",
    )


def is_below(lane: object) -> bool:
    """Does the call that asks interrupt one of the same thread that works on `lane`?

    Told by the frames: those of this library from the caller's on, the code that it was called by, and then, if that
    interrupted one, such frames again.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_ours(frame):
        frame = frame.f_back
    while frame is not None:
        if _is_ours(frame) and any(frame.f_locals.get(name) is lane for name in ("lane", "self")):
            return True
        frame = frame.f_back
    return False


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith(("clientlib.", "shm."))


@final
class Turn(threading.local):
    """Of one client: is this thread in a call already?"""

    _taken = False

    def run(self, call: Callable[[], T]) -> T:
        """The result of `call`. Raises Interrupted within another one."""
        if self._taken:
            raise interrupted()
        self._taken = True
        try:
            return call()
        finally:
            self._taken = False
