"""A client's ring of events as a worker has it open: a request waits until the work that fills its inputs is done.

Opened by `broker.worker.cuda.windows` for a region of kind "events". What comes for an ensemble, or for a model that
keeps no order, waits in `Waiters`, before it is queued (`broker.worker.held`); for anything else
`broker.worker.cuda.execute` asks before a run.

The thread looks, for a second at most (TENSORBROKER_EVENT_PATIENCE_MS), instead of having the instance's stream wait
(cuStreamWaitEvent): what was enqueued cannot be taken back, so a client whose event never happens, or that was killed
before, would hold up an instance that is everybody's until its worker is killed, too.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Final, NamedTuple, final

from broker.worker.cuda.streams import end_if_lost
from broker.worker.plans import Plan
from shm.admission import EXPIRED, Request
from shm.cuda.descriptor import CudaEvents
from shm.cuda.driver import Context, CudaError, make_current
from shm.cuda.sync import OpenedRing
from shm.errors import Code, InferError, as_infer_error
from shm.statistics import GPU_WAIT_NS, GPU_WAITS

_ASKED = os.environ.get("TENSORBROKER_EVENT_PATIENCE_MS", "")
_IS_TIME = re.fullmatch("[0-9]{1,5}", _ASKED) is not None  # 100 s at most: an instance waits that long for a client
PATIENCE_NS: Final = 1_000_000 * (int(_ASKED) if _IS_TIME else 1000)  # for all requests of a batch together
IMPATIENCE_NS: Final = 100_000_000  # for a client that has just been waited for in vain
RECOVERY: Final = 10  # a client is waited for as long as the tenth of the time since it was in vain
AWAKE_NS: Final = 100_000  # after which the thread sleeps between two looks
PAUSE_S: Final = 50e-6
LOOKS: Final = 4  # times as long as it took to look at all that wait, where that is more
FEW: Final = 4  # that wait: looking at them again and again takes next to nothing from who runs
LINGER_S: Final = 1.0  # the thread stays, with nothing to look at: to start one takes longer than most requests wait
_now = time.monotonic_ns
_counting = threading.Lock()


@final
class Patience:
    """How long clients are waited for, each as a whole, whatever rings it has: all instances are everybody's.

    Waiting in vain takes a tenth of an instance's time or less, beside 0.1 s for each request. Times: CLOCK_MONOTONIC.
    """

    __slots__ = ("_in_vain", "_lock")

    def __init__(self) -> None:
        self._in_vain: dict[int, int] = {}  # when a session was, the last time, where that counts yet
        self._lock = threading.Lock()

    def with_client(self, owner: int, now: int) -> int:
        """How long, in ns, session `owner` is waited for."""
        last = self._in_vain.get(owner)
        return PATIENCE_NS if last is None else min(PATIENCE_NS, max(IMPATIENCE_NS, (now - last) // RECOVERY))

    def was_in_vain(self, owner: int, now: int) -> None:
        """An event of session `owner` was waited for and did not happen."""
        with self._lock:
            self._in_vain[owner] = now
            for other, last in list(self._in_vain.items()):
                if now - last >= RECOVERY * PATIENCE_NS:
                    del self._in_vain[other]


@final
class Events:
    """A ring of session `owner`. `words`: the worker's own, where waits are counted."""

    __slots__ = ("_ended", "_ordinal", "_owner", "_patience", "_ring", "_words")

    def __init__(
        self, name: str, events: CudaEvents, owner: int, ordinal: int, words: memoryview, patience: Patience
    ) -> None:
        self._owner, self._ordinal, self._words, self._patience = owner, ordinal, words, patience
        self._ended = False
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
        began = _now()
        if self.happened(number, began, began, until_ns, deadline_ns):
            return
        try:
            while not self.happened(number, began, _now(), until_ns, deadline_ns):
                if _now() - began < AWAKE_NS:
                    os.sched_yield()
                else:
                    time.sleep(PAUSE_S)
        finally:
            self.count(_now() - began)

    def happened(self, number: int, since: int, now: int, until_ns: int, deadline_ns: int) -> bool:
        """One look, `since` the first. Raises as `wait`."""
        make_current(self._ordinal)
        if self._ring.happened(number - 1):
            return True
        if self._ended:
            raise InferError(Code.NOT_FOUND, "the events of this request were unregistered")
        if deadline_ns and now >= deadline_ns:
            raise InferError(*EXPIRED)
        patience = self._patience.with_client(self._owner, since)
        if now >= until_ns or now - since >= patience:
            if now > since:  # else the time went to others of its batch
                self._patience.was_in_vain(self._owner, now)
            raise InferError(
                Code.UNAVAILABLE,
                f"the event of this request did not happen within {patience / 1e9:.3g} s: submit later, or wait for "
                "the stream first (order='synchronize')",
            )
        return False

    def count(self, waited_ns: int) -> None:
        """A request has waited."""
        with _counting:
            self._words[GPU_WAITS] += 1
            self._words[GPU_WAIT_NS] += waited_ns

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


def events_of(request: Request, plan: Plan) -> Events:
    """The ring that the request's event is in. Raises InferError INVALID_ARG if it has none."""
    if plan.events is None or plan.events.events is None:
        raise InferError(
            Code.INVALID_ARG, f"the request names event {request.wait_event - 1}, and its plan no ring of events"
        )
    return plan.events.events


def has_happened(request: Request, events: Events) -> bool:
    """One look at the request's event. Raises as `Events.wait`."""
    now = _now()
    try:
        return events.happened(request.wait_event, now, now, now + PATIENCE_NS, request.deadline)
    except CudaError as error:
        end_if_lost(error, "an event of a client")
        raise


class _Waiting(NamedTuple):
    """`since`, `until`: CLOCK_MONOTONIC ns."""

    request: Request
    events: Events
    since: int
    until: int
    then: Callable[[Exception | None], None]

    def is_over(self, now: int) -> bool:
        """Has it happened, or failed, or does nobody want it any more? Then whoever waits has been told."""
        if self.request.ended:
            self.then(InferError(Code.CANCELLED, "the request was cancelled"))
            return True
        error: Exception | None = None
        try:
            if not self.events.happened(self.request.wait_event, self.since, now, self.until, self.request.deadline):
                return False
        except Exception as failure:
            if isinstance(failure, CudaError):
                end_if_lost(failure, "an event of a client")
            error = as_infer_error(failure)
        if now > self.since:
            self.events.count(now - self.since)
        self.then(error)
        return True


@final
class Waiters:
    """Requests that begin when their events have happened. One thread looks at all of them while there are any."""

    __slots__ = ("_at_work", "_changed", "_waiting")

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards what follows
        self._waiting: list[_Waiting] = []
        self._at_work = False

    def add(self, request: Request, events: Events, then: Callable[[Exception | None], None]) -> None:
        """Call `then` on another thread, with what went wrong. Raises RuntimeError if nothing will be."""
        now = _now()
        with self._changed:
            if not self._at_work:
                threading.Thread(target=self._serve, name="events", daemon=True).start()
                self._at_work = True
            self._waiting.append(_Waiting(request, events, now, now + PATIENCE_NS, then))
            self._changed.notify()

    def _serve(self) -> None:
        try:
            while self._some():
                self._look()
        except BaseException:
            # Requests would wait for ever: the worker's replacement redoes them from the ledger.
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(70)

    def _some(self) -> bool:
        """Is there something to look at? False: there was nothing for a while, and this thread ends."""
        with self._changed:
            if not self._waiting:
                self._changed.wait(LINGER_S)
            self._at_work = bool(self._waiting)
            return self._at_work

    def _look(self) -> None:
        began = _now()
        waiting = tuple(self._waiting)
        over = [each for each in waiting if each.is_over(_now())]
        with self._changed:
            for each in over:
                self._waiting.remove(each)
        ended = _now()
        if len(waiting) <= FEW and (over or ended - waiting[-1].since < AWAKE_NS):
            os.sched_yield()
        else:
            time.sleep(max(PAUSE_S, LOOKS * (ended - began) / 1e9))
