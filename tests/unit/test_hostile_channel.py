"""A client that writes what it likes, where it likes, when it likes into its channel.

The worker must not raise, must hand out only what passed its checks, and must not do anything to other channels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from random import Random
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shm import recovery, worker_channel
from shm.admission import Request
from shm.errors import Code
from shm.layout import ARMED, CANCEL, CONSUMED, CTAIL, MARK, RING, SUBMISSION, TAIL, WAITING, Geometry
from shm.recovery import bury, end_all, recover
from tests.fakes.channel import NOW, PLAN, Pending, Plan, Twin, submit

SLOTS = 4
GEOMETRY = Geometry(SLOTS)
bounded = settings(max_examples=200, derandomize=True, database=None, deadline=None)

CONTROL = [TAIL, CONSUMED, WAITING, CTAIL, ARMED]
ANYWHERE = range(GEOMETRY.channel_bytes // 8)
INTERESTING = [*CONTROL, *range(RING, GEOMETRY.completions + 16 * SLOTS)]
VALUES = [0, 1, 2, 3, 4, 5, 8, 16, 17, 1 << 16, CANCEL, CANCEL | 1, (1 << 48) - 1, 1 << 63, (1 << 64) - 1, PLAN]


class Attack:
    """A worker that serves the channel of a hostile client, and that of an honest one beside it."""

    def __init__(self, hostile: Twin, honest: Twin) -> None:
        self.twin = hostile
        self.words = hostile.worker({}).words
        self.neighbour, self.client = honest.worker({PLAN: Plan()}), honest.client()
        self.replace()

    def replace(self) -> None:
        """The worker died and another takes the channel over."""
        self.plan = Plan(input_positions=2, output_positions=3, rows=2)
        self.worker = self.twin.worker({PLAN: self.plan})
        suspects, fresh = recover(self.worker, NOW)
        assert all(request.attempts < 2 for request in suspects)
        self.queue = suspects + fresh
        self.check()

    def check(self) -> None:
        """Everything handed out is what a plan allows, and no two write to the same place."""
        for request in self.queue:
            assert request.plan is self.plan
            assert request.input_position < 2
            assert request.output_position < 3
            assert 0 < request.rows <= 2
            assert self.worker.live[request.slot] is request
            assert self.worker.ledger[MARK + request.slot] >> 16 == request.position <= self.worker.head
        outputs = [request.output_position for request in self.queue]
        assert len(set(outputs)) == len(outputs)
        assert [place for place in range(3) if self.plan.busy[place]] == sorted(outputs)

    def write(self, word: int, value: int) -> None:
        self.words[word] = value

    def garbage(self, seed: int) -> None:
        self.words[:] = memoryview(Random(seed).randbytes(8 * len(self.words))).cast("Q")

    def publish(self, slot: int, fields: list[int]) -> None:
        """Something that looks like a submission, or nearly so."""
        position = self.worker.head + 1
        at = 8 * (GEOMETRY.submissions + 8 * slot)
        SUBMISSION.pack_into(self.worker.memory, at, position, PLAN, 0, 0, *fields, 0, 0, 0, 0, 0, 0)
        self.words[RING + (self.worker.head & GEOMETRY.ring_mask)] = slot
        self.words[TAIL] = position

    def take(self) -> None:
        for request, admitted in self.worker.take(8, NOW, self.queue):
            if not admitted:
                self.worker.complete([request])
            elif request in self.queue:
                self.queue.remove(request)
                self.worker.complete([request])
        self.check()

    def take_inline(self) -> None:
        """Take one entry and end it at once, where the worker could run it inline."""
        request = self.worker.peek(NOW) if self.worker.pending() else None
        if request is not None:
            self.worker.begin(request)
            self.queue.append(request)
            self.check()
            self.queue.remove(request)
            self.worker.complete([request])

    def complete(self, count: int) -> None:
        done, self.queue = self.queue[:count], self.queue[count:]
        for request in done:
            self.worker.start([request])
        self.worker.complete(done)
        self.check()

    def bury(self) -> None:
        twin = self.twin
        bury(twin.memory_fd, twin.ledger_fd, twin.pipe_write, SLOTS, lambda word: word % 2 == 0, NOW)
        self.replace()

    def end_all(self) -> None:
        twin = self.twin
        end_all(twin.memory_fd, twin.ledger_fd, twin.pipe_write, SLOTS, Code.UNAVAILABLE, "over", NOW)
        self.replace()
        assert self.queue == []

    def serve_neighbour(self) -> None:
        _, pending = submit(self.client)
        out: list[Request] = []
        assert self.neighbour.take(8, NOW, out) == []
        (request,) = out
        request.copied = 42
        self.neighbour.start([request])
        self.neighbour.complete(out)
        assert self.client.reap() == 1
        assert pending.code is Code.OK
        assert pending.entries[0][7] == 42
        assert (self.neighbour.broken, self.neighbour.refused) == ("", 0)


STEPS = st.one_of(
    st.tuples(st.just(Attack.write), st.sampled_from(INTERESTING), st.sampled_from(VALUES)),
    st.tuples(st.just(Attack.write), st.sampled_from(CONTROL), st.sampled_from(VALUES)),
    st.tuples(st.just(Attack.write), st.sampled_from(ANYWHERE), st.integers(0, 2**64 - 1)),
    st.tuples(st.just(Attack.garbage), st.integers(0, 1000)),
    st.tuples(
        st.just(Attack.publish),
        st.integers(0, SLOTS - 1),
        st.tuples(st.integers(0, 2), st.sampled_from([0, 1, 2, 3, 65535]), st.sampled_from([0, 1, 2, 3, 2**32 - 1])),
    ),
    st.tuples(st.just(Attack.take)),
    st.tuples(st.just(Attack.take_inline)),
    st.tuples(st.just(Attack.complete), st.integers(1, 4)),
    st.tuples(st.sampled_from([Attack.replace, Attack.bury, Attack.end_all])),
    st.tuples(st.just(Attack.serve_neighbour)),
)


@bounded
@given(st.lists(STEPS, max_size=30))
def test_whatever_a_client_writes_between_the_workers_steps(steps):
    with Twin(SLOTS) as hostile, Twin(SLOTS) as honest:
        attack = Attack(hostile, honest)
        for step, *arguments in steps:
            step(attack, *arguments)
        attack.replace()
        attack.serve_neighbour()


class Meanwhile:
    """While active, `strike` is called before each bytecode of the worker's side: another process never waits."""

    def __init__(self, strike: Callable[[], None]) -> None:
        self._strike = strike
        self._previous: Any = None

    def __enter__(self) -> None:
        self._previous = sys.gettrace()
        sys.settrace(self._call)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._previous)

    def _call(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        if frame.f_code.co_filename not in (worker_channel.__file__, recovery.__file__):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._opcode

    def _opcode(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        self._strike()
        return self._opcode


@pytest.mark.parametrize("seed", range(8))
def test_whatever_a_client_writes_during_the_workers_steps(seed):
    random = Random(seed)
    with Twin(SLOTS) as hostile, Twin(SLOTS) as honest:
        attack = Attack(hostile, honest)
        words = attack.words
        good = SUBMISSION.pack(1, PLAN, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0)
        bad = SUBMISSION.pack(1, PLAN, 0, 0, 9, 9, 9, 0, 0, 0, 0, 0, 0)

        entries = [[slot, slot, slot, slot, slot | CANCEL, 3 - slot, 0xFFFF] for slot in range(SLOTS)]

        def strike() -> None:
            """Entries turn from good to bad and back between any two looks of the worker."""
            position = attack.worker.head + random.randrange(1, 4)
            slot = position % SLOTS
            start = GEOMETRY.submissions + 8 * slot
            words[start : start + 8] = memoryview(random.choice([good, good, bad])).cast("Q")
            words[start] = position
            words[start + 4] += random.randrange(3) << 16
            words[start + 7] = random.choice([0, 0, position])
            words[RING + (position - 1 & GEOMETRY.ring_mask)] = random.choice(entries[slot])
            words[TAIL] = attack.worker.head + 3
            if random.random() < 0.01:
                words[random.choice(INTERESTING)] = random.choice(VALUES)

        steps = [attack.take, attack.take, attack.take_inline, attack.bury, attack.end_all, attack.replace]
        taken = 0
        for _ in range(32):
            step = random.choice(steps)
            with Meanwhile(strike):
                step()
                taken += len(attack.queue)
                attack.complete(random.randrange(3))
        assert taken
        attack.serve_neighbour()


@bounded
@given(before=st.integers(0, 40), tail=st.one_of(st.integers(0, 80), st.sampled_from(VALUES)))
def test_a_tail_outside_the_ring_breaks_the_channel_and_no_other_does(before, tail):
    with Twin(SLOTS) as twin:
        client, worker = twin.client(), twin.worker({PLAN: Plan()})
        for _ in range(before):
            submit(client)
            out: list[Request] = []
            worker.take(8, NOW, out)
            worker.complete(out)
            client.reap()
        worker.words[TAIL] = tail
        assert worker.pending() == (tail != before)
        worker.take(100, NOW, [])
        assert bool(worker.broken) == (not before <= tail <= before + 4 * SLOTS)
        assert not worker.pending()


# --- and an honest one ----------------------------------------------------------------------------------------------


class Diligent:
    """An honest client that cancels a lot and a slow worker; checks what the layout promises them."""

    def __init__(self, twin: Twin) -> None:
        self.client = twin.client()
        self.worker = twin.worker({PLAN: Plan(output_positions=SLOTS * 3)})
        self.requests: list[tuple[int, Pending]] = []
        self.queue: list[Request] = []
        self.worker.plans[PLAN].conflict = lambda *_: ""

    def submit(self) -> None:
        pending = Pending()
        ident = self.client.submit(pending, PLAN, 0, 0, 0, 0)
        if ident:
            self.requests.append((ident, pending))

    def cancel(self, back: int) -> None:
        for ident, _ in self.requests[-back:]:
            self.client.cancel(ident)

    def reap(self) -> None:
        self.client.reap()

    def take(self, limit: int) -> None:
        for request, admitted in self.worker.take(limit, NOW, self.queue):
            if admitted:
                self.queue.remove(request)
            self.worker.complete([request])

    def complete(self, count: int) -> None:
        done, self.queue = self.queue[-count:], self.queue[:-count]
        self.worker.complete(done)

    def check(self) -> None:
        words, worker = self.worker.words, self.worker
        unread = [words[RING + (at & GEOMETRY.ring_mask)] & 0xFFFF for at in range(worker.head, words[TAIL])]
        assert all(unread.count(slot) <= 3 for slot in range(SLOTS))
        assert words[CTAIL] - words[CONSUMED] + sum(map(bool, worker.live)) <= SLOTS
        assert (worker.broken, worker.refused) == ("", 0)
        assert all(pending.finals <= 1 for _, pending in self.requests)

    def finish(self) -> None:
        while self.worker.pending() or self.queue:
            self.take(100)
            self.complete(100)
        self.reap()
        assert self.client.outstanding == 0
        assert all(pending.finals == 1 for _, pending in self.requests)


DILIGENT = st.one_of(
    st.tuples(st.just(Diligent.submit)),
    st.tuples(st.just(Diligent.submit)),
    st.tuples(st.just(Diligent.cancel), st.integers(1, 6)),
    st.tuples(st.just(Diligent.reap)),
    st.tuples(st.just(Diligent.take), st.integers(1, 5)),
    st.tuples(st.just(Diligent.complete), st.integers(1, 3)),
)


@bounded
@given(st.lists(DILIGENT, max_size=60))
def test_an_honest_client_never_overflows_ring_or_completions(steps):
    with Twin(SLOTS) as twin:
        pair = Diligent(twin)
        for step, *arguments in steps:
            step(pair, *arguments)
            pair.check()
        pair.finish()


def test_three_unread_entries_for_every_slot_fit():
    """The most an honest client can leave: an old cancel, a submission and its cancel, for each slot."""
    with Twin(SLOTS) as twin:
        pair = Diligent(twin)
        for _ in range(SLOTS):
            pair.submit()
        pair.take(100)
        pair.complete(100)
        pair.cancel(SLOTS)  # their endings are published and not read
        pair.reap()
        for _ in range(SLOTS):
            pair.submit()
        pair.cancel(SLOTS)
        assert pair.worker.published() - pair.worker.head == 3 * SLOTS
        pair.check()
        pair.finish()
