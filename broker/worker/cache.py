"""The response cache: what a model answered before, by all that the answer depends on.

One per worker process, bounded in bytes; the response that was not asked for the longest goes first. Pure data: no
clock, no model, no memory of clients. `broker.worker.cached` looks requests up and puts answers in.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, MutableSequence
from typing import NamedTuple, final

import msgspec

from shm import statistics

ENTRY_BYTES = 256  # what an entry takes beside its data, about
Owner = tuple[str, int, int]  # model, version, generation: a reload starts afresh
Key = tuple[Owner, bytes]


class Input(NamedTuple):
    """A tensor as it is in a request: `shape` with the batch dimension."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes | memoryview


class Output(NamedTuple):
    """A tensor as the client gets it."""

    name: str
    shape: tuple[int, ...]
    data: bytes


class Response(NamedTuple):
    """All outputs that were asked for. `parameters`: what the model gave beside them (`shm.parameters.pack`)."""

    outputs: tuple[Output, ...]
    parameters: bytes = b""


Parameters = tuple[tuple[str, str, str], ...]  # of `shm.parameters.key_of`


def key_of(owner: Owner, inputs: Iterable[Input], outputs: Iterable[str], parameters: Parameters = ()) -> Key:
    """Equal for requests that must get the same answer. The order of tensors does not matter.

    Triton's key leaves out datatypes, shapes, the outputs that are asked for, and parameters.
    """
    ordered = sorted(inputs, key=lambda each: each.name)
    sizes = [(each.name, each.datatype, each.shape, len(each.data)) for each in ordered]
    digest = hashlib.blake2b(msgspec.msgpack.encode((sizes, sorted(outputs), parameters)), digest_size=32)
    for each in ordered:
        digest.update(each.data)
    return owner, digest.digest()


@final
class ResponseCache:
    """`words`: the worker's block of the statistics page, or anything as long; written under the cache's lock."""

    __slots__ = ("_entries", "_lock", "_words", "byte_size")

    def __init__(self, byte_size: int, words: MutableSequence[int] | memoryview) -> None:
        self.byte_size = byte_size
        self._entries: OrderedDict[Key, Response] = OrderedDict()
        self._lock = threading.Lock()
        self._words = words
        words[statistics.CACHE_SIZE] = byte_size
        words[statistics.CACHE_USED] = words[statistics.CACHE_ENTRIES] = 0  # a worker that died here left its own

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def used(self) -> int:
        """Bytes of all entries."""
        return self._words[statistics.CACHE_USED]

    def get(self, key: Key) -> Response | None:
        """The response, which is the youngest then."""
        with self._lock:
            found = self._entries.get(key)
            if found is not None:
                self._entries.move_to_end(key)
            return found

    def put(self, key: Key, response: Response) -> bool:
        """Keep it, in place of the oldest. False: it is larger than the whole cache."""
        size = _size(response)
        if size > self.byte_size:
            return False
        with self._lock:
            words = self._words
            self._remove(key)
            while self._entries and self.used + size > self.byte_size:
                self._remove(next(iter(self._entries)))
                words[statistics.CACHE_EVICTIONS] += 1
            self._entries[key] = response
            words[statistics.CACHE_USED] += size
            words[statistics.CACHE_ENTRIES] = len(self._entries)
        return True

    def drop(self, owner: Owner) -> None:
        """Forget what a model answered that is gone."""
        with self._lock:
            for key in [key for key in self._entries if key[0] == owner]:
                self._remove(key)

    def count(self, word: int, by: int) -> None:
        """Add to one of the worker's counters of the cache."""
        with self._lock:
            self._words[word] += by

    def _remove(self, key: Key) -> None:
        response = self._entries.pop(key, None)
        if response is not None:
            self._words[statistics.CACHE_USED] -= _size(response)
            self._words[statistics.CACHE_ENTRIES] = len(self._entries)


def _size(response: Response) -> int:
    return ENTRY_BYTES + len(response.parameters) + sum(len(each.data) for each in response.outputs)
