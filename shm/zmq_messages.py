"""The messages between a ZeroMQ client and the gateway, as docs/wire-protocol.md describes them.

One msgpack map per message, in one frame. Every request carries an `id` of the client's choice; exactly one reply
carries the same. Unknown fields, wrong types and missing fields are refused. Used by `broker.gateway.zmq.server` and
`clientlib.remote.zmq_transport`; other clients are written from the document.

Client → gateway (reply):
    hello → welcome          first message of a connection
    heartbeat, goodbye → done
    server → server_state    models → index    metadata → metadata    config → config    statistics → statistics
    register, register_cuda, unregister → done    regions → regions
    infer → result           prepare → prepared    run → result    release → done    cancel → done
    load, unload → done
Any of them → error.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from shm.message_values import IndexEntry, ModelMetadata, Positions, Size, Text

PROTOCOL = 1
MAX_MESSAGE = 1 << 20  # bytes, to the gateway
MAX_REPLY = 16 << 20
MAX_TENSORS = 4096
TOKEN = "^[0-9a-f]{32}$"

RequestId = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Slot = Annotated[int, msgspec.Meta(ge=0, lt=65535)]
Dim = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]  # the service says what is wrong with a negative one
Shape = Annotated[tuple[Dim, ...], msgspec.Meta(max_length=64)]
Milliseconds = Annotated[int, msgspec.Meta(ge=100, le=60_000)]
Value = bool | int | float | str
Parameters = Annotated[dict[Text, Value], msgspec.Meta(max_length=256)]


class Request(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    tag_field="type",
    tag=str.lower,
    gc=False,
):
    """What every message of a client has."""

    id: RequestId


# --- the session --------------------------------------------------------------------------------------------------


class Hello(Request, frozen=True, kw_only=True):
    """`pid` is used where the connection does not tell. `token` resumes the session that it names.

    `headers`: what the server's restricted APIs ask for, names in lower case.
    """

    protocol: Number
    pid: Number = 0
    heartbeat_ms: Milliseconds = 10_000
    token: Annotated[str, msgspec.Meta(pattern=TOKEN)] | None = None
    library: Annotated[str, msgspec.Meta(max_length=256)] = ""
    headers: Annotated[dict[Text, Text], msgspec.Meta(max_length=16)] = {}


class Heartbeat(Request, frozen=True, kw_only=True):
    """I am there. Any other message says the same."""


class Goodbye(Request, frozen=True, kw_only=True):
    """Ends the session: its requests are cancelled, its regions go."""


# --- what there is ------------------------------------------------------------------------------------------------


class Server(Request, frozen=True, kw_only=True):
    """Name, version, extensions, live and ready."""


class Models(Request, frozen=True, kw_only=True):
    """The repository index."""

    ready: bool = False


class Metadata(Request, frozen=True, kw_only=True):
    """Inputs, outputs and state of a model; `version` "" is the latest."""

    model: Text
    version: Text = ""


class Config(Request, frozen=True, kw_only=True):
    """The completed configuration."""

    model: Text
    version: Text = ""


class Statistics(Request, frozen=True, kw_only=True):
    """Triton's model statistics; `model` "": of all."""

    model: Text = ""
    version: Text = ""


class Load(Request, frozen=True, kw_only=True):
    """`config`: JSON text that replaces config.pbtxt. `files`: path below the model's directory → contents."""

    model: Text
    config: str = ""
    files: dict[Text, bytes] = {}


class Unload(Request, frozen=True, kw_only=True):
    """`unload_dependents`: the models that only an ensemble used, too."""

    model: Text
    unload_dependents: bool = False


# --- memory -------------------------------------------------------------------------------------------------------


class Register(Request, frozen=True, kw_only=True):
    """POSIX shared memory: `byte_size` bytes from `offset` of the object `key`, under `name`."""

    name: Text
    key: Text
    byte_size: Size
    offset: Size = 0


class RegisterCuda(Request, frozen=True, kw_only=True, tag="register_cuda"):
    """GPU memory by its cudaIpcMemHandle_t."""

    name: Text
    handle: Annotated[bytes, msgspec.Meta(max_length=4096)]
    device: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
    byte_size: Size


class Unregister(Request, frozen=True, kw_only=True):
    """`name` "": all of this session. Unknown names succeed."""

    name: Text = ""


class Regions(Request, frozen=True, kw_only=True):
    """Those of this session; `name` "": all."""

    name: Text = ""


# --- inference ----------------------------------------------------------------------------------------------------


class Input(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """Either `data`, or `byte_size` bytes at `offset` of `region`. `stride`: only in `prepare`."""

    name: Text
    datatype: Text
    shape: Shape
    data: memoryview | None = None
    region: Text = ""
    offset: Size = 0
    byte_size: Size = 0
    stride: Size = 0


class Output(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """Without `region` the result comes in the reply. `stride`: only in `prepare`."""

    name: Text
    region: Text = ""
    offset: Size = 0
    byte_size: Size = 0
    stride: Size = 0
    classes: Number = 0


Inputs = Annotated[tuple[Input, ...], msgspec.Meta(max_length=MAX_TENSORS)]
Outputs = Annotated[tuple[Output, ...], msgspec.Meta(max_length=MAX_TENSORS)]


class Infer(Request, frozen=True, kw_only=True):
    """`outputs` absent: all of them, in the reply. `timeout_us` and `priority` 0: none."""

    model: Text
    version: Text = ""
    inputs: Inputs
    outputs: Outputs | None = None
    timeout_us: Number = 0
    priority: Number = 0
    sequence_id: int | Text = 0
    sequence_start: bool = False
    sequence_end: bool = False
    parameters: Parameters = {}


class Prepare(Request, frozen=True, kw_only=True):
    """An inference to be run by number: position k of a tensor lies at `offset` + k · `stride`."""

    model: Text
    version: Text = ""
    inputs: Inputs
    outputs: Outputs | None = None
    input_slots: Positions = 1
    output_slots: Positions = 1
    parameters: Parameters = {}


class Run(Request, frozen=True, kw_only=True):
    """Run what was prepared as `number`."""

    number: Number
    input_slot: Slot = 0
    output_slot: Slot = 0
    timeout_us: Number = 0
    priority: Number = 0
    sequence_id: int | Text = 0
    sequence_start: bool = False
    sequence_end: bool = False


class Release(Request, frozen=True, kw_only=True):
    """Forget what was prepared as `number`."""

    number: Number


class Cancel(Request, frozen=True, kw_only=True):
    """End the request with id `target`, if it still runs; it gets its own reply."""

    target: RequestId


ClientMessage = (
    Hello
    | Heartbeat
    | Goodbye
    | Server
    | Models
    | Metadata
    | Config
    | Statistics
    | Load
    | Unload
    | Register
    | RegisterCuda
    | Unregister
    | Regions
    | Infer
    | Prepare
    | Run
    | Release
    | Cancel
)

# --- gateway → client ---------------------------------------------------------------------------------------------


class Reply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag=str.lower, gc=False):
    """What every message of the gateway has. `id` 0: the request's could not be read."""

    id: int


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Of one session."""

    message_bytes: int
    requests: int
    request_bytes: int
    prepared: int


class Welcome(Reply, frozen=True, kw_only=True):
    """`resumed`: the session is the one that the token named."""

    protocol: int
    token: str
    resumed: bool
    server: str
    version: str
    limits: Limits


class Done(Reply, frozen=True, kw_only=True):
    """It is done; there is nothing to say about it."""


class Error(Reply, frozen=True, kw_only=True):
    """`code` is one of Triton's names. `hello`: this connection has no session, say hello (again)."""

    code: str
    message: str
    hello: bool = False


class ServerState(Reply, frozen=True, kw_only=True, tag="server_state"):
    """The answer to `server`."""

    name: str
    version: str
    extensions: tuple[str, ...]
    live: bool
    ready: bool


class Index(Reply, frozen=True, kw_only=True):
    """The answer to `models`."""

    models: tuple[IndexEntry, ...]


class MetadataIs(Reply, frozen=True, kw_only=True, tag="metadata"):
    """The answer to `metadata`."""

    metadata: ModelMetadata


class ConfigIs(Reply, frozen=True, kw_only=True, tag="config"):
    """The answer to `config`."""

    config: dict[str, Any]


class StatisticsAre(Reply, frozen=True, kw_only=True, tag="statistics"):
    """The answer to `statistics`."""

    model_stats: list[dict[str, Any]]


class RegionIs(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `regions`."""

    name: str
    kind: str
    key: str
    offset: int
    byte_size: int


class RegionsAre(Reply, frozen=True, kw_only=True, tag="regions"):
    """The answer to `regions`, sorted by name."""

    regions: tuple[RegionIs, ...]


class Prepared(Reply, frozen=True, kw_only=True):
    """The answer to `prepare`."""

    number: int


class OutputIs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One output of a result. Without `data` it lies in the region that was asked for."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytearray | None = None  # the gateway gives any buffer, a client gets one that is its own


class Result(Reply, frozen=True, kw_only=True):
    """The answer to `infer` and `run`."""

    model: str
    version: str
    outputs: list[OutputIs]
    parameters: dict[str, Value] = {}


GatewayMessage = (
    Welcome
    | Done
    | Error
    | ServerState
    | Index
    | MetadataIs
    | ConfigIs
    | StatisticsAre
    | RegionsAre
    | Prepared
    | Result
)
