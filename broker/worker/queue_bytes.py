"""A queue whose waiting requests have inputs of so many bytes at most (model parameter `max_queue_bytes`).

`bounded` puts it around the queue of a model that has the parameter; requests that run at once never come here. What is
refused has Triton's text for a full queue; native clients are told when to try again, as far as what has run says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, final

from broker.repository.config import ModelConfig
from broker.worker.batcher import DROPPED, DynamicBatcher, SingleQueue
from broker.worker.levels import FULL, told_more
from broker.worker.queues import Queue, Row
from shm.admission import Request, Verdict
from shm.errors import Code

MEASURED = 4  # batches at least before the pace says anything
_MS = 1_000_000
_TOO_MANY = "too many bytes wait (max_queue_bytes, drop_oldest)"


class _Tensor(Protocol):
    """Of a plan: what is asked of `broker.worker.plans.PlacedTensor`."""

    row_bytes: int
    place: Any


def bounded(queue: Queue, config: ModelConfig) -> Queue:
    """`queue` itself where nothing is asked for."""
    most = config.max_queue_bytes
    if not most or not isinstance(queue, SingleQueue | DynamicBatcher):
        return queue
    return ByteBound(queue, most, config.drop_oldest)


def input_bytes(request: Request) -> int:
    """How many bytes its inputs have."""
    tensors: Sequence[_Tensor] = () if request.plan is None else request.plan.inputs  # type: ignore[attr-defined]
    rows = request.rows
    return sum(rows * t.row_bytes if rows and t.row_bytes else int(t.place.byte_size) for t in tensors)


@final
class ByteBound:
    """One request is always let in where nothing waits, so that none is too large for ever. What idle instances can
    take does not count (see `broker.worker.batcher`).

    With `drop_oldest` (a batcher's levels have it in their policies) the oldest go for a new one. Else no client is
    kept out that has less here than others: the newest of the one that has most are refused for it.
    """

    __slots__ = ("_began", "_drop_oldest", "_dropped", "_inside", "_lines", "_most", "_pace", "_sizes", "_total")

    def __init__(self, inside: SingleQueue | DynamicBatcher, most: int, drop_oldest: bool = False) -> None:
        self._inside = inside
        self._drop_oldest = drop_oldest
        self._most = most
        self._sizes: dict[Request, int] = {}  # of what waits and was not set aside for an idle instance
        self._lines: dict[int, _Line] = {}  # the same, by client, as in `shm.fair_line`
        self._dropped: dict[Request, Verdict] = {}  # they leave by `late`
        self._total = 0
        self._pace = _Pace()
        self._began = 0  # when the batch before was taken, while something has waited ever since

    def __len__(self) -> int:
        return len(self._inside) + len(self._dropped)

    @property
    def pinned(self) -> bool:
        """As inside."""
        return self._inside.pinned

    @property
    def late_at(self) -> int:
        """As inside, but at once when something is to leave."""
        return 1 if self._dropped else self._inside.late_at

    @property
    def closed_by(self) -> int:
        """As inside."""
        return self._inside.closed_by

    def add(self, request: Request, now: int, free: int = 0) -> Verdict | None:
        """FULL, where it would be too much together with what waits; else what the queue inside says."""
        size = input_bytes(request)
        if free and self._sizes and self._total + size > self._most:
            self._left(self._inside.set_aside(free))
        while self._sizes and self._total + size > self._most:
            gone = self._let_oldest_go(request, now)
            if gone is not None:
                self._left((gone,))
            elif not self._make_room(request, size):
                return self._full(request, size)
        verdict = self._inside.add(request, now, free)
        if free:
            self._left(self._inside.set_aside(0))  # it may have its own reason to do so
        if verdict is None:
            if not self._sizes:
                self._began = 0
            self._sizes[request] = size
            self._lines.setdefault(request.client, _Line()).add(request, size)
            self._total += size
        return verdict

    def _let_oldest_go(self, request: Request, now: int) -> Request | None:
        if isinstance(self._inside, DynamicBatcher):
            return self._inside.let_oldest_go(request, now, _TOO_MANY)
        if not self._drop_oldest:
            return None
        oldest = next(iter(max(self._lines.values(), key=lambda line: line.total).sizes))
        self._inside.remove(oldest)
        self._dropped[oldest] = (Code.UNAVAILABLE, DROPPED + _TOO_MANY)
        return oldest

    def _make_room(self, request: Request, size: int) -> bool:
        """Refuse the newest of the client with most bytes, if that has no less even then."""
        own = self._lines.get(request.client)
        most = max(self._lines.values(), key=lambda line: line.total)
        need, found, freed = self._total + size - self._most, list[Request](), 0
        for newest in reversed(most.sizes):
            if freed >= need:
                break
            if newest.priority == request.priority:
                found.append(newest)
                freed += most.sizes[newest]
        if freed < need or most.total - freed < (own.total if own else 0) + size:
            return False
        for newest in found:
            self._dropped[newest] = self._full(newest, self._sizes[newest])
            self._inside.remove(newest)
        self._left(found)
        return True

    def _full(self, request: Request, size: int) -> Verdict:
        if not told_more(request):
            return FULL  # for Triton's clients, its own text
        code, text = FULL
        text += f": the inputs that wait have {self._total} bytes, these {size}, max_queue_bytes is {self._most}"
        wait = self._pace.time_for(min(self._total, self._total + size - self._most))
        return code, text + (f"; try again in {max(1, round(wait / _MS))} ms" if wait else "")

    def take(self, now: int, instance: int = 0, most: int = 0) -> Sequence[Row]:
        """As inside."""
        rows = self._inside.take(now, instance, most)
        if rows:
            self._left(rows)
            if self._began:
                self._pace.saw(sum(input_bytes(row) for row in rows if row is not None), now - self._began)
            self._began = now if self._sizes else 0
        return rows

    def _left(self, rows: Sequence[Row]) -> None:
        total = 0
        for row in rows:
            size = self._sizes.pop(row, None) if row is not None else None
            if row is None or size is None:
                continue
            total += size
            client = row.client
            self._lines[client].remove(row)
            if not self._lines[client].sizes:
                del self._lines[client]
        self._total -= total

    def wants(self, now: int, instance: int = 0) -> bool:
        """As inside."""
        return self._inside.wants(now, instance)

    def due(self) -> int:
        """As inside."""
        return self._inside.due()

    def done(self, instance: int, batch: Sequence[Row]) -> int:
        """As inside."""
        return self._inside.done(instance, batch)

    def remove(self, request: Request) -> bool:
        """As inside."""
        if self._dropped.pop(request, None) is not None:
            return True
        found = self._inside.remove(request)
        if found:
            self._left((request,))
        return found

    def late(self, now: int) -> list[tuple[Request, Verdict]]:
        """As inside."""
        late = self._inside.late(now)
        self._left([request for request, _ in late])
        late += self._dropped.items()
        self._dropped.clear()
        return late


@final
class _Line:
    """What waits of one client, the newest last."""

    __slots__ = ("sizes", "total")

    def __init__(self) -> None:
        self.sizes: dict[Request, int] = {}
        self.total = 0

    def add(self, request: Request, size: int) -> None:
        self.sizes[request] = size
        self.total += size

    def remove(self, request: Request) -> None:
        self.total -= self.sizes.pop(request)


@final
class _Pace:
    """How fast bytes have left a queue that was never empty in between, the latest batches counting most."""

    __slots__ = ("_bytes", "_count", "_ns")

    def __init__(self) -> None:
        self._bytes = self._ns = 0.0
        self._count = 0

    def saw(self, size: int, ns: int) -> None:
        """`size` bytes left `ns` after those before."""
        self._bytes += (size - self._bytes) / 8
        self._ns += (ns - self._ns) / 8
        self._count += 1

    def time_for(self, size: int) -> int:
        """ns until `size` bytes have left, at that pace; 0: nobody knows."""
        if self._count < MEASURED or self._bytes <= 0:
            return 0
        return int(self._ns * size / self._bytes)
