"""Link messages between the broker and one worker, over a SEQPACKET socketpair made by the broker.

Requests carry an `id` (> 0) and are answered by `Acknowledged` or `Refused` with the same id, in any order.
The broker is trusted: the worker checks nothing here that the broker has checked.

Broker → worker:                         descriptors
    Start                                statistics memfd
    LoadInstances, UnloadModel           -
    AddRegion                            the region's descriptor; GPU memory with a handle has none
    RetireRegion, AskRegion              -
    BindPlan, DropPlan                   -
    AttachChannel                        channel memfd, ledger memfd, eventfd, write end of the client's pipe
    OpenSession                          a connected session socket
    DetachChannel, Drain, Ping           -
Worker → broker, unasked (id 0): Ready (once), ChannelBroken, RegionIdle, WantSession, Offence,
Logged.
"""

from __future__ import annotations

from typing import Final

import msgspec

from broker.repository.config import ModelConfig
from broker.repository.scheduling import Allowance
from shm.cuda.descriptor import CudaEvents, CudaMemory
from shm.messages import TensorSpec

MAX_TEXT: Final = 8000  # characters of what others wrote, so that a message fits a datagram in whatever script
CLOSED_DESCRIPTORS: Final = 73  # exit status of a worker that has lost descriptors, not by itself
IN_USE, USED, UNLOADED = "in use", "used", "unloaded"  # details of acknowledgements


class LinkMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    id: int = 0


class Predecessor(msgspec.Struct, frozen=True):
    """The process of a worker before this one, if it had served: how it ended, as clients may be told, and when
    (CLOCK_MONOTONIC, ns).
    """

    how: str
    ended_ns: int


class Start(LinkMessage, frozen=True, kw_only=True, tag=True):
    """First message. `block` is the worker's own block in the statistics page. `cache_byte_size` 0: no such cache.

    `rate_limit`: what there is of each resource that the command line names; None: no rate limiter. `cuda_peers`: may a
    worker on a GPU reach clients' memory on others?
    """

    worker: str
    broker_pid: int
    block: int
    cache_byte_size: int = 0
    rate_limit: tuple[Allowance, ...] | None = None
    cuda_peers: bool = False
    before: Predecessor | None = None


class LoadInstances(LinkMessage, frozen=True, kw_only=True, tag=True):
    """Load one version of a model: all its instances. `blocks`: one statistics block per instance.

    Answered when every instance is loaded and warmed. A version already loaded is replaced when the new one is
    ready; plans re-bind to it. `generation` distinguishes loads of the same version.
    """

    config: ModelConfig
    version: int
    generation: int
    blocks: tuple[int, ...]


class UnloadModel(LinkMessage, frozen=True, kw_only=True, tag=True):
    """`generation`: only what that load made, also while it is still loading; answered when it has ended. 0: any.

    The detail is UNLOADED if something had served.
    """

    model: str
    version: int
    generation: int = 0


class AddRegion(LinkMessage, frozen=True, kw_only=True, tag=True):
    """Map [offset, offset + byte_size) of the attached file, or of GPU memory. `kind`: "pool", "system" or "cuda"; or
    open a ring of events, "events".

    (device, inode) identify the memory across sessions, for the overlap check.
    """

    region: int
    generation: int
    name: str
    kind: str
    byte_size: int
    offset: int
    file_size: int
    device: int
    inode: int
    writable: bool
    cuda: CudaMemory | None = None
    events: CudaEvents | None = None
    owner: int = 0  # the session that registered it: what it frees is looked for among its own


class RetireRegion(LinkMessage, frozen=True, kw_only=True, tag=True):
    """New requests on this generation end NOT_FOUND; acknowledged at once; unmapped when its last lease ends.

    The detail is IN_USE while requests that were accepted before still use it; `RegionIdle` follows the last of them.
    """

    region: int
    generation: int


class AskRegion(LinkMessage, frozen=True, kw_only=True, tag=True):
    """Acknowledged with USED if a request ran on this system region since this was last asked, or one runs now.

    Whatever `RegionIdle` is due is sent before the answer.
    """

    region: int
    generation: int


class PlanTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A checked tensor of a plan, with the region resolved to what the worker mapped."""

    spec: TensorSpec
    region: int
    generation: int


class BindPlan(LinkMessage, frozen=True, kw_only=True, tag=True):
    """`refused_until_ns` (CLOCK_MONOTONIC): requests end UNAVAILABLE until then, because this session's requests
    for this model killed workers (design promise 3). `interface`: of the model that it was checked against.
    """

    session: int
    index: int
    generation: int
    model: str
    version: int
    inputs: tuple[PlanTensor, ...]
    outputs: tuple[PlanTensor, ...]
    input_positions: int
    output_positions: int
    rows: int
    interface: str = ""
    follow_latest: bool = True
    refused_until_ns: int = 0
    retryable: bool = True
    owner: int = 0  # see `shm.admission.BoundPlan`
    responses: int = 0  # see `shm.messages.Prepare`
    parameters: dict[str, bool | int | float | str] = {}  # see `shm.parameters`
    step: bool = False  # see `shm.messages.PrepareStep`
    credit: PlanTensor | None = None  # likewise
    events: tuple[int, int] | None = None  # (region, generation) of the ring whose events submissions name


class DropPlan(LinkMessage, frozen=True, kw_only=True, tag=True):
    session: int
    index: int
    generation: int


class AttachChannel(LinkMessage, frozen=True, kw_only=True, tag=True):
    """Serve it. What a previous worker left in it is taken over; that one's pidfd is readable by now."""

    channel: int
    session: int
    slots: int
    steps: bool = False  # it is a worker's, for steps of ensembles: served until that worker has let it go


class DetachChannel(LinkMessage, frozen=True, kw_only=True, tag=True):
    """Queued requests are dropped, running ones finish and are discarded. Answered when idle.

    `ended`: so is the session, and nobody goes on with its sequences.
    """

    channel: int
    ended: bool = False


class Drain(LinkMessage, frozen=True, kw_only=True, tag=True):
    """Take no new work, finish what was accepted (queued requests included), answer, exit with status 0."""


class Ping(LinkMessage, frozen=True, kw_only=True, tag=True):
    """A sign of life is wanted: acknowledged at once, whatever else goes on in the worker."""


class OpenSession(LinkMessage, frozen=True, kw_only=True, tag=True):
    """A connected session socket comes along, as a client's (`shm.messages`): what `WantSession` asked for."""


class Ready(LinkMessage, frozen=True, kw_only=True, tag=True):
    """The worker is up and reads its link. Sent once, before anything is loaded."""

    pid: int


class Acknowledged(LinkMessage, frozen=True, kw_only=True, tag=True):
    detail: str = ""


class Refused(LinkMessage, frozen=True, kw_only=True, tag=True):
    """`lacking`: for want of descriptors or threads; another process, or this one later, may be able to."""

    code: str
    message: str
    lacking: bool = False


class RegionIdle(LinkMessage, frozen=True, kw_only=True, tag=True):
    """No request uses this retired region any more."""

    region: int
    generation: int


class WantSession(LinkMessage, frozen=True, kw_only=True, tag=True):
    """An ensemble has members in other workers: their steps go there as requests of a session of this worker."""


class Logged(LinkMessage, frozen=True, kw_only=True, tag=True):
    """For the log; `level` is that of `logging`."""

    level: int
    text: str


class Offence(LinkMessage, frozen=True, kw_only=True, tag=True):
    """A step of a request for ensemble `model` was alone in another worker when it ended that for the second time."""

    session: int
    model: str


class ChannelBroken(LinkMessage, frozen=True, kw_only=True, tag=True):
    """The client of this channel broke a rule of the channel: the broker hangs up its session."""

    channel: int
    reason: str


ToWorker = (
    Start
    | LoadInstances
    | UnloadModel
    | AddRegion
    | RetireRegion
    | AskRegion
    | BindPlan
    | DropPlan
    | AttachChannel
    | DetachChannel
    | OpenSession
    | Drain
    | Ping
)
ToBroker = Ready | Acknowledged | Refused | ChannelBroken | RegionIdle | WantSession | Offence | Logged

_encoder = msgspec.msgpack.Encoder()
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_to_broker: msgspec.msgpack.Decoder[ToBroker] = msgspec.msgpack.Decoder(ToBroker)


def sendable(text: str) -> str:
    """What a model's code wrote, as it can be sent: not too long, and without lone surrogates, which UTF-8 has not."""
    return text[:MAX_TEXT].encode(errors="replace").decode()


def encode(message: LinkMessage) -> bytes:
    """The datagram of any link message."""
    return _encoder.encode(message)


def decode_to_worker(data: bytes) -> ToWorker:
    """Used by the worker."""
    return _to_worker.decode(data)


def decode_to_broker(data: bytes) -> ToBroker:
    """Used by the broker."""
    return _to_broker.decode(data)
