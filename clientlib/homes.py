"""Which worker has a sequence, of models that several workers serve.

One per session with the broker (`clientlib.link.Link`), whatever plan a step comes by; asked by `clientlib.spread`. Any
thread.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import final

MAX_HOMES = 65_536  # sequences whose worker is remembered; those that began first are forgotten first
MAX_ENDED = 4_096  # the same of those whose END was sent

_Key = tuple[str, int]  # model, sequence


@final
class Homes:
    """Which worker has a sequence: the one that its START went to.

    It is also known after END: that step may have to be sent again, or may never have been sent.

    `shared`: its steps may come through other processes, as those of gateways do. Where none has come through this one,
    its id decides, and not in which order or in what company the workers are named. `alone`: only through one that
    comes after this one. Then a START need not wait for a worker that is being replaced: this process knows of it.
    """

    __slots__ = ("_alone", "_counts", "_ended", "_homes", "_lock", "_shared")

    def __init__(self, *, shared: bool = False, alone: bool = False) -> None:
        self._shared = shared
        self._alone = alone
        self._lock = threading.Lock()
        self._homes: OrderedDict[_Key, str] = OrderedDict()
        self._ended: OrderedDict[_Key, str] = OrderedDict()
        self._counts: Counter[tuple[str, str]] = Counter()  # by model and worker, without those that have ended

    def find(self, model: str, sequence_id: int, workers: tuple[str, ...]) -> str:
        """The worker of a sequence that has begun. It may be none of `workers`, which the plan prefers."""
        key = model, sequence_id
        home = self._homes.get(key) or self._ended.get(key)
        if home is None:
            return _by_id(sequence_id, workers) if self._shared else workers[0]
        return home

    def begin(
        self, model: str, sequence_id: int, workers: tuple[str, ...], up: list[str], unbound: Sequence[str] = ()
    ) -> str:
        """The worker of one that begins: of those that are `up`, the freest first, the one with the fewest sequences.

        A sequence keeps a slot of its worker's instances, whether steps of it run just now or not. One that begins anew
        stays where it was, if that is up: there its START ends what it had before, which would keep its slot elsewhere.
        With several gateways it goes where all of them will look for it, and waits there if it must. The only gateway
        passes over a worker that is known to have died, and its sequences with it; not over one that the plan has not
        reached, or that does not respond, `unbound`: that may be stopped, and have a sequence of this id, with which
        steps would go on there that the next gateway sends.
        """
        key = model, sequence_id
        with self._lock:
            before = self._forget(key)
            if self._shared and not self._alone:
                home = _by_id(sequence_id, workers)
            elif before in up:
                home = before
            elif self._shared:
                home = _by_id(sequence_id, [*up, *unbound])
            else:
                home = min(up, key=lambda worker: self._counts[model, worker])
            while len(self._homes) >= MAX_HOMES:
                self._forget(next(iter(self._homes)))
            self._homes[key] = home
            self._counts[model, home] += 1
        return home

    def end(self, model: str, sequence_id: int) -> None:
        """Its last step is about to be sent. That may fail, and the step come again."""
        key = model, sequence_id
        with self._lock:
            if (home := self._forget(key)) is not None:
                self._ended[key] = home
                if len(self._ended) > MAX_ENDED:
                    self._ended.popitem(last=False)

    def leave(self, model: str, worker: str) -> None:
        """The worker does not serve the model any more: what it had is lost."""
        with self._lock:
            for homes in (self._homes, self._ended):
                for key in [key for key, home in homes.items() if key[0] == model and home == worker]:
                    self._forget(key)

    def _forget(self, key: _Key) -> str | None:
        home = self._homes.pop(key, None)
        if home is None:
            return self._ended.pop(key, None)
        self._counts[key[0], home] -= 1
        return home


def _by_id(sequence_id: int, workers: Sequence[str]) -> str:
    """The same for every choice of workers that has it: each id ranks all workers that there can be in its own way."""
    return max(workers, key=lambda worker: blake2b(f"{sequence_id} {worker}".encode(), digest_size=8).digest())
