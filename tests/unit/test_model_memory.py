"""Which models go for another one, and how large each is."""

from __future__ import annotations

import os
import random

import pytest

from broker.model_memory import Loaded, to_unload
from broker.model_sizes import ModelSizes, Resident, files_size, resident

MB = 1 << 20


def loaded(name: str, byte_size: int, last_ms: int = 0, stays: str = "", users: str = "") -> Loaded:
    return Loaded(name, byte_size, last_ms, stays, frozenset(users))


def test_the_least_recently_used_goes_first_and_no_more_than_needed():
    models = [loaded("a", 10, 3), loaded("b", 10, 1), loaded("c", 10, 2)]
    assert to_unload(models, 1) == ["b"]
    assert to_unload(models, 10) == ["b"]
    assert to_unload(models, 11) == ["b", "c"]
    assert to_unload(models, 0) == []


def test_what_stays_stays_and_then_nothing_goes_in_vain():
    models = [loaded("a", 10, 1, "1 lease"), loaded("b", 10, 2)]
    assert to_unload(models, 10) == ["b"]
    assert to_unload(models, 11) is None


def test_a_member_goes_after_its_ensembles_whenever_it_was_used():
    models = [loaded("m", 10, 1, users="e"), loaded("n", 10, 4), loaded("e", 0, 9)]
    assert to_unload(models, 10) == ["n"]
    assert to_unload(models, 20) == ["n", "e", "m"]
    assert to_unload([*models[:2], loaded("e", 0, 9, "1 lease")], 20) is None


def test_an_ensemble_that_gives_no_room_stays():
    kept = [loaded("m", 10, 1, "1 lease", "e"), loaded("n", 10, 4), loaded("e", 0, 2)]
    assert to_unload(kept, 10) == ["n"]


def test_ensembles_of_ensembles_go_outermost_first():
    models = [loaded("m", 10, 1, users="i"), loaded("i", 0, 2, users="o"), loaded("o", 0, 3)]
    assert to_unload(models, 5) == ["o", "i", "m"]


@pytest.mark.parametrize("seed", range(50))
def test_whatever_is_loaded_enough_goes_or_nothing(seed):
    chance = random.Random(seed)
    names = [f"m{number}" for number in range(8)]
    models = [
        Loaded(
            name,
            chance.choice((0, 1, 5, 10)),
            chance.randrange(5),
            chance.choice(("", "", "busy")),
            frozenset(chance.sample(names[at + 1 :], chance.randrange(min(2, len(names) - at)))),
        )
        for at, name in enumerate(names)
    ]
    by_name = {model.name: model for model in models}
    needed = chance.randrange(1, 40)
    going = to_unload(models, needed)
    if going is None:
        free = dict(by_name)
        while ready := [m for m in free.values() if not m.stays and not m.users & free.keys()]:
            del free[ready[0].name]
        assert sum(m.byte_size for m in models) - sum(m.byte_size for m in free.values()) < needed
        return
    assert sum(by_name[name].byte_size for name in going) >= needed
    for at, name in enumerate(going):
        assert not by_name[name].stays
        assert by_name[name].users <= set(going[:at])  # nothing that is loaded lacks a member


# --- sizes ----------------------------------------------------------------------------------------------------------


def grow(sizes: ModelSizes, growth: int, *models: str, mapped: int = 0) -> None:
    """Loads that overlap in one worker."""
    for _ in models:
        sizes.begin("cpu/default", 7, Resident(100 * MB, 50 * MB))
    for name in models:
        sizes.end("cpu/default", (name, 1), 7, Resident(100 * MB + growth, 50 * MB + mapped))


def test_a_model_is_as_large_as_its_files_until_it_was_measured():
    sizes = ModelSizes()
    assert sizes.of("m", 1) == 0
    assert sizes.note("m", {1: 10, 2: 20}) == 30
    assert (sizes.of("m", 1), sizes.of("m", 2)) == (10, 20)
    grow(sizes, 3 * MB, "m")
    assert (sizes.of("m", 1), sizes.of("m", 2)) == (3 * MB, 20)


def test_a_worker_that_grew_less_had_memory_left_of_another():
    sizes = ModelSizes()
    sizes.note("m", {1: 5 * MB})
    grow(sizes, MB, "m")
    assert sizes.of("m", 1) == 5 * MB


def test_it_is_known_for_files_of_the_same_size_and_is_the_largest_seen():
    sizes = ModelSizes()
    for growth in (2, 3, 1):
        assert sizes.note("m", {1: 10}) in (10, 2 * MB, 3 * MB)
        grow(sizes, growth * MB, "m")
    assert sizes.of("m", 1) == 3 * MB
    assert sizes.note("m", {1: 11}) == 11


def test_loads_that_overlap_share_by_the_size_of_their_files():
    sizes = ModelSizes()
    sizes.note("m", {1: 99})
    sizes.note("n", {1: 299})
    grow(sizes, 4 * MB, "m", "n")
    assert (sizes.of("m", 1), sizes.of("n", 1)) == (MB, 3 * MB)


def test_of_mapped_files_no_more_counts_than_the_models_own():
    sizes = ModelSizes()
    sizes.note("m", {1: MB})
    grow(sizes, 2 * MB, "m", mapped=30 * MB)
    assert 3 * MB <= sizes.of("m", 1) <= 3 * MB + 1


@pytest.mark.parametrize("how", ["shrank", "unload", "death", "failure", "unknown"])
def test_what_tells_nothing_changes_nothing(how):
    sizes = ModelSizes()
    sizes.note("m", {1: 10})
    before = Resident(100 * MB, 0)
    after = None if how == "unknown" else Resident((90 if how == "shrank" else 110) * MB, 0)
    sizes.begin("w", 7, before)
    if how == "unload":
        sizes.disturb("w")
    sizes.end("w", None if how == "failure" else ("m", 1), 8 if how == "death" else 7, after)
    assert sizes.of("m", 1) == 10
    sizes.begin("w", 8, before)  # the next one is measured again
    sizes.end("w", ("m", 1), 8, Resident(101 * MB, 0))
    assert sizes.of("m", 1) == MB


def test_what_two_workers_have_of_it_adds_up():
    sizes = ModelSizes()
    sizes.note("m", {1: 10})
    for worker, growth in (("cpu/a", MB), ("cpu/b", 2 * MB)):
        sizes.begin(worker, 7, Resident(0, 0))
        sizes.end(worker, ("m", 1), 7, Resident(growth, 0))
    assert sizes.of("m", 1) == 3 * MB


def test_what_a_process_has_and_what_files_take(tmp_path):
    found = resident(os.getpid())
    assert found is not None
    assert found.own > MB
    assert found.mapped > 0
    assert resident(None) is None
    (tmp_path / "below").mkdir()
    (tmp_path / "model.onnx").write_bytes(bytes(1000))
    (tmp_path / "below" / "weights").write_bytes(bytes(500))
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    assert files_size(str(tmp_path)) == 1500
    assert files_size(str(tmp_path / "nowhere")) == 0
