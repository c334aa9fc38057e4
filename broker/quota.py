"""How much memory clients may make this host hold for them: bytes in total, regions and their descriptors per uid.

Charged by `broker.registry` (regions) and `broker.channels` (channel memory). Memfds do not count against the size of
/dev/shm, so without this budget the only limit on registered memory would be the out-of-memory killer.
"""

from __future__ import annotations

from collections import Counter
from typing import final

from shm.cuda.descriptor import HANDLE_SIZE
from shm.errors import Code, InferError

MAX_REGIONS = 16384  # per uid; the kernel's default of 65,530 mappings per worker process is shared by everybody
MAX_EVENTS = 65536  # per uid, opened by every worker that its plans go to: the rings of 1,024 clients on a GPU
MAX_CUDA = 1 << 40  # bytes per uid; no GPU has more, and the memory is its owner's own
# What a mapped region holds open in its worker: the mapping's, and for memory that can shrink one to watch its size.
# GPU memory: the broker's, of VMM memory.
DESCRIPTORS = {"pool": 1, "system": 2, "cuda": 1, "events": 0}


@final
class Quota:
    """`limit` bytes for all uids together; for each uid `max_regions`, which take `max_descriptors` in a worker.

    `cuda_limit`: bytes of GPU memory for each uid. `max_events`: events in its rings.
    """

    __slots__ = (
        "_cuda",
        "_descriptors",
        "_events",
        "_regions",
        "_used",
        "cuda_limit",
        "limit",
        "max_descriptors",
        "max_events",
        "max_regions",
        "total",
    )

    def __init__(
        self,
        limit: int,
        max_regions: int = MAX_REGIONS,
        max_descriptors: int = 2 * MAX_REGIONS,
        cuda_limit: int = MAX_CUDA,
        max_events: int = MAX_EVENTS,
    ) -> None:
        self.limit = limit
        self.cuda_limit = cuda_limit
        self.max_regions = max_regions
        self.max_descriptors = max_descriptors
        self.max_events = max_events
        self.total = 0
        self._used: Counter[int] = Counter()
        self._cuda: Counter[int] = Counter()
        self._events: Counter[int] = Counter()
        self._regions: Counter[int] = Counter()
        self._descriptors: Counter[int] = Counter()

    def take(self, uid: int, byte_size: int, what: str) -> None:
        """Charge `byte_size` to `uid`. Raises INVALID_ARG when it can never fit, UNAVAILABLE when it does not now."""
        if self.total + byte_size > self.limit:
            code = Code.INVALID_ARG if byte_size > self.limit else Code.UNAVAILABLE
            raise InferError(
                code,
                f"no memory quota for {what}: asked {byte_size} bytes, used {self.total} (by uid {uid}: "
                f"{self._used[uid]}), limit {self.limit}. Unregister regions, or start the broker with a larger "
                "--region-memory",
            )
        self.total += byte_size
        self._used[uid] += byte_size

    def give(self, uid: int, byte_size: int) -> None:
        """Return what `take` charged."""
        self.total -= byte_size
        self._used[uid] -= byte_size
        if not self._used[uid]:
            del self._used[uid]

    def take_cuda(self, uid: int, byte_size: int, what: str) -> None:
        """Charge GPU memory that `uid` shares, apart from the host's. Raises INVALID_ARG or UNAVAILABLE as `take`."""
        used = self._cuda[uid]
        if used + byte_size > self.cuda_limit:
            code = Code.INVALID_ARG if byte_size > self.cuda_limit else Code.UNAVAILABLE
            raise InferError(
                code,
                f"no GPU memory quota for {what}: asked {byte_size} bytes, used by uid {uid}: {used}, limit "
                f"{self.cuda_limit}. Unregister CUDA regions, or start the broker with a larger --cuda-region-memory",
            )
        self._cuda[uid] += byte_size

    def give_cuda(self, uid: int, byte_size: int) -> None:
        """Return what `take_cuda` charged."""
        self._cuda[uid] -= byte_size
        if not self._cuda[uid]:
            del self._cuda[uid]

    def cuda_used(self, uid: int) -> int:
        """Bytes of GPU memory that `uid` shares."""
        return self._cuda[uid]

    def take_events(self, uid: int, byte_size: int, what: str) -> None:
        """Charge the events behind `byte_size` bytes of handles. Raises UNAVAILABLE at the cap."""
        used, more = self._events[uid], byte_size // HANDLE_SIZE
        if used + more > self.max_events:
            raise InferError(
                Code.UNAVAILABLE,
                f"too many events for {what}: asked {more}, those of uid {uid}: {used}, limit {self.max_events}. "
                "Unregister rings, or have streams waited for by the client (order='synchronize')",
            )
        self._events[uid] += more

    def give_events(self, uid: int, byte_size: int) -> None:
        """Return what `take_events` charged."""
        self._events[uid] -= byte_size // HANDLE_SIZE
        if not self._events[uid]:
            del self._events[uid]

    def take_region(self, uid: int, kind: str) -> None:
        """Count one more region of `uid`; `kind` is one of DESCRIPTORS. Raises UNAVAILABLE at a cap."""
        advice = "Unregister some, or use ranges of fewer, larger regions"
        if self._regions[uid] >= self.max_regions:
            raise InferError(
                Code.UNAVAILABLE,
                f"too many regions: uid {uid} has {self._regions[uid]}, the limit is {self.max_regions}. {advice}",
            )
        held, needed = self._descriptors[uid], DESCRIPTORS[kind]
        if held + needed > self.max_descriptors:
            raise InferError(
                Code.UNAVAILABLE,
                f"too many regions: those of uid {uid} take {held} descriptors, a {kind} region takes {needed}, the "
                f"limit is {self.max_descriptors}. {advice}; a larger `ulimit -n` for the broker raises the limit",
            )
        self._regions[uid] += 1
        self._descriptors[uid] += needed

    def give_region(self, uid: int, kind: str) -> None:
        """Return what `take_region` counted."""
        self._regions[uid] -= 1
        self._descriptors[uid] -= DESCRIPTORS[kind]
        if not self._regions[uid]:
            del self._regions[uid], self._descriptors[uid]
