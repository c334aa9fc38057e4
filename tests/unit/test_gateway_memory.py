"""When a gateway has the allocator give memory back."""

from __future__ import annotations

import itertools

from broker.gateway.memory import LONGEST, WORTH, Pace

BASE = 100 << 20


def trims(pace: Pace, *looks: int) -> list[int]:
    return [number for number, private in enumerate(looks) if pace.look(private)]


def test_small_changes_are_left_alone():
    assert trims(Pace(BASE), *(BASE + k % 2 * (WORTH - 1) for k in range(100))) == []


def test_after_growth_until_it_is_gone():
    assert trims(Pace(BASE), BASE, BASE + WORTH, BASE + WORTH, BASE, BASE, BASE) == [1, 2]


def test_what_stays_is_tried_less_and_less_often():
    pace = Pace(BASE)
    assert trims(pace, *[BASE + 9 * WORTH] * 40) == [0, 1, 3, 7, 15, 31]
    later = trims(pace, *[BASE + 9 * WORTH] * 10 * LONGEST)
    assert {after - before for before, after in itertools.pairwise(later)} == {LONGEST}
    assert trims(pace, BASE + 10 * WORTH, BASE + 10 * WORTH) == [0, 1]


def test_slow_growth_is_growth():
    assert trims(Pace(BASE), *(BASE + k * WORTH // 4 for k in range(6))) == [4, 5]
