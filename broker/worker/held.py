"""Requests whose producer on a GPU is not done: they are queued when it is, so that no instance waits for it.

Asked by `broker.worker.intake`, kept by the loop. An instance that waited would hold up everybody who waits for
nothing: what is behind it, and what shares its batch. Where a model keeps its requests' order (sequences,
`preserve_ordering`) or runs one alone after a death, the instance does wait (`broker.worker.cuda.execute`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, final

from broker.worker.model import LoadedModel
from broker.worker.plans import Plan
from broker.worker.sequences import Sequences
from shm.admission import Request
from shm.errors import Code, InferError, as_infer_error

if TYPE_CHECKING:
    from broker.worker.cuda.events import Waiters

Queue = Callable[[list[Request]], None]
End = Callable[[list[Request], Code, str], None]
_WAIT_EVENT = 10  # of `shm.layout.SUBMISSION`


@final
class Held:
    """All of a worker's. `queue`, `end` and `take_back`, which ends what is still queued, are called on a thread of its
    own.
    """

    __slots__ = ("_end", "_lock", "_queue", "_take_back", "_waiters")

    def __init__(self, queue: Queue, end: End, take_back: Queue) -> None:
        self._queue, self._end, self._take_back = queue, end, take_back
        self._lock = threading.Lock()  # of the models' counts
        self._waiters: Waiters | None = None

    def hold(self, request: Request, plan: Plan, model: LoadedModel) -> bool:
        """True: it waits here, or has ended. False: it may be queued; its event has happened, or is its instance's to
        wait for. Called by who takes requests in, `request` names an event.
        """
        if isinstance(model.queue, Sequences) or model.in_order is not None:
            return False
        from broker.worker.cuda.events import Waiters, events_of, has_happened

        try:
            events = events_of(request, plan)
            if has_happened(request, events):
                _forget_event(request)
                return False
            if self._waiters is None:
                self._waiters = Waiters()
            self._count(model, 1)
            self._waiters.add(request, events, functools.partial(self._go_on, request, model))
        except InferError as error:
            self._end([request], Code[error.code], error.message)
        except RuntimeError:  # there is no thread to be had
            self._count(model, -1)
            return False
        return True

    def _go_on(self, request: Request, model: LoadedModel, error: Exception | None) -> None:
        if error is None:
            _forget_event(request)
            self._queue([request])
            if request.ended:  # by somebody who found nothing queued, after the last look at its event
                self._take_back([request])
        else:
            failure = as_infer_error(error)
            self._end([request], Code[failure.code], failure.message)
        self._count(model, -1)  # only now: without it, and with nothing queued, an unloaded model may be closed

    def _count(self, model: LoadedModel, one: int) -> None:
        with self._lock:
            model.held += one


def _forget_event(request: Request) -> None:
    """Who runs it has nothing to ask for any more."""
    entry = request.entry
    request.entry = (*entry[:_WAIT_EVENT], 0, *entry[_WAIT_EVENT + 1 :])
