"""What models on the CPU read and write instead of a client's GPU memory: memory of the host, as large as the region,
whose pages come into being where something is copied to.

`broker.worker.cuda.windows` makes one with each region; `broker.worker.cuda.execute` holds those of a batch while it
runs. No quota counts this memory, so all mirrors of a worker together keep at most KEPT bytes from one run to the next.
What is more goes back to the system, beginning with what has not been used for longest; the next run on it takes fresh
pages. Between runs nobody needs what is in it.

A mirror that is used again and again is pinned: the GPU then copies to and from it by itself, not through buffers of
the driver's. Always all of it or nothing: drivers refuse copies that begin in pinned memory and end elsewhere. That
takes milliseconds, on a thread of its own.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Final, final

import numpy as np

from broker.worker.cuda.streams import Bytes

KEPT: Final = 256 << 20  # bytes: of 1080p RGB frames in FP32, ten
PIN_AFTER: Final = 16  # uses since its pages came: what comes and goes is not worth it
PIN_LEAST: Final = 64 << 10  # bytes; drivers copy less than this at once, pinned or not
MAP_NORESERVE: Final = 0x4000  # <sys/mman.h>: pages are counted when they are used, which may be never
PAGE: Final = mmap.PAGESIZE
Unpin = Callable[[], None]
Pin = Callable[[Bytes], Unpin | None]  # None: it cannot be pinned


@final
class Mirror:
    """`bytes`: all of it. Pages may be there from `low` to `high`; `running`: runs that use it."""

    __slots__ = ("_memory", "_pin", "_tried", "bytes", "high", "low", "running", "unpin", "uses")

    def __init__(self, byte_size: int, pin: Pin = lambda memory: None) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._memory = mmap.mmap(-1, byte_size, flags=flags)
        self.bytes: Bytes = np.frombuffer(self._memory, np.uint8)
        self.low = self.high = self.running = self.uses = 0
        self._pin, self._tried = pin, False
        self.unpin: Unpin | None = None  # set while it is pinned

    @property
    def size(self) -> int:
        """Bytes that it takes, at most."""
        return self.high - self.low

    def reach(self, start: int, stop: int) -> None:
        """Something in [start, stop) is about to be written."""
        start, stop = start // PAGE * PAGE, -(-stop // PAGE) * PAGE
        self.low, self.high = (min(self.low, start), max(self.high, stop)) if self.high else (start, stop)
        self.uses += 1

    def worth_pinning(self, most: int) -> bool:
        """Is it used often, and for the larger part? Then all of its pages will be there. `most`: bytes."""
        whole = self.bytes.size
        return not self._tried and self.uses >= PIN_AFTER and PIN_LEAST <= whole <= most and 2 * self.size >= whole

    def pin(self) -> Unpin | None:
        """Try to; takes long. What it returns is for `unpin`."""
        self._tried = True
        return self._pin(self.bytes)

    def give_back(self) -> None:
        """All pages; what they held is lost."""
        if self.unpin is not None:
            self.unpin()
            self.unpin, self._tried = None, False
        if self.size:
            self._memory.madvise(mmap.MADV_DONTNEED, self.low, self.size)
        self.low = self.high = self.uses = 0


@final
class Mirrors:
    """A worker's. Called by every thread that runs models, and by the control thread (`forget`)."""

    __slots__ = ("_lock", "_most", "_used")

    def __init__(self, most: int = KEPT) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._used: dict[Mirror, None] = {}  # by last use, the longest ago first

    @property
    def size(self) -> int:
        """Bytes that all of them take, at most."""
        with self._lock:
            return sum(mirror.size for mirror in self._used)

    @contextlib.contextmanager
    def held(self, spans: Iterable[tuple[Mirror, int, int]]) -> Iterator[None]:
        """A run that may write these parts [start, stop): what is in them stays to its end."""
        held = []
        with self._lock:
            for mirror, start, stop in spans:
                mirror.running += 1
                mirror.reach(start, stop)
                held.append(mirror)
        try:
            yield
        finally:
            self._release(held)

    def forget(self, mirror: Mirror) -> None:
        """Its region is closed; the memory goes with its last reference."""
        with self._lock:
            self._used.pop(mirror, None)
            unpin, mirror.unpin = mirror.unpin, None
        if unpin is not None:
            unpin()

    def _release(self, held: list[Mirror]) -> None:
        with self._lock:
            for mirror in held:
                mirror.running -= 1
                self._used.pop(mirror, None)
                self._used[mirror] = None
            self._give_back(sum(mirror.size for mirror in self._used) - self._most)
            often = {mirror for mirror in held if not mirror.running and mirror.worth_pinning(self._most)}
            for mirror in often:
                mirror.running += 1  # until it is done
        for mirror in often:
            threading.Thread(target=self._pin, args=(mirror,), name="pin", daemon=True).start()

    def _give_back(self, excess: int) -> None:
        for mirror in [mirror for mirror in self._used if not mirror.running]:
            if excess <= 0:
                return
            excess -= mirror.size
            mirror.give_back()
            del self._used[mirror]

    def _pin(self, mirror: Mirror) -> None:
        unpin = mirror.pin()
        with self._lock:
            mirror.running -= 1
            if unpin is not None and mirror in self._used:
                mirror.reach(0, mirror.bytes.size)
                mirror.unpin, unpin = unpin, None
        if unpin is not None:  # its region was closed meanwhile
            unpin()
