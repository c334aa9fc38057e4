"""What a transport must provide, and the words that it carries. Nothing here does I/O or imports a wire's package.

A transport turns words into one wire's messages and answers back into plain data. It keeps no regions, plans or models;
those are `clientlib.remote.core`'s. A module `clientlib.remote.<name>_transport` provides

    connect(address: Address) -> Transport                     for threads
    connect_async(address: Address) -> AsyncTransport          for the running event loop (a plain function)

neither of which needs to reach the server: the client's first call (`Live`) does. Put what both say into one pure
codec, so that the two classes differ in waiting alone. Rules for both:

* A word is answered by what its docstring says, or the call raises `InferError` with the wire's code and the server's
  text (`plain` takes the request-id prefix off). Code UNAVAILABLE, text naming `address.url`, when the server is not
  reached or the connection ends first; UNAVAILABLE and `expired()` when `deadline` passes.
* `deadline` is on `time.monotonic()`, `math.inf` for none. A request also carries `timeout_us`, for the server.
* A request is sent at most once, unless it is certain that the server cannot have run it.
* Data of a request may be views of the application's memory, which do not change before `infer` or `submit` returns:
  whoever keeps them longer copies them.
* Data of an answer belongs to the caller: bytes, or better something writable that is not used again.
* A control word that gets no answer in time is `late(...)`.
* `shares_memory`: do regions named in a request work? If so the words `RegisterSystem` and `Unregister` do too, and a
  request counts as running until the server no longer touches those regions: only then may `ended` be called or the
  awaiting task end, also when the request was cancelled.
* Nothing is unbounded: the client has at most `slots` requests in flight and calls `submit` for no more.
* A missing package is `missing(...)`: UNSUPPORTED, naming the extra to install.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, final, runtime_checkable

from clientlib.address import Address
from shm.errors import Code, ConnectionLost, InferError
from shm.parameters import Parameter

Buffer = bytes | bytearray | memoryview

# --- control words, and what answers them -------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Live:
    """→ bool: does the server live?"""


@final
@dataclass(frozen=True, slots=True)
class Index:
    """→ list[shm.message_values.IndexEntry]: the repository index."""


@final
@dataclass(frozen=True, slots=True)
class Metadata:
    """→ shm.messages.ModelMetadata, as far as KServe's metadata says: name, version(s), platform, inputs, outputs."""

    model: str
    version: str = ""


@final
@dataclass(frozen=True, slots=True)
class Config:
    """→ dict: the model configuration in Triton's JSON form, as far as `clientlib.details` reads it."""

    model: str
    version: str = ""


@final
@dataclass(frozen=True, slots=True)
class Statistics:
    """→ list[dict]: `model_stats` in Triton's JSON form (numbers, durations in ns). "": all models."""

    model: str = ""
    version: str = ""


@final
@dataclass(frozen=True, slots=True)
class Load:
    """→ None, when the model is ready. `config`, `files`: as of `Client.load`; files only with a config."""

    model: str
    config: str | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True)
class Unload:
    """→ None."""

    model: str
    unload_dependents: bool = False


@final
@dataclass(frozen=True, slots=True)
class RegisterSystem:
    """→ None: the server may use this POSIX object. For transports that share memory."""

    name: str
    key: str
    byte_size: int
    offset: int = 0


@final
@dataclass(frozen=True, slots=True)
class Unregister:
    """→ None, when the server has let go of the region. Unknown names succeed. For transports that share memory."""

    name: str


Word = Live | Index | Metadata | Config | Statistics | Load | Unload | RegisterSystem | Unregister

# --- inference ----------------------------------------------------------------------------------------------------


@final
@dataclass(slots=True)
class InputTensor:
    """Either `data`, in KServe's encoding, or `region` (if memory is shared) with offset and byte_size in bytes."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Buffer | None = None
    region: str = ""
    offset: int = 0
    byte_size: int = 0


@final
@dataclass(slots=True)
class WantedOutput:
    """`region`: where the server writes the result (if memory is shared); "": it comes with the answer."""

    name: str
    region: str = ""
    offset: int = 0
    byte_size: int = 0


@final
@dataclass(slots=True)
class InferRequest:
    """`outputs` None: all of them. `timeout_us`, `priority` and `sequence_id` 0: none given."""

    model: str
    version: str
    inputs: list[InputTensor]
    outputs: list[WantedOutput] | None = None
    timeout_us: int = 0
    priority: int = 0
    sequence_id: int = 0
    sequence_start: bool = False
    sequence_end: bool = False
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


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
class InferAnswer:
    """`timing` (queue, input, infer, output ns) and `copied` (bytes): what the server did, as far as the wire tells.

    `parameters`: what the model said beside the outputs.
    """

    outputs: list[OutputTensor] = field(default_factory=list)
    timing: tuple[int, int, int, int] = (0, 0, 0, 0)
    copied: int = 0
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


Ended = Callable[[InferAnswer | InferError], None]

# --- the interface ------------------------------------------------------------------------------------------------


class Transport(Protocol):
    """One server, for threads. Every method may be called from any thread.

    `wire` is what people call it ("gRPC").
    """

    wire: str
    shares_memory: bool

    def call(self, word: Word, deadline: float) -> Any:
        """Say a control word and wait for what answers it."""

    def infer(self, request: InferRequest, deadline: float) -> InferAnswer:
        """Run a request that names no region and wait, on the caller's thread."""

    def submit(self, request: InferRequest, deadline: float, ended: Ended) -> Callable[[], None]:
        """Start a request. `ended` is called exactly once, from any thread, possibly before this returns.

        Returns what asks for an early end: it does not wait, may be called at any time and more than once. After it
        `ended` gets a CANCELLED error, or whatever the end was that came first.
        """

    def wait(self, event: threading.Event, timeout: float | None) -> bool:
        """Wait for what an `ended` will set, at most `timeout` seconds; was it set?"""

    def close(self) -> None:
        """Let go of everything; requests in flight end with an error, soon. May be called again, from any thread."""

    def leave_to_parent(self) -> None:
        """In a forked child: close copies of descriptors at most, take no lock, call nobody. Never used again."""


class AsyncTransport(Protocol):
    """One server, for one event loop."""

    wire: str
    shares_memory: bool

    async def call(self, word: Word, deadline: float) -> Any:
        """Say a control word and await what answers it."""

    async def infer(self, request: InferRequest, deadline: float) -> InferAnswer:
        """Run a request. Cancelling the awaiting task cancels the request."""

    async def close(self) -> None:
        """Let go of everything; requests in flight end with an error. May be called again."""

    def drop(self) -> None:
        """As far as `close` can go without awaiting: for clients that nobody closed. From any thread."""

    def leave_to_parent(self) -> None:
        """As `Transport.leave_to_parent`."""


# --- several answers to one request, where the wire has them -------------------------------------------------------


class Answers(Protocol):
    """The answers to one request, for threads."""

    def next(self) -> InferAnswer | None:
        """Wait for the next one; None: that was the last. Raises the InferError that comes in its place."""

    def cancel(self) -> bool:
        """Ask for an early end; False when it has come. Does not wait; any thread, any time."""


class AsyncAnswers(Protocol):
    """The answers to one request, for an event loop. `final`: nothing follows what came last, as it said itself."""

    final: bool

    async def next(self) -> InferAnswer | None:
        """As `Answers.next`. Cancelling the awaiting task cancels the request."""

    def cancel(self) -> bool:
        """As `Answers.cancel`, on the loop."""


@runtime_checkable
class Streams(Protocol):
    """A transport for threads that carries several answers to a request."""

    def stream(self, request: InferRequest, deadline: float, ended: Callable[[], None]) -> Answers:
        """Send a request, whose data are not needed any more when this returns.

        `ended` is called exactly once, from any thread, when it is over, unless this raises.
        """


@runtime_checkable
class AsyncStreams(Protocol):
    """The same for an event loop."""

    def stream(self, request: InferRequest, deadline: float, ended: Callable[[], None]) -> AsyncAnswers:
        """As `Streams.stream`."""


# --- what all transports say the same way -------------------------------------------------------------------------

_REQUEST_ID = re.compile(r"^\[request id: [^\]]*\] ")
_UNLOADED = re.compile(r"Request for unknown model: '([^']+)' has no available versions: unloaded")
_RESTRICTED = re.compile(r"This (?:API|protocol) is restricted, expecting header '([^']+)'")
_APIS: dict[type[Word], str] = {  # Triton's names of what is restricted; everything else runs models
    Live: "health",
    Index: "model-repository",
    Metadata: "metadata",
    Config: "model-config",
    Statistics: "statistics",
    Load: "model-repository",
    Unload: "model-repository",
    RegisterSystem: "shared-memory",
    Unregister: "shared-memory",
}


def plain(text: str, word: Word | None = None) -> str:
    """A server's error text without the request's id, which whoever gets the error here knows.

    What `word` (None: a request) needs a header for is told with how to send it, behind the server's text; of a model
    that was unloaded, how it comes back.
    """
    text = _REQUEST_ID.sub("", text)
    if missing := _RESTRICTED.fullmatch(text):
        api = _APIS[type(word)] if word is not None else "inference"
        text += f" with its value for '{api}': clientlib.connect(url, headers={{'{missing[1]}': value}})"
    elif gone := _UNLOADED.fullmatch(text):
        text += f"; client.load('{gone[1]}') loads it, if it is in the repository"
    return text


def unreachable(address: Address, reason: object) -> InferError:
    """The error for a server that could not be asked."""
    return InferError(Code.UNAVAILABLE, f"cannot reach {address.url}: {reason}")


def lost(address: Address, reason: object) -> ConnectionLost:
    """The error for an answer that will not come."""
    return ConnectionLost(
        f"the connection to {address.url} ended before the answer came ({reason}): the request may have run or not"
    )


def late(address: Address, word: Word) -> InferError:
    """The error for a control word without an answer at its deadline."""
    return InferError(Code.UNAVAILABLE, f"timeout expired: no answer to {type(word).__name__} from {address.url}")


def cancelled() -> InferError:
    """The error of a request that was cancelled, in the words of the native transport."""
    return InferError(Code.CANCELLED, "the request was cancelled")


def missing(wire: str, extra: str, error: ImportError) -> InferError:
    """The error for a package that is not installed."""
    return InferError(
        Code.UNSUPPORTED,
        f"the {wire} transport needs a package that is not installed ({error.name or error}): "
        f"pip install 'tensorbroker[{extra}]'",
    )


def latest(versions: Sequence[str]) -> str:
    """The version that a request without one gets, of those that are ready."""
    return max(versions, key=lambda version: (len(version), version), default="")
