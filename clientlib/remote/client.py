"""`RemoteClient`: the client of `clientlib.connect("grpc://…")` and the like, for threads.

    RemoteClient ── Remote (what is said, what is known)
                 └─ Transport (how it gets there)

The same verbs as `clientlib.Client`. Nothing is repeated: a request that may have run is not sent again, and a server
that went away is reached again by the next call.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar, final

import numpy.typing as npt

from clientlib import process
from clientlib.address import Address
from clientlib.arguments import LoadConfig, LoadFiles, load_arguments, model_text, seconds, version_text, whole
from clientlib.automatic import Inputs, Request
from clientlib.callable_model import Model
from clientlib.claims import FULL_WAIT_S
from clientlib.client import CALL_S
from clientlib.failures import NO_CUDA
from clientlib.interrupted import Turn
from clientlib.leases import not_native
from clientlib.process import StaysHere
from clientlib.recipe import Budget, Outputs, Slots, recipe
from clientlib.region import MappedRegion, Region, TensorRef
from clientlib.remote import opening
from clientlib.remote.core import Procedure, Remote, deadline_of, full, patience_s
from clientlib.remote.layout import Layout, Position, move
from clientlib.remote.plans import RemotePending, RemotePlan, ended_result, request_of
from clientlib.remote.streams import RemoteInflow, RemoteSingle, check_layout
from clientlib.remote.transport import Answers, InferAnswer, InferRequest, Streams, Transport
from clientlib.results import InferResult
from clientlib.streams import Source, Stream
from clientlib.submission import MAX_PRIORITY, Options, deadline_ns_of
from shm.errors import Code, InferError, fresh
from shm.messages import ModelMetadata, RegionRecord
from shm.parameters import Parameter

T = TypeVar("T")
LAST_WORD_S = 5.0  # how long to ask why a request was refused
UNUSED = Budget(places=1, byte_size=1)  # nothing is reserved here


def connect(address: Address, timeout: float, slots: int) -> RemoteClient:
    """Connect to a server. Called by `clientlib.connect`, which describes the arguments.

    Raises InferError UNAVAILABLE when it is not reached.
    """
    client = RemoteClient(address, opening.connect(address), slots)
    try:
        client.greet(timeout)
    except BaseException:
        client.close()
        raise
    return client


@final
class RemoteClient(StaysHere):
    """A connection to a server. Every method may be called from any thread. What the verbs do: see `Client`."""

    elsewhere = "call clientlib.connect() in the other process"

    def __init__(self, address: Address, transport: Transport, slots: int) -> None:
        reference = weakref.ref(self)

        def make_region(*args: Any, **kwargs: Any) -> MappedRegion:
            owner = reference()
            assert owner is not None
            return Region(*args, **kwargs).bind(owner)

        self.remote = Remote(address, transport.wire, transport.shares_memory, make_region)
        self._transport = transport
        self._slots = slots
        self._free = threading.BoundedSemaphore(slots)
        self.turn = Turn()  # of each call of the transport, and of what waits for one
        process.tell_after_fork(self)
        weakref.finalize(self, _close, transport, process.generation)

    def greet(self, timeout: float) -> None:
        """Ask whether the server is there. Called by `connect`."""
        self._run(self.remote.greet(), timeout)

    # --- models ----------------------------------------------------------------------------------------------------

    def models(self) -> dict[str, ModelMetadata]:
        """Every model of the server by name, with its state."""
        return self._run(self.remote.models())

    def model(self, name: str, version: str | int = "") -> Model:
        """A model to call. Raises InferError when the server does not serve it."""
        name, version = model_text(name), version_text(version)
        self._run(self.remote.model(name, version))
        return Model(self, self.remote.known, name, version)

    def statistics(self, model: str = "", version: str | int = "") -> list[dict[str, Any]]:
        """Triton's model statistics (counts, durations in ns), of one model or all."""
        return self._run(self.remote.statistics(model, version))

    def load(self, model: str, timeout: float = CALL_S, *, config: LoadConfig = None, files: LoadFiles = None) -> None:
        """Load a model, or reload it; returns when it is ready.

        `config`: the configuration to use in place of the repository's, as a dict or JSON text. `files`: path below the
        model's directory → contents; then the model consists of these alone, and needs a `config`.
        """
        text, contents = load_arguments(config, files)
        self._run(self.remote.load(model, text, contents), timeout)

    def unload(self, model: str, timeout: float = CALL_S, *, unload_dependents: bool = False) -> None:
        """Unload a model; requests it has accepted are finished. `unload_dependents`: and members that only it used."""
        self._run(self.remote.unload(model, unload_dependents), timeout)

    def keep_loaded(
        self, model: str, version: str | int = "", timeout: float = CALL_S
    ) -> AbstractContextManager[Model]:
        """Raises InferError UNSUPPORTED: the protocol knows no leases."""
        raise not_native()

    # --- regions ---------------------------------------------------------------------------------------------------

    def create_region(self, name: str, byte_size: int) -> Region:
        """New memory of this host; the server shares it where the transport does."""
        return _own(self._run(self.remote.create_region(name, byte_size)))

    def register_system_shm(self, name: str, key: str, byte_size: int, offset: int = 0) -> Region:
        """POSIX shared memory of this host that exists already; `key` is its name below /dev/shm."""
        return _own(self._run(self.remote.register_system(name, key, byte_size, offset)))

    def register_cuda_shm(self, name: str, tensor: object = None, **_: object) -> Region:
        """GPU memory; raises InferError UNSUPPORTED."""
        raise InferError(Code.UNSUPPORTED, f"cannot register '{name}': {NO_CUDA}")

    def alloc_cuda(self, name: str, byte_size: int, device: str | None = None) -> Region:
        """GPU memory; raises InferError UNSUPPORTED."""
        raise InferError(Code.UNSUPPORTED, f"cannot allocate '{name}': {NO_CUDA}")

    def open_region(self, token: str, name: str | None = None) -> Region:
        """A region that another client of the same uid on this host shared."""
        return _own(self._run(self.remote.open_region(name, token)))

    def share(self, region: MappedRegion) -> str:
        """As `region.share()`."""
        self.remote.check()
        return self.remote.share(region)

    def regions(self) -> list[RegionRecord]:
        """The regions of this client."""
        self.remote.check()
        return self.remote.list_regions()

    def unregister(self, name: str | None = None) -> None:
        """Retire one region, or all. Requests that run end as usual, arrays stay valid."""
        self._run(self.remote.unregister(name))

    # --- inference -------------------------------------------------------------------------------------------------

    def prepare(
        self,
        model: str,
        inputs: Mapping[str, TensorRef],
        outputs: Outputs = None,
        slots: Slots = 1,
        version: str | int = "",
        parameters: Mapping[str, Parameter] | None = None,
    ) -> RemotePlan:
        """Check a request once, to run it many times. Raises InferError with what does not fit."""
        return RemotePlan(
            self, self._run(self.remote.prepare(recipe(model, inputs, outputs, slots, version, UNUSED, parameters)))
        )

    def infer(
        self,
        model: str,
        inputs: Inputs,
        outputs: Outputs = None,
        timeout: float | None = None,
        priority: int = 0,
        parameters: Mapping[str, Parameter] | None = None,
        version: str | int = "",
    ) -> InferResult:
        """Run a model on arrays, or on tensors in regions."""
        deadline_ns = 0 if timeout is None else deadline_ns_of(timeout)
        asked = Request(model, version, inputs, outputs, parameters)
        options = (0, whole(priority, "priority", 0, MAX_PRIORITY), 0, False, False)
        made = asked.recipe(UNUSED)
        layout = self._run(self.remote.once(made), patience_s(deadline_ns, CALL_S))
        scratch = self._run(self.remote.borrow(asked.values), patience_s(deadline_ns, CALL_S))
        try:
            try:
                request, at, copied = request_of(self.remote, layout, deadline_ns, 0, None, options, asked.values)
            except BaseException:
                self.remote.give_back(scratch)
                raise
            if scratch is None:
                return self.run(layout, request, at, copied, deadline_ns)
            move(request, scratch)
            return self.start(None, layout, request, at, copied, deadline_ns, scratch).result()
        except InferError as error:
            if error.code == "NOT_FOUND":
                self.remote.forget(made.model, made.version)  # the model may have changed: ask again next time
            raise self._run(self.remote.better_word(made, error), LAST_WORD_S) from None

    def stream(
        self,
        model: str,
        inputs: Inputs,
        outputs: Outputs = None,
        timeout: float | None = None,
        priority: int = 0,
        parameters: Mapping[str, Parameter] | None = None,
        version: str | int = "",
    ) -> Stream:
        """Send a request; iterate over what comes. As `Client.stream`.

        Responses of a decoupled model come over gRPC; other transports raise InferError UNSUPPORTED. From a server
        that is no broker, an error in the place of a response has no code of its own there (UNKNOWN).
        """
        deadline_ns = 0 if timeout is None else deadline_ns_of(timeout)
        asked = Request(model, version, inputs, outputs, parameters)
        options = (0, whole(priority, "priority", 0, MAX_PRIORITY), 0, False, False)
        made = asked.recipe(UNUSED)
        layout = self._run(self.remote.once(made, streamed=True), patience_s(deadline_ns, CALL_S))

        def failed(error: InferError) -> None:
            if error.code in ("NOT_FOUND", "INVALID_ARG", "UNSUPPORTED", "UNKNOWN"):
                self.remote.forget(made.model, made.version)

        try:
            return Stream(self.source(None, layout, deadline_ns, 0, options, asked.values), failed)
        except InferError as error:
            failed(error)
            raise

    # --- life ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of the server. Arrays, results included, stay valid. May be called again."""
        if self.remote.close():
            self._transport.close()

    def __enter__(self) -> RemoteClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def leave_to_parent(self) -> None:
        """In a forked child: nothing of this client works here."""
        self._transport.leave_to_parent()

    # --- inside ----------------------------------------------------------------------------------------------------

    def source(
        self,
        plan: object,
        layout: Layout,
        deadline_ns: int,
        input_slot: int,
        options: Options,
        values: Sequence[npt.NDArray[Any]] = (),
    ) -> Source:
        """Send the request of a stream."""
        model = self._run(self.remote.heard_of(layout.model, layout.version), patience_s(deadline_ns, CALL_S))
        if not model.decoupled:
            scratch = self._run(self.remote.borrow(values), patience_s(deadline_ns, CALL_S))
            try:
                request, at, copied = request_of(self.remote, layout, deadline_ns, input_slot, None, options, values)
            except BaseException:
                self.remote.give_back(scratch)
                raise
            if scratch is not None:
                move(request, scratch)
            return RemoteSingle(self.start(plan, layout, request, at, copied, deadline_ns, scratch))
        check_layout(layout, self._transport.wire, streams=isinstance(self._transport, Streams))
        assert isinstance(self._transport, Streams)
        request, at, copied = request_of(self.remote, layout, deadline_ns, input_slot, None, options, values)
        transport = self._transport
        try:
            answers = self.turn.run(lambda: self._stream(transport, request, deadline_ns))
        finally:
            layout.ranges.live.pop(at.output_slot, None)  # its inputs are in the message
        return RemoteInflow((self, plan), self.remote, layout, answers, copied)

    def _stream(self, transport: Streams, request: InferRequest, deadline_ns: int) -> Answers:
        self._take_slot(deadline_ns)
        try:
            return transport.stream(request, deadline_of(deadline_ns), self._free.release)
        except BaseException:
            self._free.release()
            raise

    def run(self, layout: Layout, request: InferRequest, at: Position, copied: int, deadline_ns: int) -> InferResult:
        """Run a request whose ranges are claimed and wait for it."""
        if layout.shared and layout.regions:  # those stay in use when the deadline answers the caller
            return self.start(None, layout, request, at, copied, deadline_ns).result()
        end: InferAnswer | InferError
        try:
            end = self.turn.run(lambda: self._exchange(request, deadline_ns))
        except InferError as error:
            end = fresh(error)
        except BaseException:
            layout.ranges.live.pop(at.output_slot, None)
            raise
        result = ended_result(layout, at, copied, end)
        if isinstance(result, InferError):
            self.remote.check()  # a client that was closed meanwhile says so
            raise fresh(result)
        return result

    def start(
        self,
        plan: object,
        layout: Layout,
        request: InferRequest,
        at: Position,
        copied: int,
        deadline_ns: int,
        scratch: MappedRegion | None = None,
    ) -> RemotePending:
        """Start a request whose ranges are claimed. `scratch` is given back at its end."""
        try:
            self.turn.run(lambda: self._take_slot(deadline_ns))
        except BaseException:
            layout.ranges.live.pop(at.output_slot, None)
            self.remote.give_back(scratch)
            raise

        def freed() -> None:
            self.remote.give_back(scratch)
            self._free.release()

        pending = RemotePending((self, plan), layout, at, copied, deadline_ns, freed)
        self.turn.run(lambda: self._submit(request, deadline_ns, pending))
        return pending

    def _submit(self, request: InferRequest, deadline_ns: int, pending: RemotePending) -> None:
        try:
            cancel = self._transport.submit(request, deadline_of(deadline_ns), pending.ended)
            pending.submitted(cancel, self._transport.wait)
        except InferError as error:  # it did not start
            pending.ended(error)
            raise

    def _exchange(self, request: InferRequest, deadline_ns: int) -> InferAnswer:
        self._take_slot(deadline_ns)
        try:
            return self._transport.infer(request, deadline_of(deadline_ns))
        finally:
            self._free.release()

    def _take_slot(self, deadline_ns: int) -> None:
        if self._free.acquire(blocking=False):
            return
        if not self._free.acquire(timeout=patience_s(deadline_ns, FULL_WAIT_S)):
            raise full(self._slots)

    def _run(self, steps: Procedure[T], timeout: float = CALL_S) -> T:
        self.remote.check()
        deadline = time.monotonic() + seconds(timeout)
        try:
            word = next(steps)
            while True:
                try:
                    answer: Any = self.turn.run(functools.partial(self._transport.call, word, deadline))
                except BaseException as error:
                    word = steps.throw(error)
                else:
                    word = steps.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result


def _close(transport: Transport, made_in: int) -> None:
    if made_in == process.generation:
        transport.close()


def _own(region: MappedRegion) -> Region:
    assert isinstance(region, Region)
    return region
