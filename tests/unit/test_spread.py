"""Which worker a request goes to where several serve its model."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from clientlib import homes, spread
from clientlib.homes import Homes
from clientlib.load import FRESH_NS, Load
from clientlib.spread import Spread
from clientlib.submission import NO_ROUTE
from shm.costs import HALF_NS

A, B, C = "cpu/a", "cpu/b", "cpu/c"


class Channel:
    """As much of a `ClientChannel` as is looked at."""

    def __init__(self) -> None:
        self.outstanding = self.ran = self.completed = self.told = 0
        self.failed = False
        self.away = self.replaced = False

    def ahead(self) -> int:
        return self.told


class Bench:
    """A plan on three workers; `now` is the time in ns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *bound: str, shared: bool = False, alone: bool = False) -> None:
        self.now = 10**12
        self.waits: dict[int, tuple[str, int]] = {}  # of senders: at which worker, and until when
        monkeypatch.setattr(spread, "_now_ns", lambda: self.now)
        self.channels = {worker: Channel() for worker in (A, B, C)}
        lanes = [SimpleNamespace(worker=worker, channel=channel) for worker, channel in self.channels.items()]
        homes, load = Homes(shared=shared, alone=alone), Load(SimpleNamespace(all=lambda: lanes))
        link: Any = SimpleNamespace(homes=homes, load=load)
        prepared: Any = SimpleNamespace(workers=(A, B, C))
        self.spread: Spread[Any] = Spread("m", link, prepared)
        for lane in lanes:
            if lane.worker in (bound or (A, B, C)):
                self.spread.bounds[lane.worker] = lane  # a binding has its channel, too

    def ran(self, **ns: int) -> None:
        for name, value in ns.items():
            self.channels[f"cpu/{name}"].ran = value

    def told(self, **ns: int) -> None:
        for name, value in ns.items():
            self.channels[f"cpu/{name}"].told = value

    def picks(self, count: int = 30) -> set[str]:
        return {self.spread.pick(NO_ROUTE) for _ in range(count)}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_of_equal_workers_all_are_used(bench: Bench) -> None:
    assert bench.picks() == {A, B, C}
    bench.ran(a=5000, b=5000, c=5000)
    assert bench.picks() == {A, B, C}


def test_the_fewest_in_flight_and_the_quickest_win(bench: Bench) -> None:
    bench.ran(a=5000, b=5000, c=5000)
    bench.channels[A].outstanding = bench.channels[C].outstanding = 2
    assert bench.picks() == {B}
    bench.ran(b=16_000)
    assert bench.picks() == {A, C}, "3 times 5 µs are less than one time 16"


def test_a_worker_that_is_at_work_for_others_is_left_alone(bench: Bench) -> None:
    bench.ran(a=5000, b=5000, c=5000)
    bench.told(a=1 << 20, c=1 << 17)
    assert bench.picks() == {B}
    bench.channels[B].outstanding = 5
    assert bench.picks() == {B}, "six of 5 µs"
    bench.channels[B].outstanding = 40
    assert bench.picks() == {C}, "its 41 take longer than others' work elsewhere"
    bench.told(a=0, c=0)
    assert bench.picks() == {A, C}, "as soon as they are done"


def test_a_workers_own_word_covers_what_this_process_has_there(bench: Bench) -> None:
    bench.ran(a=50_000, b=50_000, c=50_000)
    for at, channel in enumerate(bench.channels.values()):
        channel.outstanding = 4
        channel.told = (1 << 17, 1 << 17, 1 << 18)[at]
    assert bench.picks() == {A, B}, "4 of 50 µs are more than is said, so they are all there is"


@pytest.mark.parametrize("seed", range(20))
def test_it_goes_where_it_ends_first_as_far_as_is_known(bench: Bench, seed: int) -> None:
    chance = random.Random(seed)
    bench.picks(3)
    for _ in range(200):
        ends = {}
        for worker, channel in bench.channels.items():
            channel.outstanding = chance.randrange(4)
            channel.completed += 1
            channel.ran = chance.randrange(1000, 1 << 20)
            channel.told = chance.choice((0, 1 << chance.randrange(16, 24)))
            ends[worker] = max(channel.outstanding * channel.ran, channel.told) + channel.ran
        picked = bench.spread.pick(NO_ROUTE)
        assert ends[picked] == min(ends.values())


def test_what_was_slow_once_is_tried_again(bench: Bench) -> None:
    bench.ran(a=5000, b=5000, c=5000)
    bench.picks()
    bench.ran(b=40_000, c=10**9)
    assert bench.picks() == {A}
    for _ in range(4):
        bench.now += HALF_NS
        bench.spread.pick(NO_ROUTE)
    assert bench.picks(1) <= {A, B}
    bench.now += 3 * HALF_NS
    assert B in bench.picks(3)


def test_a_worker_that_answers_nothing_is_left_alone(bench: Bench) -> None:
    bench.ran(a=1000, b=50_000, c=50_000)
    bench.channels[A].outstanding = 1
    assert bench.picks() == {A}, "two in flight there take less than one elsewhere"
    bench.now += 40_000
    assert bench.picks() <= {B, C}, "but none has ended for long"
    bench.channels[A].completed += 1
    assert bench.picks() == {A}


def test_of_which_nothing_is_known_is_taken_for_one_like_the_others(bench: Bench) -> None:
    bench.ran(a=5000, b=9000)
    assert bench.picks() == {A}, "7000 is more"
    bench.channels[A].outstanding = 1
    assert bench.picks() == {C}
    bench.channels[A].outstanding = bench.channels[C].outstanding = 1
    assert bench.picks() == {B}
    bench.channels[A].outstanding = bench.channels[C].outstanding = 0
    assert bench.picks() == {A}
    tried = []
    for _ in range(10):
        bench.now += HALF_NS // 10
        tried.append(bench.spread.pick(NO_ROUTE))
    assert tried == [A] * 9 + [C], "it was not tried for a second"


@dataclass
class Simulated:
    """A worker with one instance. `fails`: at once, all of them. Hangs where `run_ns` is 0."""

    run_ns: int
    fails: bool = False
    line: list[int] = field(default_factory=list)  # which of the senders wait
    began: int = 0
    sent: int = 0


def simulate(
    bench: Bench, workers: dict[str, Simulated], senders: int, seconds: float, patience_ns: int = 1 << 62
) -> dict[str, int]:
    """How many requests each got of `senders`, each of which sends its next request when its last has ended, at the
    latest after `patience_ns`. No worker tells what it has ahead.
    """
    step, until = 250_000, bench.now + int(seconds * 1e9)
    waits = bench.waits
    while bench.now < until:
        for sender in range(senders):
            if sender not in waits:
                worker = bench.spread.pick(NO_ROUTE)
                at, channel = workers[worker], bench.channels[worker]
                at.sent += 1
                if at.fails:
                    channel.failed, channel.completed = not channel.ran, channel.completed + 1
                    continue
                if not at.line:
                    at.began = bench.now
                at.line.append(sender)
                channel.outstanding += 1
                waits[sender] = worker, bench.now + patience_ns
        bench.now += step
        for worker, at in workers.items():
            channel = bench.channels[worker]
            if at.line and at.run_ns and bench.now - at.began >= at.run_ns:
                end(bench, worker, at.line.pop(0))
                channel.ran, channel.failed, at.began = at.run_ns, False, bench.now
            for sender in [each for each in at.line if waits[each][1] <= bench.now]:
                at.line.remove(sender)  # its deadline: nobody counts it, though the run goes on
                end(bench, worker, sender)
                channel.failed = not channel.ran
    return {worker: at.sent for worker, at in workers.items()}


def end(bench: Bench, worker: str, sender: int) -> None:
    del bench.waits[sender]
    bench.channels[worker].outstanding -= 1
    bench.channels[worker].completed += 1


@pytest.mark.parametrize("senders", [1, 4, 16])
def test_a_worker_that_fails_everything_at_once_gets_little(bench: Bench, senders: int) -> None:
    good, bad = 5_000_000, Simulated(5_000_000, fails=True)
    sent = simulate(bench, {A: Simulated(good), B: Simulated(good), C: bad}, senders, 30)
    assert sent[A] + sent[B] > 30 * 190
    assert 1 < sent[C] <= 20 + senders, "it is tried again now and then, as it may be good by then"


@pytest.mark.parametrize("senders", [2, 4, 16])
def test_a_worker_that_hangs_from_its_first_request_gets_few(bench: Bench, senders: int) -> None:
    sent = simulate(bench, {A: Simulated(5_000_000), B: Simulated(5_000_000), C: Simulated(0)}, senders, 10)
    assert sent[C] <= max(1, senders // 3), "its share of the first ones, when nothing was known"
    assert sent[A] + sent[B] > 10 * 190


@pytest.mark.parametrize("senders", [1, 4, 16])
def test_a_worker_where_all_that_wait_lose_patience_gets_few(bench: Bench, senders: int) -> None:
    """It has nothing outstanding then, and has never said how long it takes."""
    workers = {A: Simulated(5_000_000), B: Simulated(5_000_000), C: Simulated(0)}
    sent = simulate(bench, workers, senders, 30, 200_000_000)
    assert sent[C] <= 20 + senders
    assert sent[A] + sent[B] > 30 * 150


def test_a_worker_that_was_bad_is_found_good(bench: Bench) -> None:
    workers = {A: Simulated(5_000_000), B: Simulated(5_000_000), C: Simulated(5_000_000, fails=True)}
    simulate(bench, workers, 6, 5)
    workers[C].fails, workers[C].sent = False, 0
    assert simulate(bench, workers, 6, 20)[C] > 10 * 190, "of 200 a second, from when it is tried again"


def test_a_worker_that_is_being_replaced_gets_nothing_unless_all_are(bench: Bench) -> None:
    bench.channels[A].away = True
    assert bench.picks() == {B, C}
    bench.channels[B].away = bench.channels[C].away = True
    assert bench.picks() == {A, B, C}


@pytest.mark.parametrize("replaced", [False, True])
def test_through_the_only_gateway_a_sequence_begins_also_where_one_may_live_on(
    monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    """A worker that does not respond gets no other request, but may go on with a sequence of the same id."""
    bench = Bench(monkeypatch, shared=True, alone=True)
    bench.channels[A].away, bench.channels[A].replaced = True, replaced
    assert bench.picks() == {B, C}
    begun = {bench.spread.pick((number, True, False)) for number in range(1, 60)}
    assert begun == ({B, C} if replaced else {A, B, C})


def test_where_all_fail_or_are_being_replaced_all_are_used(bench: Bench) -> None:
    for channel in bench.channels.values():
        channel.failed = True
    assert bench.picks() == {A, B, C}
    for channel in bench.channels.values():
        channel.away = True
    assert bench.picks() == {A, B, C}


def test_those_without_a_binding_are_tried_every_second(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, A)
    assert bench.spread.missing() == [B, C]
    assert bench.picks() == {A}
    assert not bench.spread.is_due(), "they were tried just now"
    bench.now += spread.AGAIN_NS
    assert bench.spread.is_due()
    assert not bench.spread.is_due()
    for worker in (B, C):
        bench.spread.bounds[worker] = bench.spread.bounds[A]
    bench.now += spread.AGAIN_NS
    assert not bench.spread.is_due()


def test_steps_of_a_sequence_follow_its_start(bench: Bench) -> None:
    begun = {number: bench.spread.pick((number, True, False)) for number in range(1, 10)}
    assert sorted(begun.values()) == [A] * 3 + [B] * 3 + [C] * 3, "they are shared out"
    bench.ran(a=1, b=10**9, c=10**9)
    bench.channels[B].away = True
    for number, home in begun.items():
        assert bench.spread.pick((number, False, False)) == home, "wherever it is quicker"
    assert bench.spread.pick((1, False, True)) == begun[1]
    assert bench.spread.pick((1, False, True)) == begun[1], "its last step may have to be sent again"
    assert bench.spread.pick((10, False, False)) == A, "one that never began: any worker can say so"
    assert bench.spread.pick((2, True, False)) in (A, C), "it begins anew, where somebody is"


def test_a_sequence_that_begins_anew_stays_where_it_was(bench: Bench) -> None:
    begun = {number: bench.spread.pick((number, True, False)) for number in range(1, 10)}
    bench.ran(a=10**9, b=1, c=10**9)
    assert {number: bench.spread.pick((number, True, False)) for number in begun} == begun
    assert bench.spread._homes._counts.total() == len(begun)


def test_sequences_that_never_end_are_forgotten(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes, "MAX_HOMES", 3)
    begun = [bench.spread.pick((number, True, False)) for number in range(1, 7)]
    assert [bench.spread.pick((number, False, False)) for number in (4, 5, 6)] == begun[3:]
    assert len(bench.spread._homes._homes) == 3
    assert bench.spread._homes._counts.total() == 3


def test_where_steps_come_by_several_processes_the_id_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = Bench(monkeypatch, shared=True), Bench(monkeypatch, A, shared=True)
    for number in range(1, 100):
        home = one.spread.pick((number, True, False))
        assert other.spread.pick((number, False, False)) == home
    assert {one.spread.pick((number, True, False)) for number in range(1, 100)} == {A, B, C}


def test_with_many_channels_what_was_counted_serves_for_a_moment(bench: Bench) -> None:
    lanes = [SimpleNamespace(worker=worker, channel=Channel()) for worker in (A, B, C) for _ in range(20)]
    for lane in lanes:
        lane.channel.outstanding = 3 if lane.worker == B else 1
    counted = []

    def every() -> list[Any]:
        counted.append(bench.now)
        return lanes

    bench.spread._load = Load(SimpleNamespace(all=every))
    picked = [bench.spread.pick(NO_ROUTE) for _ in range(60)]
    assert counted == [bench.now]
    assert [picked.count(worker) for worker in (A, B, C)] == [30, 0, 30], "what was sent meanwhile counts"
    bench.now += FRESH_NS
    bench.spread.pick(NO_ROUTE)
    assert counted == [bench.now - FRESH_NS, bench.now]
