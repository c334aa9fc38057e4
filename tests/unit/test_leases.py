"""Who keeps which models loaded."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from broker.leases import MAX_LEASES, Leases
from shm.errors import InferError


def test_the_same_lease_again_is_one_and_another_model_under_its_number_is_refused():
    leases = Leases()
    for _ in range(2):
        leases.take(1, 5, "m")
    assert leases.count("m") == 1
    with pytest.raises(InferError, match="lease 5 of this session is held already, on 'm'"):
        leases.take(1, 5, "n")
    leases.take(2, 5, "n")  # another session's numbers are its own
    assert leases.count("n") == 1


def test_a_session_has_so_many():
    leases = Leases()
    for number in range(MAX_LEASES):
        leases.take(1, number, "m")
    with pytest.raises(InferError, match="the most there are"):
        leases.take(1, MAX_LEASES, "m")
    leases.take(2, 1, "m")


def test_a_refusal_says_how_many_keep_it_and_through_what():
    leases = Leases()
    assert leases.refusal("m") == ""
    leases.take(1, 1, "m")
    assert leases.refusal("m").startswith("1 lease of 1 session keeps it loaded:")
    leases.take(1, 2, "m", "3")
    leases.take(2, 1, "e")
    assert leases.refusal("m").startswith("2 leases of 1 session keep it loaded:")
    text = "3 leases of 2 sessions keep it loaded (through 'e'):"
    assert leases.refusal("m", ["e", "f"]).startswith(text)
    assert leases.refusal("other") == ""


def test_versions_are_counted_apart():
    leases = Leases()
    for number, version in enumerate(("", "1", "1", "2")):
        leases.take(1, number, "m", version)
    assert leases.versions("m") == Counter({1: 2, 2: 1})
    assert leases.versions("n") == Counter()


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_the_count_is_of_what_is_held(seed):
    chance = random.Random(seed)
    leases = Leases()
    held: dict[tuple[int, int], str] = {}
    for _ in range(300):
        session, number, model = chance.randrange(4), chance.randrange(6), chance.choice("abc")
        match chance.randrange(5):
            case 0:
                assert leases.end(session, number) == held.pop((session, number), "")
            case 1:
                mine = {key: name for key, name in held.items() if key[0] == session}
                assert leases.end_all(session) == set(mine.values())
                for key in mine:
                    del held[key]
            case _ if held.get((session, number), model) == model:
                leases.take(session, number, model)
                held[session, number] = model
            case _:
                with pytest.raises(InferError):
                    leases.take(session, number, model)
        for name in "abc":
            assert leases.count(name) == sum(each == name for each in held.values())
            assert bool(leases.refusal(name)) == bool(leases.count(name))
        assert all(leases.is_held(*key) for key in held)
