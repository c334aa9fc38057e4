"""Memory of the host that stands for clients' GPU memory: how much of it stays between runs."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable

import pytest

from broker.worker.cuda.mirrors import PIN_AFTER, PIN_LEAST, Mirror, Mirrors
from broker.worker.cuda.streams import Bytes
from tests.fakes.broker import eventually

PAGE = mmap.PAGESIZE


def resident(mirror: Mirror) -> int:
    """Bytes of it that this process has, as the kernel counts them."""
    pages = -(-mirror.bytes.size // PAGE)
    found = (ctypes.c_ubyte * pages)()
    start = mirror.bytes.__array_interface__["data"][0]
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(mirror.bytes.size), found)
    return sum(page & 1 for page in found) * PAGE


def run(mirrors: Mirrors, mirror: Mirror, start: int = 0, stop: int | None = None) -> None:
    stop = mirror.bytes.size if stop is None else stop
    with mirrors.held([(mirror, start, stop)]):
        mirror.bytes[start:stop] = 1


def test_what_fits_stays_for_the_next_run() -> None:
    mirrors, mirror = Mirrors(8 * PAGE), Mirror(8 * PAGE)
    run(mirrors, mirror)
    assert (mirror.bytes == 1).all()
    assert mirrors.size == mirror.size == 8 * PAGE


def test_what_does_not_goes_back_when_the_run_has_ended() -> None:
    mirrors, mirror = Mirrors(8 * PAGE), Mirror(900 * PAGE)
    for _ in range(2):
        with mirrors.held([(mirror, 0, 900 * PAGE)]):
            mirror.bytes[:] = 1
            assert resident(mirror)  # not all of it where the machine swaps
        assert resident(mirror) == 0
        assert mirrors.size == 0
        assert not mirror.bytes.any()


def test_what_was_not_used_for_longest_goes_first() -> None:
    mirrors, (one, two, three) = Mirrors(8 * PAGE), (Mirror(4 * PAGE) for _ in range(3))
    run(mirrors, one)
    run(mirrors, two)
    run(mirrors, one)
    run(mirrors, three)
    assert [each.size for each in (one, two, three)] == [4 * PAGE, 0, 4 * PAGE]
    assert one.bytes.all()
    assert not two.bytes.any()


def test_what_another_run_uses_stays() -> None:
    mirrors, busy, idle = Mirrors(PAGE), Mirror(4 * PAGE), Mirror(4 * PAGE)
    with mirrors.held([(busy, 0, 4 * PAGE)]):
        busy.bytes[:] = 1
        run(mirrors, busy, 0, PAGE)
        run(mirrors, idle)
        assert busy.bytes.all()
    assert mirrors.size == 0
    assert not busy.bytes.any()


@pytest.mark.parametrize(("start", "stop", "pages"), [(0, 1, 1), (PAGE - 1, PAGE + 1, 2), (5 * PAGE, 6 * PAGE, 1)])
def test_only_what_runs_reach_is_counted(start: int, stop: int, pages: int) -> None:
    mirrors, mirror = Mirrors(), Mirror(100 * PAGE + 7)
    run(mirrors, mirror, start, stop)
    assert mirrors.size == pages * PAGE
    run(mirrors, mirror, 100 * PAGE + 6, 100 * PAGE + 7)
    assert mirror.high == 101 * PAGE
    mirrors.forget(mirror)
    assert mirrors.size == 0


class Driver:
    """Pins what it is given. `started` and `go`: a pin that is under way, and may end."""

    def __init__(self, pins: bool = True) -> None:
        self.pins = pins
        self.pinned: list[int] = []
        self.started, self.go = threading.Semaphore(0), threading.Semaphore(0)

    def pin(self, memory: Bytes) -> Callable[[], None] | None:
        self.started.release()
        assert self.go.acquire(timeout=60)
        if not self.pins:
            return None
        self.pinned.append(memory.size)
        return lambda: self.pinned.remove(memory.size)


def used_often(mirrors: Mirrors, mirror: Mirror, stop: int | None = None) -> None:
    for _ in range(PIN_AFTER):
        run(mirrors, mirror, 0, stop)


def test_what_is_used_often_is_pinned_whole_until_it_goes_back() -> None:
    driver, mirrors, size = Driver(), Mirrors(PIN_LEAST), PIN_LEAST
    mirror, other = Mirror(size, driver.pin), Mirror(size)
    used_often(mirrors, mirror, size // 2)
    driver.go.release()
    eventually(lambda: not mirror.running, "it is pinned")
    assert (driver.pinned, mirrors.size) == ([size], size)
    run(mirrors, other)
    assert (driver.pinned, mirror.size, other.size) == ([], 0, size), "the other one was used later"
    used_often(mirrors, mirror)
    driver.go.release()
    eventually(lambda: driver.pinned == [size], "it is pinned again")
    mirrors.forget(mirror)
    assert driver.pinned == []


def test_a_region_that_closes_while_its_mirror_is_pinned_leaves_nothing_pinned() -> None:
    driver, mirrors = Driver(), Mirrors()
    mirror = Mirror(PIN_LEAST, driver.pin)
    used_often(mirrors, mirror)
    assert driver.started.acquire(timeout=60)
    run(mirrors, mirror)
    mirrors.forget(mirror)
    driver.go.release()
    eventually(lambda: not mirror.running and driver.pinned == [], "it was, and is no more")


def test_what_cannot_be_pinned_is_tried_once() -> None:
    driver, mirrors = Driver(pins=False), Mirrors()
    mirror = Mirror(PIN_LEAST, driver.pin)
    used_often(mirrors, mirror)
    driver.go.release()
    eventually(lambda: not mirror.running, "it was tried")
    used_often(mirrors, mirror)
    assert (driver.started._value, mirror.running) == (1, 0)


@pytest.mark.parametrize(("size", "stop"), [(PIN_LEAST - 1, None), (2 * PIN_LEAST, PAGE), (8 * PIN_LEAST, None)])
def test_what_is_small_or_little_used_or_too_large_is_not_pinned(size: int, stop: int | None) -> None:
    driver, mirrors = Driver(), Mirrors(4 * PIN_LEAST)
    mirror = Mirror(size, driver.pin)
    used_often(mirrors, mirror, stop)
    assert mirror.running == 0, "nobody pins it"


def test_a_run_that_fails_lets_go() -> None:
    mirrors, mirror = Mirrors(0), Mirror(PAGE)
    with pytest.raises(ValueError, match="it failed"), mirrors.held([(mirror, 0, PAGE)] * 2):
        raise ValueError("it failed")
    assert (mirror.running, mirrors.size) == (0, 0)
