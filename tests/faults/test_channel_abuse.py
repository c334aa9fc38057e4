"""X: clients that do to their channel what the client library never would. Nobody else may suffer."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest

from shm.layout import (
    ARMED,
    CANCEL,
    CONSUMED,
    CTAIL,
    RING,
    SUBMISSION,
    TAIL,
    WAITING,
    Geometry,
)
from shm.memory import map_words
from tests.fakes.broker import tensor
from tests.faults import child, raw
from tests.faults.lab import SAME, eventually, scaled

SLOTS = 16
POSITIONS = 4
X, Y, END = 4096, 8192, 12288  # of the region: guard, inputs, outputs, guard
GUARD = 0xA5
MAX = 2**64 - 1


class Bare:
    """A session with a region, a plan of add1 with four positions, and a channel's memory without anyone's rules."""

    def __init__(self) -> None:
        self.session = raw.session()
        self.region = raw.Region(self.session, "r", END + 4096)
        self.bytes = np.frombuffer(self.region.memory, np.uint8)
        self.bytes[:] = GUARD
        self.bytes[X:Y] = 0
        places = {"shape": (2, 8), "stride": 64}
        plan = self.session.ask(
            "Prepare",
            model="add1",
            inputs=[tensor("x", "r", offset=X, **places)],
            outputs=[tensor("y", "r", offset=Y, **places)],
            input_positions=POSITIONS,
            output_positions=POSITIONS,
        )
        self.plan_word = plan["index"] | plan["generation"] << 32
        info = self.session.ask("OpenChannel", worker=SAME, slots=SLOTS)
        assert info["slots"] == SLOTS, info
        self.memory_fd, self.bell, self.pipe = self.session.fds
        self.session.fds = []
        self.geometry = Geometry(SLOTS)
        self.memory, self.words = map_words(self.memory_fd, self.geometry.channel_bytes)
        os.close(self.memory_fd)
        self.tail = 0

    def write(self, slot: int, tag: int, *, plan: int | None = None, **fields: int) -> None:
        """Fill slot `slot`; what is not given is as in a request that is right."""
        at = (self.geometry.submissions + 8 * slot) * 8
        names = ("request", "deadline", "input", "output", "rows", "sequence", "flags", "priority", "wait", "done")
        values = [fields.get(name, 0) for name in names]
        word = self.plan_word if plan is None else plan
        SUBMISSION.pack_into(self.memory, at, tag, word, *values, fields.get("cancel", 0))

    def publish(self, slot: int) -> None:
        self.words[RING + (self.tail & self.geometry.ring_mask)] = slot
        self.tail += 1
        self.words[TAIL] = self.tail

    def ring(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self.bell, 1)

    def ended(self, timeout_s: float = 0.0) -> bool:
        """Has the broker hung up?"""
        return bool(select.select([self.session.socket], [], [], timeout_s)[0])

    def untouched(self) -> bool:
        """Did nobody write outside the outputs?"""
        return bool((self.bytes[:X] == GUARD).all() and (self.bytes[END:] == GUARD).all() and not self.bytes[X:Y].any())

    def close(self) -> None:
        self.session.close()
        os.close(self.bell)
        os.close(self.pipe)


# --- descriptors ----------------------------------------------------------------------------------------------


def loosen() -> dict[str, Any]:
    """Make every descriptor blocking and full, then have the worker use them."""
    bare = Bare()
    writable = os.open(f"/proc/self/fd/{bare.pipe}", os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writable, bytes(4096))
    for fd in (bare.bell, bare.pipe, writable):
        os.set_blocking(fd, True)
    answered = 0
    for turn in range(200):
        bare.words[WAITING] = turn + 1  # ring me: into a full pipe
        bare.write(turn % SLOTS, turn + 1, output=turn % POSITIONS)
        bare.publish(turn % SLOTS)
        bare.ring()
        answered += _reaches(bare, turn + 1)
        bare.words[CONSUMED] = turn + 1
    os.eventfd_write(bare.bell, MAX - 1000)  # all but full: who writes much to it now waits
    os.set_blocking(bare.bell, True)
    child.say({"answered": answered, "ended": bare.ended(0.1)})
    child.hear()
    os.close(writable)
    bare.close()
    return {}


def _reaches(bare: Bare, tail: int) -> bool:
    deadline = time.monotonic() + 10
    while bare.words[CTAIL] < tail:
        if time.monotonic() > deadline:
            return False
        os.sched_yield()
    return True


def test_x1_blocking_full_descriptors_hold_nobody_up(lab):
    offender = lab.start(loosen)
    assert offender.heard() == {"answered": 200, "ended": False}
    lab.settled(holders=1)
    offender.tell("end")
    offender.result()
    lab.settled()


# --- memory ---------------------------------------------------------------------------------------------------


FIELDS = (
    *((name, 64) for name in ("plan", "request", "deadline", "sequence", "cancel")),
    ("rows", 32),
    *((name, 16) for name in ("input", "output", "flags", "priority", "wait", "done")),
)


class Scribbler:
    """Random requests that are right, nearly right, or not requests at all; and rewriting them while they run."""

    def __init__(self, bare: Bare, chance: random.Random, calm: bool) -> None:
        self.bare, self.chance = bare, chance
        self.acts = [self.ask, self.ask, self.rewrite, self.cancel, self.forge_completion, self.consume, self.bare.ring]
        if not calm:
            self.acts += [self.any_word, self.any_tail, self.forge_tail]

    def number(self) -> int:
        """Of any size, mostly odd ones."""
        sizes = (1, 2, 8, 16, 31, 32, 33, 63, 64)
        return self.chance.choice((0, 1, MAX, 2**63, self.chance.getrandbits(self.chance.choice(sizes))))

    def ask(self) -> None:
        bare, chance = self.bare, self.chance
        slot = chance.randrange(SLOTS)
        fields = {"input": chance.randrange(POSITIONS), "output": chance.randrange(POSITIONS)}
        if chance.random() < 0.5:
            name, bits = chance.choice(FIELDS)
            fields[name] = self.number() & ((1 << bits) - 1)
        bare.write(slot, bare.tail + chance.choice((1, 1, 1, 1, 0, 2)), **fields)
        bare.publish(slot)
        bare.words[WAITING] = chance.choice((0, bare.words[CONSUMED] + 1 & MAX))
        if bare.words[ARMED]:
            bare.ring()

    def rewrite(self) -> None:
        """A word of a slot that may be taken just now."""
        at = self.bare.geometry.submissions + self.chance.randrange(8 * SLOTS)
        self.bare.words[at] = self.number()

    def cancel(self) -> None:
        slot = self.chance.randrange(SLOTS)
        words = self.bare.words
        words[self.bare.geometry.submissions + 8 * slot + 7] = max(0, self.bare.tail - self.chance.randrange(3))
        self.bare.publish(slot | CANCEL)

    def forge_completion(self) -> None:
        geometry = self.bare.geometry
        at = geometry.completions + self.chance.randrange(geometry.notes - geometry.completions + 1024)
        self.bare.words[at] = self.number()

    def forge_tail(self) -> None:
        self.bare.words[CTAIL] = self.chance.choice((self.number(), self.bare.words[CTAIL] + 1 & MAX))

    def consume(self) -> None:
        self.bare.words[CONSUMED] = self.bare.words[CTAIL]

    def any_word(self) -> None:
        self.bare.words[self.chance.randrange(self.bare.geometry.channel_bytes // 8)] = self.number()

    def any_tail(self) -> None:
        if self.chance.random() < 0.02:
            self.bare.words[TAIL] = self.chance.choice((self.number(), self.bare.tail + self.chance.randrange(200)))


def scribble(seconds: float, seed: int) -> dict[str, Any]:
    chance = random.Random(seed)
    told: Counter[str] = Counter()
    end = time.monotonic() + seconds
    # On a busy machine longer: until a session had results, and one was hung up before it ended.
    while (now := time.monotonic()) < end or (now < end + 60 and not (told["results"] and told["hung up"])):
        bare = Bare()
        calm = chance.random() < 0.5
        scribbler = Scribbler(bare, chance, calm)
        session_end = now + chance.uniform(0.01, 0.2)
        while time.monotonic() < session_end and not bare.ended():
            for _ in range(50):
                chance.choice(scribbler.acts)()
                told["acts"] += 1
            if calm:  # else there is soon more in the ring than fits
                scribbler.consume()
                time.sleep(0.0005)
        told["hung up" if bare.ended() else "endured"] += 1
        told["touched"] += not bare.untouched()
        told["results"] += int(bare.bytes[Y:END].view(np.float32)[0] == 1)
        bare.close()
    return told


@pytest.mark.parametrize("seed", range(2))
def test_x2_rewritten_channel_hurts_only_itself(lab, seed):
    told = lab.offend(scribble, seconds=scaled(2000, 120_000) / 1000, seed=seed, timeout_s=150)
    assert told.get("touched", 0) == 0
    assert told["results"] > 0
    assert told["hung up"] > 0
    lab.settled()


def test_x2_rewritten_channel_is_taken_over_by_replacements(lab):
    offender = lab.start(scribble, seconds=scaled(2000, 120_000) / 1000, seed=9)
    kills = 0
    while not offender.ended(0.15):
        victim = lab.worker_pid()
        if victim:
            os.kill(victim, signal.SIGKILL)
            kills += 1
            eventually(lambda victim=victim: lab.worker_pid() not in (0, victim), "a new worker")
            eventually(lambda: lab._is_ready(SAME), "a worker that is ready")
    told = offender.result()
    assert kills > 0
    assert told.get("touched", 0) == 0
    lab.settled(replaced=SAME)
