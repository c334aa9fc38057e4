"""The order of work on a GPU between processes: streams, and rings of events that one records and another looks at.

    client  ring = EventRing.create(n)   index = ring.record(the producer's stream)   send the index
    worker  ring = OpenedRing(handles)   ring.happened(index) before it has a model read
    client  ring.give(index) when the request has ended

What is looked at is the latest record. So an event is recorded before its index is sent, and not again before the
request has ended. A handle of memory carries no order: without an event the producer waits for its stream, or for all
of its context, before it sends.

All functions need a current context. Used by `clientlib.cuda_order` and `broker.worker.cuda`.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Final, final

from shm.cuda.descriptor import HANDLE_SIZE, MAX_EVENTS
from shm.cuda.driver import NOT_READY, CudaError, attempt, bindings, call
from shm.cuda.handles import handle_bytes, handle_of
from shm.errors import Code, InferError

NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING: not ordered with the legacy default stream
IPC_EVENT: Final = 2 | 4  # CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS, which needs the other


@final
class Stream:
    """A stream of this process's own. `handle` is its address, as runtimes want it."""

    __slots__ = ("_stream", "handle")

    def __init__(self) -> None:
        self._stream = call("cuStreamCreate", NON_BLOCKING)
        self.handle = int(self._stream)

    def copy(self, to: int, source: int, byte_size: int) -> None:
        """Copy between any two addresses, of GPUs or pinned memory of the host. Returns at once."""
        call("cuMemcpyAsync", to, source, byte_size, self._stream)

    def synchronize(self) -> None:
        """Return when all is done; other threads of Python run meanwhile. Raises CudaError for what went wrong."""
        call("cuStreamSynchronize", self._stream)

    def close(self) -> None:
        """Wait for its work and destroy it."""
        stream, self._stream = self._stream, None
        if stream is not None:
            call("cuStreamDestroy", stream)


def synchronize(stream: int | None) -> None:
    """Wait for anybody's stream, by its address (torch: `current_stream().cuda_stream`); 0, 1, 2: the default ones.

    None: for everything in this context, whatever its stream. Other threads of Python run meanwhile.
    """
    if stream is None:
        call("cuCtxSynchronize")
    else:
        call("cuStreamSynchronize", stream)


def is_done(stream: int) -> bool:
    """Has a stream nothing left to do?"""
    try:
        call("cuStreamQuery", stream)
    except CudaError as error:
        if error.number != NOT_READY:
            raise
        return False
    return True


def events_between_processes(ordinal: int) -> bool:
    """Can a GPU's events be shared? Where not, producers synchronise."""
    return bool(
        call("cuDeviceGetAttribute", bindings().CUdevice_attribute.CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED, ordinal)
    )


@final
class EventRing:
    """Events that this process records for another. `handles`: 64 bytes each, one after the other, sent once."""

    __slots__ = ("_events", "_free", "_lock", "handles")

    def __init__(self, events: list[Any], handles: bytes) -> None:
        self._events = events
        self.handles = handles
        self._free = deque(range(len(events)))
        self._lock = threading.Lock()

    @classmethod
    def create(cls, count: int) -> EventRing:
        """`count` events, none recorded. Raises CudaError where events cannot be shared."""
        assert 1 <= count <= MAX_EVENTS
        events: list[Any] = []
        try:
            for _ in range(count):
                events.append(call("cuEventCreate", IPC_EVENT))
            return cls(events, b"".join(handle_bytes(call("cuIpcGetEventHandle", event)) for event in events))
        except BaseException:
            for event in events:
                attempt("cuEventDestroy", event)
            raise

    def record(self, stream: int) -> int | None:
        """Take a free event and record it on the producer's stream, by its address: the index to send.

        None: all are in requests that have not ended. Raises CudaError, as for a stream of another GPU.
        """
        with self._lock:
            if not self._free:
                return None
            index = self._free.popleft()
        try:
            call("cuEventRecord", self._events[index], stream)
        except BaseException:
            self.give(index)
            raise
        return index

    def give(self, index: int) -> None:
        """The request that was sent with `index` has ended."""
        with self._lock:
            self._free.append(index)

    def close(self) -> None:
        """Destroy them. Nobody may wait for one any more."""
        events, self._events = self._events, []
        for event in events:
            attempt("cuEventDestroy", event)


@final
class OpenedRing:
    """Another process's events, opened once. `handles`: as `CudaEvents.check` allows. Raises CudaError for others."""

    __slots__ = ("_events",)

    def __init__(self, handles: bytes) -> None:
        self._events: list[Any] = []
        try:
            for start in range(0, len(handles), HANDLE_SIZE):
                handle = handle_of("CUipcEventHandle", handles[start : start + HANDLE_SIZE])
                self._events.append(call("cuIpcOpenEventHandle", handle))
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._events)

    def happened(self, index: int) -> bool:
        """Has everything happened that event `index` was recorded after? Raises INVALID_ARG for one that is not."""
        if not 0 <= index < len(self._events):
            raise InferError(Code.INVALID_ARG, f"there is no event {index} in a ring of {len(self._events)}")
        try:
            call("cuEventQuery", self._events[index])
        except CudaError as error:
            if error.number != NOT_READY:
                raise
            return False
        return True

    def close(self) -> None:
        """Let them go."""
        events, self._events = self._events, []
        for event in events:
            attempt("cuEventDestroy", event)
