"""Session messages that mostly gateways need: the rest of what is asked, and requests on behalf of a principal.

Part of the protocol that `shm.messages` describes.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from shm.message_values import IndexEntry, Message, Name, Principal, Size, Text

# --- what else is asked, mostly by gateways ----------------------------------------------------------------------


class GetConfig(Message, frozen=True, kw_only=True, tag=True):
    """`whole`: all that the broker knows of it, for `tensorbroker explain`."""

    model: Text
    version: Text = ""
    whole: bool = False


class GetIndex(Message, frozen=True, kw_only=True, tag=True):
    ready: bool = False  # only those that are READY


class GetServer(Message, frozen=True, kw_only=True, tag=True):
    pass


class GetMetrics(Message, frozen=True, kw_only=True, tag=True):
    pass


class LogSettings(Message, frozen=True, kw_only=True, tag=True):
    """Triton's log settings after those in `update` were changed."""

    update: dict[str, bool | int | str] = {}


class TraceSettings(Message, frozen=True, kw_only=True, tag=True):
    """Triton's trace settings, of a model or ("") the global ones, after `update`; None clears to the global value."""

    model: Text = ""
    update: dict[str, str | list[str] | None] = {}


# --- gateway → broker, on behalf of a principal; refused to everybody else ----------------------------------------


class RegisterFor(Message, frozen=True, kw_only=True, tag=True):
    principal: Principal
    name: Name
    key: Text
    byte_size: Size
    offset: Size = 0


class RegisterCudaFor(Message, frozen=True, kw_only=True, tag=True):
    """GPU memory by its cudaIpcMemHandle_t. `ordinal`: the broker's own number of the GPU, from 0.

    A handle that has not 64 bytes is refused; by the broker, which knows whether there is a GPU at all.
    """

    principal: Principal
    name: Name
    handle: Annotated[bytes, msgspec.Meta(max_length=65)]
    ordinal: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
    byte_size: Size


class UnregisterFor(Message, frozen=True, kw_only=True, tag=True):
    """`name` "" means all of the principal's regions of `kind` ("system", "cuda"; "": any). Unknown names succeed."""

    principal: Principal
    name: Text = ""
    kind: Text = ""


class ListFor(Message, frozen=True, kw_only=True, tag=True):
    principal: Principal


class UseRegion(Message, frozen=True, kw_only=True, tag=True):
    """Open the principal's region in the gateway's own session. The reply's `name` is what plans call it there.

    Asked again for the same region, the answer is the same. It ends with the principal's region. `descriptor`: one
    descriptor of its file comes along, which GPU memory has not.
    """

    principal: Principal
    name: Name
    descriptor: bool = False


class Serving(Message, frozen=True, kw_only=True, tag=True):
    """The gateway listens (`lines`: what to log, one per service), or cannot (`error` says why)."""

    lines: tuple[Text, ...] = ()
    error: Text = ""


# --- broker → client ----------------------------------------------------------------------------------------------


class Config(Message, frozen=True, kw_only=True, tag=True):
    """The completed model configuration in Triton's JSON form. `labels`: an output's label file, one name a line.

    `whole`, if asked for: the broker's own form (`broker.repository.config.ModelConfig`, without large data), then
    those of an ensemble's members, and of theirs, that serve now. `version`: the number of the version.
    """

    config: str
    labels: dict[str, bytes] = {}
    whole: tuple[bytes, ...] = ()
    version: int = 0


class Index(Message, frozen=True, kw_only=True, tag=True):
    models: tuple[IndexEntry, ...]


class ServerState(Message, frozen=True, kw_only=True, tag=True):
    """`ready` follows --strict-readiness; both are False while the broker exits."""

    live: bool
    ready: bool


class Metrics(Message, frozen=True, kw_only=True, tag=True):
    """The numbers behind /metrics: see `broker.metrics`."""

    metrics: dict[str, Any]


class Settings(Message, frozen=True, kw_only=True, tag=True):
    settings: dict[str, Any]


class Tracing(Message, frozen=True, kw_only=True, tag=True):
    """Sent to gateways unasked: the trace settings by model, "" the global ones, now that `model`'s were changed."""

    settings: dict[str, dict[str, str | list[str]]]
    model: Text = ""


class Exiting(Message, frozen=True, kw_only=True, tag=True):
    """Sent to gateways unasked: refuse new requests from now on with "Server exiting", finish those that run."""
