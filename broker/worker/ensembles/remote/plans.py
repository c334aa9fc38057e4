"""The plan of an ensemble's step in the workers that serve its member, and which of them the step goes to.

Made by `broker.worker.ensembles.remote.prepared`. The broker prepares it at one worker and then binds it, under the
same name, at the others.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Protocol, final

from broker.worker.ensembles.remote.channel import Lane
from broker.worker.ensembles.remote.memory import SharedMemory
from broker.worker.ensembles.remote.places import Places
from broker.worker.ensembles.remote.session import StepSession
from broker.worker.plans import PlacedTensor, Plan
from shm.costs import costs_ns
from shm.errors import Code, InferError, fresh
from shm.message_values import TensorSpec
from shm.messages import Prepare, PrepareAt, PrepareStep, Release, Reply
from shm.messages import Prepared as Answer
from shm.sockets import close_all

AGAIN_NS = 1_000_000_000  # between two tries to bind a plan at a worker that refused it


class Counts(Protocol):
    """Who bounds how many plans there are (`broker.worker.ensembles.remote.pool.Budget`)."""

    def less(self) -> None:
        """One of them is gone."""


@final
class Bound:
    """One such plan, asked for when this is made; for one step at a time."""

    __slots__ = (
        "_asked",
        "_at",
        "_counts",
        "_error",
        "_first",
        "_lock",
        "_member",
        "_memory",
        "_refused",
        "_released",
        "_session",
        "_tried_ns",
        "_word",
        "_workers",
        "places",
        "plan",
    )

    def __init__(
        self,
        session: StepSession,
        memory: SharedMemory,
        counts: Counts,
        plan: Plan,
        message: PrepareStep,
        workers: Sequence[str],
        places: Places | None,
    ) -> None:
        """`message` names the first worker. `places`: of a decoupled member's responses."""
        self.plan = plan  # the same here, for which nothing runs
        self.places = places
        self._session, self._memory, self._counts = session, memory, counts
        self._lock = threading.Lock()  # of what follows
        self._workers = workers
        self._first = message.plan.worker
        self._member = message.plan.model
        self._word = 0
        self._at: tuple[str, ...] = ()  # where it is bound
        self._asked: dict[str, bool] = {}  # where it is about to be: is that to be waited for?
        self._refused: dict[str, InferError] = {}
        self._tried_ns = 0
        self._error: InferError | None = None
        self._released = False
        session.call(message, self._answered)

    def word(self, worker: str) -> int:
        """What submissions name it by, 0 while it is not known there. Raises InferError if it cannot be had."""
        if self._error is not None:
            raise fresh(self._error)
        if worker in self._at:
            return self._word
        with self._lock:
            refused = self._refused.get(worker)
            if refused is not None and worker not in self._at and worker not in self._asked:
                raise fresh(refused)
            return self._word if worker in self._at else 0

    def choose(self, now: int, turn: int) -> Lane:
        """The lane for its next step: of the workers that have it and are up, the one with the least to do. Where none
        is up, another one that serves the member; where none of those is, any: it is waited for.
        """
        lanes = [self._lane(worker) for worker in (self._at or (self._first,))]
        if len(self._workers) == 1:
            return lanes[0]
        if len(self._at) < len(self._workers) and now - self._tried_ns > AGAIN_NS:
            self._spread(now)
        best = least_of(lanes, now, turn)
        if best is None and self._at:
            best = least_of([self._lane(worker) for worker in self._workers if worker not in self._at], now, turn)
            if best is not None:
                self._bind_at((best.worker,), wait=True)
        return best or lanes[turn % len(lanes)]

    def home(self, number: int, start: bool, now: int, turn: int) -> Lane:
        """The lane for a step of a sequence: the same for all of them. `start`: it begins, not at a worker that is
        being replaced. One that does not respond may have a sequence of this number, and go on with it: there it waits.
        """
        homes, workers = self._session.homes, self._workers
        worker = homes.find(self._member, number, workers)
        if start and len(workers) > 1 and self._lane(worker).replaced:
            best = least_of([self._lane(each) for each in workers], now, turn)
            if best is not None:
                worker = best.worker
                homes.stray(self._member, number, worker)
        if worker != self._first and worker not in self._at:
            self._bind_at((worker,), wait=True)
        return self._lane(worker)

    def release(self) -> None:
        """No request of it is under way, and none will be."""
        with self._lock:
            known, released, self._released = self._word, self._released, True
        if not released:
            self._counts.less()
            if known:
                self._let_go(known)

    def _lane(self, worker: str) -> Lane:
        return self._session.lane(worker, streams=self.places is not None)

    def _answered(self, reply: Reply | InferError, fds: list[int]) -> None:
        close_all(fds)
        if not isinstance(reply, Answer):
            names = (tensor.region.info.name for tensor in (*self.plan.inputs, *self.plan.outputs))
            refused = self._memory.refusal(names)  # if so, that there is no such region says nothing
            self._error = refused or (reply if isinstance(reply, InferError) else InferError(Code.INTERNAL, "no plan"))
            return
        with self._lock:
            self._word = reply.index | reply.generation << 32
            self._at = (self._first,)
            released, waiting = self._released, tuple(self._asked)
        if released:
            self._let_go(self._word)
            return
        self._ask(waiting, wait=True)

    def _spread(self, now: int) -> None:
        """Have it bound at all workers that are up, in good time for the next step."""
        with self._lock:
            if not self._word or self._released:
                return
            self._tried_ns = now
            missing = tuple(each for each in self._workers if each not in self._at and each not in self._asked)
            self._asked.update(dict.fromkeys(missing, False))
        self._ask(missing, wait=False)

    def _bind_at(self, workers: tuple[str, ...], *, wait: bool) -> None:
        with self._lock:
            new = tuple(each for each in workers if each not in self._at and each not in self._asked)
            self._asked.update((each, wait) for each in workers if each in new or (wait and each in self._asked))
            known = self._word
        if known:
            self._ask(new, wait=wait)

    def _ask(self, workers: Iterable[str], *, wait: bool) -> None:
        index, generation = self._word & 0xFFFF_FFFF, self._word >> 32
        for worker in workers:
            message = PrepareAt(index=index, generation=generation, worker=worker, wait=wait)

            def bound(reply: Reply | InferError, fds: list[int], worker: str = worker) -> None:
                close_all(fds)
                with self._lock:
                    again = isinstance(reply, InferError) and self._asked[worker] and not wait
                    if not again:
                        del self._asked[worker]
                    if isinstance(reply, InferError):
                        self._refused[worker] = reply
                    else:
                        self._at = (*self._at, worker)
                if again:  # a step has come meanwhile that can go nowhere else
                    self._ask((worker,), wait=True)

            self._session.call(message, bound)

    def _let_go(self, word: int) -> None:
        self._session.call(Release(index=word & 0xFFFF_FFFF, generation=word >> 32))


def least_of(lanes: Sequence[Lane], now: int, turn: int) -> Lane | None:
    """The lane with the least to do, of equals now this one, now that (`turn`); None if no worker of theirs is up."""
    up = []
    for number in range(len(lanes)):
        lane = lanes[(number + turn) % len(lanes)]
        if (seen := lane.seen(now)) is not None:
            up.append((lane, seen))
    if not up:
        return None
    costs = costs_ns([seen for _, seen in up])
    return up[costs.index(min(costs))][0]


def prepare_of(plan: Plan, model: str, version: int, worker: str, places: Places | None) -> Prepare:
    """What the broker is asked for."""
    return Prepare(
        model=model,
        version=str(version) if version > 0 else "",
        worker=worker,
        inputs=tuple(map(spec_of, plan.inputs)),
        outputs=tuple(map(spec_of, plan.outputs)) if places is None else places.specs(),
        responses=0 if places is None else places.responses,
        parameters=dict(plan.parameters),
    )


def spec_of(tensor: PlacedTensor) -> TensorSpec:
    """A tensor of a plan here as the broker is told of it."""
    return TensorSpec(
        name=tensor.name,
        region=tensor.region.info.name,
        datatype=tensor.datatype,
        shape=tensor.shape,
        offset=tensor.place.offset,
        byte_size=tensor.place.byte_size,
    )
