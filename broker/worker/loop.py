"""The worker's loop: take requests from channels, schedule, run, publish.

`Loop.serve` is the main function of every instance thread and of the spare. One of them leads (see `turn`): it sweeps
the hot channels (see `hot_set`), feeds the queues, and runs what is due.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import final

from broker.worker.backlog import Backlog
from broker.worker.batch import SHORT_NS, Batch, by_channel, worth_taking
from broker.worker.closing import Closing
from broker.worker.endings import count_endings
from broker.worker.ensembles.inline import lone_run
from broker.worker.execute import run_batch
from broker.worker.held import Held
from broker.worker.hot_set import HotSet
from broker.worker.intake import take_in, withdraw
from broker.worker.model import LoadedModel
from broker.worker.parking import Parking
from broker.worker.plans import Plan
from broker.worker.scheduler import Refused, Scheduler
from broker.worker.turn import Inline, Turn
from shm import statistics
from shm.admission import Request
from shm.errors import Code, forget_frames
from shm.layout import TAIL
from shm.recovery import Recovered
from shm.worker_channel import WorkerChannel

DEPOSE_NS, QUIET_NS, DRAIN_NS = 10_000_000, 100_000_000, 2_000_000
_now = time.monotonic_ns


@final
class Loop:
    """The channels belong to whoever leads; `scheduler` has a lock of its own."""

    def __init__(self, own_block: memoryview, on_broken: Callable[[WorkerChannel], None], watch_fd: int) -> None:
        self.turn = Turn()
        self.scheduler = Scheduler(self.turn)
        self.hot_set = HotSet(own_block, on_broken, self._saw_traffic)
        self._attached: list[WorkerChannel] = []  # with those that are not watched any more and still have requests
        self.stopping = False
        self.busy = False  # traffic lately: the control thread looks after the leader
        self._ran_inline: set[LoadedModel] = set()  # their statistics wait to be flushed
        self._parking = Parking(self.scheduler, self.hot_set)
        self._threads: set[int] = set()  # those that serve
        self._ran_short = False  # by a leader, since it slept last
        self._block = own_block
        self._backlog = Backlog(self.scheduler)
        self._held = Held(self.submit, self.end, self.take_back)
        self._taken = 0  # since the last flush
        self._closing = Closing()
        self._watches = 0
        self._watch_fd = watch_fd  # wakes the control thread: look after the leader

    # --- called by the control thread ---------------------------------------------------------------------------

    def attach(self, channel: WorkerChannel, recovered: Recovered) -> None:
        """Watch a channel whose recovery has run."""
        self._block[statistics.RECOVERED] += len(recovered.suspects) + len(recovered.fresh)
        self._attached = [*self._attached, channel]
        self._refuse(self.scheduler.adopt(Recovered(recovered.suspects, take_in(recovered.fresh, self._held))))
        self.hot_set.add(channel)

    def detach(self, channel: WorkerChannel) -> None:
        """Stop watching, and end what is queued: it never runs."""
        channel.broken = channel.broken or "detached"
        self.hot_set.remove(channel)
        self._drop(channel)
        for request in channel.live:
            if request is not None:
                request.ended = request.ended or Code.CANCELLED  # a stream has nobody to go on for
                withdraw(request)
        self._drop(channel)  # what was held may have been queued before it was marked
        self.wake()  # it may be hot: a leader that sleeps would keep its memory mapped

    def _drop(self, channel: WorkerChannel) -> None:
        self.end(self.scheduler.drop(channel), Code.CANCELLED, "the session ended")

    def release(self, channel: WorkerChannel) -> None:
        """Nothing of a detached channel runs any more."""
        self._attached = [other for other in self._attached if other is not channel]
        self._backlog.look(self._attached, _now(), self.turn.overdue)  # which must not keep its memory mapped

    def submit(self, requests: list[Request]) -> None:
        """Queue steps of an ensemble, or what was held, from any thread."""
        if any(request.plan.model.intake for request in requests):  # type: ignore[union-attr]
            requests = take_in(requests, self._held)
        self._refuse(self.scheduler.add(requests))
        if len(requests) > 1 or threading.get_ident() not in self._threads:
            self.wake()  # a thread of ours that ended the step before takes one of them

    def take_back(self, requests: list[Request]) -> None:
        """End steps that are still queued, from any thread: nobody wants what they would write."""
        self.end([r for r in requests if self.scheduler.remove(r)], Code.CANCELLED, "the request was cancelled")

    def retire(self, model: LoadedModel, *, replaced: bool = False) -> None:
        """Close a model once it has nothing left to do; of one that was replaced, sequences may go on."""
        self.scheduler.retire(model, _now() if replaced else 0)
        self.ask_for_watch()

    def looked(self) -> Callable[[], bool]:
        """Tells whether there was a `watch` since: a retired model that had nothing to do is being closed then."""
        seen = self._watches
        self.ask_for_watch()
        return lambda: self._watches > seen

    def watch(self, now: int) -> None:
        """The control thread's look after the leader, every 10 ms while there is traffic."""
        self._watches += 1
        self.turn.depose(now, DEPOSE_NS)
        left = self.scheduler.look_at_models(now)
        self._backlog.look(self._attached, now, self.turn.overdue)
        self._block[statistics.IN_FLIGHT] = self.scheduler.in_flight()  # streams end on threads that tell nobody
        self.scheduler.close_retired(now, self._closing.begin)
        if not left and self._quiet(now):
            self.busy = False
            if not self._quiet(now):  # traffic that came in between saw that somebody looks
                self.busy = True

    def _quiet(self, now: int) -> bool:
        quiet = all(now - channel.last_traffic > QUIET_NS for channel in self.hot_set.channels.values())
        return quiet and not (self.scheduler.retired or self.scheduler.shrinking) and self.scheduler.idle()

    def ask_for_watch(self) -> None:
        """Have the control thread look (`watch`) until all is quiet."""
        self.busy = True
        os.eventfd_write(self._watch_fd, 1)

    def _saw_traffic(self) -> None:
        if not self.busy:
            self.ask_for_watch()

    def wake(self) -> None:
        """Make the leader look again."""
        self.hot_set.wake()
        self._parking.end()

    def finished(self) -> bool:
        """Has everything that was admitted ended? What is refused comes and goes as fast as clients ask."""
        idle = self.scheduler.idle() and not self._closing
        return idle and not any(request.started for request in self.live_requests())

    def live_requests(self) -> Iterable[Request]:
        """Every request taken and not ended, of all channels: a session's end does not stop what runs for it."""
        for channel in self._attached:
            for request in channel.live:
                if request is not None:
                    yield request

    # --- the threads ------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Main function of a thread: lead, or run what the leader found too long to run itself."""
        self._threads.add(threading.get_ident())
        while not self.stopping:
            term = self.turn.take()
            batch = self._lead(term)
            self.turn.step_down(term)
            if self._parking.parked:
                if batch is None:
                    self._parking.wait(self._next_look()[0])
                elif not self.scheduler.saturated():
                    self._parking.end()
            while batch is not None:
                was_alone = batch.alone
                self._run(batch)
                if self._backlog.asked:
                    self._backlog.tell(_now())
                if self._parking.parked:
                    break  # to look at the channels first
                batch = self.scheduler.due(_now())
                left = batch is None or was_alone or self.scheduler.limiter is not None
                if self.scheduler.waiting() if left else self.scheduler.growing():
                    self.wake()  # what this run held is free, or it has queued steps of ensembles: the leader may sleep

    def _lead(self, term: int) -> Batch | None:
        """Returns a batch to run without the lead, or None when the lead was lost or the worker stops."""
        scheduler = self.scheduler
        channel: WorkerChannel | None
        sweep = 0
        if self._parking.parked:
            self.hot_set.attend()  # cold channels have rung, and nobody has listened
        while not self.stopping:
            now = _now()
            found, sweep = False, sweep + 1
            if not sweep & 15:
                self.hot_set.attend()  # cold channels, and whoever wants the leader to look, ring in busy times too
                if not sweep & 1023:  # a client that always comes soon leaves no other time for it
                    self._flush()
            for channel in self.hot_set.hot:
                count = channel.words[TAIL] - channel.head
                if not count or channel.broken:
                    if channel.held:
                        channel.ring_held()
                    continue
                channel.last_traffic = now
                found = True
                if not (scheduler.queued or scheduler.suspects or scheduler.alone):
                    done = self._run_inline(channel, now, term, count)
                    if done is Inline.DONE:
                        if count == 1 and len(self.hot_set.hot) == 1:
                            os.sched_yield()  # on a shared core the client can go on at once
                        continue
                    if done is Inline.DEPOSED:
                        return None
                if channel.held:
                    channel.ring_held()
                self._take(channel, now, worth_taking(channel, now))
            batch = None
            if not found or scheduler.queued or scheduler.suspects:
                if scheduler.deadline and now >= scheduler.deadline:
                    self._refuse(scheduler.expired(now))
                batch = scheduler.due(now) if scheduler.queued or scheduler.suspects else None
            if batch is None and not found:
                if (scheduler.running or self._parking.parked) and self._parking.begin(self._flush):
                    return None
                channel = None  # this frame must not keep a closed channel's memory mapped while it sleeps
                self._pause()
            while batch is not None:
                if not batch.short():
                    self._ring_held()  # the other threads may be busy for long, too
                    if self._backlog.asked:
                        self._backlog.tell(_now())
                    return batch
                self._ran_short = True
                self.turn.enter()
                self.turn.commit(_now())
                self._run(batch)
                if not self.turn.leave(term):
                    return None
                # What runs alone gains nothing from those behind it: the queue is emptied, the rest can run inline.
                more = batch.instance.model.alone and scheduler.queued and _now() - now < DRAIN_NS
                batch = scheduler.due(now) if more else None
        self._ring_held()
        return None

    def _run_inline(self, channel: WorkerChannel, now: int, term: int, count: int) -> Inline:
        """The hot path: a request that nothing could be batched with, known to be short, goes straight to its model."""
        request = channel.peek(now)
        if request is None:
            return Inline.NOT_POSSIBLE
        plan = request.plan
        assert isinstance(plan, Plan)
        model = plan.model
        if model is None or not model.free or not (model.alone or (count == 1 and model.immediate)):
            if model is None or model.ensemble is None or count > 1:
                return Inline.NOT_POSSIBLE
            return self._run_steps(channel, request, model, term)
        instance = model.free[-1]
        rows = request.rows
        execution = plan.bindings.get((instance.number, request.input_position, request.output_position, rows))
        if execution is None or not 0 < execution.typical_ns < SHORT_NS or execution.copies or execution.opens:
            return Inline.NOT_POSSIBLE
        if plan.shared and plan.changed_size():
            return Inline.NOT_POSSIBLE
        self.turn.enter()
        try:
            free = model.free.pop()
        except IndexError:  # taken by a thread that finished meanwhile
            return Inline.NOT_POSSIBLE if self.turn.leave(term) else Inline.DEPOSED
        if free is not instance or self.scheduler.alone:
            model.free.append(free)
            return Inline.NOT_POSSIBLE if self.turn.leave(term) else Inline.DEPOSED
        channel.begin(request)
        began = _now()
        self.turn.commit(began)  # only now: two leaders must not begin one entry
        self._taken += 1
        instance.begin(rows, began)
        try:
            execution.run()
        except BaseException as error:
            forget_frames(error)  # the backend may hold it
            instance.end(rows, 0)  # the attempt counts for nothing, and what follows may fail before it runs
            run_batch(instance, [request])  # tells the ways of failing apart
            channel.complete((request,))
        else:
            request.infer_ns = took = _now() - began
            execution.measured(took)
            instance.count_inline(rows, took)
            instance.end(rows, took)
            self._ran_inline.add(model)
            channel.finish(request, count > 1)
        model.free.append(instance)
        self._ran_short = True
        return Inline.DONE if self.turn.leave(term) else Inline.DEPOSED

    def _run_steps(self, channel: WorkerChannel, request: Request, model: LoadedModel, term: int) -> Inline:
        """The same for an ensemble, all of whose steps are such requests."""
        lone = lone_run(request, model)
        if lone is None:
            return Inline.NOT_POSSIBLE
        self.turn.enter()
        ran = lone.claim() and not self.scheduler.alone
        if ran:
            channel.begin(request)
            self.turn.commit(_now())
            self._taken += 1
            lone.run(channel)
            self._ran_inline |= lone.models
            self._ran_short = True
        lone.give_back()
        return (Inline.DONE if ran else Inline.NOT_POSSIBLE) if self.turn.leave(term) else Inline.DEPOSED

    def _ring_held(self) -> None:
        for channel in self.hot_set.hot:
            if channel.held:
                channel.ring_held()

    def _take(self, channel: WorkerChannel, now: int, limit: int) -> None:
        """Feed the queues from one channel, and end what was not admitted or was cancelled."""
        taken: list[Request] = []
        notable = channel.take(limit, now, taken)
        self._taken += len(taken)
        if taken and any(request.plan.model.intake for request in taken):  # type: ignore[union-attr]
            taken = take_in(taken, self._held)
        if taken:
            self._refuse(self.scheduler.add(taken))
        refused = [request for request, admitted in notable if not admitted]
        if refused:
            self._taken += len(refused)
            count_endings(refused)
            channel.complete(refused)
            if steps := [request for request in refused if request.sequence_id and request.ended == Code.CANCELLED]:
                self.scheduler.miss(steps)
        # A running request is not interrupted; its ending tells how it ended.
        for request in [request for request, admitted in notable if admitted]:
            withdraw(request)
            self.take_back([request])

    def end(self, requests: list[Request], code: Code, text: str) -> None:
        """Give requests that have not run, and will not, their ending."""
        for request in requests:
            request.fail(code, text)
            count_endings([request])
            request.channel.complete((request,))

    def _refuse(self, refused: Iterable[Refused]) -> None:
        for request, verdict in refused:
            self.end([request], *verdict)

    def _run(self, batch: Batch) -> None:
        requests = batch.requests
        if not batch.begin():
            self.scheduler.done(batch)
            return
        groups = by_channel(requests)
        streams = batch.instance.model.streams
        for channel, own in groups:  # what runs once more has been started, and may have ended
            channel.start(own if streams is None else [request for request in own if not request.attempts])
        if requests[0].attempts > 1:  # alone, as a suspect
            batch.instance.block[statistics.RETRIED] += 1
        run_batch(batch.instance, requests, batch.rows)
        order = batch.instance.model.in_order
        if streams is not None:
            pass  # each ends when its model sends the final response
        elif order is not None and not batch.alone:
            order.end(batch.number, groups)
        else:
            for channel, own in groups:
                channel.complete(own)
        # Only now: with one instance, answers must not overtake each other, and a drain must not leave before them.
        self.scheduler.done(batch)

    # --- nothing to do ------------------------------------------------------------------------------------------

    def _pause(self) -> None:
        """Nothing to take, nothing due: spin where that pays, then sleep until a doorbell or a due time.

        It pays after a short run, and while a batch could still grow. While other threads run long batches it would
        only take the core that those, or the clients, could use.
        """
        if not ((self._ran_short or self.scheduler.growing()) and self.hot_set.spin(self._flush)):
            self._ran_short = False
            self._flush()
            self.hot_set.sleep(self._next_look)

    def _flush(self) -> None:
        """Write the statistics of what was taken and of what ran inline."""
        self._block[statistics.TAKEN] += self._taken
        self._taken = 0
        self._block[statistics.IN_FLIGHT] = self.scheduler.in_flight()
        if self._backlog.asked and self._backlog.has_news():
            self._backlog.tell(_now())
        while self._ran_inline:  # a deposed leader may add to it meanwhile
            self._ran_inline.pop().flush()

    def _next_look(self) -> tuple[int, bool]:
        self._block[statistics.IN_FLIGHT] = self.scheduler.in_flight()
        self._block[statistics.REFUSED] += sum(channel.unreported() for channel in self.hot_set.hot)
        return self.scheduler.next_look()
