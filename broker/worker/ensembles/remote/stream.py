"""A step of a decoupled member in another worker: its responses come part by part, and are branches of a flow here.

Made by `broker.worker.ensembles.remote.elsewhere`. Parts are copied out of their places as they come, as long as the
steps that read them keep up; else they stay there, and the other worker waits, until the flow's thread gets to them.
The thread of the session never waits.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, final

import numpy as np
import numpy.typing as npt

from broker.worker.ensembles.memory import Value, byte_size_of, private
from broker.worker.ensembles.remote.channel import Lane
from broker.worker.ensembles.remote.places import Places, fits
from broker.worker.ensembles.remote.plans import Bound
from shm.admission import Request, Verdict
from shm.errors import Code, InferError, as_infer_error
from shm.layout import CODE_MASK, FINAL, NOTED
from shm.recovery import to_blame
from shm.responses import Extent, part_count, unpack

if TYPE_CHECKING:
    from broker.worker.ensembles.remote.flow import SpreadBranch

LARGEST = 1 << 30  # bytes of one response, as for clients


@final
class RemoteStream:
    """Implements `broker.worker.ensembles.remote.channel.Sends`, and `broker.worker.ensembles.flow.Brings`."""

    __slots__ = ("_arrived", "_assembler", "_bound", "_branch", "_failure", "_lane", "_lock", "_ready", "ident", "step")
    light = False

    def __init__(self, branch: SpreadBranch, step: Request, lane: Lane, bound: Bound) -> None:
        assert bound.places is not None
        self._branch, self._lane, self._bound = branch, lane, bound
        self.step = step
        self.ident = 0
        self._lock = threading.Lock()  # of what follows
        self._arrived: deque[bytes] = deque()  # notes of parts that still lie in their places
        self._ready: deque[dict[str, Value] | None] = deque()  # of parts that were copied; None: more must follow
        self._assembler = _Assembler(bound.places)
        self._failure: InferError | None = None  # it was asked to end for this reason
        bound.places.taken(0)

    # --- of the session's thread --------------------------------------------------------------------------------

    def word(self) -> int:
        """See `Sends`."""
        return self._bound.word(self._lane.worker)

    def settle(self, entry: tuple[int, ...], note: bytes) -> None:
        """A part of a response has come, an error, or the end, perhaps with one of these."""
        code = Code(entry[2] & CODE_MASK)
        if not code and entry[2] & NOTED:
            with self._lock:
                self._arrived.append(note)
                while self._arrived and self._branch.has_room():
                    self._copy()
            self._branch.came(self)
        error = InferError(code, note.rstrip(b"\0").decode(errors="replace")) if code else None
        if not entry[2] & FINAL:
            if error is not None:
                self._give_up(error)  # as of a member here, the first error is the end
            return
        self._lane.ended(self)
        step = self.step
        step.queue_ns, step.input_ns, step.infer_ns, step.output_ns = entry[3:7]
        if code == Code.UNAVAILABLE and error is not None and to_blame(error.message):
            self._branch.blame()
        error = self._failure or error
        if error is not None:
            step.fail(Code[error.code], error.message)
        step.channel.complete((step,))

    def fail(self, verdict: Verdict) -> None:
        """See `Sends`."""
        self.step.fail(*verdict)
        self.step.channel.complete((self.step,))

    # --- of the flow's thread -----------------------------------------------------------------------------------

    def take(self) -> dict[str, Value] | None:
        """See `Brings`."""
        with self._lock:
            if not self._ready:
                self._copy()
            return self._ready.popleft()

    # --- with the lock ------------------------------------------------------------------------------------------

    def _copy(self) -> None:
        """The next part is taken: its place may be written again."""
        note = self._arrived.popleft()
        written: dict[str, Value] | None = None
        if self._failure is None:
            try:
                written = self._assembler.add(note)
            except (InferError, MemoryError) as error:
                self._give_up(as_infer_error(error))
        if written is not None:
            self._branch.waits(byte_size_of(written))
            self._branch.learn(written)
        self._ready.append(written)

    def _give_up(self, error: InferError) -> None:
        if self._failure is None:
            self._failure = error
            self._lane.cancel(self.step)


@final
class _Assembler:
    """Puts the parts of one request's responses together; no word of their notes is trusted."""

    __slots__ = ("_note", "_part", "_parts", "_places", "_taken", "_values")

    def __init__(self, places: Places) -> None:
        self._places = places
        self._taken = 0
        self._note = b""
        self._values: list[Value | None] = []
        self._part, self._parts = 0, 1

    def add(self, note: bytes) -> dict[str, Value] | None:
        """Copy the next part out of its place. Returns the response, by ensemble tensor, when it is complete.

        Raises InferError for notes that no worker writes, and for a response that is too large.
        """
        if not self._part:
            self._begin(note)
        elif note != self._note:
            raise _garbled("its parts do not belong together")
        place = self._taken % self._places.responses
        for output, value in zip(self._places.outputs, self._values, strict=True):
            if value is not None:
                start = self._part * output.room
                piece: npt.NDArray[np.uint8] = value.region.bytes[start : min(start + output.room, value.byte_size)]
                piece[...] = output.at(place)[: piece.size]
        self._taken += 1
        self._places.taken(self._taken)
        self._part += 1
        if self._part < self._parts:
            return None
        self._part = 0
        outputs = zip(self._places.outputs, self._values, strict=True)
        return {output.tensor: value for output, value in outputs if value is not None}

    def _begin(self, note: bytes) -> None:
        outputs = self._places.outputs
        try:
            extents = unpack(note, len(outputs))
        except ValueError as error:
            raise _garbled(str(error)) from None
        total = 0
        for output, extent in zip(outputs, extents, strict=True):
            if extent is not None and not fits(output.datatype, extent):
                raise _garbled(f"output '{output.name}' of shape {list(extent.shape)} has {extent.byte_size} bytes")
            total += 0 if extent is None else extent.byte_size
        if total > LARGEST:
            raise InferError(Code.UNSUPPORTED, f"a response has {total} bytes: one may have {LARGEST}")
        self._note = note
        self._parts = part_count(extents, [output.room for output in outputs])
        self._values = [
            None if extent is None else _place(output.datatype, extent)
            for output, extent in zip(outputs, extents, strict=True)
        ]


def _place(datatype: str, extent: Extent) -> Value:
    place = private("UINT8", (extent.byte_size,))
    return place._replace(datatype=datatype, shape=tuple(extent.shape), byte_size=extent.byte_size)


def _garbled(what: str) -> InferError:
    return InferError(Code.INTERNAL, f"another worker reported a response that cannot be: {what}")
