"""An honest client: one thread, prepared plans with many positions, all of them in flight all the time."""

from __future__ import annotations

import random
import sys
import time
from collections import deque
from typing import Any, final

import numpy as np

import clientlib
from clientlib import Client, InferError, Pending
from tests.stress.counters import Counters, Tally
from tests.stress.judge import Judge
from tests.stress.models import COLUMNS, ONCE, QUICK, SLOW, Served, numbers

RUNNING, ENDED = np.float32(-1), np.float32(-2)  # what an output holds before its request ends, and after
LOST_S = 60.0  # a request that has not ended by then never will
SHORT_S = (0.0002, 0.01)  # deadlines that some requests have


@final
class Sent:
    """A request that has not ended."""

    __slots__ = ("at", "cancelled", "given", "pending", "place", "strip")

    def __init__(self, strip: Strip, place: int, given: Any, pending: Pending) -> None:
        self.strip, self.place, self.given, self.pending = strip, place, given, pending
        self.cancelled = False
        self.at = time.monotonic()


@final
class Strip:
    """One plan and the memory of its positions. `gap`: bytes between rows, so that neighbours are no batch in place."""

    def __init__(self, client: Client, served: Served, places: int, rows: int, gap: int) -> None:
        size = 4 * COLUMNS * rows
        stride = size + gap
        region = client.create_region(f"{served.name}{gap}", 2 * places * stride)
        shape = (rows, COLUMNS)
        self.served = served
        self.rows = rows
        self.x = [region.array(shape, np.float32, k * stride) for k in range(places)]
        self.y = [region.array(shape, np.float32, (places + k) * stride) for k in range(places)]
        self.plan = client.prepare(
            served.name,
            inputs={"x": region.tensor(shape, "FP32", stride=stride)},
            outputs={"y": region.tensor(shape, "FP32", offset=places * stride, stride=stride)},
            slots=places,
        )
        self.free = deque(range(places))
        for y in self.y:
            y[:] = ENDED

    def untouched(self, place: int) -> bool:
        """Has nobody written to a position since its request ended?"""
        return bool((self.y[place] == ENDED).all())


@final
class PlanClient:
    """Runs until the counters say stop and everything has ended.

    `spin_us` as in `connect`; `patience_s`: of one wait, after which it looks whether others have ended.
    """

    def __init__(
        self, directory: str, counters: Counters, tally: Tally, seed: int, spin_us: float, patience_s: float
    ) -> None:
        self._url = f"ipc://{directory}"
        self._counters = counters
        self._tally = tally
        self._judge = Judge(counters, tally, prompt=patience_s < 0.05)
        self._patience_s = patience_s
        self._random = random.Random(seed)
        self._spin_us = spin_us
        self._nonce = seed
        self._seen = (0, 0)

    def run(self) -> None:
        self._connect()
        while True:
            if not (self._counters.stopping or self._judge.renew):
                self._fill()
            if self._sent:
                self._wait()
                self._collect()
            elif self._counters.stopping:
                return self._leave()
            elif self._judge.renew:
                self._leave()
                self._tally.add("reconnects")
                self._connect()

    def _connect(self) -> None:
        self._judge.renew = False
        self._client = clientlib.connect(self._url, spin_us=self._spin_us)
        self._strips = [
            Strip(self._client, QUICK, 40, 1, gap=0),
            Strip(self._client, QUICK, 8, 2, gap=64),
            Strip(self._client, SLOW, 8, 1, gap=0),
            Strip(self._client, ONCE, 6, 1, gap=0),
        ]
        self._sent: list[Sent] = []
        self._seen = (0, 0)
        self._newest = 0  # in order of submission, of the ordered model's answered requests

    def _fill(self) -> None:
        """Use every free position; all of them together are fewer than the channel's 64 slots."""
        for strip in self._strips:
            for _ in range(len(strip.free)):
                self._submit(strip, strip.free.popleft())

    def _submit(self, strip: Strip, place: int) -> None:
        chance = self._random.random()
        self._nonce += 1
        rows = 1 if strip.rows == 2 and chance < 0.5 else strip.rows
        if not strip.untouched(place):
            self._judge.report("late_writes", f"{strip.served.name} position {place}: {strip.y[place].tolist()}")
        strip.x[place][:] = given = numbers(self._nonce, strip.rows)
        strip.y[place][:] = RUNNING
        timeout = self._random.uniform(*SHORT_S) if chance > 0.97 else None
        began = time.monotonic_ns()
        try:
            pending = strip.plan.submit(
                timeout, input_slot=place, output_slot=place, rows=0 if rows == strip.rows else rows
            )
        except InferError as error:  # the first one opens the channel, and may have no time for that
            self._judge.error(strip.served, error, deadline_ns=timeout and began + int(timeout * 1e9))
            strip.y[place][:] = ENDED
            strip.free.append(place)
            return
        self._tally.add("submitted")
        sent = Sent(strip, place, given[:rows], pending)
        if self._random.random() < 0.03:
            sent.cancelled = pending.cancel()
        self._sent.append(sent)

    def _wait(self) -> None:
        """Until one of them has ended, not always the first."""
        sent = self._random.choice(self._sent[:24])
        sent.pending.wait(time.monotonic() + self._patience_s)
        if self._random.random() < 0.01:
            victim = self._random.choice(self._sent)
            victim.cancelled |= victim.pending.cancel()

    def _collect(self) -> None:
        ended = [sent for sent in self._sent if sent.pending.entry is not None]
        self._sent = [sent for sent in self._sent if sent.pending.entry is None]
        ended.sort(key=lambda sent: sent.pending.entry[0])  # type: ignore[index]
        for sent in ended:
            self._end(sent)
        now = time.monotonic()
        for sent in self._sent:
            if now - sent.at > LOST_S:
                self._lose(sent, now)
        self._account()

    def _end(self, sent: Sent) -> None:
        strip, place, pending = sent.strip, sent.place, sent.pending
        try:
            result = pending.take()
        except InferError as error:
            self._judge.error(strip.served, error, deadline_ns=pending.deadline_ns, cancelled=sent.cancelled)
        else:
            self._judge.answer(strip.served, sent.given, result["y"])
            if len(sent.given) < strip.rows and not (strip.y[place][len(sent.given) :] == RUNNING).all():
                self._judge.wrong("a row that was not asked for was written")
            if strip.served.ordered and not (sent.cancelled or pending.deadline_ns):
                if pending.ident >> 16 < self._newest:
                    self._judge.report("reordered", f"{pending.ident >> 16} answered after {self._newest}")
                self._newest = max(self._newest, pending.ident >> 16)
        strip.y[place][:] = ENDED
        strip.free.append(place)

    def _lose(self, sent: Sent, now: float) -> None:
        self._judge.report("lost", f"{sent.strip.served.name}, {now - sent.at:.1f} s after it was submitted")
        sys.exit(3)

    def _account(self) -> None:
        """What the channel has counted since the last time."""
        lanes = self._client.native.link.lanes.all() if self._client.native.link else []
        seen = (sum(lane.channel.lost_wakeups for lane in lanes), sum(lane.channel.strays for lane in lanes))
        self._tally.add("lost_wakeups", seen[0] - self._seen[0])
        self._tally.add("duplicated", seen[1] - self._seen[1])
        self._seen = seen

    def _leave(self) -> None:
        """Late writes of the last requests of all would go unseen: look once more, a little later."""
        time.sleep(0.05)
        for strip in self._strips:
            for place in strip.free:
                if not strip.untouched(place):
                    self._judge.report("late_writes", f"{strip.served.name} position {place}, at the end")
        for lane in self._client.native.link.lanes.all() if self._client.native.link else []:
            lane.look()
        self._account()
        self._client.close()
