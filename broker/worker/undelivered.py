"""Results of sequences' steps that had too little room: kept until the client asks for them again, with more.

To run the step once more instead would take the sequence a step too far, in models that keep the state themselves.
`broker.worker.assembled` makes a `Kept` of such a result, `broker.worker.sequences` keeps and finds it under the
scheduler's lock, and gives the request for it to an instance as a batch of its own, which hands it over. Ensembles keep
their own results (`ensembles.run`), so that none of their steps runs again. The client's part is the flag
SEQUENCE_AGAIN.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, Final, Generic, Protocol, TypeVar, final

import numpy as np
import numpy.typing as npt

from broker.worker.sequence import Key, Sequence
from shm.admission import Verdict
from shm.errors import Code

MAX_KEPT: Final = 64  # of a model
MAX_BYTES: Final = 64 << 20  # of them all
MAX_OF_CLIENT: Final = 16 << 20  # bytes, where it is more than one result; all clients of gateways are one
KEPT_S: Final = 30  # clients that mean to ask again do so at once; Triton's never do
MAX_REASONS: Final = 256  # why those that went last did

Arrays = Mapping[str, npt.NDArray[Any]]


def worth_keeping(sizes: Iterable[int]) -> bool:
    """Is there room for a result of so many bytes? Asked before it is copied."""
    return sum(sizes) <= MAX_BYTES


@final
class Kept:
    """One step's outputs, and the states that are its sequence's once its answer is delivered."""

    __slots__ = ("byte_size", "given", "outputs", "record", "states")

    def __init__(self, record: Sequence, outputs: Arrays, states: Arrays, given: bytes) -> None:
        """The arrays are copied: the runtime's own are the next batch's. `given`: the response's parameters."""
        self.record = record
        self.outputs = {name: np.array(array) for name, array in outputs.items()}
        self.states = {name: np.array(array) for name, array in states.items()}
        self.given = given
        self.byte_size = sum(array.nbytes for array in (*self.outputs.values(), *self.states.values()))


class Sized(Protocol):
    """What is kept."""

    @property
    def byte_size(self) -> int:
        """Of memory."""


K = TypeVar("K", bound=Sized)


@final
class Undelivered(Generic[K]):
    """The latest of each sequence of a model."""

    __slots__ = ("_bytes", "_kept", "_of_client", "_reasons")

    def __init__(self) -> None:
        self._kept: OrderedDict[Key, tuple[K, int]] = OrderedDict()  # the oldest first, with the time of each
        self._bytes = 0
        self._of_client: Counter[int] = Counter()
        self._reasons: OrderedDict[Key, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def until(self) -> int:
        """When the oldest goes, if nobody asks for it; 0: there is none."""
        return next(iter(self._kept.values()))[1] + KEPT_S * 1_000_000_000 if self._kept else 0

    def keep(self, key: Key, kept: K, now: int) -> None:
        """The oldest go where it would be too much, this client's before others'; one that is too large is not kept."""
        self.expire(now)
        self.take(key)
        if kept.byte_size > MAX_BYTES:
            self._note(key, f"it has more than {MAX_BYTES} bytes")
            return
        self._reasons.pop(key, None)
        self._kept[key] = (kept, now)
        self._bytes += kept.byte_size
        self._of_client[key[0]] += kept.byte_size
        while self._of_client[key[0]] > MAX_OF_CLIENT:
            oldest = next(each for each in self._kept if each[0] == key[0])
            if oldest == key:  # alone
                break
            self._give_up(oldest, f"later ones of its client's took the {MAX_OF_CLIENT} bytes that one may have kept")
        while len(self._kept) > MAX_KEPT or self._bytes > MAX_BYTES:
            self._give_up(next(iter(self._kept)), f"later ones took the {MAX_BYTES} bytes that a model may have kept")

    def expire(self, now: int) -> None:
        """Those that nobody has asked for in time go."""
        while self._kept and self.until <= now:
            self._give_up(next(iter(self._kept)), f"nobody asked for it within {KEPT_S} s")

    def drop(self, owner: int) -> None:
        """The client is gone."""
        for key in [key for key in self._kept if key[0] == owner]:
            self.take(key)

    def take(self, key: Key) -> K | None:
        """It is asked for, or something newer came of its sequence."""
        kept, _ = self._kept.pop(key, (None, 0))
        if kept is not None:
            self._bytes -= kept.byte_size
            self._of_client[key[0]] -= kept.byte_size
            if not self._of_client[key[0]]:
                del self._of_client[key[0]]
        return kept

    def why(self, key: Key) -> str:
        """Why the result that is asked for was not kept, if that is still known. Told once."""
        return self._reasons.pop(key, "")

    def skip(self, key: Key) -> None:
        """The result of a later step is not kept at all: what is known of an earlier one says nothing of it."""
        self._reasons.pop(key, None)

    def _give_up(self, key: Key, why: str) -> None:
        self.take(key)
        self._note(key, why)

    def _note(self, key: Key, why: str) -> None:
        self._reasons[key] = why
        if len(self._reasons) > MAX_REASONS:
            self._reasons.popitem(last=False)


def lost(model: str, sequence_id: int, why: str = "") -> Verdict:
    """Of a step that has run and whose result is not here: the worker was replaced, others came behind it, or `why`."""
    return Code.UNAVAILABLE, (
        f"inference request for sequence {sequence_id} to model '{model}' has run, and its result did not fit and is"
        f" not kept any more: begin the sequence again{f' ({why})' if why else ''}"
    )
