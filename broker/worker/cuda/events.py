"""A client's ring of events as a worker has it open: a request waits until the work that fills its inputs is done.

Opened by `broker.worker.cuda.windows` for a region of kind "events"; `broker.worker.cuda.execute` asks before a run.

The thread looks, for a second at most, instead of having the instance's stream wait (cuStreamWaitEvent): what was
enqueued cannot be taken back, so a client whose event never happens, or that was killed before, would hold up an
instance that is everybody's until its worker is killed, too.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Final, final

from broker.worker.cuda.streams import end_if_lost
from shm.admission import EXPIRED
from shm.cuda.descriptor import CudaEvents
from shm.cuda.driver import Context, CudaError, make_current
from shm.cuda.sync import OpenedRing
from shm.errors import Code, InferError
from shm.statistics import GPU_WAIT_NS, GPU_WAITS

PATIENCE_NS: Final = 1_000_000_000  # for all requests of a batch together
AWAKE_NS: Final = 100_000  # after which the thread sleeps between two looks
PAUSE_S: Final = 50e-6
_now = time.monotonic_ns
_counting = threading.Lock()


@final
class Events:
    """The ring of one session. `words`: the worker's own, where waits are counted."""

    __slots__ = ("_ended", "_ordinal", "_patient", "_ring", "_words")

    def __init__(self, name: str, events: CudaEvents, ordinal: int, words: memoryview) -> None:
        self._ordinal, self._words = ordinal, words
        self._ended = False
        self._patient = True  # a client that was waited for in vain is not, until an event of it comes in time
        events.check(name)
        try:
            with Context(ordinal):
                self._ring = OpenedRing(events.handles)
        except CudaError as error:
            end_if_lost(error, f"'{name}'")
            raise InferError(
                Code.INVALID_ARG, f"failed to register '{name}': no events of another process: {error.message}"
            ) from None

    def wait(self, number: int, until_ns: int, deadline_ns: int = 0) -> None:
        """Return when event `number` (from 1) has happened. Called by the thread that is about to run the request.

        Raises INVALID_ARG for an event that is not, UNAVAILABLE at `until_ns`, or at the request's deadline.
        """
        make_current(self._ordinal)
        if self._ring.happened(number - 1):
            self._patient = True
            return
        began = _now()
        ends = until_ns if self._patient else began
        try:
            while not self._ring.happened(number - 1):
                now = _now()
                if self._ended:
                    raise InferError(Code.NOT_FOUND, "the events of this request were unregistered")
                if deadline_ns and now >= deadline_ns:
                    raise InferError(*EXPIRED)
                if now >= ends:
                    self._patient = False
                    raise _in_vain()
                if now - began < AWAKE_NS:
                    os.sched_yield()
                else:
                    time.sleep(PAUSE_S)
        finally:
            with _counting:
                self._words[GPU_WAITS] += 1
                self._words[GPU_WAIT_NS] += _now() - began

    def end(self) -> None:
        """Nobody is to wait any more."""
        self._ended = True

    def close(self) -> None:
        """No plan names it, no request waits."""
        try:
            with Context(self._ordinal):
                self._ring.close()
        except CudaError as error:
            end_if_lost(error, "events of a client")


def _in_vain() -> InferError:
    return InferError(
        Code.UNAVAILABLE,
        f"the event of this request did not happen within {PATIENCE_NS / 1e9:g} s, or others of this client before it "
        "did not: submit later, or wait for the stream first (order='synchronize')",
    )
