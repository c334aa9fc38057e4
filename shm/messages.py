"""Session messages between a client process and the broker: msgpack maps, one per SEQPACKET datagram.

Every request carries an `id`; exactly one reply carries the same `id`: the type named after the arrow, or `Failure`.
Unknown fields, wrong types and missing fields are refused (`decode_request` raises `ProtocolError`). Descriptors
travel with SCM_RIGHTS beside the datagram that is described as having them; any others are closed unread.

Client → broker (reply):
    Hello → Welcome          first message of a session; `Starting` notices may precede the reply
    GetModels → Models       GetModel → Models (one entry)
    RegisterPool + 1 fd → RegionInfo
    RegisterSystem → RegionInfo + 1 fd (the same open file the broker checked)
    RegisterCuda (+ 1 fd for VMM memory), RegisterEvents → RegionInfo
    ShareRegion → Token      OpenRegion → RegionInfo + 1 fd
    Unregister → Done        ListRegions → Regions
    Prepare → Prepared       PrepareAt → Done         Release → Done
    OpenChannel → ChannelInfo + 3 fds (channel memfd, eventfd to ring the worker, read end of the worker's pipe)
    CloseChannel → Done
    GetStatistics → Statistics   GetStatus → Status
    LoadModel (+ 1 fd: configuration and files, `shm.load_parameters`), UnloadModel → Done
    KeepLoaded, LetGo → Done
    GetConfig → Config       GetIndex → Index       GetServer → ServerState   GetMetrics → Metrics
    LogSettings, TraceSettings → Settings
Gateway → broker, on behalf of a principal (reply):
    RegisterFor, RegisterCudaFor → RegionInfo    UnregisterFor → Done     ListFor → Regions
    UseRegion → RegionInfo (+ 1 fd if asked)     Serving → Done
Worker → broker, for ensembles with members in other workers: PrepareStep → Prepared, beside what any client may ask.
Broker → client, unasked (id 0): Starting, Goodbye; to gateways: Exiting, Settings (of the log) and
Tracing when they have changed.
A reply larger than 64 KiB is sent as `Large` + 1 fd: a memfd that holds the encoded reply.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from shm.cuda_messages import RegisterCuda as RegisterCuda
from shm.cuda_messages import RegisterEvents as RegisterEvents
from shm.errors import ProtocolError
from shm.gateway_messages import (
    Config,
    Exiting,
    GetConfig,
    GetIndex,
    GetMetrics,
    GetServer,
    Index,
    ListFor,
    LogSettings,
    Metrics,
    RegisterCudaFor,
    RegisterFor,
    ServerState,
    Serving,
    Settings,
    TraceSettings,
    Tracing,
    UnregisterFor,
    UseRegion,
)
from shm.lease_messages import KeepLoaded, LetGo
from shm.message_values import MAX_POSITIONS as MAX_POSITIONS
from shm.message_values import MAX_RESPONSES as MAX_RESPONSES
from shm.message_values import Id as Id
from shm.message_values import Message as Message
from shm.message_values import ModelMetadata as ModelMetadata
from shm.message_values import Name, Parameters, Positions, Responses, Size, Text
from shm.message_values import RegionRecord as RegionRecord
from shm.message_values import TensorMetadata as TensorMetadata
from shm.message_values import TensorSpec as TensorSpec

PROTOCOL = 1
MAX_DATAGRAM = 65536  # bytes; larger replies travel in a memfd

# --- client → broker ----------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True, tag=True):
    protocol: Id
    library: Text = ""


class GetModels(Message, frozen=True, kw_only=True, tag=True):
    pass


class GetModel(Message, frozen=True, kw_only=True, tag=True):
    model: Text
    version: Text = ""


class RegisterPool(Message, frozen=True, kw_only=True, tag=True):
    name: Name
    byte_size: Size


class RegisterSystem(Message, frozen=True, kw_only=True, tag=True):
    name: Name
    key: Text
    byte_size: Size
    offset: Size = 0


class ShareRegion(Message, frozen=True, kw_only=True, tag=True):
    name: Name


class OpenRegion(Message, frozen=True, kw_only=True, tag=True):
    name: Name
    token: Name


class Unregister(Message, frozen=True, kw_only=True, tag=True):
    """`name` "" means all regions of this session. Unknown names succeed, as in Triton."""

    name: Text = ""


class ListRegions(Message, frozen=True, kw_only=True, tag=True):
    pass


class Prepare(Message, frozen=True, kw_only=True, tag=True):
    """Checks a plan once and binds it to `worker` ("" = the broker chooses one that serves the model).

    `responses` is for decoupled models, and only for those: how many places for responses lie in one output position,
    each `byte_size / responses` of every output, whose shape is then (-1,) (see `shm.responses`).
    `parameters`: of every request of the plan (see `shm.parameters`). `events`: the ring whose events submissions name.
    """

    model: Text
    version: Text = ""
    worker: Text = ""
    inputs: Annotated[tuple[TensorSpec, ...], msgspec.Meta(max_length=4096)]
    outputs: Annotated[tuple[TensorSpec, ...], msgspec.Meta(max_length=4096)]
    input_positions: Positions = 1
    output_positions: Positions = 1
    responses: Responses = 0
    parameters: Parameters = {}
    events: Text = ""


class PrepareStep(Message, frozen=True, kw_only=True, tag=True):
    """Prepare a step of an ensemble for another worker; refused to everybody but the broker's own workers.

    `owner`: whose sequences its requests belong to (`shm.admission.BoundPlan`). `retry` False: they may not run twice
    whatever their model says. The plan keeps the model that it was bound to, also when that is replaced or unloaded.
    """

    plan: Prepare
    owner: Id = 0
    retry: bool = True
    credit: TensorSpec | None = None  # of a decoupled member: one UINT64, how many parts of responses were taken


class PrepareAt(Message, frozen=True, kw_only=True, tag=True):
    """Bind plan `index` to one more of `Prepared.workers`: its requests may go there, too, under the same name.

    `wait`: for a worker that is not up, or does not respond; else it is refused.
    """

    index: Id
    generation: Id
    worker: Name
    wait: bool = False


class Release(Message, frozen=True, kw_only=True, tag=True):
    """Forget plan `index`. Its requests in flight end as usual."""

    index: Id
    generation: Id


class OpenChannel(Message, frozen=True, kw_only=True, tag=True):
    worker: Name
    slots: Annotated[int, msgspec.Meta(ge=1, le=4096)]


class CloseChannel(Message, frozen=True, kw_only=True, tag=True):
    channel: Id


class GetStatistics(Message, frozen=True, kw_only=True, tag=True):
    model: Text = ""
    version: Text = ""


class GetStatus(Message, frozen=True, kw_only=True, tag=True):
    pass


class LoadModel(Message, frozen=True, kw_only=True, tag=True):
    """`parameters`: one descriptor comes along, `shm.load_parameters`."""

    model: Text
    parameters: bool = False


class UnloadModel(Message, frozen=True, kw_only=True, tag=True):
    """`unload_dependents`: members of an ensemble too, unless another ensemble needs them."""

    model: Text
    unload_dependents: bool = False


# --- broker → client ----------------------------------------------------------------------------------------------


class Welcome(Message, frozen=True, kw_only=True, tag=True):
    """`epoch` names this run of the broker: when it differs after a reconnect, regions and plans are gone there."""

    protocol: int
    epoch: str
    session: int
    version: str
    max_channels: int = 64


class Starting(Message, frozen=True, kw_only=True, tag=True):
    """The start-up load is still running; `Welcome` follows when it has ended. `waits_for`: what takes long of it."""

    done: int
    total: int
    waits_for: Text = ""


class Goodbye(Message, frozen=True, kw_only=True, tag=True):
    """The broker will close this session (shutdown, or a rule was broken: `reason` says which)."""

    reason: str


class Failure(Message, frozen=True, kw_only=True, tag=True):
    code: str
    message: str


class Done(Message, frozen=True, kw_only=True, tag=True):
    pass


class Large(Message, frozen=True, kw_only=True, tag=True):
    byte_size: Size


class Models(Message, frozen=True, kw_only=True, tag=True):
    models: tuple[ModelMetadata, ...]


class RegionInfo(Message, frozen=True, kw_only=True, tag=True):
    """[offset, offset + byte_size) of an object of `file_size` bytes, which `device` and `inode` tell from others."""

    name: str
    kind: str
    region: int
    generation: int
    byte_size: int
    offset: int = 0
    file_size: int = 0
    writable: bool = True
    device: int = 0
    inode: int = 0


class Token(Message, frozen=True, kw_only=True, tag=True):
    token: str


class Regions(Message, frozen=True, kw_only=True, tag=True):
    regions: tuple[RegionRecord, ...]


class Prepared(Message, frozen=True, kw_only=True, tag=True):
    """The plan is bound at `worker`, which acknowledged it. Submissions name (index, generation).

    `workers`: where it may be bound by `PrepareAt`, `worker` included; empty if there are no others.
    """

    index: int
    generation: int
    worker: str
    model_version: str
    rows: int  # size of the batch dimension of one position; 0 for models without one
    workers: tuple[str, ...] = ()


class ChannelInfo(Message, frozen=True, kw_only=True, tag=True):
    channel: int
    worker: str
    slots: int


class Statistics(Message, frozen=True, kw_only=True, tag=True):
    """`model_stats` in the JSON form of Triton's statistics extension (numbers, durations in ns)."""

    model_stats: tuple[dict[str, Any], ...]


class Status(Message, frozen=True, kw_only=True, tag=True):
    """What `tensorbroker status --json` prints."""

    status: dict[str, Any]


Request = (
    Hello
    | GetModels
    | GetModel
    | RegisterPool
    | RegisterSystem
    | RegisterCuda
    | RegisterEvents
    | ShareRegion
    | OpenRegion
    | Unregister
    | ListRegions
    | Prepare
    | PrepareStep
    | PrepareAt
    | Release
    | OpenChannel
    | CloseChannel
    | GetStatistics
    | GetStatus
    | LoadModel
    | UnloadModel
    | KeepLoaded
    | LetGo
    | GetConfig
    | GetIndex
    | GetServer
    | GetMetrics
    | LogSettings
    | TraceSettings
    | RegisterFor
    | RegisterCudaFor
    | UnregisterFor
    | ListFor
    | UseRegion
    | Serving
)
Reply = (
    Welcome
    | Starting
    | Goodbye
    | Failure
    | Done
    | Large
    | Models
    | RegionInfo
    | Token
    | Regions
    | Prepared
    | ChannelInfo
    | Statistics
    | Status
    | Config
    | Index
    | ServerState
    | Metrics
    | Settings
    | Exiting
    | Tracing
)

WITH_DESCRIPTORS = (RegisterPool, RegisterCuda, LoadModel)  # requests that may have some; all others lose theirs

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)

T = TypeVar("T")


def encode(message: msgspec.Struct) -> bytes:
    """The datagram of any message."""
    return _encoder.encode(message)


def decode_request(data: bytes) -> Request:
    """Raises ProtocolError, naming the field, for anything that is not exactly one request."""
    return _decode(_request_decoder, data)


def decode_reply(data: bytes) -> Reply:
    """Raises ProtocolError for anything that is not exactly one reply."""
    return _decode(_reply_decoder, data)


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not a message of protocol {PROTOCOL}: {error}") from None
