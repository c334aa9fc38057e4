"""An instance's way to its GPU: a stream of its own, and the event that says when all of it is done.

Made when an instance on a GPU is loaded, or when an instance on the CPU first gets a request on GPU memory. Used by the
thread that runs the instance, one at a time.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from broker.worker.backends import OnGpu
from shm.cuda.driver import Context, CudaError, Device, attempt, call, make_current

Bytes = npt.NDArray[np.uint8]
NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING: never waits for the default stream, which others may use
DISABLE_TIMING: Final = 2  # CU_EVENT_DISABLE_TIMING
STICKY_EXIT: Final = 71  # exit status of a worker that has lost its context


def address(array: npt.NDArray[Any]) -> int:
    """Where an array of the host lies."""
    found: int = array.__array_interface__["data"][0]
    return found


@final
class Lane:
    """Work in order on one GPU. What is enqueued has happened when `finish` returns, not before.

    Its methods make the GPU's context current for the calling thread where it is not, and leave it so.
    """

    __slots__ = ("_done", "_stream", "device", "stream")

    def __init__(self, device: Device) -> None:
        self.device = device
        self.enter()
        self._stream = call("cuStreamCreate", NON_BLOCKING)
        self._done = call("cuEventCreate", DISABLE_TIMING)
        self.stream = int(self._stream)

    def enter(self) -> None:
        """Before anything else on a thread: contexts are current per thread."""
        make_current(self.device.ordinal)

    def copy_in(self, to: int, source: Bytes) -> None:
        """Host to GPU. `source` is read until `finish`; at once where it is not pinned, by most drivers."""
        call("cuMemcpyHtoDAsync", to, address(source), source.size, self._stream)

    def copy_out(self, to: Bytes, source: int) -> None:
        """GPU to host, to.size bytes."""
        call("cuMemcpyDtoHAsync", address(to), source, to.size, self._stream)

    def copy(self, to: int, source: int, byte_size: int) -> None:
        """Within the GPU."""
        call("cuMemcpyDtoDAsync", to, source, byte_size, self._stream)

    def finish(self) -> None:
        """Return when the GPU has done everything. Raises CudaError for what went wrong meanwhile."""
        call("cuEventRecord", self._done, self._stream)
        call("cuEventSynchronize", self._done)

    def fetch(self, place: OnGpu) -> Bytes:
        """A copy of GPU memory on the host, complete."""
        data = np.empty(place.size, np.uint8)
        if place.size:
            self.copy_out(data, place.pointer)
            self.finish()
        return data

    def check(self) -> None:
        """After a failure: is the GPU's context still good? Ends the process if not; nothing of CUDA would work again.

        Its replacement runs once more what may run twice, as after any death.
        """
        try:
            call("cuStreamSynchronize", self._stream)
        except CudaError as error:
            if error.sticky:
                print(
                    f"{self.device.name} ({self.device.uuid}): {error.message}: the CUDA context is lost, this worker "
                    "ends and is replaced",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(STICKY_EXIT)

    def close(self) -> None:
        """Nothing is under way on it. From any thread."""
        with Context(self.device.ordinal):
            attempt("cuEventDestroy", self._done)
            attempt("cuStreamDestroy", self._stream)
