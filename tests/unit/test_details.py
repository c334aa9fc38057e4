"""What Triton's wires have no field for: said to who asks, taken where it came, done without where it did not."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from clientlib import details
from shm.message_values import ModelMetadata, TensorMetadata

X = TensorMetadata(name="x", datatype="FP32", shape=(-1, -1))
PLAIN = ModelMetadata(name="m", version="1", versions=("1",), inputs=(X,), outputs=(replace(X, name="y"),))
KNOWN = replace(
    PLAIN,
    reason="in /srv/models",
    workers=("cpu/default",),
    max_batch_size=4,
    max_batch_size_completed=True,
    inputs=(replace(X, symbols=("", "n"), file_shape="[batch,n]", zero_copy=True, zero_copy_reason="in place"),),
)


def test_both_ways() -> None:
    config: dict[str, Any] = {"max_batch_size": 4, "parameters": {"retry": {"string_value": "no"}}}
    details.add_to(config, KNOWN)
    assert config["parameters"]["retry"] == {"string_value": "no"}
    assert "/srv" not in str(config)
    found = details.merged(PLAIN, config)
    assert found.inputs == (replace(KNOWN.inputs[0], zero_copy=False, zero_copy_reason=""),)
    assert (found.max_batch_size, found.max_batch_size_completed, found.versions) == (4, True, ("1",))


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"parameters": None, "input": None},
        {"parameters": {"tensorbroker.details": {}}},
        {"parameters": {"tensorbroker.details": {"string_value": "{"}}},
        {"parameters": {"tensorbroker.details": {"string_value": '{"name": 5}'}}},
        {"parameters": {"tensorbroker.details": None}},
    ],
)
def test_of_another_server(config: dict[str, Any]) -> None:
    assert details.merged(PLAIN, config) == PLAIN
    stated = config | {"max_batch_size": 8, "model_transaction_policy": {"decoupled": True}}
    found = details.merged(PLAIN, stated | {"input": [{"name": "x", "optional": True}, {"name": "z"}]})
    assert (found.max_batch_size, found.decoupled, found.inputs) == (8, True, (replace(X, optional=True),))


def test_nobody_else_is_told() -> None:
    assert details.asked({"tensorbroker-details": "1"})
    assert not details.asked({"tensorbroker-details": ""})
    assert not details.asked({})
