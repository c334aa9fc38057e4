"""The order of work on a GPU between processes: streams, and rings of events that one records and another awaits.

    client  ring = EventRing.create(n)   index = ring.record(the producer's stream)   send the index
    worker  ring = OpenedRing(handles)   wait on its own stream for event `index`: the GPU waits, no thread does
    client  ring.give(index) when the request has ended

An event's wait is for the record that was the latest when the wait was asked for. So an event is recorded before its
index is sent, and not again before the request has ended: a ring has as many events as requests may be under way. A
handle of memory carries no order: without an event the producer waits for its stream before it sends (`synchronize`).

All functions need a current context. Workers use the streams (`broker.worker.cuda`). No message
carries a ring to a worker yet: clients wait for their streams.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Final, final

from shm.cuda.descriptor import HANDLE_SIZE
from shm.cuda.driver import attempt, bindings, call
from shm.cuda.handles import handle_bytes, handle_of
from shm.errors import Code, InferError

NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING: not ordered with the legacy default stream
IPC_EVENT: Final = 2 | 4  # CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS, which needs the other
MAX_EVENTS: Final = 1024  # of a ring: as many as requests of a channel


@final
class Stream:
    """A stream of this process's own. `handle` is its address, as runtimes want it."""

    __slots__ = ("_stream", "handle")

    def __init__(self) -> None:
        self._stream = call("cuStreamCreate", NON_BLOCKING)
        self.handle = int(self._stream)

    def wait(self, event: Any) -> None:
        """Later work of the stream runs when `event` has happened. Returns at once."""
        call("cuStreamWaitEvent", self._stream, event, 0)

    def record(self, event: Any) -> None:
        """`event` happens when the stream has done what it has by now. Returns at once."""
        call("cuEventRecord", event, self._stream)

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


def synchronize(stream: int = 0) -> None:
    """Wait for anybody's stream, by its address (torch: `current_stream().cuda_stream`); 0, 1, 2: the default ones."""
    call("cuStreamSynchronize", stream)


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

    def record(self, stream: int) -> int:
        """Take a free event and record it on the producer's stream, by its address: the index to send.

        Raises UNAVAILABLE when all are in requests that have not ended.
        """
        with self._lock:
            if not self._free:
                raise InferError(
                    Code.UNAVAILABLE, f"all {len(self._events)} events are in requests that have not ended: await some"
                )
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
    """Another process's events, opened once. Raises InferError INVALID_ARG for what is no such ring."""

    __slots__ = ("_events",)

    def __init__(self, handles: bytes) -> None:
        if not handles or len(handles) % HANDLE_SIZE or len(handles) > MAX_EVENTS * HANDLE_SIZE:
            raise InferError(
                Code.INVALID_ARG,
                f"a ring is 1 to {MAX_EVENTS} handles of events of {HANDLE_SIZE} bytes, {len(handles)} bytes came",
            )
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

    def wait(self, index: int, stream: Stream) -> None:
        """Have `stream` wait for event `index`. Raises INVALID_ARG for one that there is not."""
        if not 0 <= index < len(self._events):
            raise InferError(Code.INVALID_ARG, f"there is no event {index} in a ring of {len(self._events)}")
        stream.wait(self._events[index])

    def close(self) -> None:
        """Let them go."""
        events, self._events = self._events, []
        for event in events:
            attempt("cuEventDestroy", event)
