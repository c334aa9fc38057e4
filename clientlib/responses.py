"""The responses of a request to a decoupled model: from the completions of a channel to results that wait to be read.

    completion ─▶ Inbox.put ── Assembler.add (copies a part) ── Response ─▶ Inbox.take ─▶ InferResult

Used by `clientlib.streams` and `clientlib.async_streams`, one `Inbox` per request. Knows neither channels nor clocks.
What the notes mean is in `shm.responses`; no word of them is trusted.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import numpy.typing as npt

from clientlib import shapes
from clientlib.arena import aligned
from clientlib.results import InferResult
from shm import datatypes
from shm.datatypes import BYTES
from shm.errors import Code, InferError, fresh
from shm.layout import CODE_MASK, FINAL, NOTED
from shm.messages import MAX_RESPONSES
from shm.responses import Extent, part_count, unpack

if TYPE_CHECKING:
    from clientlib.layout import Placed

Array = npt.NDArray[Any]
FIRST_ROOM = 4 << 10  # bytes for an output of a response, as long as nobody knows how large it will be
LARGEST_ROOM = 128 << 10  # … and at most: what is larger comes in parts
MIN_PLACES, PLACES_BYTES = 8, 1 << 20  # of one request: more than the fewest as far as the bytes go
MIN_STREAMS, MAX_STREAMS, STREAMS_BYTES = 16, 64, 16 << 20  # requests of a plan at once, likewise
MANY_PARTS = 8  # of one response: the next stream gets larger rooms
LARGEST = 1 << 30  # bytes of one response
UNREAD = 64 << 20  # bytes that may wait for the reader, beside one response
ENOUGH, ENOUGH_BYTES = 64, 16 << 20  # responses, or bytes, of which no more need to come until some were read
OVERHEAD = 1 << 10  # bytes that a response takes beside its outputs'


def room(datatype: str, shape: Sequence[int], wanted: int | None) -> int:
    """Bytes for one output of one response. `shape` has -1 where only running the model tells; `wanted`: what earlier
    responses would have needed.
    """
    if shapes.is_open(datatype, shape):
        return min(aligned(wanted or FIRST_ROOM), LARGEST_ROOM)
    return min(aligned(max(datatypes.byte_size(datatype, shape), wanted or 0)), LARGEST_ROOM)


def places(rooms: Sequence[int]) -> int:
    """How many responses, or parts of one, a worker may be ahead of the client, for outputs of these rooms."""
    return min(max(PLACES_BYTES // max(sum(rooms), 1), MIN_PLACES), MAX_RESPONSES)


def at_once(byte_size: int) -> int:
    """How many requests of a plan may run at once at least, for places of `byte_size` each.

    More than those of other models would get: a stream keeps its place for as long as it lasts. Memory that no response
    comes to is not used.
    """
    return min(max(STREAMS_BYTES // max(byte_size, 1), MIN_STREAMS), MAX_STREAMS)


def not_placed(name: str) -> InferError:
    """The error for an output of a decoupled model that the caller placed."""
    return InferError(
        Code.INVALID_ARG,
        f"output '{name}' is placed in a region: outputs of a decoupled model come one response at a time: they cannot "
        "be placed; leave it out of outputs=, and copy the array of each response to where it is wanted",
    )


class _Rooms(NamedTuple):
    """Where an output's parts lie: row i of `places` is its room in place i."""

    name: str
    datatype: str
    dtype: np.dtype[Any]
    places: npt.NDArray[np.uint8]


@final
class Response:
    """A response in memory of its own: one array per output, None for those that it does not have."""

    __slots__ = ("_arrays", "_copied", "_entry", "_extents", "_raw", "_rooms", "byte_size")

    def __init__(
        self,
        rooms: Sequence[_Rooms],
        extents: Sequence[Extent | None],
        arrays: Sequence[Array | None],
        raw: bool,
        entry: tuple[int, ...],
        copied: int,
    ) -> None:
        self._rooms, self._extents, self._arrays, self._raw = rooms, extents, arrays, raw
        self._entry, self._copied = entry, copied
        self.byte_size = sum(array.nbytes for array in arrays if array is not None)

    def result(self) -> InferResult:
        """As the application gets it. Raises InferError for strings that are none."""
        arrays: dict[str, Array] = {}
        found: dict[str, tuple[int, ...]] = {}
        for tensor, extent, array in zip(self._rooms, self._extents, self._arrays, strict=True):
            if extent is None or array is None:
                continue
            if self._raw:
                found[tensor.name] = extent.shape
            elif tensor.datatype == BYTES:
                count = datatypes.element_count(extent.shape)
                array = datatypes.decode_bytes(array, count, f"output '{tensor.name}'").reshape(extent.shape)
            arrays[tensor.name] = array
        return InferResult(arrays, self._entry, self._copied, found)


@final
class Assembler:
    """Copies the parts of one request's responses out of its places and puts them together.

    `outputs` are those of the plan, `position` is the request's. With `raw` arrays are 1-D bytes in KServe's encoding.
    """

    __slots__ = (
        "_arrays",
        "_copied",
        "_extents",
        "_note",
        "_part",
        "_parts",
        "_raw",
        "_rooms",
        "_targets",
        "_turn",
        "outgrown",
    )

    def __init__(self, outputs: Sequence[Placed], position: int, responses: int, *, raw: bool) -> None:
        self._rooms = [
            _Rooms(tensor.name, tensor.datatype, tensor.dtype, tensor.raw(position).reshape(responses, -1))
            for tensor in outputs
        ]
        self._raw = raw
        self.outgrown: tuple[str, int] | None = None  # an output, and a room that would have spared most of its parts
        self._turn = 0  # the place of the next part
        self._note: bytes | None = None  # of the response at hand, and what it says
        self._extents: list[Extent | None] = []
        self._parts = 1
        self._part = 0  # how many of them are here; 0: the next part begins a response
        self._copied = 0  # by the worker, for these
        self._arrays: list[Array | None] = []
        self._targets: list[npt.NDArray[np.uint8] | None] = []

    @property
    def unfinished(self) -> bool:
        """Is a response here that lacks parts?"""
        return self._part > 0

    def drop(self) -> None:
        """Forget a response whose other parts will not come."""
        self._part = 0
        self._arrays, self._targets = [], []

    def add(self, entry: tuple[int, ...], note: bytes, copied: int = 0) -> Response | None:
        """Copy the next part. Returns its response when that is complete; `copied`: bytes to report beside its own.

        Raises InferError for notes that no worker writes, and for a response of more than 1 GiB.
        """
        if not self._part:
            self._begin(note)
        elif note != self._note:
            raise _garbled(f"part {self._part + 1} of {self._parts} of a response says something else than the first")
        self._copied += entry[7]
        place, part = self._turn, self._part
        for tensor, target in zip(self._rooms, self._targets, strict=True):
            if target is not None:
                size = tensor.places.shape[1]
                piece = target[part * size : (part + 1) * size]
                piece[...] = tensor.places[place, : piece.size]
        if self._rooms:
            self._turn = (place + 1) % len(self._rooms[0].places)
        self._part = part + 1
        if self._part < self._parts:
            return None
        arrays, done = self._arrays, (*entry[:7], self._copied, *entry[8:])
        self.drop()
        size = sum(extent.byte_size for extent in self._extents if extent is not None)
        return Response(self._rooms, self._extents, arrays, self._raw, done, size + copied)

    def _begin(self, note: bytes) -> None:
        if note != self._note:
            try:
                extents = unpack(note, len(self._rooms))
            except ValueError as error:
                raise _garbled(str(error)) from None
            for tensor, extent in zip(self._rooms, extents, strict=True):
                if extent is not None:
                    _check(tensor, extent)
            size = sum(extent.byte_size for extent in extents if extent is not None)
            if size > LARGEST:
                raise InferError(
                    Code.UNSUPPORTED, f"a response has {size} bytes: one response of a stream may have {LARGEST}"
                )
            self._parts = part_count(extents, [tensor.places.shape[1] for tensor in self._rooms])
            self._note, self._extents = note, extents
            if self._parts > MANY_PARTS:
                self._ask_for_more()
        self._copied = 0
        self._arrays, self._targets = [], []
        for tensor, extent in zip(self._rooms, self._extents, strict=True):
            if extent is None:
                self._arrays.append(None)
                self._targets.append(None)
                continue
            try:
                if self._raw or tensor.datatype == BYTES:
                    array: Array = np.empty(extent.byte_size, np.uint8)
                else:
                    array = np.empty(extent.shape, tensor.dtype)
            except ValueError as error:  # numpy's limit on the number of dimensions
                raise _garbled(f"output '{tensor.name}': {error}") from None
            self._arrays.append(array)
            self._targets.append(array.reshape(-1).view(np.uint8))

    def _ask_for_more(self) -> None:
        sizes = [0 if extent is None else extent.byte_size for extent in self._extents]
        largest = self._rooms[sizes.index(max(sizes))]
        wanted = min(max(sizes) // (MANY_PARTS // 2), LARGEST_ROOM)
        if wanted > largest.places.shape[1] and (self.outgrown is None or wanted > self.outgrown[1]):
            self.outgrown = largest.name, wanted


def _check(tensor: _Rooms, extent: Extent) -> None:
    shape = datatypes.shape_text(extent.shape)
    try:
        if tensor.datatype == BYTES:
            least = datatypes.element_count(extent.shape) * 4  # of each string's length
            fits = extent.byte_size >= least if least else extent.byte_size == 0
        else:
            fits = extent.byte_size == datatypes.byte_size(tensor.datatype, extent.shape)
    except InferError as error:
        raise _garbled(f"output '{tensor.name}': {error.message}") from None
    if not fits:
        raise _garbled(f"output '{tensor.name}' of {tensor.datatype} {shape} has {extent.byte_size} bytes")


def _garbled(what: str) -> InferError:
    return InferError(Code.INTERNAL, f"the worker reported a response that cannot be: {what}")


@final
class Inbox:
    """What came of one request and was not read yet. One thread at a time puts in, any threads take out.

    Takes no lock where it puts in or closes: streams are collected, and closed, anywhere.
    """

    __slots__ = (
        "_assembler",
        "_came",
        "_closed",
        "_copied",
        "_error",
        "_failure",
        "_gone",
        "_last",
        "_queue",
        "_reading",
        "deaf",
        "ended",
        "final",
    )

    def __init__(self, assembler: Assembler, failure: Callable[[int, bytes], InferError], copied: int) -> None:
        """`failure` makes an error of a completion's code and note; `copied`: bytes of the request's own inputs."""
        self._assembler = assembler
        self._failure = failure
        self._copied = copied
        self._queue: deque[Response | InferError] = deque()
        self._error: InferError | None = None  # what comes after the queue
        self._came = self._gone = 0  # bytes, ever
        self._reading = threading.Lock()
        self._closed = False
        self._last: Response | InferError | None = None  # what came with the end
        self.final = False  # nothing follows what was taken last, as it said itself
        self.ended = False  # nothing will be added to what is here
        self.deaf = False  # what still comes is not wanted: the request is to be cancelled

    @property
    def ready(self) -> bool:
        """Is there something to take, if only the end?"""
        return self.ended or len(self._queue) > 0

    @property
    def over(self) -> bool:
        """Has everything been taken?"""
        return self._closed or (self.ended and not self._queue and self._error is None)

    @property
    def enough(self) -> bool:
        """May what comes next wait until some of this was read?"""
        return not self.ended and (len(self._queue) >= ENOUGH or self._came - self._gone >= ENOUGH_BYTES)

    def put(self, entry: tuple[int, ...], note: bytes) -> None:
        """Take in a completion, laid out as `shm.layout.COMPLETION`. Never raises: who reaps does so for others too."""
        if self.deaf:
            self._assembler.drop()
            return
        try:
            self._put(entry, note)
        except InferError as error:
            self.fail(error)
        except MemoryError:
            self.fail(InferError(Code.UNAVAILABLE, "no memory is left for a response"))

    def take(self) -> InferResult | None:
        """The next response; None: there is none now. Raises InferError for the error that came in its place."""
        with self._reading:
            if self._queue:
                item = self._queue.popleft()
                self.final = item is self._last
                self._gone += _size(item)
            elif self._error is not None:
                item, self._error = self._error, None
                self.final = True
            else:
                return None
        if self._closed:
            return None
        if isinstance(item, InferError):
            raise fresh(item)
        return item.result()

    def fail(self, error: InferError) -> None:
        """Whoever has taken what is here gets `error`, then the end. Nothing else is taken in."""
        if not self.ended:
            self.deaf = True
            self._error = error
            self.ended = True

    def close(self) -> None:
        """Nobody reads any more."""
        self._closed = self.deaf = self.ended = True
        self._queue.clear()

    @property
    def unread_bytes(self) -> int:
        """Of the responses that were not taken, with what each takes beside its arrays."""
        return 0 if self._closed else self._came - self._gone

    @property
    def outgrown(self) -> tuple[str, int] | None:
        """As `Assembler.outgrown`."""
        return self._assembler.outgrown

    def _put(self, entry: tuple[int, ...], note: bytes) -> None:
        status = entry[2]
        item: Response | InferError | None = None
        if code := status & CODE_MASK:
            self._assembler.drop()
            item = self._failure(code, note)
        elif status & NOTED:
            item = self._assembler.add(entry, note, self._copied)
            if item is not None:
                self._copied = 0
        if status & FINAL:
            if self._assembler.unfinished:
                raise _garbled("it ended before the last of its parts came")
            self._last = item
        if item is not None:
            self._append(item)
        if status & FINAL:
            self.ended = True

    def _append(self, item: Response | InferError) -> None:
        size = _size(item)
        if self._queue and self._came - self._gone + size > UNREAD:
            raise InferError(
                Code.UNAVAILABLE,
                f"{len(self._queue)} responses wait to be read, no more than {UNREAD} bytes are kept for a stream: the "
                "request was cancelled; read faster, or in a thread or task of its own",
            )
        self._came += size
        self._queue.append(item)


def _size(item: Response | InferError) -> int:
    return OVERHEAD + (item.byte_size if isinstance(item, Response) else 0)
