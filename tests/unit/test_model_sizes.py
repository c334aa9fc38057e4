"""What a worker's growth says of models: nothing of ensembles, which have no files of their own."""

from __future__ import annotations

from broker.model_sizes import ModelSizes, Resident

MIB = 1 << 20


def test_an_ensemble_that_loads_alone_is_not_measured():
    sizes = ModelSizes()
    sizes.begin("w", 1, Resident(MIB, 0))
    sizes.end("w", ("chain", 1), 1, Resident(3 * MIB, 0))
    assert sizes.of("chain", 1) == 0


def test_what_grows_beside_an_ensemble_is_the_models():
    sizes = ModelSizes()
    assert sizes.note("m", {1: 100}) == 100
    for _ in range(2):
        sizes.begin("w", 1, Resident(MIB, 0))
    sizes.end("w", ("chain", 1), 1, Resident(2 * MIB, 0))
    sizes.end("w", ("m", 1), 1, Resident(3 * MIB, 0))
    assert sizes.of("m", 1) == 2 * MIB
