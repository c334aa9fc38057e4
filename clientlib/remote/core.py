"""What a remote client knows and says: regions, models, requests; without I/O.

Every verb is a procedure that yields control words (`clientlib.remote.transport.Word`) and gets what answers them:
`RemoteClient` drives it with blocking calls, `AsyncRemoteClient` with awaits. Regions are this process's memory; only a
transport that shares memory tells the server of them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar, final

import numpy.typing as npt

from clientlib import details, process
from clientlib.address import Address
from clientlib.arena import aligned
from clientlib.arguments import LONGEST_TEXT, model_text, shown, text, version_text, whole
from clientlib.callable_model import Known
from clientlib.failures import with_remedy
from clientlib.pending import expired
from clientlib.recipe import Recipe
from clientlib.region import MappedRegion, TensorRef
from clientlib.remote import memory, transport
from clientlib.remote.layout import Layout
from clientlib.remote.memory import Opened
from clientlib.remote.transport import InferRequest, Word
from clientlib.submission import remaining_s
from shm import model_fit
from shm.errors import Code, ConnectionLost, InferError
from shm.message_values import IndexEntry
from shm.messages import ModelMetadata, RegionRecord
from shm.model_fit import Given
from shm.regions import create_pool

T = TypeVar("T")
INLINE = 64 << 10  # bytes of arrays that go into a message where memory is shared
SMALLEST, KEPT = 1 << 20, 4  # of the regions for what does not: bytes of each, and how many wait for the next request
Procedure = Generator[Word, Any, T]
MakeRegion = Callable[..., MappedRegion]
log = logging.getLogger("clientlib")


@final
class Remote:
    """The state of one client. Made by the client, which also owns the transport."""

    def __init__(self, address: Address, wire: str, shares_memory: bool, make_region: MakeRegion) -> None:
        self.address = address
        self.shares_memory = shares_memory
        self.closed = False
        self.made_in = process.generation
        self.regions: dict[str, MappedRegion] = {}
        self._known: dict[tuple[str, str], ModelMetadata] = {}  # by name and version asked for, as last heard
        self._outdated: set[tuple[str, str]] = set()  # of these
        self._made: dict[str, weakref.finalize[..., MappedRegion]] = {}  # removes the name of an object made here
        self._scratch: list[MappedRegion] = []  # of the client's own, not in use
        self._wire = wire
        self._make_region = make_region

    @property
    def known(self) -> Known:
        """Models as last heard of."""
        return self._known

    # --- life ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises InferError when the client was closed or belongs to another process."""
        process.check(self.made_in)
        if self.closed:
            raise closed()

    def check_process(self) -> None:
        """Raises ForkedError in a child of the process that made the client."""
        process.check(self.made_in)

    def greet(self) -> Procedure[None]:
        """The first call: is there a server? Says once what the transport means for copies."""
        try:
            live = yield transport.Live()
        except ConnectionLost:  # gRPC's first one in a forked child may break while it comes about
            live = yield transport.Live()
        if not live:
            raise InferError(Code.UNAVAILABLE, f"the server at {self.address.url} is not ready to serve")
        means = (
            "arrays travel in messages, tensors in regions are read and written where they lie"
            if self.shares_memory
            else "tensors are copied into every request and out of every answer, regions are memory of this process; "
            "connect() on the broker's host shares memory instead"
        )
        log.info("connected to %s by %s: %s", self.address.url, self._wire, means)

    def close(self) -> bool:
        """Arrays stay valid, everything else says that the client was closed. False: not the first time."""
        if self.closed or self.made_in != process.generation:
            return False
        self.closed = True
        for region in self.regions.values():
            self._retire(region, "lost when the client was closed")
        self.regions.clear()
        for remove in tuple(self._made.values()):
            remove()
        self._scratch.clear()
        return True

    # --- regions ---------------------------------------------------------------------------------------------------

    def create_region(self, name: str, byte_size: int) -> Procedure[MappedRegion]:
        """New memory: local, or a POSIX object where the server shares it."""
        name, byte_size = self._free_name(name), whole(byte_size, "byte_size", 1)
        if not self.shares_memory:
            return self._enter(name, Opened(create_pool(byte_size), byte_size))
        region = yield from self._make_shared(name, byte_size)
        self.regions[name] = region  # the server has refused a second one of this name
        return region

    def register_system(self, name: str, key: str, byte_size: int, offset: int) -> Procedure[MappedRegion]:
        """A POSIX object that somebody made, mapped here."""
        name, key = self._free_name(name), text(key, "key", LONGEST_TEXT)
        byte_size, offset = whole(byte_size, "byte_size", 1), whole(offset, "offset")
        return (yield from self._register(name, memory.open_key(name, key, byte_size, offset)))

    def open_region(self, name: str | None, token: str) -> Procedure[MappedRegion]:
        """A region that another client on this host shared; without a name it gets one that follows from the token."""
        token = text(token, "token", LONGEST_TEXT)
        name = self._free_name(f"shared.{token[-64:]}" if name is None else name)
        return (yield from self._register(name, memory.open_token(name, token)))

    def share(self, region: MappedRegion) -> str:
        """A token for `region`."""
        if not isinstance(region, MappedRegion):
            raise InferError(Code.INVALID_ARG, f"region must be a region of this client, got {shown(region)}")
        self.check_region(region)
        return memory.token_of(region)

    def unregister(self, name: str | None) -> Procedure[None]:
        """Retire one region, or all. Unknown names succeed, as in Triton."""
        for each in [*self.regions] if name is None else [text(name, "name")]:
            if self.shares_memory:
                yield transport.Unregister(each)
            region = self.regions.pop(each, None)
            if region is not None:
                self._retire(region, "unregistered")

    def list_regions(self) -> list[RegionRecord]:
        """The regions there are."""
        return [
            RegionRecord(
                name=region.name,
                kind=region.kind,
                byte_size=region.byte_size,
                offset=region.offset,
                key=region.key,
                owner_pid=os.getpid(),
                owner_uid=os.getuid(),
            )
            for region in tuple(self.regions.values())
        ]

    def check_region(self, region: MappedRegion) -> None:
        """Raises InferError NOT_FOUND unless `region` is one of this client's."""
        if self.regions.get(region.name) is not region:
            why = f": it was {region.retired}" if region.retired else ": it belongs to another client"
            raise InferError(Code.NOT_FOUND, f"Unable to find shared memory region: '{region.name}'{why}")

    def borrow(self, values: Sequence[npt.NDArray[Any]]) -> Procedure[MappedRegion | None]:
        """Where the server shares memory, a region of the client's own for arrays too large for a message."""
        byte_size = sum(aligned(value.nbytes) for value in values)
        if not self.shares_memory or byte_size <= INLINE:
            return None
        for region in sorted(self._scratch, key=lambda region: region.byte_size):
            if region.byte_size >= byte_size:
                with contextlib.suppress(ValueError):  # another thread was faster
                    self._scratch.remove(region)
                    return region
        while len(self._scratch) >= KEPT:
            region = self._scratch.pop(0)
            yield transport.Unregister(region.name)
            self._retire(region, "replaced by a larger one")
        name = f"clientlib.{os.urandom(8).hex()}"
        return (yield from self._make_shared(name, max(1 << (byte_size - 1).bit_length(), SMALLEST)))

    def give_back(self, region: MappedRegion | None) -> None:
        """The request for which it was borrowed has ended. Any thread."""
        if region is not None and not self.closed:
            self._scratch.append(region)

    def _make_shared(self, name: str, byte_size: int) -> Procedure[MappedRegion]:
        opened = memory.create_system(name, byte_size)
        try:
            yield transport.RegisterSystem(name, opened.key, byte_size)
        except BaseException:
            os.close(opened.fd)
            memory.remove(opened.key, os.getpid())
            raise
        region = self._make_region(name, opened.fd, 0, byte_size, True, kind=opened.kind, key=opened.key)
        self._made[name] = weakref.finalize(region, memory.remove, opened.key, os.getpid())
        return region

    def _free_name(self, name: str) -> str:
        name = text(name, "name")
        if name in self.regions:
            raise InferError(Code.ALREADY_EXISTS, f"shared memory region '{name}' already in manager")
        return name

    def _register(self, name: str, opened: Opened) -> Procedure[MappedRegion]:
        if self.shares_memory:
            try:
                if not opened.key:
                    raise InferError(Code.NOT_FOUND, "this token names memory that a server cannot open")
                yield transport.RegisterSystem(name, opened.key, opened.byte_size, opened.offset)
            except BaseException:
                os.close(opened.fd)
                raise
        return self._enter(name, opened)

    def _enter(self, name: str, opened: Opened) -> MappedRegion:
        region = self._make_region(
            name, opened.fd, opened.offset, opened.byte_size, opened.writable, kind=opened.kind, key=opened.key
        )
        if self.regions.setdefault(name, region) is not region:  # another thread was faster
            raise InferError(Code.ALREADY_EXISTS, f"shared memory region '{name}' already in manager")
        return region

    def _retire(self, region: MappedRegion, why: str) -> None:
        region.retired = why
        region.release_fd()
        remove = self._made.pop(region.name, None)
        if remove is not None:
            remove()

    # --- models ----------------------------------------------------------------------------------------------------

    def models(self) -> Procedure[dict[str, ModelMetadata]]:
        """Every model by name; of those that are not ready, the state alone."""
        found: dict[str, ModelMetadata] = {}
        entries: Sequence[IndexEntry] = yield transport.Index()
        for entry in entries:
            if entry.state == "READY":
                found[entry.name] = yield from self.model(entry.name, "")
            elif entry.name not in found:
                found[entry.name] = ModelMetadata(
                    name=entry.name, version=entry.version, state=entry.state or "UNAVAILABLE", reason=entry.reason
                )
        return found

    def model(self, name: str, version: str | int) -> Procedure[ModelMetadata]:
        """One model. Raises InferError with Triton's lookup texts."""
        name, version = model_text(name), version_text(version)
        metadata: ModelMetadata = yield transport.Metadata(name, version)
        config: dict[str, Any] = yield transport.Config(name, version)
        model = self._known[name, version] = details.merged(metadata, config)
        self._outdated.discard((name, version))
        return model

    def heard_of(self, name: str, version: str) -> Procedure[ModelMetadata]:
        """The same, asked for only if it is not known or may be outdated."""
        model = self._known.get((name, version))
        if model is None or (name, version) in self._outdated:
            model = yield from self.model(name, version)
        return model

    def statistics(self, model: str, version: str | int) -> Procedure[list[dict[str, Any]]]:
        """Triton's model_stats."""
        stats: list[dict[str, Any]] = yield transport.Statistics(model_text(model, empty=True), version_text(version))
        return stats

    def load(self, model: str, config: str | None, files: Mapping[str, bytes]) -> Procedure[None]:
        """Load or reload a model; returns when it is ready."""
        yield transport.Load(model_text(model), config, files)

    def unload(self, model: str, unload_dependents: bool) -> Procedure[None]:
        """Unload a model."""
        yield transport.Unload(model_text(model), bool(unload_dependents))

    # --- requests --------------------------------------------------------------------------------------------------

    def prepare(self, recipe: Recipe) -> Procedure[Layout]:
        """Check a request as the broker would, and lay it out."""
        self._check_regions(recipe)
        model = yield from self.model(recipe.model, recipe.version)
        names, rows = _fit(recipe, model)
        layout = self._lay_out(recipe, names, rows)
        layout.ranges.enter()
        return layout

    def once(self, recipe: Recipe, *, streamed: bool = False) -> Procedure[Layout]:
        """The layout of a request that is made once.

        Where nothing need be known of the model, the server alone checks whether it fits: see `better_word`.
        """
        self._check_regions(recipe)
        names: Sequence[str] | None = None if recipe.outputs is None else tuple(recipe.outputs)
        if streamed or isinstance(recipe.outputs, dict):
            model = yield from self.heard_of(recipe.model, recipe.version)
            try:
                names, _ = _fit(recipe, model)
            except InferError:  # it may have been reloaded since
                names, _ = _fit(recipe, (yield from self.model(recipe.model, recipe.version)))
        layout = self._lay_out(recipe, names, 0)
        if layout.ranges.inputs or layout.ranges.outputs:
            layout.ranges.enter()
        return layout

    def better_word(self, recipe: Recipe, error: InferError) -> Procedure[InferError]:
        """What a native client is told of a request that was refused with `error`; that, if the request fits."""
        remedied = with_remedy(error)
        if remedied is not error or error.code != Code.INVALID_ARG.name:
            return remedied
        try:
            model = yield from self.model(recipe.model, recipe.version)
        except InferError:
            return error
        try:
            _fit(recipe, model)
        except InferError as better:
            return better
        return error

    def forget(self, model: str, version: str) -> None:
        """What was heard of a model may be outdated."""
        self._outdated.add((model, version))

    def _lay_out(self, recipe: Recipe, names: Sequence[str] | None, rows: int) -> Layout:
        return Layout(recipe, names, rows, shared=self.shares_memory)

    def _check_regions(self, recipe: Recipe) -> None:
        outputs = recipe.outputs.values() if isinstance(recipe.outputs, dict) else ()
        for ref in (*recipe.inputs.values(), *outputs):
            if isinstance(ref, TensorRef):
                self.check_region(ref.region)


def _fit(recipe: Recipe, model: ModelMetadata) -> tuple[Sequence[str], int]:
    """The outputs to ask for, and the rows of one position. Raises InferError as the broker does for native clients."""
    rows = model_fit.check_inputs(
        model, [Given(name, value.datatype, value.shape) for name, value in recipe.inputs.items()]
    )
    if recipe.outputs is None or isinstance(recipe.outputs, dict):
        # As in the native client: a mapping places some outputs, a list chooses.
        names = tuple(dict.fromkeys([*(tensor.name for tensor in model.outputs), *(recipe.outputs or ())]))
    else:
        names = tuple(recipe.outputs)
    model_fit.check_outputs_named(model, names)
    if isinstance(recipe.outputs, dict) and not model.decoupled:
        sizes = model_fit.symbol_sizes(model, {name: value.shape for name, value in recipe.inputs.items()})
        for name, ref in recipe.outputs.items():
            if ref is not None:
                model_fit.check_output(model, Given(name, ref.datatype, ref.shape), rows, sizes)
    return names, rows


def with_options(
    request: InferRequest, deadline_ns: int, priority: int, sequence_id: int, start: bool, end: bool
) -> InferRequest:
    """`request` with what every submission may carry."""
    if deadline_ns:
        request.timeout_us = max((deadline_ns - time.monotonic_ns()) // 1000, 1)
    request.priority, request.sequence_id = int(priority), int(sequence_id)
    request.sequence_start, request.sequence_end = bool(start), bool(end)
    return request


def deadline_of(deadline_ns: int) -> float:
    """A request's deadline as transports want it."""
    return deadline_ns * 1e-9 if deadline_ns else math.inf


def patience_s(deadline_ns: int, otherwise: float) -> float:
    """Seconds that what a request needs may take: until its deadline, without one `otherwise`."""
    remaining = remaining_s(deadline_ns)
    if remaining is not None and remaining <= 0:
        raise expired()
    return otherwise if remaining is None else remaining


def closed() -> InferError:
    """The error for calls on a client that was closed."""
    return InferError(Code.UNAVAILABLE, "the client was closed")


def full(slots: int) -> InferError:
    """The error for one request too many."""
    return InferError(
        Code.UNAVAILABLE,
        f"all {slots} slots of this client are taken by outstanding requests: wait for results, or connect(slots=) "
        "with more",
    )
