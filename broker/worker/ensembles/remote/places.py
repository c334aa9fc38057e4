"""Where another worker writes the responses to a step of a decoupled member, and where it is told which were taken.

As a client has it (`shm.responses`): each output has a room in each of a few places; a response larger than its rooms
comes in parts. Unlike a client's, a place is not given back by reading the channel, which is that of many steps, but by
a count beside the places (`shm.messages.PrepareStep.credit`): a step whose responses nobody takes holds up itself only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

import numpy as np

from broker.worker.ensembles.remote.memory import Block, SharedMemory
from broker.worker.plans import Bytes, PlacedTensor
from shm import datatypes
from shm.errors import InferError
from shm.message_values import MAX_RESPONSES, TensorSpec
from shm.responses import Extent

FIRST_ROOM = 4 << 10  # bytes for an output of a response, as long as nobody knows how large it will be
LARGEST_ROOM = 128 << 10  # … and at most: what is larger comes in parts
MIN_PLACES, PLACES_BYTES = 8, 1 << 20  # more than the fewest as far as the bytes go
_ALIGNED = 64


class Output(NamedTuple):
    """One output: `room` bytes in each place. `tensor`: what it is for the ensemble."""

    name: str
    tensor: str
    datatype: str
    room: int
    block: Block

    def at(self, place: int) -> Bytes:
        """Its room there."""
        start = self.block.offset + place * self.room
        return self.block.region.bytes[start : start + self.room]


@final
class Places:
    """For one request at a time."""

    __slots__ = ("_credit", "_memory", "_word", "outputs", "responses")

    def __init__(
        self, memory: SharedMemory, outputs: Sequence[PlacedTensor], names: dict[str, str], rooms: list[int]
    ) -> None:
        """`outputs`: of the step's plan. `names`: output → the ensemble's tensor. Raises InferError UNAVAILABLE."""
        self._memory = memory
        self.responses = min(max(PLACES_BYTES // max(sum(rooms), 1), MIN_PLACES), MAX_RESPONSES)
        self.outputs: list[Output] = []
        self._credit = memory.allocate(_ALIGNED)
        start = self._credit.offset
        self._word = self._credit.region.bytes[start : start + 8].view(np.uint64)
        try:
            for tensor, room in zip(outputs, rooms, strict=True):
                block = memory.allocate(self.responses * room)
                self.outputs.append(Output(tensor.name, names[tensor.name], tensor.datatype, room, block))
        except InferError:
            self.free()
            raise

    @property
    def byte_size(self) -> int:
        """Of shared memory."""
        return _ALIGNED + sum(output.block.byte_size for output in self.outputs)

    def have(self, rooms: Sequence[int]) -> bool:
        """Are its rooms at least as large?"""
        return all(output.room >= room for output, room in zip(self.outputs, rooms, strict=True))

    def taken(self, parts: int) -> None:
        """So many parts of this request's responses were taken; 0 before it is sent."""
        self._word[0] = parts

    def specs(self) -> tuple[TensorSpec, ...]:
        """As a plan names them."""
        return tuple(
            _spec(each.name, each.block, each.datatype, (-1,), each.room * self.responses) for each in self.outputs
        )

    def credit(self) -> TensorSpec:
        """Where the count lies."""
        return _spec("credit", self._credit, "UINT64", (1,), 8)

    def free(self) -> None:
        """No plan names it any more."""
        self._memory.free([self._credit, *(output.block for output in self.outputs)])


def room_of(datatype: str, shape: Sequence[int], largest: int) -> int:
    """Bytes for one output in one place. `shape`: of the plan. `largest`: of the responses so far."""
    wanted = max(largest, FIRST_ROOM)
    if datatype != datatypes.BYTES and -1 not in shape:
        wanted = max(datatypes.byte_size(datatype, shape), largest, 1)
    return min(-(-wanted // _ALIGNED) * _ALIGNED, LARGEST_ROOM)


def fits(datatype: str, extent: Extent) -> bool:
    """Can a tensor of this shape have so many bytes? Raises InferError for a shape that cannot be."""
    if datatype == datatypes.BYTES:
        least = datatypes.element_count(extent.shape) * 4  # of each string's length
        return extent.byte_size >= least if least else extent.byte_size == 0
    return extent.byte_size == datatypes.byte_size(datatype, extent.shape)


def _spec(name: str, block: Block, datatype: str, shape: tuple[int, ...], byte_size: int) -> TensorSpec:
    region = block.region.info.name
    return TensorSpec(
        name=name, region=region, datatype=datatype, shape=shape, offset=block.offset, byte_size=byte_size
    )
