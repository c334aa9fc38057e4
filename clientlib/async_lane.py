"""A channel on an event loop: one poller for all requests of the loop, and a queue for those that find it full.

While requests end in quick succession the poller takes one look per turn of the loop; when 200 µs passed without one
it asks to be rung and lets the loop watch the pipe. While only streams are outstanding whose readers have enough, it
does not look: their workers wait. Used on its loop only.
"""

from __future__ import annotations

import asyncio
from typing import Protocol, final

from clientlib.channels import CLOSED, GONE, Left
from shm.client_channel import ClientChannel
from shm.errors import Code, ForkedError, InferError, fresh
from shm.fair_line import FairLine
from shm.layout import FINAL

BUSY_S = 200e-6  # polling costs 15 µs a request, being rung 40 µs: worth it while requests follow each other
REST_S = 0.05  # longest rest while requests are outstanding: bounds what a lost wake-up could cost
PAUSE_S = 5.0  # between two looks for streams that nobody reads; a worker gives up after 30 s without one
UNUSED_S = 60.0  # a channel that was not used for so long may be given back when the broker gives no more
LATE_S = 0.3  # for the ring of what a rest finds completed when it ends; after a death it is the broker that rings


class Sends(Protocol):
    """A request of the loop. `client`: for whom; they take turns where the channel is full."""

    client: int

    def send(self) -> bool:
        """Put it into the channel; False when that is full."""

    def check(self) -> None:
        """Raises struct.error for what `send` could not put into the channel."""

    def settle(self, entry: tuple[int, ...], note: bytes) -> None:
        """A completion, as of `shm.client_channel.Settles`."""


@final
class AsyncLane:
    """Owns `channel`. Lives on the loop it was made on."""

    __slots__ = (
        "__weakref__",
        "_active",
        "_busy",
        "_held",
        "_left",
        "_queue",
        "_rest",
        "_unrung",
        "channel",
        "error",
        "loop",
        "number",
        "worker",
    )

    def __init__(self, worker: str, channel: ClientChannel, left: Left) -> None:
        self.worker = worker
        self.channel = channel
        self.number = 0
        self.error: InferError | None = None
        self._left = left
        self.loop = asyncio.get_running_loop()
        self._busy = False
        self._active = self.loop.time()  # when something last happened
        self._rest: asyncio.TimerHandle | None = None
        self._unrung = False  # something was completed, and nobody has rung since
        self._queue: FairLine[Sends] = FairLine()
        self._held: set[Sends] = set()  # streams of which enough has come: what waits for them alone may wait
        self.loop.add_reader(channel.pipe_fd, self._rung)

    def submit(self, pending: Sends) -> None:
        """Send the request, or queue it behind those that came before."""
        if self.error is not None:
            raise fresh(self.error)
        if self._queue or not pending.send():
            pending.check()  # what the channel would refuse later, when nobody is there to be told
            self._queue.add(pending)
        if not self._busy:
            self._wake()

    def withdraw(self, pending: Sends) -> bool:
        """Take a request back that was not sent yet; False when it was."""
        return self._queue.remove(pending)

    def hold(self, stream: Sends) -> None:
        """Its reader has enough to read: its worker may wait, unless other requests need to be looked after."""
        self._held.add(stream)

    def let_come(self, stream: Sends) -> None:
        """What comes for it is wanted again, if only its end."""
        if stream in self._held:
            self._held.remove(stream)
            if not self._busy and self.error is None:
                self._wake()

    def touch(self) -> None:
        """Somebody is about to use it, if it is at rest."""
        self._active = self.loop.time()

    @property
    def unused_s(self) -> float:
        """For how long nobody has used it; 0 while somebody does."""
        if self.error is not None or self._queue or self.channel.outstanding:
            return 0.0
        return self.loop.time() - self._active

    def give_back(self) -> None:
        """Others need a channel. Whoever has waited for something else since they were given this one is told."""
        text = f"the channel to worker '{self.worker}', which nobody used, was given back for another one: try again"
        self._stop(InferError(Code.UNAVAILABLE, text))

    def close(self) -> None:
        """End everything that is outstanding, as far as this process is concerned."""
        self._stop(InferError(Code.UNAVAILABLE, CLOSED))

    def leave_to_parent(self) -> None:
        """The channel and the loop are the parent's."""
        self.error = ForkedError()

    def _wake(self) -> None:
        self._busy = True
        self._active = self.loop.time()
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None
        self.channel.stir()
        self.loop.call_soon(self._poll)

    def _poll(self) -> None:
        """One look per turn of the loop; between them others run and submit more."""
        channel = self.channel
        if self.error is not None:
            return
        if channel.reap():
            self._active = self.loop.time()
        self._send_queued()  # also when nothing was reaped: who looks for free memory reaps too
        if not channel.outstanding:
            self._busy = False
        elif self._held and channel.outstanding == len(self._held):
            self._busy = False
            self._rest = self.loop.call_later(PAUSE_S, self._paused)
        elif self.loop.time() - self._active < BUSY_S:
            self.loop.call_soon(self._poll)
        elif channel.rest():
            channel.stir()
            self.loop.call_soon(self._poll)
        else:
            self._busy = False
            self._rest = self.loop.call_later(REST_S, self._rested)

    def _send_queued(self) -> None:
        while self._queue and self._queue.first().send():
            self._queue.pop()

    def _rung(self) -> None:
        self._unrung = False
        self.channel.drain_pipe()
        if self.channel.gone:
            self.channel.reap()  # what was completed before the end
            self._stop(InferError(Code.UNAVAILABLE, CLOSED if self._left.closed else GONE))
            self._left.channel_gone()
        elif not self._busy:
            self._wake()

    def _paused(self) -> None:
        self._rest = None
        if not self._busy:
            self._wake()

    def _rested(self) -> None:
        """Nobody rang for as long as we may sleep."""
        self._rest = None
        if not self._busy:
            if self.channel.rest():
                self._unrung = True
                self.loop.call_later(LATE_S, self._count_lost)
            self._wake()

    def _count_lost(self) -> None:
        """What a rest's end found completed has not been rung for by now: that was not on its way."""
        self.channel.lost_wakeups += self._unrung

    def _stop(self, error: InferError) -> None:
        if self.error is not None:
            return
        self.error = error
        self.loop.remove_reader(self.channel.pipe_fd)
        if self._rest is not None:
            self._rest.cancel()
        self.channel.close()
        queued, self._queue = self._queue, FairLine()
        self._held.clear()
        for pending in (*self.channel.abandoned(), *queued):
            pending.settle((0, 0, Code[error.code] | FINAL, 0, 0, 0, 0, 0), error.message.encode())


@final
class LoopLanes:
    """The lanes of one session on one loop: one per worker."""

    __slots__ = ("_by_worker", "_limit")

    def __init__(self, limit: int) -> None:
        """`limit`: how many channels the broker gives the session."""
        self._limit = limit
        self._by_worker: dict[str, AsyncLane] = {}

    def mine(self, worker: str) -> AsyncLane | None:
        """The loop's lane to `worker`; None: open a channel and `add` it."""
        lane = self._by_worker.get(worker)
        if lane is None or lane.error is not None:
            return None
        lane.touch()
        return lane

    def add(self, worker: str, channel: ClientChannel, left: Left) -> AsyncLane:
        """A new channel is this loop's; a second one for the same worker is one too many."""
        lane = self._by_worker.get(worker)
        if lane is None or lane.error is not None:
            lane = self._by_worker[worker] = AsyncLane(worker, channel, left)
        else:
            channel.close()
        return lane

    def keep(self, worker: str, channel: ClientChannel, number: int, left: Left) -> bool:
        """A new channel is this loop's if it has none; False: it has one."""
        lane = self.add(worker, channel, left)
        if lane.channel is not channel:
            return False
        lane.number = number
        return True

    def shared(self, worker: str) -> AsyncLane | None:
        """A loop has one lane per worker: there is none to share instead."""
        return None

    def give_up(self) -> AsyncLane | None:
        """At the broker's limit the lane that was not used for the longest, closed; None: all are in use."""
        lane = max(self.all(), key=lambda lane: lane.unused_s, default=None)
        if lane is None or len(self._by_worker) < self._limit or lane.unused_s <= UNUSED_S:
            return None
        del self._by_worker[lane.worker]
        lane.give_back()
        return lane

    def all(self) -> list[AsyncLane]:
        """Every lane."""
        return list(self._by_worker.values())

    def end(self) -> None:
        """The session has ended. The loop watches the lanes, and closes each when its worker has let go of it.

        Each refers to its link, and that to this object: they would wait for Python's collector.
        """
        self._by_worker.clear()
