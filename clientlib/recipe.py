"""What the application asked for when it prepared a request: kept so that it can be laid out again.

Made by both clients from their arguments. Knows no model and no broker; checks only what Python lets people get wrong.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np

from clientlib.arguments import model_text, parameters_of, shown, text, version_text
from clientlib.region import TensorRef
from shm.errors import Code, InferError
from shm.messages import MAX_POSITIONS
from shm.parameters import Parameter

Outputs = Mapping[str, TensorRef | None] | Sequence[str] | None
Slots = int | tuple[int, int]


@final
@dataclass(frozen=True, slots=True)
class ArrayInput:
    """An input that is copied from an array into the client's own memory with every request."""

    datatype: str
    shape: tuple[int, ...]
    byte_size: int


@final
@dataclass(frozen=True, slots=True)
class Budget:
    """How many places to make when the number is the client's choice: up to `places`, as far as `byte_size` goes."""

    places: int
    byte_size: int
    least: int = 2  # places, however large each is

    def places_for(self, each: int, at_least: int) -> int:
        """At least `at_least`, for places of `each` bytes."""
        return min(max(at_least, self.least, min(self.places, self.byte_size // max(each, 1))), MAX_POSITIONS)


@final
@dataclass(slots=True)
class Recipe:
    """A prepared request before it has a place. `rooms` grows when a result turns out larger than was reserved.

    `raw`: arrays are bytes in KServe's encoding, 1-D uint8, both the inputs' values and the results, whose shapes are
    in `InferResult.shapes`. Memory that the caller placed is not looked at: such outputs have a shape only. A
    mapping of outputs has all that are wanted; without `raw` the model's others come beside them. `parameters`: of
    every request, for the model (`shm.parameters`). `events`: the ring whose events requests may name.
    `widens`: the first request that finds no place free raises `clientlib.failures.Crowded`.
    """

    model: str
    version: str
    inputs: Mapping[str, TensorRef | ArrayInput]
    outputs: Outputs
    input_positions: int
    output_positions: int
    budget: Budget
    rooms: dict[str, int] = field(default_factory=dict)
    raw: bool = False
    parameters: dict[str, Parameter] = field(default_factory=dict)
    events: str = ""
    widens: bool = False


def recipe(
    model: str,
    inputs: Mapping[str, TensorRef],
    outputs: Outputs,
    slots: Slots,
    version: str | int,
    budget: Budget,
    parameters: Mapping[str, Parameter] | None = None,
) -> Recipe:
    """The recipe of a `prepare` call. Raises InferError for arguments of the wrong kind."""
    if not isinstance(inputs, Mapping):
        raise InferError(Code.INVALID_ARG, f"inputs must map names to tensors (region.tensor(…)), got {_kind(inputs)}")
    model, version = model_text(model), version_text(version)
    for name, value in inputs.items():
        text(name, "the name of an input")
        if not isinstance(value, TensorRef):
            raise InferError(
                Code.INVALID_ARG,
                f"input '{name}' must be a tensor in a region (region.tensor(…)), got {_kind(value)}; infer() takes "
                "arrays",
            )
    input_positions, output_positions = _positions(slots)
    asked = Recipe(model, version, dict(inputs), check_outputs(outputs), input_positions, output_positions, budget)
    if parameters is not None:
        asked.parameters = parameters_of(parameters)
    return asked


def check_outputs(outputs: Outputs) -> Outputs:
    """A private copy of `outputs`. Raises InferError for anything that does not name outputs."""
    if outputs is None:
        return None
    if isinstance(outputs, Mapping):
        for name, value in outputs.items():
            text(name, "the name of an output")
            if value is not None and not isinstance(value, TensorRef):
                raise InferError(
                    Code.INVALID_ARG,
                    f"output '{name}' must be a tensor in a region (region.tensor(…)), got {_kind(value)}",
                )
        return dict(outputs)
    if isinstance(outputs, str | bytes | np.ndarray) or not isinstance(outputs, Iterable):
        raise InferError(
            Code.INVALID_ARG, f"outputs must map names to tensors, or be a list of names, got {shown(outputs)}"
        )
    return tuple(text(name, "the name of an output") for name in outputs)


def _positions(slots: Slots) -> tuple[int, int]:
    try:
        pair = (slots, slots) if not isinstance(slots, tuple) else slots
        input_positions, output_positions = (operator.index(count) for count in pair)
    except (TypeError, ValueError):
        input_positions = output_positions = 0
    if not (1 <= input_positions <= MAX_POSITIONS and 1 <= output_positions <= MAX_POSITIONS):
        raise InferError(
            Code.INVALID_ARG,
            f"slots must be 1 to {MAX_POSITIONS}, or a pair (inputs, outputs) of such, got {shown(slots)}",
        )
    return input_positions, output_positions


def _kind(value: object) -> str:
    return type(value).__name__
