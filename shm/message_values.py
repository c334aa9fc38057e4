"""What session messages are made of: the base of all, and the values inside them.

Used through `shm.messages`, which describes the protocol.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

MAX_POSITIONS = 65534  # input/output positions are u16 and 0xFFFF is reserved

Id = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Dim = Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Positions = Annotated[int, msgspec.Meta(ge=1, le=MAX_POSITIONS)]
MAX_RESPONSES = 16  # places for responses that a client has not read; a request may have any number of responses
Responses = Annotated[int, msgspec.Meta(ge=0, le=MAX_RESPONSES)]
Parameters = dict[str, bool | int | float | str]  # see `shm.parameters`
Shape = Annotated[tuple[Dim, ...], msgspec.Meta(max_length=64)]


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """Anything with an `id` that pairs a reply with its request."""

    id: Id = 0


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor of a plan: position k lies at `offset + k * stride` of region `region`.

    `byte_size` is what one position holds. Inputs: exactly the tensor's bytes. Outputs with an open dimension
    (-1 in `shape`): the room for the result, whose true shape travels in the completion's note.
    `stride` 0 means: the same bytes at every position (inputs only).
    """

    name: Name
    region: Name
    datatype: Name
    shape: Shape
    offset: Size = 0
    stride: Size = 0
    byte_size: Size = 0


class TensorMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """A model's input or output. `shape` includes the batch dimension (-1) when `max_batch_size` > 0.

    `symbols` has one entry per dimension: "" for a fixed one, else the name the model file gives it; equal names
    mean equal sizes, which is how an output's shape follows from the inputs'. "?…" marks a size that only running
    the model tells. `file_shape` is the model file's own shape as text, "" where it is not known: for errors only.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    symbols: tuple[str, ...] = ()
    optional: bool = False
    zero_copy: bool = False
    zero_copy_reason: str = ""
    file_shape: str = ""


class ModelMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What a client may know of a model version. `state` is Triton's: READY, LOADING, UNLOADING, UNAVAILABLE.

    `max_batch_size_completed`: auto-completion chose `max_batch_size`, no configuration says it.
    `reads_parameters`: its code, or that of a member, may look at the parameters of a request (`shm.parameters`).
    `correlation`: the CORRID control of a sequence model. One of BYTES may be given as one more input of a plan: the
    sequence's id as a string.
    """

    name: str
    version: str
    versions: tuple[str, ...] = ()
    platform: str = ""
    state: str = "READY"
    reason: str = ""
    max_batch_size: int = 0
    inputs: tuple[TensorMetadata, ...] = ()
    outputs: tuple[TensorMetadata, ...] = ()
    workers: tuple[str, ...] = ()
    decoupled: bool = False
    max_batch_size_completed: bool = False
    correlation: TensorMetadata | None = None
    reads_parameters: bool = False


class RegionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `client.regions()` and of the status page."""

    name: str
    kind: str
    byte_size: int
    offset: int = 0
    key: str = ""
    generation: int = 0
    owner_pid: int = 0
    owner_uid: int = 0
    state: str = "active"  # or "draining"


class Principal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """On whose behalf a gateway acts: a uid and a scope of names.

    `scope` is "kserve" for HTTP and gRPC, which share one namespace per uid as in Triton, and "zmq:…" for one ZeroMQ
    client. Regions belong to a principal and survive the gateway that registered them.
    """

    uid: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
    scope: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


class IndexEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the repository index. A model that was never loaded has a name only."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""
