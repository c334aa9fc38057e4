"""What runs of ensembles with members elsewhere have prepared, until the next run of the same kind takes it.

`Pool` is one ensemble's; `Budget` bounds the plans of all of them, which are those of one session with the broker.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import final

from broker.worker.ensembles.remote.prepared import Key, SharedPrepared
from shm.errors import Code, InferError

MAX_POOLED = 256  # of one ensemble
PREPARED_BYTES = 64 << 20  # of memory that these hold, also of one ensemble
MAX_PLANS = 3072  # of all: a session has at most 4096, and what is let go of here is let go of there a little later


@final
class Pool:
    """One ensemble's. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: OrderedDict[SharedPrepared, None] = OrderedDict()  # the one used last at the end
        self._by_key: dict[Key, list[SharedPrepared]] = {}
        self._bytes = 0

    def take(self, key: Key) -> SharedPrepared | None:
        """What a run of this kind has left, if there is something: the caller's alone from now on."""
        with self._lock:
            found = self._by_key.get(key)
            return self._remove(found[-1]) if found else None

    def put(self, prepared: SharedPrepared) -> list[SharedPrepared]:
        """For the next one. Returns what there is no room for any more, not used for the longest time."""
        prepared.put_aside_ns = time.monotonic_ns()
        gone: list[SharedPrepared] = []
        with self._lock:
            self._by_key.setdefault(prepared.key, []).append(prepared)
            self._all[prepared] = None
            self._bytes += prepared.kept
            while len(self._all) > MAX_POOLED or self._bytes > PREPARED_BYTES:
                gone.append(self._remove(next(iter(self._all))))
        return gone

    def oldest_ns(self) -> int:
        """When what was not used for the longest time was put here; 0: nothing is here."""
        with self._lock:
            return next(iter(self._all)).put_aside_ns if self._all else 0

    def take_oldest(self) -> SharedPrepared | None:
        """What was not used for the longest time."""
        with self._lock:
            return self._remove(next(iter(self._all))) if self._all else None

    def take_all(self) -> list[SharedPrepared]:
        """Whatever is here."""
        with self._lock:
            pooled = list(self._all)
            self._all.clear()
            self._by_key.clear()
            self._bytes = 0
        return pooled

    def _remove(self, prepared: SharedPrepared) -> SharedPrepared:
        del self._all[prepared]
        self._bytes -= prepared.kept
        same = self._by_key[prepared.key]
        same.remove(prepared)
        if not same:
            del self._by_key[prepared.key]
        return prepared


@final
class Budget:
    """How many plans this worker's ensembles have in others: at the limit, those that wait for their next run go, of
    whatever ensemble, those not used for the longest time first. From any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools: list[Pool] = []
        self.count = 0

    def add(self, pool: Pool) -> None:
        """Its plans may go for others'."""
        with self._lock:
            self._pools.append(pool)

    def remove(self, pool: Pool) -> None:
        """Its ensemble is closed."""
        with self._lock:
            self._pools = [each for each in self._pools if each is not pool]

    def more(self) -> None:
        """There is about to be one more. Raises InferError UNAVAILABLE if requests under way have them all."""
        with self._lock:
            self.count += 1
        while self.count > MAX_PLANS:
            oldest = self._oldest()
            if oldest is None:
                self.less()
                raise InferError(
                    Code.UNAVAILABLE,
                    f"requests under way have {MAX_PLANS} plans in other workers, which is as many as their ensembles "
                    "may have: send fewer at a time",
                )
            oldest.dispose()

    def less(self) -> None:
        """One is gone."""
        with self._lock:
            self.count -= 1

    def _oldest(self) -> SharedPrepared | None:
        with self._lock:
            pools = list(self._pools)
        aged = [(pool.oldest_ns(), pool) for pool in pools]
        used = [each for each in aged if each[0]]
        return min(used, key=lambda each: each[0])[1].take_oldest() if used else None
