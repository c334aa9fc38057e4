"""A hostile client: it writes what it likes into its channel, and into its bell, while the worker and recoveries run.

It uses the library to get a session, a plan and a channel, then the channel's memory and descriptors directly.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import select
import time
from typing import Any, final

import clientlib
from shm.client_channel import ClientChannel
from shm.layout import ARMED, CANCEL, CONSUMED, CTAIL, RING, SUBMISSION, TAIL, WAITING, Geometry
from tests.stress.counters import Counters, Tally
from tests.stress.models import COLUMNS, ONCE, QUICK, SLOW

MASK = (1 << 64) - 1
PLACES = 16
PAUSE_S = 0.0005
FULL = MASK - 1  # the most an eventfd holds
ATTACK_S = (0.05, 1.5)


@final
class Hostile:
    """Attacks until the counters say stop, with a new session whenever the broker hangs up."""

    def __init__(self, directory: str, counters: Counters, tally: Tally, seed: int) -> None:
        self._url = f"ipc://{directory}"
        self._counters = counters
        self._tally = tally
        self._random = random.Random(seed)

    def run(self) -> None:
        while not self._counters.stopping:
            try:
                client = clientlib.connect(self._url, spin_us=0)
                try:
                    self._attack(client)
                finally:
                    client.close()
            except clientlib.InferError:
                time.sleep(0.01)  # hung up on in the middle of a call, or refused: that is what it asked for

    def _attack(self, client: clientlib.Client) -> None:
        region = client.create_region("evil", 1 << 16)
        shape = (1, COLUMNS)
        plans = [
            client.prepare(
                name,
                inputs={"x": region.tensor(shape, "FP32")},
                outputs={"y": region.tensor(shape, "FP32", offset=1 << 15)},
                slots=PLACES,
            )
            for name in (QUICK.name, SLOW.name, ONCE.name)
        ]
        with contextlib.suppress(TimeoutError, clientlib.InferError):
            plans[0].submit(1.0).result(1.0)
        link = client.native.link
        if link is None:
            return
        channel = link.lanes.all()[0].channel
        words = [plan.prepared.word for plan in plans if plan.prepared is not None]
        memory = region.array((1 << 13,), "UINT64")
        attack = _Attack(channel, words, self._random)
        self._tally.add("attacks")
        poll = select.poll()
        poll.register(link.session._sock, 0)  # its end only
        end = time.monotonic() + self._random.uniform(*ATTACK_S)
        while time.monotonic() < end and not self._counters.stopping:
            attack.strike()
            memory[self._random.randrange(len(memory))] = self._random.getrandbits(64)
            if poll.poll(0):
                self._tally.add("hangups")
                return
            time.sleep(PAUSE_S)


@final
class _Attack:
    """One channel's end. Which rules it breaks, and how often, is drawn once: some stay attached for long."""

    def __init__(self, channel: ClientChannel, plan_words: list[int], rnd: random.Random) -> None:
        geometry: Geometry = channel._geometry
        self._random = rnd
        self._words: Any = channel._words
        self._memory: Any = channel._memory
        self._bell = channel._bell
        self._geometry = geometry
        self._plan_words = plan_words
        self._scribbles = rnd.choice((0, 1, 20, 200))
        self._forges_tail = rnd.choice((0.0, 0.0, 0.01, 0.5))
        self._entries = rnd.choice((0, 1, 8))
        self._next = self._words[TAIL]
        for fd in (channel._bell, channel.pipe_fd):
            fcntl.fcntl(fd, fcntl.F_SETFL, 0)  # clears O_NONBLOCK
        if rnd.random() < 0.5:
            self._fill_bell()

    def strike(self) -> None:
        for _ in range(self._entries):
            self._submit()
        for _ in range(self._scribbles):
            self._scribble()
        if self._random.random() < self._forges_tail:
            self._words[TAIL] = self._random.choice((0, MASK, 1 << 63, self._next + 1000, self._random.getrandbits(64)))
        self._ring()

    def _submit(self) -> None:
        """An entry that looks right, or nearly: any plan, position, deadline, cancelled or not."""
        rnd, geometry = self._random, self._geometry
        slot = rnd.randrange(geometry.slots)
        position = self._next + 1
        SUBMISSION.pack_into(
            self._memory,
            (geometry.submissions + 8 * slot) * 8,
            position + (rnd.random() < 0.05),
            rnd.choice((*self._plan_words, rnd.getrandbits(64))),
            rnd.getrandbits(64),
            rnd.choice((0, 0, 1, time.monotonic_ns() + 2_000_000, MASK)),
            rnd.randrange(PLACES + 2),
            rnd.randrange(PLACES + 2),
            rnd.choice((0, 1, 2, 0xFFFFFFFF)),
            rnd.getrandbits(64),
            rnd.getrandbits(16),
            rnd.getrandbits(16),
            0,
            0,
            rnd.choice((0, 0, 0, position)),
        )
        word = slot | (CANCEL if rnd.random() < 0.1 else 0)
        self._words[RING + (self._next & geometry.ring_mask)] = word
        self._next = position
        self._words[TAIL] = position
        self._words[CONSUMED] = self._words[CTAIL]

    def _scribble(self) -> None:
        rnd, words = self._random, self._words
        anywhere = rnd.randrange(CONSUMED, len(words))
        at = rnd.choice((CONSUMED, WAITING, CTAIL, ARMED)) if rnd.random() < 0.1 else anywhere
        words[at] = rnd.choice((0, 1, MASK, 1 << 63, rnd.randrange(1000), rnd.getrandbits(64), words[CTAIL]))

    def _ring(self) -> None:
        """Its own write may block by now: only into an empty bell."""
        if select.select([], [self._bell], [], 0)[1]:
            os.eventfd_write(self._bell, 1)

    def _fill_bell(self) -> None:
        """Whoever waits for room in it now waits for ever."""
        fcntl.fcntl(self._bell, fcntl.F_SETFL, os.O_NONBLOCK)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._bell, FULL)
        fcntl.fcntl(self._bell, fcntl.F_SETFL, 0)
