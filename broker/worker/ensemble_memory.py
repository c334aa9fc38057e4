"""Tensors on their way through an ensemble, and the plans by which its steps read and write them.

A step's plan has one position. It lies on the client's own ranges where they fit, else on this worker's memory, which
grows with what is written to it (`Region.private`). Used by `broker.worker.ensemble`.
"""

from __future__ import annotations

from typing import NamedTuple

from broker.worker.messages import BindPlan, PlanTensor
from broker.worker.overlap import Crowds
from broker.worker.plans import PlacedTensor, Plan
from broker.worker.regions import Region, RegionTable
from shm import datatypes
from shm.errors import Code, InferError
from shm.message_values import TensorSpec

ROOM = 64  # of a private output of unknown size; it grows
Shape = tuple[int, ...]


class Value(NamedTuple):
    """An ensemble's tensor that exists, or the place for it: `shape` has -1 where only the run will tell."""

    datatype: str
    shape: Shape
    region: Region
    offset: int
    byte_size: int


def private(datatype: str, shape: Shape) -> Value:
    """A place of its own in this worker's memory."""
    size = ROOM
    if datatype != "BYTES" and -1 not in shape:
        size = datatypes.byte_size(datatype, list(shape))
    return Value(datatype, shape, Region.private(max(size, ROOM)), 0, size)


def of_client(tensor: PlacedTensor, position: int, rows: int, shape: Shape) -> Value:
    """One position of a client's tensor, `shape` as the ensemble has it."""
    size = rows * tensor.row_bytes if rows and tensor.row_bytes else tensor.place.byte_size
    return Value(tensor.datatype, shape, tensor.region, tensor.place.offset + position * tensor.place.stride, size)


def fitted(shape: Shape, wanted: Shape) -> Shape | None:
    """`shape` as a model wants it, with a batch dimension of 1 more or less where that is the only difference."""
    for candidate in (shape, (1, *shape), shape[1:] if shape[:1] == (1,) else None):
        if candidate is None or len(candidate) != len(wanted):
            continue
        if all(want in (-1, came) or came == -1 for want, came in zip(wanted, candidate, strict=True)):
            return candidate
    return None


def step_plan(
    client: Plan, model: str, version: int, inputs: dict[str, Value], outputs: dict[str, Value], rows: int
) -> Plan:
    """The plan of one step on these tensors (by the member's names). It is bound to no model yet."""
    table = RegionTable()
    numbers: dict[int, int] = {}

    def place(name: str, value: Value) -> PlanTensor:
        number = numbers.setdefault(id(value.region), len(numbers))
        table.hold(number, value.region)
        spec = TensorSpec(
            name=name, region=name, datatype=value.datatype, shape=value.shape, offset=value.offset,
            byte_size=value.byte_size,
        )  # fmt: skip
        return PlanTensor(spec=spec, region=number, generation=0)

    message = BindPlan(
        id=0,
        session=client.session,
        index=client.index,
        generation=client.generation,
        model=model,
        version=version,
        inputs=tuple(place(name, value) for name, value in inputs.items()),
        outputs=tuple(place(name, value) for name, value in outputs.items()),
        input_positions=1,
        output_positions=1,
        rows=rows,
        follow_latest=version < 0,
        owner=client.owner,
    )
    return Plan(message, table, Crowds(lambda: ()))


def not_fitting(tensor: str, shape: Shape, model: str, wanted: Shape) -> InferError:
    """What came out of one step is not what the next one takes."""
    return InferError(
        Code.INVALID_ARG,
        f"unexpected shape for input '{tensor}' for model '{model}'. Expected {datatypes.shape_text(wanted)}, got"
        f" {datatypes.shape_text(shape)}",
    )
