"""Tensors on their way through an ensemble: on the client's own ranges, or on this worker's memory, which grows with
what is written to it (`Region.private`).

Used by `broker.worker.ensembles.run` and `ensembles.steps`. `Prepared` is what one run leaves to the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from broker.worker.ensembles.graph import Needed
from broker.worker.plans import PlacedTensor, Plan
from broker.worker.regions import Region
from shm import datatypes
from shm.errors import Code, InferError

ROOM = 64  # of a private output of unknown size; it grows
Shape = tuple[int, ...]


class Value(NamedTuple):
    """An ensemble's tensor that exists, or the place for it: `shape` has -1 where only the run will tell."""

    datatype: str
    shape: Shape
    region: Region
    offset: int
    byte_size: int


class Outputs(NamedTuple):
    """What a run has given, in copies."""

    values: dict[str, Value]
    byte_size: int

    @staticmethod
    def copied(values: Mapping[str, Value]) -> Outputs:
        """Of these tensors."""
        copies = {
            name: of_bytes(each.datatype, each.shape, each.region.bytes[each.offset : each.offset + each.byte_size])
            for name, each in values.items()
        }
        return Outputs(copies, byte_size_of(copies))


class Prepared:
    """Plans and memory of a run on one position of a client's plan, for one such run after the other.

    `sources`: what the plan of a step was made from. `places`: where tensors are written. `epoch`: of the ensemble when
    it was made; members may have been replaced since. `kept`: bytes, when it was put aside. `chain`: the plans of its
    steps in their order, if they can run at once (`ensembles.inline`); None: not known yet. `note`: of such a run's
    answer.
    """

    __slots__ = ("chain", "epoch", "kept", "needed", "note", "places", "plans", "sources")

    def __init__(self, needed: Needed, epoch: int) -> None:
        self.needed = needed
        self.epoch = epoch
        self.kept = 0
        self.chain: tuple[Plan, ...] | None = None
        self.note = b""
        self.plans: dict[int, Plan] = {}
        self.sources: dict[int, tuple[Value, ...]] = {}
        self.places: dict[str, Value] = {}

    def own_place(self, name: str, datatype: str, shape: Shape) -> Value | None:
        """Where the ensemble's tensor `name` is to be written, if not on the client's memory or on this worker's."""
        return None

    @property
    def byte_size(self) -> int:
        """This worker's memory that it keeps."""
        regions = {value.region for value in self.places.values()}
        return sum(region.bytes.size for region in regions if region.info.kind == "private")


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


def not_fitting(tensor: str, shape: Shape, model: str, wanted: Shape) -> InferError:
    """What came out of one step is not what the next one takes."""
    return InferError(
        Code.INVALID_ARG,
        f"unexpected shape for input '{tensor}' for model '{model}'. Expected {datatypes.shape_text(wanted)}, got"
        f" {datatypes.shape_text(shape)}",
    )


def byte_size_of(written: Mapping[str, Value]) -> int:
    """Of all these tensors."""
    return sum(value.byte_size for value in written.values())


def kept(datatype: str, array: npt.NDArray[Any]) -> Value:
    """A copy of what a model has sent."""
    if datatype == datatypes.BYTES:
        raw = np.frombuffer(datatypes.encode_bytes(array), np.uint8)
    else:
        raw = np.ascontiguousarray(array).view(np.uint8).reshape(-1) if array.size else np.empty(0, np.uint8)
    return of_bytes(datatype, tuple(array.shape), raw)


def of_bytes(datatype: str, shape: Sequence[int], raw: npt.NDArray[np.uint8]) -> Value:
    """A copy of a tensor's bytes."""
    value = private("UINT8", (raw.size,))._replace(datatype=datatype, shape=tuple(shape))
    value.region.bytes[: raw.size] = raw
    return value


def as_array(value: Value, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """A view of it; of strings a copy."""
    raw = value.region.bytes[value.offset : value.offset + value.byte_size]
    if value.datatype == datatypes.BYTES:
        return datatypes.decode_bytes(raw, datatypes.element_count(shape), "a step's output").reshape(shape)
    return raw.view(datatypes.numpy_dtype(value.datatype)).reshape(shape)
