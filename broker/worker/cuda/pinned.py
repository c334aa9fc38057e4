"""Host memory that a GPU reads and writes by itself: pinned once, when a region is registered, where that is possible.

Called by `broker.worker.regions` in workers on a GPU, and for mirrors of GPU memory that are used often. Copies of
memory that is not pinned work, too, but go through the driver's own buffers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from broker.worker.cuda.streams import Bytes, address
from shm.cuda.driver import Context, CudaError, attempt, call
from shm.statistics import PINNED_BYTES

PORTABLE: Final = 1  # CU_MEMHOSTREGISTER_PORTABLE
READ_ONLY: Final = 8  # CU_MEMHOSTREGISTER_READ_ONLY: the mapping cannot be written


_counting = threading.Lock()


def pin(memory: Bytes, ordinal: int, words: memoryview, *, writable: bool) -> Callable[[], None] | None:
    """Pin it; returns what unpins it, to be called before it is unmapped, by any thread. None: it cannot be pinned.

    `words`: the worker's own, where the bytes are counted.
    """
    start, size = address(memory), memory.size
    try:
        with Context(ordinal):
            call("cuMemHostRegister", start, size, PORTABLE if writable else PORTABLE | READ_ONLY)
    except CudaError:
        return None
    with _counting:
        words[PINNED_BYTES] += size

    def unpin() -> None:
        with Context(ordinal):
            attempt("cuMemHostUnregister", start)
        with _counting:
            words[PINNED_BYTES] -= size

    return unpin
