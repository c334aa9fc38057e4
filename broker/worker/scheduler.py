"""What runs next: the queues of all models, free instances, and the suspects of a recovery.

`lock` guards everything here; the loop's threads and the control thread take it for an instant. No channel, no clock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import final

from broker.worker.batch import Batch
from broker.worker.deadlines import Deadlines
from broker.worker.model import Instance, LoadedModel
from broker.worker.queues import Row
from broker.worker.rate_limiter import Pool, RateLimiter, claims_of, idle
from broker.worker.retirement import Begin, claim, close, here, needed, predecessor
from broker.worker.sequences import Sequences
from broker.worker.turn import Turn
from shm import statistics
from shm.admission import EXPIRED, Request, Verdict
from shm.recovery import Recovered
from shm.worker_channel import WorkerChannel

Refused = tuple[Request, Verdict]  # how it is to end
SEQUENCES_NS = 30_000_000_000  # how long sequences of a model that was replaced may go on


@final
class Scheduler:
    """Queues and what is running. `deadline` is the earliest of the queued requests, 0 = none.

    `limiter`: None without a rate limiter; set before the first model is loaded.
    """

    def __init__(self, turn: Turn) -> None:
        self.lock = threading.Lock()
        self.queued: list[LoadedModel] = []  # models with something queued
        self.suspects: deque[Request] = deque()
        self.alone = False  # a suspect runs
        self.running: list[Instance] = []  # that have a batch; what the leader runs inline is not counted
        self.deadline = 0
        self.timed: list[LoadedModel] = []  # those whose queues let requests go by themselves
        self.serving: tuple[LoadedModel, ...] = ()  # those that take new requests
        self._deadlines = Deadlines()
        self._requests = 0  # queued and running, without streams and those that the leader ran at once
        self.retired: list[LoadedModel] = []  # unloaded or replaced, still at work
        self.shrinking: list[LoadedModel] = []  # those that have more instances than they are to have
        self.limiter: RateLimiter | None = None
        self._held: set[LoadedModel] = set()  # those whose next batch the limiter does not let run yet
        self._turn = turn

    def add(self, requests: list[Request]) -> list[Refused]:
        """Queue admitted requests. Returns those that were not taken in, which the caller ends."""
        with self.lock:
            return self._enqueue(requests)

    def adopt(self, recovered: Recovered) -> list[Refused]:
        """Take over what a recovery found: suspects run first, each alone. Returns what `add` would."""
        with self.lock:
            self.suspects.extend(recovered.suspects)
            for request in recovered.suspects:
                self._note(request)
            return self._enqueue(recovered.fresh)

    def _enqueue(self, requests: Sequence[Request]) -> list[Refused]:
        refused: list[Refused] = []
        listed, timed = None, False
        for request in requests:
            model: LoadedModel = request.plan.model  # type: ignore[union-attr]
            free = idle(self.limiter, model) if model.timed and not (self.alone or self.suspects) else 0
            verdict = model.closed or model.queue.add(request, request.arrival, free)
            if verdict is not None and self.retired and (old := predecessor(self.retired, request, model)):
                model, verdict = old, old.queue.add(request, request.arrival)
            if verdict is not None:
                refused.append((request, verdict))
                continue
            if model is not listed:
                listed = model
                if model not in self.queued:
                    self.queued.append(model)
                timed = timed or model.timed
            self._note(request)
        if timed:
            self._look_at_times()
        return refused

    def _note(self, request: Request) -> None:
        self._requests += 1
        if request.deadline:
            self._deadlines.add(request, request.deadline)
            self._look_at_times()

    def _look_at_times(self) -> None:
        """`deadline` is the requests' own or their queues', whichever is first."""
        earliest = self._deadlines.earliest()
        for model in self.timed:
            at = model.queue.late_at
            if at and (at < earliest or not earliest):
                earliest = at
        self.deadline = earliest

    def remove(self, request: Request) -> bool:
        """Take back a queued request (cancelled); False when it runs already."""
        with self.lock:
            return self._take_back(request)

    def _take_back(self, request: Request) -> bool:
        if not self._dequeue(request):
            return False
        self._requests -= 1
        self._deadlines.remove(request)
        if self.timed:
            self._look_at_times()  # what followed in its sequence leaves too
        return True

    def _dequeue(self, request: Request) -> bool:
        if request in self.suspects:
            self.suspects.remove(request)
            return True
        # Not by the plan's model: the request may be queued for the one that a reload replaced.
        for model in self.queued:
            if model.queue.remove(request):
                self._list(model)
                return True
        return False

    def _unlist(self, model: LoadedModel) -> None:
        self.queued.remove(model)
        model.instances[0].block[statistics.PENDING] = model.pending()

    def miss(self, requests: Sequence[Request]) -> None:
        """These steps of sequences were cancelled before they could be queued."""
        with self.lock:
            for request in requests:
                model: LoadedModel | None = request.plan.model if request.plan is not None else None  # type: ignore[attr-defined]
                if model is not None and isinstance(model.queue, Sequences):
                    model.queue.miss(request)
                    self._list(model)
            self._look_at_times()

    def gone(self, owner: int) -> None:
        """A client is gone: its sequences are over."""
        with self.lock:
            for model in (*self.serving, *self.retired):
                if isinstance(model.queue, Sequences):
                    model.queue.gone(owner)
                    self._list(model)
                elif model.ensemble is not None:
                    model.ensemble.gone(owner)
            self._look_at_times()

    def _list(self, model: LoadedModel) -> None:
        """Something has changed in its queue. (What is to be told of sequences waits there, too.)"""
        if not len(model.queue):
            if model in self.queued:
                self._unlist(model)
        elif model not in self.queued:
            self.queued.append(model)

    def drop(self, channel: WorkerChannel) -> list[Request]:
        """Take back everything queued from one channel: its client is gone."""
        with self.lock:
            return [r for r in channel.live if r is not None and self._take_back(r)]

    def waiting(self) -> bool:
        """Is anything queued?"""
        return bool(self.queued or self.suspects)

    def growing(self) -> bool:
        """Does a queue wait for more requests although an instance is free? A hint, taken without the lock."""
        return any(model.free for model in tuple(self.queued) if model not in self._held)

    def saturated(self) -> bool:
        """Is every instance at work, so that nothing that comes could begin before a batch ends?"""
        if not self.running or self.alone or self.suspects:
            return False
        return not any(model.free or model.answers for model in self.serving)

    def idle(self) -> bool:
        """Nothing queued, nothing running."""
        with self.lock:
            return not (self.running or self.queued or self.suspects or self._turn.inside())

    def in_flight(self) -> int:
        """Requests queued and running; of decoupled models until their last response."""
        streams = sum(len(model.streams) for model in (*self.serving, *self.retired) if model.streams is not None)
        return self._requests + streams or int(self._turn.inside())

    def due(self, now: int) -> Batch | None:
        """The next batch that may run on a free instance."""
        with self.lock:
            if self.alone:
                return None
            if self.suspects:
                return self._next_suspect()
            if self.limiter is not None:
                return self._due_within_limits(self.limiter, now)
            for model in list(self.queued):
                if (batch := self._due_of(model, now)) is not None:
                    return batch
        return None

    def _due_within_limits(self, limiter: RateLimiter, now: int) -> Batch | None:
        """Models take turns as ever; those that the limiter has a say in are as one of them."""
        self._held.clear()
        asked = False
        for model in list(self.queued):
            if model.claims and asked:
                continue
            asked = asked or bool(model.claims)
            batch = self._due_of_limited(limiter, now) if model.claims else self._due_of(model, now)
            if batch is not None:
                return batch
        return None

    def _due_of_limited(self, limiter: RateLimiter, now: int) -> Batch | None:
        free = [instance for model in self.queued if model.claims for instance in model.free]
        kept: set[Pool] = set()
        for instance in sorted(free, key=lambda each: limiter.turn(each.model.claims[each.index])):
            model = instance.model
            claim = model.claims[instance.index]
            if limiter.fits(claim, kept):
                rows = model.queue.take(now, instance.index)
                if rows or model.tells(instance):
                    limiter.begin(claim)
                    model.free.remove(instance)
                    return self._taken(model, instance, rows)
            elif model.queue.wants(now, instance.index):
                kept.update(claim.needs)
                self._held.add(model)
        return None

    def _due_of(self, model: LoadedModel, now: int) -> Batch | None:
        for _ in range(len(model.free) if model.queue.pinned else 1):
            try:
                instance = model.free.pop()  # the leader's inline path pops without the lock
            except IndexError:
                return None
            rows = model.queue.take(now, instance.index, model.share(instance))
            if rows or model.tells(instance):
                return self._taken(model, instance, rows)
            model.free.insert(0, instance)  # the next one is another one
        return None

    def _taken(self, model: LoadedModel, instance: Instance, rows: Sequence[Row]) -> Batch:
        batch = Batch(instance, [row for row in rows if row is not None], rows)
        if model.endings is not None:
            batch.endings = model.endings.take(instance.index)
        if rows:
            instance.block[statistics.CLOSED + model.queue.closed_by] += 1
        self._unlist(model)
        if len(model.queue):
            self.queued.append(model)  # behind the others: they get their turn
        return self._begin(batch)

    def _begin(self, batch: Batch) -> Batch:
        self.running.append(batch.instance)
        streams = batch.instance.model.streams
        if streams is not None:  # from now on they are among the model's streams; what runs once more is already
            self._requests -= sum(request not in streams.again for request in batch.requests)
        for request in batch.requests:
            if request.deadline:
                self._deadlines.remove(request)
        return batch

    def _next_suspect(self) -> Batch | None:
        # The leader enters its inline batch first and looks at `alone` then; here it is the other way round, so one of
        # the two always sees the other.
        self.alone = True
        if self.running or self._turn.inside():
            self.alone = False
            return None
        request = self.suspects.popleft()
        instance = request.plan.model.free.pop()  # type: ignore[union-attr]
        return self._begin(Batch(instance, [request], [request], alone=True))

    def done(self, batch: Batch) -> None:
        """The batch has run; its instance is free."""
        with self.lock:
            instance = batch.instance
            if not batch.alone:
                instance.model.queue.done(instance.index, batch.rows)
                self._list(instance.model)
                if instance.model.claims and self.limiter is not None:
                    self.limiter.end(instance.model.claims[instance.index])
            instance.model.free_again(instance)
            self.running.remove(instance)
            if instance.model.streams is None:
                self._requests -= len(batch.requests)
            self.alone = self.alone and not batch.alone
            if instance.model.timed:
                self._look_at_times()

    def expired(self, now: int) -> list[Refused]:
        """Take back every queued request whose deadline has passed, or whose queue lets it wait no longer."""
        with self.lock:
            late: list[Refused] = []
            for model in self.timed:  # first, because they have reasons of their own
                for request, verdict in model.queue.late(now):
                    self._deadlines.remove(request)
                    late.append((request, verdict))
                self._list(model)
            for request in self._deadlines.passed(now):
                self._dequeue(request)
                late.append((request, EXPIRED))
            self._requests -= len(late)
            self._look_at_times()
        return late

    def next_look(self) -> tuple[int, bool]:
        """When something becomes due or expires (0 = never), and whether anything is outstanding.

        Called before a sleep; also the moment to publish how much is queued.
        """
        with self.lock:
            until = [self.deadline] if self.deadline else []
            for model in self.queued:
                model.instances[0].block[statistics.PENDING] = model.pending()
                if not model.free or self.alone or self.suspects or model in self._held:
                    continue
                if due := model.queue.due():
                    until.append(due)
            return min(until, default=0), bool(self.queued or self.suspects or self.running)

    def admit(self, model: LoadedModel) -> None:
        """Its instances may run as the limiter lets them. Raises InferError when it can never let them."""
        if self.limiter is not None and (claims := claims_of(model.config.instance_group)):
            with self.lock:
                self.limiter.admit(claims)
            model.limit(claims)

    def forget(self, model: LoadedModel) -> None:
        """It was admitted, and runs no more."""
        if self.limiter is not None and model.claims:
            with self.lock:
                self.limiter.remove(model.claims)

    def serve(self, models: Sequence[LoadedModel]) -> None:
        """These take new requests from now on."""
        with self.lock:
            self.serving = tuple(models)
            self.timed += [model for model in models if model.timed and model not in self.timed]

    def retire(self, model: LoadedModel, replaced_at: int = 0) -> None:
        """The model gets no new requests; what it has still runs, then `close_retired` gives its memory back.

        `replaced_at`: its sequences may go on for a while, until they end or time out.
        """
        with self.lock:
            if replaced_at and isinstance(model.queue, Sequences):
                model.queue.drain(replaced_at + SEQUENCES_NS)
            self.retired.append(model)

    def look_at_models(self, now: int) -> bool:
        """End what nobody can answer any more, nobody wants, or was kept long enough; is anything left?"""
        models = [model for model in (*self.serving, *self.retired) if model.streams is not None or model.ensemble]
        left = [model.look(now) for model in models]
        return any(left)

    def reserve(self, model: LoadedModel, count: int) -> tuple[list[int], int]:
        """It is to have `count` instances: the indexes of those it lacks, and how many it was to have until now."""
        with self.lock:
            before, model.count = model.count, max(model.count, count)
            there = {instance.index for instance in model.instances}
            return [index for index in range(count) if index not in there], before

    def resize(self, model: LoadedModel, added: Sequence[Instance], count: int) -> None:
        """These are new, and those from index `count` on go, each when it has nothing to do (`close_retired`)."""
        with self.lock:
            model.instances += added
            model.count = count
            resting, model.resting = model.resting, []
            for instance in (*added, *resting):
                model.free_again(instance)
            if len(model.instances) > count and model not in self.shrinking:
                self.shrinking.append(model)

    def close_retired(self, now: int = 0, begin: Begin = here) -> None:
        """Close the retired models that have nothing left to do, and instances that are too many. `begin`: where."""
        if not (self.retired or self.shrinking):
            return
        with self.lock:
            surplus = [instance for model in self.shrinking for instance in model.surplus()]
            self.shrinking = [model for model in self.shrinking if len(model.instances) > model.count]
            wanted = [request.plan.model for request in self.suspects]  # type: ignore[union-attr]
            done = [m for m in self.retired if not needed(m, now) and m not in wanted and claim(m)]
            self.retired = [m for m in self.retired if m not in done]
            self.timed = [m for m in self.timed if m not in done]
        for model in done:
            self.forget(model)
        close(done, surplus, begin)
