"""Memory of the host that stands for clients' GPU memory: how much of it stays between runs."""

from __future__ import annotations

import ctypes
import mmap

import pytest

from broker.worker.cuda.mirrors import Mirror, Mirrors

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


def test_a_run_that_fails_lets_go() -> None:
    mirrors, mirror = Mirrors(0), Mirror(PAGE)
    with pytest.raises(ValueError, match="it failed"), mirrors.held([(mirror, 0, PAGE)] * 2):
        raise ValueError("it failed")
    assert (mirror.running, mirrors.size) == (0, 0)
