"""Parameters that a model gives with its responses: from what its binding says after a run to the run's requests.

Used by `execute`, `gathered`, `assembled` and `decoupled`, for models whose bindings have `response_parameters`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from broker.worker.backends import OWN_CODE, Binding, gives_parameters
from broker.worker.model import LoadedModel
from shm.admission import Request
from shm.errors import Code, InferError
from shm.parameters import pack


def give(model: LoadedModel, binding: Binding, requests: Sequence[Request]) -> None:
    """Give each request of the run its parameters, when its outputs are delivered. Raises as `said`, and where they
    have no room.
    """
    for request, parameters in zip(requests, said(model, binding, requests), strict=True):
        request.give(parameters)


def said(model: LoadedModel, binding: Binding, rows: Sequence[Request | None]) -> list[bytes]:
    """What the run gave, packed, for each request in the order of the batch; None is an empty slot.

    Raises InferError for what no response can have, and whatever the model raises.
    """
    given = of_rows(model, binding, [row.rows if row is not None else 1 for row in rows])
    if all(each is given[0] for each in given):
        return [packed(model.name, given[0])] * len(given)
    return [packed(model.name, each) for each in given]


def of_rows(model: LoadedModel, binding: Binding, sizes: Sequence[int]) -> list[Mapping[str, Any]]:
    """What the run gave for each request; `sizes`: their rows in the order of the batch, 0 is one."""
    with OWN_CODE:
        given = binding.response_parameters() if gives_parameters(binding) else None
    if given is None or isinstance(given, Mapping):
        return [given or {}] * len(sizes)
    total = sum(size or 1 for size in sizes)
    if not isinstance(given, list | tuple) or len(given) != total:
        got = f"{len(given)} values" if isinstance(given, list | tuple) else type(given).__name__
        raise InferError(
            Code.INTERNAL,
            f"'response_parameters' of model '{model.name}' must return a mapping, or a list of one for each row of "
            f"the batch ({total}), it returned {got}",
        )
    found: list[Mapping[str, Any]] = []
    row = 0
    for size in sizes:
        merged: dict[str, Any] = {}
        for each in given[row : row + (size or 1)]:
            merged.update(_checked(model.name, each))
        found.append(merged)
        row += size or 1
    return found


def packed(model: str, given: Mapping[str, Any]) -> bytes:
    """`given` for a response of `model`. Raises InferError INTERNAL, naming it, for what no response can have."""
    if not given and isinstance(given, Mapping):
        return b""
    values = {name: v.item() if isinstance(v, np.generic) else v for name, v in _checked(model, given).items()}
    try:
        return pack(values)
    except InferError as error:
        raise InferError(Code.INTERNAL, f"model '{model}': {error.message}") from None


def _checked(model: str, given: object) -> Mapping[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InferError(
            Code.INTERNAL,
            f"model '{model}': the parameters of a response must map names to values, got {type(given).__name__}",
        )
    return given
