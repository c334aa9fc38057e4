from __future__ import annotations

import random

import pytest

from broker.supervision import (
    BLAME_WINDOW_NS,
    BackOff,
    HangWatch,
    Idleness,
    LoadDeaths,
    Offenders,
    Pulse,
    Running,
    Truncations,
    close_limit_s,
    hang_limit_s,
)

S = 1_000_000_000
A, B, C = ("a", 1, 1), ("b", 1, 2), ("c", 1, 3)


def test_the_end_of_a_model_may_take_a_tenth_of_what_its_load_may():
    assert [close_limit_s(load_s) for load_s in (600, 80, 1)] == [60, 8, 5]


def test_back_off_grows_and_stays_at_its_end():
    back_off = BackOff()
    assert [back_off.after_death(False) for _ in range(8)] == [0.0, 0.1, 0.5, 2.0, 10.0, 30.0, 30.0, 30.0]


def test_a_worker_that_was_ready_is_replaced_at_once_and_starts_anew():
    back_off = BackOff()
    for _ in range(4):
        back_off.after_death(False)
    assert back_off.after_death(True) == 0.0
    assert back_off.after_death(False) == 0.0
    assert back_off.after_death(False) == 0.1


def test_waiting_is_hopeless_once_the_next_try_is_far():
    back_off = BackOff()
    seen = [(back_off.after_death(False), back_off.hopeless) for _ in range(6)]
    assert [hopeless for _, hopeless in seen] == [delay >= 10.0 for delay, _ in seen]


def test_the_load_that_was_alone_is_given_up_at_the_limit():
    deaths = LoadDeaths(3)
    assert [deaths.died([A]) for _ in range(3)] == [None, None, A]
    assert deaths.died([A]) is None, "counting starts anew once it was given up"


def test_success_resets_the_count():
    deaths = LoadDeaths(2)
    assert deaths.died([A]) is None
    deaths.forget(A)
    assert deaths.died([A]) is None
    assert deaths.died([A]) == A


def test_nobody_is_blamed_for_a_death_in_company():
    deaths = LoadDeaths(1)
    for _ in range(10):
        assert deaths.died([A, B]) is None
    assert deaths.died([]) is None


def test_company_in_two_deaths_makes_suspects_and_success_clears_them():
    deaths = LoadDeaths(5)
    deaths.died([A, B, C])
    assert not any(map(deaths.suspect, (A, B, C)))
    deaths.forget(C)
    deaths.died([A, B, C])
    assert [deaths.suspect(load) for load in (A, B, C)] == [True, True, False]
    deaths.forget(A)
    assert [deaths.suspect(load) for load in (A, B, C)] == [False, True, False]


def test_one_death_alone_makes_a_suspect():
    deaths = LoadDeaths(5)
    deaths.died([A])
    assert deaths.suspect(A)
    assert not deaths.suspect(("a", 1, 2)), "the next generation is another load"


def test_concurrent_loads_end_with_the_culprit_alone():
    """Every load of `bad` dies, whatever runs beside it; the rule must give up exactly that one."""
    deaths, wanted, died = LoadDeaths(5), [A, B, C], 0
    bad = B
    while bad in wanted:
        crowd = [load for load in wanted if not deaths.suspect(load)]
        for outstanding in [crowd, *([load] for load in wanted if deaths.suspect(load))]:
            if bad in outstanding:
                died += 1
                given_up = deaths.died(outstanding)
                if given_up is not None:
                    wanted.remove(given_up)
                break
            for load in outstanding:
                deaths.forget(load)
    assert wanted == [A, C]
    assert died == 2 + 5


def test_two_endings_in_a_minute_are_an_offence():
    offenders = Offenders()
    assert not offenders.ending(1, "m", 0)
    assert offenders.ending(1, "m", 59 * S)
    assert not offenders.ending(1, "m", 60 * S), "both endings are used up"


def test_endings_of_others_or_long_ago_do_not_count():
    offenders = Offenders()
    assert not offenders.ending(1, "m", 0)
    assert not offenders.ending(2, "m", 1)
    assert not offenders.ending(1, "n", 2)
    assert not offenders.ending(1, "m", BLAME_WINDOW_NS + 1)
    assert offenders.ending(2, "m", BLAME_WINDOW_NS + 1)


@pytest.mark.parametrize(
    ("expected_ns", "setting_s", "limit_s"),
    [
        (0, 0.0, 120.0),
        (1, 0.0, 10.0),
        (S, 0.0, 10.0),
        (2 * S, 0.0, 20.0),
        (0, 0.5, 0.5),
        (100 * S, 0.5, 0.5),
    ],
)
def test_how_long_a_batch_may_run(expected_ns, setting_s, limit_s):
    assert hang_limit_s(expected_ns, setting_s) == limit_s


def test_a_hang_needs_two_samples_of_the_same_batch():
    watch = HangWatch()
    hung = Running(3, 0, S, 0.0)
    assert watch.sample([hung], 11 * S) == []
    assert watch.sample([hung], 11 * S + 1) == [hung]


def test_a_machine_that_stood_still_is_no_hang():
    watch = HangWatch()
    runs = Running(3, 0, 0, 0.5)
    assert watch.sample([runs], S // 4) == []
    assert watch.sample([runs], 3600 * S) == []
    assert watch.sample([runs], 3600 * S + S // 4) == []
    assert watch.sample([runs], 3600 * S + S // 2) == [runs], "what it ran before and since counts"


def test_batches_that_follow_each_other_do_not_hang():
    watch = HangWatch()
    for start in range(0, 100 * S, 5 * S):
        # BATCH of the next batch is seen before its STARTED: once, and never again with that STARTED.
        assert watch.sample([Running(3, start - 50 * S, S, 0.0)], start) == []
        assert watch.sample([Running(3, start, S, 0.0)], start + 1) == []


def test_an_idle_sample_forgets():
    watch = HangWatch()
    hung = Running(3, 0, S, 0.0)
    watch.sample([hung], 11 * S)
    watch.sample([], 12 * S)
    assert watch.sample([hung], 13 * S) == []


def silence(pulse: Pulse, start_s: int, seconds: int, *, answered: bool = False, busy: bool = False) -> list[int]:
    """The seconds, counted from the first look, at which a worker looked at each second is found gone."""
    return [at for at in range(1, seconds + 1) if pulse.is_gone(answered, busy, (start_s + at) * S)]


def test_silence_of_an_idle_worker_ends_at_the_limit():
    assert silence(Pulse(5.0, 30.0, 0), 0, 32) == [31, 32]


def test_an_answer_or_a_running_model_starts_the_silence_anew():
    for kind in ("answered", "busy"):
        pulse = Pulse(5.0, 30.0, 0)
        assert silence(pulse, 0, 30) == []
        assert silence(pulse, 30, 60, **{kind: True}) == []
        assert silence(pulse, 90, 31) == [31]


def test_a_broker_that_stood_still_does_not_blame_the_worker():
    pulse = Pulse(5.0, 30.0, 0)
    assert not pulse.is_gone(False, False, 3600 * S)


def test_a_worker_is_asked_every_five_seconds():
    pulse = Pulse(5.0, 30.0, 0)
    assert [at for at in range(1, 16) if pulse.is_due(at * S)] == [5, 10, 15]


def test_the_third_truncated_region_within_a_minute_is_one_too_many():
    truncations = Truncations()
    assert [truncations.region(1, region, region * 25 * S) for region in range(1, 4)] == [False, False, True]
    assert not truncations.region(2, 4, 75 * S), "another session's"


def test_truncations_long_ago_or_of_the_same_region_do_not_count():
    truncations = Truncations()
    assert [truncations.region(1, region, region * 31 * S) for region in range(1, 9)] == [False] * 8
    assert [truncations.region(2, 1, at) for at in range(4)] == [False] * 4


def test_idleness_is_long_when_every_look_of_that_time_found_nothing():
    idleness = Idleness(60.0)
    assert not idleness.is_long(True, 0)
    assert not idleness.is_long(True, 60 * S)
    assert idleness.is_long(True, 60 * S + 1)
    assert idleness.is_long(True, 61 * S), "until it is at work again"
    assert not idleness.is_long(False, 62 * S)
    assert not idleness.is_long(True, 122 * S)
    assert not idleness.is_long(False, 181 * S)
    assert not idleness.is_long(True, 300 * S)


def test_idleness_over_random_looks():
    choice = random.Random(5)
    for _ in range(200):
        idleness, looks, now_ns = Idleness(1.0), [(False, 0)], 0
        for _ in range(50):
            now_ns += choice.randrange(S // 2)
            looks.append((choice.random() < 0.9, now_ns))
            idle_since = next((at for idle, at in _since_work(looks)), now_ns)
            assert idleness.is_long(*looks[-1]) == (looks[-1][0] and now_ns - idle_since > S)


def _since_work(looks):
    last = max(at for at, (idle, _) in enumerate(looks) if not idle)
    return looks[last + 1 :]
