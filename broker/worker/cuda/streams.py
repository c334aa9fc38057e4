"""An instance's way to its GPU: a stream of its own, and the event that says when all of it is done.

Made when an instance on a GPU is loaded, or when an instance on the CPU first gets a request on GPU memory. Used by the
thread that runs the instance, one at a time.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from broker.worker.backends import OnGpu
from shm.cuda.driver import Context, CudaError, Device, attempt, call, make_current
from shm.cuda.sync import Stream

Bytes = npt.NDArray[np.uint8]
BLOCKING_SYNC, DISABLE_TIMING = 1, 2  # CU_EVENT_…
LONG_NS: Final = 1_000_000  # waits from which on being woken, some 50 µs, is cheaper than a core
STICKY_EXIT: Final = 71  # exit status of a worker that has lost its context


def address(array: npt.NDArray[Any]) -> int:
    """Where an array of the host lies."""
    found: int = array.__array_interface__["data"][0]
    return found


def end_if_lost(error: CudaError, where: str) -> None:
    """End this process if its context is lost: nothing of CUDA would work in it again.

    Its replacement runs once more what may run twice, as after any death.
    """
    if error.sticky:
        print(f"{where}: {error.message}: the CUDA context is lost; this worker ends", file=sys.stderr, flush=True)
        os._exit(STICKY_EXIT)


@final
class Lane:
    """Work in order on one GPU. What is enqueued has happened when `finish` returns, not before. `stream`: its address.

    Its methods make the GPU's context current for the calling thread where it is not, and leave it so.
    """

    __slots__ = ("_done", "_slept_for", "_waited_ns", "device", "moved", "order", "stream")

    def __init__(self, device: Device) -> None:
        self.device = device
        self.enter()
        self.order = Stream()
        self.stream = self.order.handle
        self.moved: Counter[str] = Counter()  # bytes that runs have copied since this was last read, by reason
        self._done = call("cuEventCreate", DISABLE_TIMING)
        self._slept_for = call("cuEventCreate", DISABLE_TIMING | BLOCKING_SYNC)
        self._waited_ns = 0  # the last time

    def enter(self) -> None:
        """Before anything else on a thread: contexts are current per thread."""
        make_current(self.device.ordinal)

    def copy_in(self, to: int, source: Bytes) -> None:
        """Host to GPU. `source` is read until `finish`; at once where it is not pinned, by most drivers."""
        call("cuMemcpyHtoDAsync", to, address(source), source.size, self.stream)

    def copy_out(self, to: Bytes, source: int) -> None:
        """GPU to host, to.size bytes."""
        call("cuMemcpyDtoHAsync", address(to), source, to.size, self.stream)

    def copy(self, to: int, source: int, byte_size: int) -> None:
        """Within the GPU."""
        call("cuMemcpyDtoDAsync", to, source, byte_size, self.stream)

    def finish(self) -> None:
        """Return when the GPU has done everything. Raises CudaError for what went wrong meanwhile.

        Where the last wait was long, the thread sleeps: drivers wait by looking, which takes a core from the clients.
        """
        event = self._slept_for if self._waited_ns > LONG_NS else self._done
        began = time.monotonic_ns()
        call("cuEventRecord", event, self.stream)
        call("cuEventSynchronize", event)
        self._waited_ns = time.monotonic_ns() - began

    def fetch(self, place: OnGpu) -> Bytes:
        """A copy of GPU memory on the host, complete."""
        data = np.empty(place.size, np.uint8)
        if place.size:
            self.copy_out(data, place.pointer)
            self.finish()
        return data

    def check(self) -> None:
        """After a failure: is the GPU's context still good? See `end_if_lost`."""
        try:
            self.order.synchronize()
        except CudaError as error:
            end_if_lost(error, f"{self.device.name}, {self.device.uuid}")

    def close(self) -> None:
        """Nothing is under way on it. From any thread."""
        with Context(self.device.ordinal):
            attempt("cuEventDestroy", self._done)
            attempt("cuEventDestroy", self._slept_for)
            self.order.close()
