"""prctl(2): what a process asks of the kernel for itself. Used by every kind of process of the broker."""

from __future__ import annotations

import ctypes
import os

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36


def prctl(option: int, value: int | bytes) -> None:
    """Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value), 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def undumpable() -> None:
    """Nobody of the same uid may open this process's memory or descriptors, unless $TENSORBROKER_DEBUG is 1."""
    if os.environ.get("TENSORBROKER_DEBUG") != "1":
        prctl(PR_SET_DUMPABLE, 0)
