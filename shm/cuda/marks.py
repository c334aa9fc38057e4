"""Looking, without waiting, whether a GPU has done what it had to do at some moment.

    mark = mark_now(ordinal, stream)     the stream's work, or all of the context's; in that context
    mark.is_past()                       in the same context, as often as one likes
    mark.drop()

`cuStreamQuery` alone would not do: another thread may give the stream more to do all the time. Work of a whole context
is captured by an event, too, which no event on a default stream could do: that says nothing of non-blocking streams.

Used by `clientlib.cuda_order` for requests with a deadline, and on event loops.
"""

from __future__ import annotations

import threading
from typing import Any, Final, Protocol, final

from shm.cuda.driver import INVALID_HANDLE, NOT_READY, Context, CudaError, call, primary
from shm.errors import Code, InferError, fresh

LET_S: Final = 5e-5  # for the thread that waits: whoever looks at once again would keep the interpreter from it
DISABLE_TIMING: Final = 2  # CU_EVENT_…: such an event is the cheapest


class Mark(Protocol):
    """A moment of a stream or of a context."""

    def is_past(self) -> bool:
        """Is all done that there was to do? Raises CudaError for what went wrong."""

    def drop(self) -> None:
        """It is not asked again."""


def mark_now(ordinal: int, stream: int | None) -> Mark:
    """What `stream` has to do by now, by its address; None: all of GPU `ordinal`'s context, which is current."""
    event = _Event(ordinal)
    try:
        if stream is not None:
            call("cuEventRecord", event.event, stream)
        else:
            call("cuCtxRecordEvent", primary(ordinal), event.event)
    except InferError as error:
        event.drop()
        if stream is not None:
            raise of_another(error, stream, ordinal) from None
        if error.code != Code.UNSUPPORTED.name:
            raise
        return _Drained.soon(ordinal)  # drivers before CUDA 12.5 have no such function
    return event


def of_another(error: InferError, stream: int, ordinal: int) -> InferError:
    """What is told of `stream`, where no event of GPU `ordinal` could be recorded."""
    if not isinstance(error, CudaError) or error.number != INVALID_HANDLE:
        return error
    return InferError(
        Code.INVALID_ARG,
        f"stream {stream:#x} is none of GPU {ordinal}, where the plan's memory lies, or has been destroyed: events are "
        'recorded on streams of the same GPU; plan.after(None) after synchronizing that stream, or order="synchronize" '
        "without a timeout, waits for any",
    )


_spare: dict[int, list[Any]] = {}  # events for further marks, by GPU; a client makes as many as it has waits at a time


@final
class _Event:
    __slots__ = ("_spare", "event")

    def __init__(self, ordinal: int) -> None:
        self._spare = _spare.setdefault(ordinal, [])
        try:
            self.event = self._spare.pop()
        except IndexError:
            self.event = call("cuEventCreate", DISABLE_TIMING)

    def is_past(self) -> bool:
        try:
            call("cuEventQuery", self.event)
        except CudaError as error:
            if error.number != NOT_READY:
                raise
            return False
        return True

    def drop(self) -> None:
        self._spare.append(self.event)  # recorded anew, it says nothing of before


_draining = threading.Lock()
_asked: dict[int, list[_Drained]] = {}  # by GPU: a thread is at work where there is an entry


@final
class _Drained:
    """A thread waits for the whole context, one per GPU, and again as long as somebody has asked meanwhile."""

    __slots__ = ("_error", "_settled")

    def __init__(self) -> None:
        self._settled = threading.Event()
        self._error: InferError | None = None

    @classmethod
    def soon(cls, ordinal: int) -> _Drained:
        mark = cls()
        with _draining:
            known = _asked.get(ordinal)
            if known is None:
                _asked[ordinal] = [mark]
                threading.Thread(target=_drain, args=(ordinal,), daemon=True).start()
            else:
                known.append(mark)
        return mark

    def is_past(self) -> bool:
        past = self._settled.wait(LET_S)
        if self._error is not None:
            raise fresh(self._error)
        return past

    def drop(self) -> None:
        pass

    def settle(self, error: InferError | None) -> None:
        self._error = error
        self._settled.set()


def _drain(ordinal: int) -> None:
    while True:
        with _draining:
            asked = _asked[ordinal]
            if not asked:
                del _asked[ordinal]
                return
            _asked[ordinal] = []
        error = None
        try:
            with Context(ordinal):
                call("cuCtxSynchronize")
        except InferError as caught:
            error = fresh(caught)
        for mark in asked:
            mark.settle(error)
