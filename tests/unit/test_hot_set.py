"""A channel leaves the hot set only empty, and armed under a stamp that nobody has rung for."""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Iterator

import pytest

from broker.worker import hot_set
from broker.worker.hot_set import GAVE_WAY_NS, LONG_SPIN_NS, SPIN_NS, HotSet
from shm.layout import ARMED
from shm.statistics import BLOCK, REFUSED
from tests.fakes.channel import PLAN, Plan, Twin, submit, take


@pytest.fixture
def twin() -> Iterator[Twin]:
    with Twin(4) as twin:
        yield twin


class Watched:
    """A hot set with one channel."""

    def __init__(self, twin: Twin) -> None:
        self.block = memoryview(bytearray(8 * BLOCK)).cast("Q")
        self.broken: list[object] = []
        self.traffic = 0
        self.set = HotSet(self.block, self.broken.append, self._saw)
        self.client = twin.client()
        self.worker = twin.worker({PLAN: Plan(output_positions=4)})
        self.worker.arm()
        self.set.add(self.worker)
        self.set.poll(0.0)  # the wake-up of `add`

    def _saw(self) -> None:
        self.traffic += 1


@pytest.fixture
def watched(twin: Twin) -> Watched:
    return Watched(twin)


def test_a_ring_makes_a_channel_hot_and_tells_of_traffic(watched):
    assert watched.set.hot == []
    submit(watched.client)
    assert watched.set.poll(0.0)
    assert watched.set.hot == [watched.worker]
    assert watched.worker.words[ARMED] == 0
    assert watched.traffic == 1


def test_what_was_published_before_it_was_watched_is_found(twin):
    watched = Watched(twin)
    watched.set.remove(watched.worker)
    submit(watched.client)
    watched.set.add(watched.worker)
    assert watched.set.poll(0.0)
    assert watched.set.hot == [watched.worker]


def test_a_channel_that_rang_stays_hot_however_late_the_leader_looks(watched):
    """Its stamp is used up: the client would not ring again."""
    submit(watched.client)
    watched.set.poll(0.0)
    watched.worker.arm()
    watched.worker.last_traffic = 1  # when the ring came, ages ago
    watched.set._cool(1)
    assert watched.set.hot == [watched.worker]
    assert watched.worker.words[ARMED] == 0


def test_a_channel_that_holds_something_stays_hot(watched):
    submit(watched.client)
    watched.set.poll(0.0)
    watched.worker.last_traffic = 1
    watched.set._cool(2)
    assert watched.set.hot == [watched.worker]


def test_an_empty_channel_without_traffic_cools_and_rings_again(watched):
    submit(watched.client)
    watched.set.poll(0.0)
    take(watched.worker)
    watched.worker.arm()
    watched.worker.last_traffic = 1
    watched.set._cool(2)
    assert watched.set.hot == []
    assert watched.worker.words[ARMED]
    submit(watched.client, 1)
    assert watched.set.poll(0.0)
    assert watched.set.hot == [watched.worker]


def test_a_sleep_is_not_begun_with_something_published(watched):
    submit(watched.client)
    watched.set.poll(0.0)
    watched.set.sleep(lambda: pytest.fail("slept"))
    assert watched.worker.words[ARMED] == 0
    assert watched.set.hot == [watched.worker]


def test_a_spin_ends_with_the_first_entry_and_keeps_the_books_when_nothing_comes(watched):
    submit(watched.client)
    watched.set.poll(0.0)
    assert watched.set.spin(lambda: pytest.fail("there is work"))
    take(watched.worker)
    kept = []
    assert not watched.set.spin(lambda: kept.append(1))
    assert len(kept) <= 1


def test_a_broken_channel_is_reported_once_and_not_listened_to(watched):
    submit(watched.client)
    watched.set.poll(0.0)
    watched.worker.broken = "forged its tail"
    watched.worker.refused = 3
    watched.set.attend()
    assert watched.broken == [watched.worker]
    assert watched.set.hot == []
    assert watched.block[REFUSED] == 3
    submit(watched.client, 1)
    watched.client._ring(1)
    assert not watched.set.poll(0.0)
    watched.set.attend()
    assert len(watched.broken) == 1


def test_removing_a_channel_leaves_another_with_its_number_alone(watched, twin):
    watched.set.remove(watched.worker)
    other = twin.worker({})
    other.arm()
    watched.set.add(other)  # the same doorbell
    watched.set.poll(0.0)
    watched.set.remove(watched.worker)
    submit(watched.client)
    assert watched.set.poll(0.0)
    assert watched.set.hot == [other]


def come(watched, monkeypatch, interval_ns, times=20):
    """Requests that come so long after there was nothing to do."""
    for _ in range(times):
        watched.set._idle_since = 1_000
        monkeypatch.setattr(hot_set, "_now", lambda: 1_000 + interval_ns)
        watched.set._came()
    monkeypatch.undo()


def test_requests_are_looked_for_as_long_as_they_usually_take(watched, monkeypatch):
    assert watched.set._patience() == SPIN_NS, "nothing is known yet"
    come(watched, monkeypatch, 10_000)
    assert watched.set._patience() == SPIN_NS
    come(watched, monkeypatch, 400_000)
    assert 480_000 < watched.set._patience() <= 500_000
    come(watched, monkeypatch, 900_000)
    assert watched.set._patience() == LONG_SPIN_NS
    come(watched, monkeypatch, 5_000_000)
    assert watched.set._patience() == SPIN_NS, "what takes so long is not worth a core"


def test_a_spin_ends_when_somebody_else_wants_the_core(watched, monkeypatch):
    submit(watched.client)
    watched.set.poll(0.0)
    take(watched.worker)
    come(watched, monkeypatch, 900_000)
    clock = iter(range(0, 1 << 40, 2 * GAVE_WAY_NS))
    monkeypatch.setattr(hot_set, "_now", lambda: next(clock))
    looked = []
    assert not watched.set.spin(lambda: looked.append(1))
    assert next(clock) < LONG_SPIN_NS


def test_a_spin_ends_at_once_when_somebody_waits_for_any_core(watched, monkeypatch):
    submit(watched.client)
    watched.set.poll(0.0)
    take(watched.worker)
    come(watched, monkeypatch, 900_000)
    clock = iter(range(0, 1 << 40, SPIN_NS // 40))
    monkeypatch.setattr(hot_set, "_now", lambda: next(clock))
    monkeypatch.setattr(watched.set._cores, "wanted", lambda: True)
    assert not watched.set.spin(lambda: None)
    assert next(clock) < SPIN_NS, "after a few looks"


def test_cores_are_asked_for_at_once_when_a_yield_let_somebody_run_and_else_seldom(watched, monkeypatch):
    submit(watched.client)
    watched.set.poll(0.0)
    take(watched.worker)
    come(watched, monkeypatch, 900_000)
    asked = []
    monkeypatch.setattr(watched.set._cores, "wanted", lambda: asked.append(1))
    clock = iter(range(0, 1 << 40, LONG_SPIN_NS // 64))
    monkeypatch.setattr(hot_set, "_now", lambda: next(clock))
    assert not watched.set.spin(lambda: None)
    assert 0 < len(asked) <= 4, "what is asked takes as long as several looks"
    asked.clear()
    monkeypatch.setattr(watched.set._cores, "wanted", lambda: asked.append(1) or True)
    clock = iter(range(0, 1 << 40, 2 * GAVE_WAY_NS))
    monkeypatch.setattr(hot_set, "_now", lambda: next(clock))
    assert not watched.set.spin(lambda: None)
    assert next(clock) <= 10 * GAVE_WAY_NS, "after the first yield"


class Step:
    """Something under way elsewhere, which ends after so many looks; -1: never."""

    def __init__(self, looks: int) -> None:
        self.looks = looks
        self.told: list[str] = []

    def came(self) -> bool:
        self.looks -= 1
        return self.looks == 0

    def look(self, now: int, wait: bool = True) -> bool:
        self.told.append("waits" if wait else "look")
        return True

    def unwatch(self, now: int) -> None:
        self.told.append("unwatch")


@pytest.mark.parametrize(("looks", "told"), [(1, ["look", "unwatch"]), (-1, ["unwatch"])])
def test_a_spin_looks_at_what_is_under_way_elsewhere_and_has_it_ring_afterwards(watched, monkeypatch, looks, told):
    submit(watched.client)
    watched.set.poll(0.0)
    take(watched.worker)
    monkeypatch.setattr(watched.set._cores, "wanted", lambda: False)
    step = Step(looks)
    watched.set.look_beside([step], lambda: [step])
    assert watched.set.spin(lambda: None) == (looks > 0)
    assert step.told == told


def test_a_fraction_of_a_millisecond_is_waited_for_as_such(watched):
    """What is due then would have waited for a whole one: so long epoll sleeps, measured beside it."""

    def takes_ns(wait, seconds):
        began = time.monotonic_ns()
        wait(seconds)
        return time.monotonic_ns() - began

    with contextlib.closing(select.epoll()) as coarse:
        pairs = [(takes_ns(watched.set.poll, 1e-4), takes_ns(coarse.poll, 1e-4)) for _ in range(21)]
    assert sum(fine < rough for fine, rough in pairs) > 10


@pytest.mark.parametrize("selectable", [True, False])
def test_a_ring_ends_a_wait_whichever_call_waits(watched, selectable):
    watched.set._selectable = selectable
    submit(watched.client)
    assert watched.set.poll(hot_set.BOUND_S / 2)
    assert watched.set.hot == [watched.worker]
    assert not watched.set.poll(1e-5)
