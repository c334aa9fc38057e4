"""What the broker and its loader process say to each other.

The broker writes one `LoadRequest` to the loader's stdin and closes it. The loader answers on stdout:

    Plan, then for every model: Begun, then Loaded or Failed; at the end Finished

each message as u32 (little endian) length + msgpack. `Begun` makes a crash inside a parser attributable: a loader that
dies after it dies of that model. `LoadRun` is the receiver's whole state, without any I/O: the broker feeds it from
asyncio, `broker.repository.check` from a blocking pipe.
"""

from __future__ import annotations

from typing import final

import msgspec

from broker.repository.config import LoadFailure, ModelConfig
from shm.errors import Code, InferError

MAX_REQUEST = 8 << 20  # bytes
MAX_MESSAGE = 64 << 20  # bytes; a configuration has kilobytes, so more is a damaged stream
_PREFIX = 4


class LoadRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Load `models` (empty: all) of `repositories`.

    `strict`: configurations must be complete (`--strict-model-config`), nothing is taken from the model file.
    `default_max_batch_size`: for models that can batch and do not say how far.
    `gpus`: device ordinals on which the broker can place instances; `no_gpus`: why there are no (other) ones.
    `on_cpu`: backends that use no GPU, as they are installed: for them KIND_AUTO is KIND_CPU.
    `overrides`: model → its configuration, in place of its config.pbtxt, in Triton's JSON form.
    `config_name` (`--model-config-name`): take `<model>/configs/<config_name>.pbtxt` where there is one.
    `explain`: also say where every value comes from (`ModelConfig.origins`, `ModelConfig.explanation`).
    `every`: of a model that fails, say all that is wrong (`LoadFailure.further`).
    """

    repositories: tuple[str, ...]
    models: tuple[str, ...] = ()
    strict: bool = False
    default_max_batch_size: int = 4
    gpus: tuple[int, ...] = ()
    no_gpus: str = ""
    on_cpu: tuple[str, ...] = ()
    overrides: dict[str, str] = {}
    config_name: str = ""
    explain: bool = False
    every: bool = False


class LoaderMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Anything the loader writes."""


class Plan(LoaderMessage, frozen=True, kw_only=True, tag=True):
    """The models that will be attempted, in order. `errors`: repositories that could not be read (path → reason)."""

    models: tuple[str, ...]
    errors: dict[str, str] = {}


class Begun(LoaderMessage, frozen=True, kw_only=True, tag=True):
    """The files of this model are about to be read."""

    name: str


class Loaded(LoaderMessage, frozen=True, kw_only=True, tag=True):
    """A model that can be served."""

    config: ModelConfig


class Failed(LoaderMessage, frozen=True, kw_only=True, tag=True):
    """A model that cannot."""

    failure: LoadFailure


class Finished(LoaderMessage, frozen=True, kw_only=True, tag=True):
    """Nothing follows."""


FromLoader = Plan | Begun | Loaded | Failed | Finished

_encoder = msgspec.msgpack.Encoder()
_from_loader: msgspec.msgpack.Decoder[FromLoader] = msgspec.msgpack.Decoder(FromLoader)
_request: msgspec.msgpack.Decoder[LoadRequest] = msgspec.msgpack.Decoder(LoadRequest)


def encode_request(request: LoadRequest) -> bytes:
    """What the broker writes to the loader's stdin."""
    return _encoder.encode(request)


def decode_request(data: bytes) -> LoadRequest:
    """Raises InferError INVALID_ARG."""
    if len(data) > MAX_REQUEST:
        raise InferError(Code.INVALID_ARG, f"load request has more than {MAX_REQUEST} bytes")
    try:
        return _request.decode(data)
    except msgspec.MsgspecError as error:
        raise InferError(Code.INVALID_ARG, f"load request cannot be read: {error}") from error


def frame(message: LoaderMessage) -> bytes:
    """The message as it travels."""
    body = _encoder.encode(message)
    return len(body).to_bytes(_PREFIX, "little") + body


@final
class LoadRun:
    """One run of a loader process as its reader sees it: bytes in, results out."""

    __slots__ = ("_buffer", "current", "finished", "plan", "results")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.plan: Plan | None = None
        self.current: str | None = None
        self.results: dict[str, ModelConfig | LoadFailure] = {}
        self.finished = False

    def feed(self, data: bytes) -> list[FromLoader]:
        """Take what the pipe gave; return the messages that are now complete.

        Raises InferError INTERNAL when the bytes are no stream of messages: stop reading then, and call `ended`.
        """
        self._buffer += data
        messages: list[FromLoader] = []
        while len(self._buffer) >= _PREFIX:
            size = int.from_bytes(self._buffer[:_PREFIX], "little")
            if size > MAX_MESSAGE:
                raise InferError(Code.INTERNAL, f"the loader announced a message of {size} bytes")
            if len(self._buffer) < _PREFIX + size:
                break
            try:
                message = _from_loader.decode(bytes(self._buffer[_PREFIX : _PREFIX + size]))
            except msgspec.MsgspecError as error:
                raise InferError(Code.INTERNAL, f"the loader wrote a message that cannot be read: {error}") from error
            del self._buffer[: _PREFIX + size]
            self._take(message)
            messages.append(message)
        return messages

    def _take(self, message: FromLoader) -> None:
        match message:
            case Plan():
                self.plan = message
            case Begun():
                self.current = message.name
            case Loaded():
                self.results[message.config.name] = message.config
                self.current = None
            case Failed():
                self.results[message.failure.name] = message.failure
                self.current = None
            case Finished():
                self.finished = True

    def ended(self, how: str) -> tuple[str, ...]:
        """The process is gone (`how`: "was killed by SIGSEGV", "exited with status 1", …).

        The model it was reading fails with that reason. Returns the models to ask a new loader for: those that it had
        not begun. A loader that dies between models would do so again, so then the rest fails too.
        """
        if self.finished or self.plan is None:
            return ()
        rest = tuple(name for name in self.plan.models if name not in self.results)
        if self.current is None:
            for name in rest:
                self.results[name] = LoadFailure(name=name, reason=f"the loader process {how} before this model")
            return ()
        self.results[self.current] = LoadFailure(
            name=self.current, reason=f"the loader process {how} while it read this model's files"
        )
        return tuple(name for name in rest if name != self.current)
