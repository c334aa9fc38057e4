"""Results of sequences' steps that had too little room: kept until the client asks for them again, with more.

To run the step once more instead would take the sequence a step too far, in models that keep the state themselves.
`broker.worker.assembled` makes a `Kept` of such a result, `broker.worker.sequences` keeps and finds it under the
scheduler's lock, and gives the request for it to an instance as a batch of its own, which hands it over. Ensembles keep
their own results (`ensembles.run`), so that none of their steps runs again. The client's part is the flag
SEQUENCE_AGAIN.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, Final, Generic, Protocol, TypeVar, final

import numpy as np
import numpy.typing as npt

from broker.worker.sequence import Key, Sequence
from shm.admission import Verdict
from shm.errors import Code

MAX_KEPT: Final = 64  # of a model: clients that mean to ask again do so at once
MAX_BYTES: Final = 64 << 20  # of them all

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

    __slots__ = ("_bytes", "_kept")

    def __init__(self) -> None:
        self._kept: OrderedDict[Key, K] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, key: Key, kept: K) -> None:
        """The oldest go where it would be too much; one that is too large is not kept."""
        self.take(key)
        if kept.byte_size > MAX_BYTES:
            return
        self._kept[key] = kept
        self._bytes += kept.byte_size
        while len(self._kept) > MAX_KEPT or self._bytes > MAX_BYTES:
            self.take(next(iter(self._kept)))

    def drop(self, owner: int) -> None:
        """The client is gone."""
        for key in [key for key in self._kept if key[0] == owner]:
            self.take(key)

    def take(self, key: Key) -> K | None:
        """It is asked for, or something newer came of its sequence."""
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._bytes -= kept.byte_size
        return kept


def lost(model: str, sequence_id: int) -> Verdict:
    """Of a step that has run and whose result is not here: the worker was replaced, or others came behind it."""
    return Code.UNAVAILABLE, (
        f"inference request for sequence {sequence_id} to model '{model}' has run, and its result did not fit and is"
        " not kept any more: begin the sequence again"
    )
