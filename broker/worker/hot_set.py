"""The channels of a worker, and how its leader learns that one of them has something.

Channels with traffic in the last 5 ms are hot: the leader looks at them without being rung. All others are armed and
ring a doorbell that the epoll set watches edge-triggered and nobody ever reads, since its description is the client's
and reading could block. A channel leaves the hot set only armed under a stamp that has not been rung for, and empty.

Everything but `add`, `remove` and `wake` is the leader's.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol, final

from broker.worker.waiting_cores import WaitingCores
from shm import statistics
from shm.fence import FENCE_IS_FULL, Fence
from shm.layout import TAIL
from shm.worker_channel import WorkerChannel

HOT_NS = 5_000_000
SPIN_NS = 50_000
GAVE_WAY_NS = 60_000  # a yield that took longer let somebody else run
LONG_SPIN_NS = 1_000_000  # where requests come at such intervals, as from one client through a gateway
LATE_S = 0.3  # how late a ring may come without being called lost
BOUND_S = 0.05  # longest sleep while requests are outstanding
IDLE_S = 3600.0
FD_SETSIZE = 1024  # what select(2) can wait for
SETTLED = 32  # looks that find nothing: time for more than looking. A power of two
_BETWEEN = SETTLED - 1
_now = time.monotonic_ns
_give_way = os.sched_yield


class Beside(Protocol):
    """Something under way in another worker (`broker.worker.ensembles.remote.channel.Lane`)."""

    def came(self) -> bool:
        """Has it ended?"""

    def look(self, now: int, wait: bool = True) -> bool:
        """Go on with what has ended, unless another thread does; `wait`: for that one."""

    def unwatch(self, now: int) -> None:
        """Nobody looks any more: have it ring."""


@final
class HotSet:
    """`on_broken` is told of a channel whose client broke a rule, `on_traffic` of the first ring after a quiet time."""

    def __init__(
        self, own_block: memoryview, on_broken: Callable[[WorkerChannel], None], on_traffic: Callable[[], None]
    ) -> None:
        self.channels: dict[int, WorkerChannel] = {}  # by doorbell descriptor; replaced, never changed
        self.hot: list[WorkerChannel] = []
        self._changing = threading.Lock()  # `channels` is replaced by the control thread and by the leader
        self._block = own_block
        self._on_broken = on_broken
        self._on_traffic = on_traffic
        self._fence = Fence()
        self._idle_since = 0  # when there was nothing to do any more; 0: there is
        self._interval = 2 * LONG_SPIN_NS  # typical, from there to the next request
        self._cores = WaitingCores()
        self._lanes: Collection[object] = ()  # see `look_beside`
        self._beside: Callable[[], Sequence[Beside]] = tuple
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # ours alone: may be read
        self._epoll.register(self._wake, select.EPOLLIN)
        self._selectable = self._epoll.fileno() < FD_SETSIZE

    def add(self, channel: WorkerChannel) -> None:
        """Watch a channel; it may hold entries that were never rung."""
        with self._changing:
            self.channels = {**self.channels, channel.bell: channel}
            self._epoll.register(channel.bell, select.EPOLLIN | select.EPOLLET)
        self.wake()

    def remove(self, channel: WorkerChannel) -> None:
        """Watch it no more. The number of its doorbell may be another's by now if it was removed before."""
        with self._changing:
            if self.channels.get(channel.bell) is channel:
                self.channels = {bell: other for bell, other in self.channels.items() if other is not channel}
                self._epoll.unregister(channel.bell)

    def wake(self) -> None:
        """Make the leader look again."""
        try:
            os.eventfd_write(self._wake, 1)
        except BlockingIOError:
            pass

    def look_beside(self, lanes: Collection[object], beside: Callable[[], Sequence[Beside]]) -> None:
        """Whoever spins looks at what `beside` gives, too. It is asked only while there are `lanes`."""
        self._lanes, self._beside = lanes, beside

    def attend(self) -> None:
        """In busy times: who rings, and whose client broke a rule?"""
        self.poll(0.0)
        for channel in self.hot:
            if channel.broken:
                self._close(channel)

    def spin(self, bookkeeping: Callable[[], None]) -> bool:
        """Look at the hot channels for a while, until one has something; the cold ones ring.

        Waking a core that was halted costs 50 µs and more, and what the caches held. So it is worth looking for as long
        as the next request has typically taken to come, up to a bound, and while nobody else wants a core.
        """
        if not self.hot or not FENCE_IS_FULL:
            return False
        began = before = now = self._idle_since = _now()
        end = began + self._patience()
        looks = [(channel.words, channel.head) for channel in self.hot if not channel.broken]
        beside = self._beside() if self._lanes else ()
        sweep = 0
        try:
            while now < end:
                _give_way()
                for words, head in looks:
                    if words[TAIL] != head:
                        self._interval += now - began - self._interval >> 2  # as `_came`, sooner; without the last look
                        self._idle_since = 0
                        return True
                if beside and self._came_beside(beside):
                    return True
                before, now = now, _now()
                gave_way = now - before > GAVE_WAY_NS
                sweep += 1
                if sweep & _BETWEEN and not gave_way:
                    continue  # a request that comes during what follows waits for it
                if (gave_way and now - began > SPIN_NS) or self._cores.wanted():
                    return False
                if sweep == SETTLED:
                    bookkeeping()
                if not sweep & _BETWEEN and self.poll(0.0):
                    return True
        finally:
            for each in beside:
                each.unwatch(_now())
        return False

    def _came_beside(self, beside: Sequence[Beside]) -> bool:
        for each in beside:
            if each.came():
                each.look(_now(), wait=False)
                self._came()
                return True
        return False

    def _patience(self) -> int:
        """How long the next request is looked for: a quarter longer than it usually takes."""
        if self._interval > LONG_SPIN_NS:
            return SPIN_NS
        return min(max(SPIN_NS, self._interval + (self._interval >> 2)), LONG_SPIN_NS)

    def _came(self) -> None:
        """Something to do: how long did it take to come?"""
        if self._idle_since:
            took = min(_now() - self._idle_since, 4 * LONG_SPIN_NS)
            self._interval += took - self._interval >> 2
            self._idle_since = 0

    def sleep(self, next_look: Callable[[], tuple[int, bool]]) -> None:
        """Sleep until a doorbell or the time that `next_look` names (0: none; and is anything outstanding?)."""
        if not self._arm():
            return
        slept = _now()
        until, outstanding = next_look()
        # Deadlines are the clients' to choose, up to 2^64 ns: more than a poll can wait for.
        timeout = min(max(0.0, (until - slept) / 1e9), IDLE_S) if until else IDLE_S
        if not self.poll(min(timeout, BOUND_S) if outstanding else timeout) and outstanding and timeout > BOUND_S:
            self._look_for_lost(min(LATE_S, timeout - BOUND_S))
        self._cool(slept)

    def park(self) -> None:
        """Have the hot channels not ring although nobody looks: whoever finishes a batch will."""
        now = _now()
        for channel in self.hot:
            channel.park(now)

    def stir(self) -> None:
        """Somebody looks again, all the time."""
        for channel in self.hot:
            channel.disarm()

    def _arm(self) -> bool:
        """Have the hot channels ring. False: one has something already, all stay hot."""
        for channel in self.hot:
            if channel.broken:
                self._close(channel)
            channel.arm()
        self._fence()
        if any(channel.pending() for channel in self.hot):
            # Published while it was not armed: it did not ring, so it must stay hot.
            for channel in self.hot:
                channel.disarm()
            return False
        return True

    def _look_for_lost(self, patience_s: float) -> None:
        """A sleep while requests were outstanding ended by its bound: count what should have rung and did not."""
        # Published after the sleep, while this thread waited for the GIL? Then the ring is there, or on its way.
        if any(channel.pending() for channel in self.channels.values()) and not self.poll(patience_s):
            self._block[statistics.LOST_WAKEUPS] += 1
            self._heat_pending()

    def _cool(self, slept: int) -> None:
        """After a sleep: keep what rang (its stamp is used up, however long ago that was) and what was hot lately."""
        now = _now()
        kept = []
        for channel in self.hot:
            if channel.broken:
                self._close(channel)
            elif channel.last_traffic >= slept or now - channel.last_traffic < HOT_NS or channel.pending():
                channel.disarm()
                kept.append(channel)
        self.hot = kept

    def poll(self, timeout: float) -> bool:
        """Wait for rings; every channel that rang becomes hot."""
        if 0.0 < timeout < BOUND_S and self._selectable:
            # epoll counts in ms, rounded up: what is due in between would wait for up to one of them longer.
            select.select((self._epoll,), (), (), timeout)
            timeout = 0.0
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
        self._came()
        if channel not in self.hot:
            channel.disarm()
            self.hot.append(channel)
        self._on_traffic()

    def _close(self, channel: WorkerChannel) -> None:
        """Stop listening to a client that broke the channel's rules: its doorbell could keep the leader awake."""
        self._block[statistics.REFUSED] += channel.unreported()
        self.hot = [other for other in self.hot if other is not channel]
        if channel.broken != "detached":
            self.remove(channel)
            self._on_broken(channel)
