"""A full memory fence for "set a flag, then look again" (both sides of every sleep/wake-up handshake).

x86 lets a load pass an earlier store to another address, so without a fence both sides of the handshake can miss each
other's store and sleep for good. Releasing an uncontended `threading.Lock` is an atomic read-modify-write, a full
fence on x86-64 and a release on others, at 0.1 µs; ctypes or C would cost a dependency to save half of that.
"""

from __future__ import annotations

import platform
import threading

# Elsewhere the lock's release is weaker than a full fence: there the channel always rings and never spins.
FENCE_IS_FULL = platform.machine() in ("x86_64", "AMD64")


class Fence(threading.local):
    """Call it between the store and the load. One lock per thread, so it is never contended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __call__(self) -> None:
        """Everything this thread stored before is visible before anything it loads after."""
        with self._lock:
            pass
