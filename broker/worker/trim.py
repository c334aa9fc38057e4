"""Giving memory back to the system, as the allocator does not by itself: pieces of a large model lie between others.

Called when a model was loaded and when its instances have been closed. Without it a worker kept 30 MiB of a network of
300 MiB after forty loads and unloads.
"""

from __future__ import annotations

import ctypes

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's allocator alone has it


def trim() -> None:
    """Takes milliseconds after a large model; the GIL is free meanwhile."""
    if _trim is not None:
        _trim(0)
