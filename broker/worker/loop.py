"""The worker's loop: take requests from channels, schedule, run, publish.

`Loop.serve` is the main function of every instance thread and of the spare. One of them leads (see `turn`): it sweeps
the hot channels, feeds the queues, and runs what is due. Channels with traffic in the last 5 ms are hot: they are
looked at without being rung. All others are armed and ring a doorbell that the epoll set watches edge-triggered and
nobody ever reads, since its description is the client's and reading could block.
"""

from __future__ import annotations

import enum
import os
import select
import threading
import time
from collections.abc import Callable, Iterable
from typing import final

from broker.worker.execute import run_batch
from broker.worker.model import MISSING, LoadedModel
from broker.worker.plans import Plan
from broker.worker.scheduler import SHORT_NS, Batch, Scheduler
from broker.worker.turn import Turn
from shm import statistics
from shm.admission import EXPIRED, Publishes, Request
from shm.errors import Code
from shm.fence import FENCE_IS_FULL, Fence
from shm.layout import TAIL
from shm.recovery import Recovered
from shm.worker_channel import WorkerChannel

HOT_NS = 5_000_000
SPIN_NS = 50_000
DEPOSE_NS = 10_000_000
QUIET_NS = 100_000_000
FLUSH_SWEEP = 8
DRAIN_NS = 1_000_000
TAKE_LIMIT = 64
LATE_S = 0.1  # how late a ring may come without being called lost
BOUND_S = 0.05  # longest sleep while requests are outstanding
IDLE_S = 3600.0
_now = time.monotonic_ns


class Inline(enum.Enum):
    """What became of an attempt to run the only request inline."""

    DONE = enum.auto()
    NOT_POSSIBLE = enum.auto()
    DEPOSED = enum.auto()


@final
class Loop:
    """The channels belong to whoever leads; `scheduler` has a lock of its own."""

    def __init__(self, own_block: memoryview, on_broken: Callable[[WorkerChannel], None], watch_fd: int) -> None:
        self.turn = Turn()
        self.scheduler = Scheduler(self.turn)
        self.channels: dict[int, WorkerChannel] = {}  # by doorbell descriptor; replaced, never changed
        self._attached: list[WorkerChannel] = []  # with those that are not watched any more and still have requests
        self._changing = threading.Lock()  # `channels` is replaced by the control thread and by the leader
        self.stopping = False
        self.busy = False  # traffic lately: the control thread looks after the leader
        self._hot: list[WorkerChannel] = []
        self._ran_inline: set[LoadedModel] = set()  # their statistics wait to be flushed
        self._block = own_block
        self._taken = 0  # since the last flush
        self._on_broken = on_broken
        self._watch_fd = watch_fd  # wakes the control thread: look after the leader
        self._fence = Fence()
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # ours alone: may be read
        self._epoll.register(self._wake, select.EPOLLIN)

    # --- called by the control thread ---------------------------------------------------------------------------

    def attach(self, channel: WorkerChannel, recovered: Recovered) -> None:
        """Watch a channel whose recovery has run."""
        self._block[statistics.RECOVERED] += len(recovered.suspects) + len(recovered.fresh)
        self._attached = [*self._attached, channel]
        self.end(self.scheduler.adopt(recovered), *MISSING)
        with self._changing:
            self.channels = {**self.channels, channel.bell: channel}
        self._epoll.register(channel.bell, select.EPOLLIN | select.EPOLLET)
        self.wake()  # it may hold entries that were never rung

    def detach(self, channel: WorkerChannel) -> None:
        """Stop watching, and end what is queued: it never runs."""
        channel.broken = channel.broken or "detached"
        self._forget(channel)
        self.end(self.scheduler.drop(channel), Code.CANCELLED, "the session ended")
        self.wake()  # it may be hot: a leader that sleeps would keep its memory mapped

    def release(self, channel: WorkerChannel) -> None:
        """Nothing of a detached channel runs any more."""
        self._attached = [other for other in self._attached if other is not channel]

    def _forget(self, channel: WorkerChannel) -> None:
        with self._changing:
            self.channels = {bell: other for bell, other in self.channels.items() if other is not channel}
        try:
            self._epoll.unregister(channel.bell)
        except OSError:
            pass  # forgotten before, when it broke a rule

    def retire(self, model: LoadedModel) -> None:
        """Close a model once it has nothing left to do."""
        self.scheduler.retire(model)
        self._ask_for_watch()

    def watch(self, now: int) -> None:
        """The control thread's look after the leader, every 10 ms while there is traffic."""
        self.turn.depose(now, DEPOSE_NS)
        if self.scheduler.retired:
            self.scheduler.close_retired()
        if self._quiet(now):
            self.busy = False
            if not self._quiet(now):  # traffic that came in between saw that somebody looks
                self.busy = True

    def _quiet(self, now: int) -> bool:
        quiet = all(now - channel.last_traffic > QUIET_NS for channel in self.channels.values())
        return quiet and not self.scheduler.retired and self.scheduler.idle()

    def _ask_for_watch(self) -> None:
        self.busy = True
        os.eventfd_write(self._watch_fd, 1)

    def wake(self) -> None:
        """Make the leader look again."""
        try:
            os.eventfd_write(self._wake, 1)
        except BlockingIOError:
            pass

    def finished(self) -> bool:
        """Has everything that was admitted ended? What is refused comes and goes as fast as clients ask."""
        return self.scheduler.idle() and not any(request.started for request in self.live_requests())

    def live_requests(self) -> Iterable[Request]:
        """Every request taken and not ended, of all channels: a session's end does not stop what runs for it."""
        for channel in self._attached:
            for request in channel.live:
                if request is not None:
                    yield request

    # --- the threads ------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Main function of a thread: lead, or run what the leader found too long to run itself."""
        while not self.stopping:
            term = self.turn.take()
            batch = self._lead(term)
            self.turn.step_down(term)
            while batch is not None:
                was_alone = batch.alone
                self._run(batch)
                batch = self.scheduler.due(_now())
                if (batch is None or was_alone) and self.scheduler.waiting():
                    self.wake()  # the leader may sleep because this instance was taken

    def _lead(self, term: int) -> Batch | None:
        """Returns a batch to run without the lead, or None when the lead was lost or the worker stops."""
        scheduler = self.scheduler
        channel: WorkerChannel | None
        while not self.stopping:
            now = _now()
            found = False
            for channel in self._hot:
                count = channel.words[TAIL] - channel.head
                if not count or channel.broken:
                    continue
                channel.last_traffic = now
                found = True
                if not (scheduler.queued or scheduler.suspects or scheduler.alone):
                    done = self._run_inline(channel, now, term, count)
                    if done is Inline.DONE:
                        continue
                    if done is Inline.DEPOSED:
                        return None
                self._take(channel, now)
            batch = None
            if scheduler.queued or scheduler.suspects:
                if scheduler.deadline and now >= scheduler.deadline:
                    self.end(scheduler.expired(now), *EXPIRED)
                batch = scheduler.due(now)
            if batch is None and not found:
                channel = None  # this frame must not keep a closed channel's memory mapped while it sleeps
                self._pause(now)
            while batch is not None:
                if not batch.short():
                    return batch
                self.turn.enter(now)
                self._run(batch)
                if not self.turn.leave(term):
                    return None
                # Requests that run alone gain nothing from those that come behind them: the queue is emptied first, so
                # that what follows can run inline again.
                more = batch.instance.model.alone and scheduler.queued and _now() - now < DRAIN_NS
                batch = scheduler.due(now) if more else None
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
            return Inline.NOT_POSSIBLE
        instance = model.free[-1]
        rows = request.rows
        execution = plan.bindings.get((instance.number, request.input_position, request.output_position, rows))
        if execution is None or not 0 < execution.mean_ns < SHORT_NS or execution.copies or execution.opens:
            return Inline.NOT_POSSIBLE
        self.turn.enter(now)
        try:
            free = model.free.pop()
        except IndexError:  # taken by a thread that finished meanwhile
            return Inline.NOT_POSSIBLE if self.turn.leave(term) else Inline.DEPOSED
        if free is not instance or self.scheduler.alone:
            model.free.append(free)
            return Inline.NOT_POSSIBLE if self.turn.leave(term) else Inline.DEPOSED
        channel.begin(request)
        self._taken += 1
        instance.begin(rows, now)
        try:
            execution.run()
        except Exception:
            instance.end(rows, 0)  # the attempt counts for nothing, and what follows may fail before it runs
            run_batch(instance, [request])  # tells the ways of failing apart
            channel.complete((request,))
        else:
            request.infer_ns = took = _now() - now
            execution.measured(took)
            instance.count_inline(rows, took)
            instance.end(rows, took)
            self._ran_inline.add(model)
            channel.finish(request)
        model.free.append(instance)
        return Inline.DONE if self.turn.leave(term) else Inline.DEPOSED

    def _take(self, channel: WorkerChannel, now: int) -> None:
        """Feed the queues from one channel, and end what was not admitted or was cancelled."""
        taken: list[Request] = []
        notable = channel.take(TAKE_LIMIT, now, taken)
        self._taken += len(taken)
        if taken:
            self.end(self.scheduler.add(taken), *MISSING)
        refused = [request for request, admitted in notable if not admitted]
        if refused:
            self._count_endings(refused)
            channel.complete(refused)
        # A running request is not interrupted; its ending tells how it ended.
        cancelled = [request for request, admitted in notable if admitted and self.scheduler.remove(request)]
        self.end(cancelled, Code.CANCELLED, "the request was cancelled")

    def end(self, requests: list[Request], code: Code, text: str) -> None:
        """Give requests that have not run, and will not, their ending."""
        for request in requests:
            request.fail(code, text)
            self._count_endings([request])
            request.channel.complete((request,))

    def _count_endings(self, requests: list[Request]) -> None:
        for request in requests:
            if isinstance(request.plan, Plan) and request.plan.model is not None:
                word = statistics.CANCELLED if request.code == Code.CANCELLED else statistics.FAIL
                if request.note == EXPIRED[1].encode():
                    word = statistics.EXPIRED
                request.plan.model.instances[0].block[word] += 1

    def _run(self, batch: Batch) -> None:
        requests = batch.requests
        for request in requests:
            request.channel.start(request)
        if requests[0].attempts > 1:  # alone, as a suspect
            batch.instance.block[statistics.RETRIED] += 1
        run_batch(batch.instance, requests)
        if len(requests) == 1:
            requests[0].channel.complete(requests)
        else:
            by_channel: dict[Publishes, list[Request]] = {}
            for request in requests:
                by_channel.setdefault(request.channel, []).append(request)
            for channel, done in by_channel.items():
                channel.complete(done)
        # Only now: with one instance, answers must not overtake each other, and a drain must not leave before them.
        self.scheduler.done(batch)

    # --- nothing to do ------------------------------------------------------------------------------------------

    def _pause(self, now: int) -> None:
        """Nothing to take, nothing due: spin while traffic is recent, then sleep until a doorbell or a due time."""
        if self._hot and FENCE_IS_FULL and self._spin(now + SPIN_NS):
            return
        self._flush()
        if not self._arm():
            return
        self._sleep()
        now = _now()
        kept = []
        for channel in self._hot:
            if channel.broken:
                self._close_broken(channel)
            elif now - channel.last_traffic < HOT_NS:
                channel.disarm()
                kept.append(channel)
        self._hot = kept

    def _arm(self) -> bool:
        """Have the hot channels ring. False: one has something already, all stay hot."""
        for channel in self._hot:
            if channel.broken:
                self._close_broken(channel)
            channel.arm()
        self._fence()
        if any(channel.pending() for channel in self._hot):
            # Published while it was not armed: it did not ring, so it must stay hot.
            for channel in self._hot:
                channel.disarm()
            return False
        return True

    def _spin(self, end: int) -> bool:
        """Look at the hot channels until one has something; the cold ones ring."""
        hot = [(channel.words, channel.head) for channel in self._hot if not channel.broken]
        sweep = 0
        while _now() < end:
            for words, head in hot:
                if words[TAIL] != head:
                    return True
            os.sched_yield()
            sweep += 1
            if sweep == FLUSH_SWEEP:  # not at once: on a shared core the client waits for us to yield
                self._flush()
            if not sweep & 15 and self._doorbells(0.0):
                return True
        return False

    def _flush(self) -> None:
        """Write the statistics of what was taken and of what ran inline."""
        self._block[statistics.TAKEN] += self._taken
        self._taken = 0
        while self._ran_inline:  # a deposed leader may add to it meanwhile
            for instance in self._ran_inline.pop().instances:
                instance.flush()

    def _sleep(self) -> None:
        self._block[statistics.IN_FLIGHT] = sum(1 for request in self.live_requests() if request.started)
        self._block[statistics.REFUSED] += sum(channel.unreported() for channel in self._hot)
        until, outstanding = self.scheduler.next_look()
        # Deadlines are the clients' to choose, up to 2^64 ns: more than a poll can wait for.
        timeout = min(max(0.0, (until - _now()) / 1e9), IDLE_S) if until else IDLE_S
        bounded = outstanding and timeout > BOUND_S
        if self._doorbells(min(timeout, BOUND_S) if outstanding else timeout) or not bounded:
            return
        # Published after the sleep, while this thread waited for the GIL? Then the ring is there, or on its way.
        if any(c.pending() for c in self.channels.values()) and not self._doorbells(min(LATE_S, timeout - BOUND_S)):
            self._block[statistics.LOST_WAKEUPS] += 1
            self._heat_pending()

    def _doorbells(self, timeout: float) -> bool:
        """Wait for rings; every channel that rang becomes hot."""
        events = self._epoll.poll(timeout)
        for fd, _ in events:
            rung = self.channels.get(fd)
            if rung is not None:
                self._heat(rung)
            elif fd == self._wake:
                try:
                    os.eventfd_read(self._wake)
                except BlockingIOError:
                    pass
                self._heat_pending()
        return bool(events)

    def _heat_pending(self) -> None:
        for channel in self.channels.values():
            if channel.pending():
                self._heat(channel)

    def _heat(self, channel: WorkerChannel) -> None:
        channel.last_traffic = _now()
        if channel not in self._hot:
            channel.disarm()
            self._hot.append(channel)
        if not self.busy:
            self._ask_for_watch()

    def _close_broken(self, channel: WorkerChannel) -> None:
        """Stop listening to a client that broke the channel's rules: its doorbell could keep the leader awake."""
        self._block[statistics.REFUSED] += channel.unreported()
        self._hot = [other for other in self._hot if other is not channel]
        if channel.broken != "detached":
            self._forget(channel)
            self._on_broken(channel)
