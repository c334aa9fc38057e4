"""The worker's loop: take requests from channels, schedule, run, publish.

`Loop.serve` is the main function of every instance thread and of the spare. One of them leads (see `turn`): it sweeps
the hot channels, feeds the queues, and runs what is due. Channels with traffic in the last 5 ms are hot: they are
looked at without being rung. All others are armed and ring a doorbell that the epoll set watches edge-triggered and nobody
ever reads, since its description is the client's and reading could block.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import final

from broker.worker.binding import Execution
from broker.worker.execute import run_batch
from broker.worker.model import Instance, LoadedModel
from broker.worker.plans import Plan
from broker.worker.turn import Turn
from shm import statistics
from shm.errors import Code
from shm.fence import FENCE_IS_FULL, Fence
from shm.layout import TAIL
from shm.recovery import Recovered
from shm.worker_channel import Request, WorkerChannel

HOT_NS = 5_000_000
SPIN_NS = 50_000
SHORT_NS = 200_000  # longer batches run without the lead: a hand-off between threads costs 10-20 µs
DEPOSE_NS = 10_000_000
QUIET_NS = 100_000_000
TAKE_LIMIT = 64
IDLE_S = 3600.0
_now = time.monotonic_ns


@final
class Batch:
    """What one thread runs: requests of one model on one of its instances. `alone`: nothing else may run."""

    __slots__ = ("alone", "instance", "requests")

    def __init__(self, instance: Instance, requests: list[Request], alone: bool = False) -> None:
        self.instance = instance
        self.requests = requests
        self.alone = alone

    def short(self) -> bool:
        """Is this known to be over sooner than a hand-off is worth? Unmeasured is long."""
        if self.alone:
            return False
        rows = sum(request.rows for request in self.requests)
        longest = self.instance.longest.get(rows, 0)
        if not longest:
            return False
        if len(self.requests) == 1:
            plan = self.requests[0].plan
            request = self.requests[0]
            assert isinstance(plan, Plan)
            found = plan.bindings.get((self.instance.number, request.input_position, request.output_position, rows))
            if isinstance(found, Execution):
                return 0 < found.mean_ns < SHORT_NS
        return longest < SHORT_NS


@final
class Loop:
    """All state of scheduling. `lock` guards queues, free instances and the counts; the lead guards the channels."""

    def __init__(self, own_block: memoryview, on_broken: Callable[[WorkerChannel], None], watch_fd: int) -> None:
        self.turn = Turn()
        self.lock = threading.Lock()
        self.channels: dict[int, WorkerChannel] = {}  # by doorbell descriptor; replaced, never changed
        self.stopping = False
        self.busy = False  # traffic lately: the control thread looks after the leader
        self._hot: list[WorkerChannel] = []
        self._queued: list[LoadedModel] = []  # models with something queued
        self._running = 0
        self._alone = False
        self._suspects: deque[Request] = deque()
        self._retired: list[LoadedModel] = []  # unloaded or replaced, still at work
        self._deadline = 0  # earliest of the queued requests, 0 = none
        self._block = own_block
        self._on_broken = on_broken
        self._watch_fd = watch_fd  # wakes the control thread: look after the leader
        self._fence = Fence()
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # ours alone: may be read
        self._epoll.register(self._wake, select.EPOLLIN)

    # --- called by the control thread ---------------------------------------------------------------------------

    def attach(self, channel: WorkerChannel, recovered: Recovered) -> None:
        """Watch a channel whose recovery has run. Suspects run first, each alone."""
        with self.lock:
            self._suspects.extend(recovered.suspects)
            for request in recovered.fresh:
                self._enqueue(request)
        self.channels = {**self.channels, channel.bell: channel}
        self._epoll.register(channel.bell, select.EPOLLIN | select.EPOLLET)
        self.wake()  # it may hold entries that were never rung

    def detach(self, channel: WorkerChannel) -> list[Request]:
        """Stop watching; returns the queued requests, dropped: they never run."""
        channels = dict(self.channels)
        channels.pop(channel.bell, None)
        self.channels = channels
        channel.broken = channel.broken or "detached"
        try:
            self._epoll.unregister(channel.bell)
        except OSError:
            pass  # closed already
        with self.lock:
            dropped = [r for r in channel.live if r is not None and self._dequeue(r)]
            self._suspects = deque(r for r in self._suspects if r.channel is not channel)
        self.wake()
        return dropped

    def retire(self, model: LoadedModel) -> None:
        """The model gets no new requests; what it has still runs, then its memory is given back."""
        with self.lock:
            self._retired.append(model)
        self._ask_for_watch()
        self._close_retired()

    def _close_retired(self) -> None:
        with self.lock:
            done = [m for m in self._retired if not len(m.queue) and len(m.free) == len(m.instances)]
            self._retired = [m for m in self._retired if m not in done]
        for model in done:
            model.close()

    def watch(self, now: int) -> None:
        """The control thread's look after the leader, every 10 ms while there is traffic."""
        self.turn.depose(now, DEPOSE_NS)
        if self._retired:
            self._close_retired()
        quiet = all(now - channel.last_traffic > QUIET_NS for channel in self.channels.values())
        if quiet and not self._retired and self.idle():
            self.busy = False

    def wake(self) -> None:
        """Make the leader look again."""
        try:
            os.eventfd_write(self._wake, 1)
        except BlockingIOError:
            pass

    def idle(self) -> bool:
        """Nothing queued, nothing running, nothing published and not taken."""
        with self.lock:
            empty = not (self._running or self._queued or self._suspects)
        return empty and not any(channel.pending() for channel in self.channels.values())

    def live_requests(self) -> Iterable[Request]:
        """Every request taken and not ended, of all channels."""
        for channel in self.channels.values():
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
                self._run(batch)
                with self.lock:
                    batch = self._due(_now())
                if batch is None and self._waiting():
                    self.wake()  # the leader may have slept because this instance was taken

    def _lead(self, term: int) -> Batch | None:
        """Returns a batch to run without the lead, or None when the lead was lost or the worker stops."""
        while not self.stopping:
            now = _now()
            found = self._sweep(now)
            with self.lock:
                if self._deadline and now >= self._deadline:
                    self._expire(now)
                batch = self._due(now) if self._queued or self._suspects else None
            if batch is not None:
                if not batch.short():
                    return batch
                self.turn.enter(now)
                self._run(batch)
                if not self.turn.leave(term):
                    return None
            elif not found:
                self._pause(now)
        return None

    def _sweep(self, now: int) -> bool:
        """Take what the hot channels hold."""
        found = False
        for channel in self._hot:
            if channel.words[TAIL] != channel.head and not channel.broken:
                self._take(channel, now)
                channel.last_traffic = now
                found = True
        return found

    def _take(self, channel: WorkerChannel, now: int) -> None:
        taken: list[Request] = []
        notable = channel.take(TAKE_LIMIT, now, taken)
        if channel.broken:
            self._close_broken(channel)
        with self.lock:
            for request in taken:
                self._enqueue(request)
        ended = []
        for request, admitted in notable:
            if not admitted:
                ended.append(request)
                continue
            with self.lock:
                queued = self._dequeue(request)
            if queued:  # a running request is not interrupted; its ending tells how it ended
                request.fail(Code.CANCELLED, "the request was cancelled")
                ended.append(request)
        if ended:
            self._count_endings(ended)
            channel.complete(ended)

    def _close_broken(self, channel: WorkerChannel) -> None:
        """Stop listening to a client that broke the channel's rules: its doorbell could keep the leader awake."""
        self._hot = [other for other in self._hot if other is not channel]
        self.channels = {bell: other for bell, other in self.channels.items() if other is not channel}
        self._epoll.unregister(channel.bell)
        self._on_broken(channel)

    def _pause(self, now: int) -> None:
        """Nothing to take, nothing due: spin while traffic is recent, then sleep until a doorbell or a due time."""
        hot = [(channel.words, channel.head) for channel in self._hot]
        if hot and FENCE_IS_FULL:
            end = now + SPIN_NS
            sweep = 0
            while _now() < end:
                for words, head in hot:
                    if words[TAIL] != head:
                        return
                os.sched_yield()
                sweep += 1
                if not sweep & 15 and self._doorbells(0.0):
                    return
        for channel in self._hot:
            channel.arm()
        self._fence()
        if not any(channel.pending() for channel in self._hot):
            self._sleep()
        now = _now()
        kept = []
        for channel in self._hot:
            if now - channel.last_traffic < HOT_NS and not channel.broken:
                channel.disarm()
                kept.append(channel)
        self._hot = kept

    def _sleep(self) -> None:
        with self.lock:
            now = _now()
            until = [self._deadline] if self._deadline else []
            for model in self._queued:
                self._count_pending(model)
            until += [model.queue.due() for model in self._queued if model.free and not self._alone]
            outstanding = bool(self._queued or self._running)
        timeout = max(0.0, (min(until) - now) / 1e9) if until else IDLE_S
        bounded = outstanding and timeout > 0.05
        woken = self._doorbells(min(timeout, 0.05) if outstanding else timeout)
        if bounded and not woken and any(channel.pending() for channel in self.channels.values()):
            self._block[statistics.LOST_WAKEUPS] += 1
            for channel in self.channels.values():
                if channel.pending():
                    self._heat(channel)

    def _doorbells(self, timeout: float) -> bool:
        """Wait for rings; every channel that rang becomes hot."""
        events = self._epoll.poll(timeout)
        for fd, _ in events:
            if fd == self._wake:
                try:
                    os.eventfd_read(self._wake)
                except BlockingIOError:
                    pass
                for channel in self.channels.values():
                    if channel.pending():
                        self._heat(channel)
            else:
                rung = self.channels.get(fd)
                if rung is not None:
                    self._heat(rung)
        return bool(events)

    def _heat(self, channel: WorkerChannel) -> None:
        channel.last_traffic = _now()
        if channel not in self._hot and not channel.broken:
            channel.disarm()
            self._hot.append(channel)
        if not self.busy:
            self._ask_for_watch()

    def _ask_for_watch(self) -> None:
        self.busy = True
        os.eventfd_write(self._watch_fd, 1)

    # --- queues; the caller holds `lock` ------------------------------------------------------------------------

    def _enqueue(self, request: Request) -> None:
        plan = request.plan
        assert isinstance(plan, Plan)
        model = plan.model
        assert model is not None
        model.queue.add(request)
        if model not in self._queued:
            self._queued.append(model)
        if request.deadline and (not self._deadline or request.deadline < self._deadline):
            self._deadline = request.deadline

    def _dequeue(self, request: Request) -> bool:
        plan = request.plan
        return isinstance(plan, Plan) and plan.model is not None and plan.model.queue.remove(request)

    def _waiting(self) -> bool:
        return bool(self._queued or self._suspects)

    def _due(self, now: int) -> Batch | None:
        """The next batch that may run on a free instance."""
        if self._alone:
            return None
        if self._suspects:
            return self._next_suspect()
        for model in list(self._queued):
            if not model.free:
                continue
            requests: list[Request] = model.queue.take(now)  # type: ignore[assignment]
            if not len(model.queue):
                self._queued.remove(model)
            elif requests:  # other models get their turn
                self._queued.remove(model)
                self._queued.append(model)
            if requests:
                self._count_pending(model)
                self._running += 1
                return Batch(model.free.pop(), requests)
        return None

    def _next_suspect(self) -> Batch | None:
        if self._running:
            return None
        request = self._suspects.popleft()
        assert isinstance(request.plan, Plan)
        assert request.plan.model is not None
        self._running += 1
        self._alone = True
        return Batch(request.plan.model.free.pop(), [request], alone=True)

    def _expire(self, now: int) -> None:
        late: list[Request] = []
        self._deadline = 0
        for model in list(self._queued):
            late.extend(model.queue.expired(now))  # type: ignore[arg-type]
            if not len(model.queue):
                self._queued.remove(model)
            earliest = model.queue.earliest_deadline()
            if earliest and (not self._deadline or earliest < self._deadline):
                self._deadline = earliest
        for request in late:
            request.fail(Code.UNAVAILABLE, "Request timeout expired")
            self._count_endings([request])
            request.channel.complete((request,))

    def _count_pending(self, model: LoadedModel) -> None:
        model.instances[0].block[statistics.PENDING] = len(model.queue)

    def _count_endings(self, requests: list[Request]) -> None:
        for request in requests:
            if isinstance(request.plan, Plan) and request.plan.model is not None:
                block = request.plan.model.instances[0].block
                word = statistics.CANCELLED if request.code == Code.CANCELLED else statistics.FAIL
                block[word] += 1

    # --- running ------------------------------------------------------------------------------------------------

    def _run(self, batch: Batch) -> None:
        requests, instance = batch.requests, batch.instance
        for request in requests:
            request.channel.start(request)
        run_batch(instance, requests)
        # The instance is free before its endings are published: a client that answers at once finds it free.
        with self.lock:
            instance.model.free.append(instance)
            self._running -= 1
            if batch.alone:
                self._alone = False
        if len(requests) == 1:
            requests[0].channel.complete(requests)
            return
        by_channel: dict[WorkerChannel, list[Request]] = {}
        for request in requests:
            by_channel.setdefault(request.channel, []).append(request)
        for channel, done in by_channel.items():
            channel.complete(done)
