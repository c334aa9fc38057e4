"""What is said of loads that take long, on simulated time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from broker.load_watch import LOGGED_S, SHOWN, SLOW_S, LoadWatch

S = 1_000_000_000


class Clock:
    now_ns = 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr("broker.load_watch.time.monotonic_ns", lambda: clock.now_ns)
    return clock


def test_a_load_that_takes_long_is_named_with_its_age_and_its_limit(clock: Clock) -> None:
    watch = LoadWatch(600)
    with watch.load("m", 2, "cpu/w"):
        assert watch.waits_for(int(SLOW_S * S) - 1) == ""
        text = "model 'm' version 2 has been loading in worker 'cpu/w' for 42 s; it is given up after 600 s (--model-"
        assert watch.waits_for(42 * S) == watch.of("m", "2", 42 * S) == f"{text}load-timeout-secs)"
        assert watch.of("m", "1", 42 * S) == watch.of("n", "2", 42 * S) == ""
    assert watch.waits_for(42 * S) == ""
    with watch.load("m", 2, "cpu/w", "has waited for"):
        assert "has waited for worker 'cpu/w' for 6 s" in watch.waits_for(6 * S)


def test_a_loader_reads_one_model_after_the_other(clock: Clock) -> None:
    watch, loader = LoadWatch(600), object()
    watch.reading(loader, "a", 120)
    clock.now_ns = 60 * S
    watch.reading(loader, "b", 120)
    text = "the files of model 'b' have been read for 30 s; its loader is ended after 120 s without progress"
    assert watch.waits_for(90 * S) == text
    watch.reading(loader, None, 120)
    assert watch.waits_for(90 * S) == ""


def test_the_longest_are_shown(clock: Clock) -> None:
    watch = LoadWatch(600)
    for number in range(SHOWN + 2):
        clock.now_ns = number * S
        watch.reading(number, f"m{number}", 120)
    text = watch.waits_for(100 * S)
    assert [f"'m{number}'" in text for number in range(SHOWN + 1)] == [True] * SHOWN + [False]
    assert text.endswith("(and 2 more)")


def test_the_log_is_told_when_a_load_is_twice_as_old_as_before(clock: Clock) -> None:
    watch = LoadWatch(600)
    with watch.load("m", 1, "w"):
        told = [second for second in range(0, 500, 5) if watch.for_log(second * S)]
    assert told == [int(LOGGED_S), 60, 120, 240, 480]
    clock.now_ns = 500 * S
    with watch.load("m", 1, "w"):
        assert not watch.for_log(510 * S)
        assert watch.for_log(530 * S), "another load"
