"""KServe v2 / Triton in plain data: what every front end decodes requests to and encodes answers from.

Tensors' bytes are in KServe's encoding: little-endian, row-major, BYTES as <uint32 length><bytes> per element. Errors
are `InferError`; each front end has one table from codes to its own status.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal, Protocol, Self, final

from broker.gateway.options import Category as Category
from clientlib.results import Timing
from shm.errors import Code, InferError
from shm.message_values import IndexEntry, ModelMetadata, Principal, RegionRecord

Buffer = bytes | bytearray | memoryview
Parameter = bool | int | float | str
Transport = Literal["http", "grpc", "zmq"]

DECOUPLED: Final = "doesn't support models with decoupled transaction policy"
_END_POINTS: Final[dict[Transport, str]] = {
    "http": "HTTP end point",
    "grpc": "ModelInfer RPC",
    "zmq": "ZeroMQ end point",
}

Identity = tuple[Principal | None, str]  # who asks; None: may not use shared memory, for the reason beside it


@final
class Caller:
    """Who asks, for one request: front ends make one per request (per message of a stream), and keep none; ZeroMQ's
    makes one per session, since the peer of a socket in the run directory stays the same.

    `principal` None: may not use shared memory, for the reason in `refusal` (remote, forwarded, foreign), which is for
    the log and never for the wire. With `ask` it is found out when first looked at: only what names a region pays.
    `headers`: names in lower case, for the restricted-API settings. `connection`: the same for all requests of one.
    `party`: see the property.
    """

    __slots__ = ("_ask", "_identity", "_party", "connection", "headers", "transport")

    def __init__(
        self,
        transport: Transport,
        principal: Principal | None = None,
        refusal: str = "",
        headers: Mapping[str, str] = MappingProxyType({}),
        *,
        ask: Callable[[], Identity] | None = None,
        connection: Any = None,
        party: Callable[[], int] = int,
    ) -> None:
        self.transport = transport
        self.headers = headers
        self.connection = connection
        self._ask = ask
        self._party = party
        self._identity: Identity = (principal, refusal)

    @property
    def principal(self) -> Principal | None:
        """On whose behalf regions are registered and used; None: nobody's."""
        return self._asked()[0]

    @property
    def refusal(self) -> str:
        """Why there is no principal."""
        return self._asked()[1]

    @property
    def identity(self) -> Identity:
        """The principal, or why there is none: it names the remote host, or the other uid."""
        return self._asked()

    @property
    def party(self) -> int:
        """Whose turn its requests take where others wait (`broker.gateway.parties`); asked anew for each."""
        return self._party()

    def _asked(self) -> Identity:
        if self._ask is not None:
            self._identity, self._ask = self._ask(), None
        return self._identity

    def __repr__(self) -> str:
        return f"Caller({self.transport!r}, {self._identity})"


@final
@dataclass(slots=True)
class InputTensor:
    """Either `data` (inline) or `region` with offset and byte_size in bytes, relative to the registered window."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Buffer | None = None
    region: str = ""
    offset: int = 0
    byte_size: int = 0


@final
@dataclass(slots=True)
class RequestedOutput:
    """`region`: where to write the result; `classes` > 0: classification; `binary` is the HTTP codec's own."""

    name: str
    region: str = ""
    offset: int = 0
    byte_size: int = 0
    classes: int = 0
    binary: bool = True


@final
@dataclass(slots=True)
class InferRequest:
    """`outputs` None: all of them. `timeout_us` and `priority` 0: none given. `parameters`: the caller's own.
    `empty_final` is gRPC's own: of a stream whose end comes without a response, the end is wanted as one.
    `trace`: where to note what becomes of it. `party`: whose turn it takes, as the core has found out.
    """

    model: str
    version: str = ""
    id: str = ""
    inputs: list[InputTensor] = field(default_factory=list)
    outputs: list[RequestedOutput] | None = None
    priority: int = 0
    timeout_us: int = 0
    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    parameters: dict[str, Parameter] = field(default_factory=dict)
    empty_final: bool = False
    trace: Trace | None = None
    party: int = 0


@final
@dataclass(slots=True)
class OutputTensor:
    """`data` None: the result lies in the region that was asked for."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Buffer | None


@final
@dataclass(slots=True)
class InferResponse:
    """Outputs in the order in which they were asked for, else the model's.

    Of a stream: `final`, nothing of its request follows; `error`, it is one, and has no outputs.
    """

    model: str
    version: str
    id: str
    outputs: list[OutputTensor]
    parameters: dict[str, Parameter] = field(default_factory=dict)
    final: bool = True
    error: InferError | None = None

    @property
    def byte_size(self) -> int:
        """Of the outputs that lie in no region."""
        return sum(memoryview(output.data).nbytes for output in self.outputs if output.data is not None)


def one_answer_only(transport: Transport) -> InferError:
    """A decoupled model was asked where there is one response to a request. UNSUPPORTED, in Triton's words."""
    return InferError(Code.UNSUPPORTED, f"{_END_POINTS[transport]} {DECOUPLED}")


async def check_answers_once(service: Service, model: str, version: str, transport: Transport) -> None:
    """Before a request is refused that takes one response: Triton looks at the model first, so do we, when it matters.

    Raises InferError: UNSUPPORTED for a decoupled model, the lookup's for one that is not there.
    """
    if (await service.metadata(model, version)).decoupled:
        raise one_answer_only(transport)


class Responses(Protocol):
    """Those to one request, in order, as they come. Errors are responses too: nothing raises InferError here.

    `decoupled`: there may be any number of them, and the end may come without one: then none was `final`. Else there is
    exactly one. Whoever has them takes them to the end or calls `aclose`.
    """

    decoupled: bool

    def __aiter__(self) -> Self:
        """Itself."""

    async def __anext__(self) -> InferResponse:
        """The next one. What was asked for runs from the first call on. Cancelled with the task that awaits it."""

    async def aclose(self) -> None:
        """Cancel what still runs. Again: nothing."""


class Trace(Protocol):
    """What is noted of a request that is traced (`broker.gateway.tracing`). Whoever asked for it writes it."""

    def mark(self, name: str, ns: int = 0) -> None:
        """It is the moment that Triton calls `name`, or was at `ns` of the monotonic clock."""

    def begin(self, request: InferRequest) -> None:
        """The core has got the request."""

    def submitted(self) -> int:
        """The model is asked, now."""

    def computed(self, submitted: int, timing: Timing) -> None:
        """It was: when, and how long it took."""

    def ended(self, version: str) -> None:
        """The core has answered."""

    def write(self) -> None:
        """Nothing more is noted."""


class Tracer(Protocol):
    """Which requests are traced."""

    on: bool  # some are

    def sample(self, model: str) -> Trace | None:
        """What is noted of a request of `model`, if it is traced."""


class Service(Protocol):
    """What a front end can ask for. Implemented by `broker.gateway.service`; every method raises InferError."""

    server_name: str
    server_version: str
    extensions: tuple[str, ...]
    exiting: bool  # refuse everything new with UNAVAILABLE "Server exiting"

    @property
    def traces(self) -> Tracer:
        """Which requests are traced."""

    def check(self, category: Category, caller: Caller) -> None:
        """The one access policy: raises Restricted (see `broker.gateway.access`)."""

    async def live(self) -> bool:
        """Is the broker up?"""

    async def ready(self) -> bool:
        """As --strict-readiness says."""

    async def model_ready(self, model: str, version: str) -> bool:
        """Raises InferError with the lookup texts for what is not known."""

    async def metadata(self, model: str, version: str) -> ModelMetadata:
        """One model version; "" is the latest ready."""

    async def config(self, model: str, version: str) -> dict[str, Any]:
        """The completed configuration in Triton's JSON form."""

    async def statistics(self, model: str, version: str) -> list[dict[str, Any]]:
        """`model_stats` in Triton's JSON form."""

    async def metrics(self) -> dict[str, Any]:
        """The document of `broker.metrics`."""

    async def index(self, ready: bool) -> Sequence[IndexEntry]:
        """The repository index."""

    async def load(self, model: str, parameters: Mapping[str, str | bytes]) -> None:
        """Load or reload; `parameters` are `config` and `file:…`."""

    async def unload(self, model: str, unload_dependents: bool) -> None:
        """Unload; draining goes on afterwards."""

    async def infer(self, request: InferRequest, caller: Caller) -> InferResponse:
        """Run one request. Cancelled with the task that awaits it. UNSUPPORTED for decoupled models."""

    async def stream(self, request: InferRequest, caller: Caller) -> Responses:
        """Check one request and have its responses come. The request is taken over: its inputs are let go."""

    def copied(self, reason: str, byte_size: int) -> None:
        """The front end copied bytes of tensors, for one of `shm.gateway_counters.COPIES`."""

    async def register_system(self, caller: Caller, name: str, key: str, byte_size: int, offset: int) -> None:
        """For the caller's principal."""

    async def register_cuda(self, caller: Caller, name: str, handle: bytes, device: int, byte_size: int) -> None:
        """For the caller's principal."""

    async def unregister(self, caller: Caller, kind: str, name: str) -> None:
        """`kind`: "system", "cuda", "" for any; `name` "": all of the caller's of it. Unknown names succeed."""

    async def regions(self, caller: Caller, kind: str, name: str) -> list[RegionRecord]:
        """Those of the caller, sorted by name; a `name` that is missing or of the other kind is NOT_FOUND."""

    async def log_settings(self, update: Mapping[str, bool | int | str]) -> dict[str, Any]:
        """After the change, if any."""

    async def trace_settings(
        self, model: str, update: Mapping[str, str | list[str] | None]
    ) -> dict[str, str | list[str]]:
        """After the change, if any; `model` "": the global ones."""
