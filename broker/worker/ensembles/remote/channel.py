"""The way of an ensemble's steps to one other worker: a channel like a client's, and a line for what cannot go yet.

Made by `broker.worker.ensembles.remote.session`, whose thread reaps. Steps wait in line while the channel is being
opened, while their plan is being prepared, or while all slots are taken; they leave it in the order in which they came,
so that steps of a sequence keep their order.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol, final

from shm.admission import EXPIRED, Request, Verdict
from shm.client_channel import ClientChannel, Settles
from shm.costs import Seen
from shm.errors import Code, InferError

FEW = 8  # steps under way that the thread that leads the worker's loop looks at; more are left to the session's thread


class Sends(Settles, Protocol):
    """A step on its way. `ident`: in the channel, 0 before it is there. `light`: its end takes little to go on from."""

    step: Request
    ident: int
    light: bool

    def word(self) -> int:
        """Its plan's, 0 while that is being prepared. Raises InferError if it cannot be had."""

    def fail(self, verdict: Verdict) -> None:
        """It never got to the other worker."""


def caller_of(step: Request) -> int:
    """The client that a step is run for, in 16 bits. Two that get the same number share a turn, no more."""
    return (step.client * 0x9E3779B1 >> 8) & 0xFFFF


@final
class Lane:
    """From any thread, but for what says otherwise.

    `stir` wakes the session's thread; `reopen` asks for the channel.
    """

    def __init__(
        self,
        worker: str,
        stir: Callable[[], None],
        reopen: Callable[[Lane], None],
        slots: int,
        waits: bool = True,
    ) -> None:
        """`waits`: a step waits while all `slots` are taken; else it is refused."""
        self.worker = worker
        self.slots = slots
        self._waits = waits
        self._stir = stir
        self._reopen = reopen
        self._lock = threading.Lock()
        self._line: deque[Sends] = deque()
        self._sends: dict[Request, Sends] = {}  # waiting, or in the channel
        self._cancelled: set[Request] = set()  # of those that wait, what must be cancelled there
        self._channel: ClientChannel | None = None
        self._opening = False
        self._closed: Verdict | None = None
        self._used_ns = 0  # when a step was last sent here
        self._moved = (-1, 0)  # completions so far, and when they were found to have changed

    def submit(self, sends: Sends) -> None:
        """It ends by `settle` or `fail`, once."""
        passes = opens = False
        with self._lock:
            refused = self._closed
            if refused is None:
                self._used_ns = sends.step.arrival
                self._sends[sends.step] = sends
                try:
                    passes = not self._line and self._pass(sends)
                except InferError as error:
                    refused = Code[error.code], error.message
                    self._forget(sends)
            if refused is None:
                if not passes:
                    self._line.append(sends)
                opens = self._channel is None and not self._opening
                self._opening = self._opening or opens
        if refused is not None:
            sends.fail(refused)
            return
        if opens:
            self._reopen(self)
        if not passes:
            self._stir()

    def cancel(self, step: Request) -> None:
        """Nobody wants what it would write: it ends at once if it waits, here or there; else when it has run.

        A step of a sequence that waits here must get there all the same: its sequence ends with it.
        """
        with self._lock:
            sends = self._sends.get(step)
            waits = sends is not None and sends in self._line
            if sends is not None and waits and step.sequence_id:
                self._cancelled.add(step)
                return
            if sends is not None and waits:
                self._line.remove(sends)
                del self._sends[step]
        if sends is None:
            return
        if waits:
            sends.fail((Code.CANCELLED, "the request was cancelled"))
        elif self._channel is not None:
            self._channel.cancel(sends.ident)

    def seen(self, now: int) -> Seen | None:
        """What a step would find there; None: its worker is being replaced, or does not respond."""
        channel, idle_ns = self._channel, now - self._used_ns
        if channel is None:
            return Seen(len(self._line), 0, False, idle_ns, 0, 0)
        if channel.away:
            return None
        outstanding, completed, ran_ns = channel.outstanding, channel.completed, channel.ran
        if not outstanding or completed != self._moved[0]:
            self._moved = completed, now
        stuck_ns = now - self._moved[1]
        return Seen(outstanding + len(self._line), ran_ns, channel.failed, idle_ns, stuck_ns, channel.ahead())

    @property
    def replaced(self) -> bool:
        """Is its worker being replaced? Then the sequences that it had are lost."""
        return self._channel is not None and self._channel.replaced

    def ended(self, sends: Sends) -> None:
        """It has its completion; called by `settle`."""
        with self._lock:
            self._sends.pop(sends.step, None)

    def _pass(self, sends: Sends) -> bool:
        """Let it go into the channel, if it can. With the lock. Raises InferError if it never can."""
        channel = self._channel
        if channel is None:
            return False
        word = sends.word()
        if not word:
            return False
        if not self._waits and channel.outstanding >= self.slots:
            raise InferError(Code.UNAVAILABLE, f"{self.slots} requests have responses to come from '{self.worker}'")
        _, _, request_id, deadline, _, _, rows, sequence_id, flags, priority, *_ = sends.step.entry
        caller = caller_of(sends.step)
        sends.ident = channel.submit(
            sends, word, 0, 0, rows, deadline, request_id, priority, flags, sequence_id, caller=caller
        )
        if sends.ident and sends.step in self._cancelled:
            self._cancelled.remove(sends.step)
            channel.cancel(sends.ident)
        return sends.ident != 0

    # --- of the session's thread --------------------------------------------------------------------------------

    def opened(self, channel: ClientChannel) -> None:
        """It can go."""
        with self._lock:
            self._channel, self._opening = channel, False

    def failed(self, error: InferError) -> None:
        """There is no channel; whoever comes next has it asked for again."""
        with self._lock:
            self._opening = False
        self._end_line((Code[error.code], error.message))

    def close(self, verdict: Verdict) -> None:
        """Nothing goes there any more."""
        with self._lock:
            self._closed = verdict
        self._end_line(verdict)

    def rung(self) -> None:
        """The worker says that it has completed something."""
        assert self._channel is not None
        self._channel.drain_pipe()

    def rest(self) -> bool:
        """Ask to be rung. Is there anything to look for, should nobody ring?"""
        channel = self._channel
        if self._rings():
            self._stir()
        return bool(self._line) or (channel is not None and channel.outstanding > 0)

    def _rings(self) -> bool:
        """Ask to be rung. True: there is something already."""
        channel = self._channel
        if channel is None:
            return False
        with self._lock:  # a stamp must name one sleep
            return channel.rest()

    # --- of the thread that leads the worker's loop --------------------------------------------------------------

    def watch(self) -> bool:
        """Ask not to be rung: the caller looks (`came`), until `unwatch`. False: nothing is under way there that it
        should look at, for it has others to look at, too.
        """
        channel = self._channel
        if channel is None or not 0 < channel.outstanding <= FEW:
            return False
        with self._lock:
            light = all(sends.light for sends in self._sends.values())
        if light:
            channel.stir()
        return light

    def came(self) -> bool:
        """Has something ended?"""
        return self._channel is not None and self._channel.unread

    def unwatch(self, now: int) -> None:
        """The caller looks no more; what has ended meanwhile is settled."""
        while self._rings():
            if not self.look(now, wait=False):
                return  # another thread is at it, and looks again before it sleeps

    # --- of either ----------------------------------------------------------------------------------------------

    def look(self, now: int, wait: bool = True) -> bool:
        """Settle what has ended, and let go what can. False, unless `wait`: another thread does."""
        channel = self._channel
        if channel is not None:
            if not channel.role.acquire(blocking=wait):
                return False
            try:
                while channel.reap():
                    pass
            finally:
                channel.role.release()
        ends: list[tuple[Sends, Verdict]] = []
        with self._lock:
            for sends in [each for each in self._line if 0 < each.step.deadline <= now]:
                self._line.remove(sends)
                ends.append((sends, EXPIRED))
            while self._line:
                sends = self._line[0]
                try:
                    sends.word()  # also without a channel: it may be known that there will be no plan
                    if not self._pass(sends):
                        break
                except InferError as error:
                    ends.append((sends, (Code[error.code], error.message)))
                self._line.popleft()
            for sends, _ in ends:
                self._forget(sends)
        for sends, verdict in ends:
            sends.fail(verdict)
        return True

    def _end_line(self, verdict: Verdict) -> None:
        with self._lock:
            line, self._line = self._line, deque()
            for sends in line:
                self._forget(sends)
        for sends in line:
            sends.fail(verdict)

    def _forget(self, sends: Sends) -> None:
        del self._sends[sends.step]
        self._cancelled.discard(sends.step)
