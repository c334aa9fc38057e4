"""`Client`: the library for threads.

    Client ── Native (what is said, what is known)
        └──── SyncSession (how it gets there)

A call finds the session lost at worst once: it is then repeated on a new one, on which regions were registered again.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, TypeVar, final

from clientlib.address import Absent, dial
from clientlib.arguments import LoadConfig, LoadFiles, load_arguments, model_text, seconds, text, version_text, whole
from clientlib.automatic import Automatic, Inputs, Request, told_apart
from clientlib.callable_model import Model
from clientlib.channels import Lane, Lanes
from clientlib.cuda_export import allocate, export
from clientlib.cuda_order import Ring
from clientlib.cuda_region import CudaRegion, register
from clientlib.failures import Crowded, PlanOutdated, RoomNeeded, with_remedy
from clientlib.interrupted import Turn
from clientlib.leases import kept
from clientlib.link import Bound, Link, Prepared
from clientlib.native import Native
from clientlib.patience import Patience, drive
from clientlib.plans import Plan
from clientlib.process import StaysHere
from clientlib.recipe import Budget, Outputs, Recipe, Slots, recipe
from clientlib.region import MappedRegion, Region, TensorRef
from clientlib.results import InferResult
from clientlib.session import Procedure
from clientlib.spread import Spread
from clientlib.streams import Source, Stream
from clientlib.submission import MAX_PRIORITY, deadline_ns_of
from clientlib.sync_session import SyncSession
from shm.errors import Code, ConnectionLost, InferError, fresh
from shm.messages import ModelMetadata, RegionRecord
from shm.parameters import Parameter

T = TypeVar("T")
CALL_S = 30.0  # how long a control call may take
RECONNECT_S = 10.0  # how long a broker that went away is waited for
RETRY_S = 0.02
BUDGET = Budget(places=64, byte_size=1 << 20)
MAX_SLOTS = 1024


@final
class Client(StaysHere):
    """A connection to the broker. Every method may be called from any thread; made by `connect`."""

    elsewhere = "call clientlib.connect() in the other process"

    def __init__(self, directory: str, deadline: float, slots: int, spin_s: float) -> None:
        reference = weakref.ref(self)

        def make_region(*args: Any, **kwargs: Any) -> MappedRegion:
            owner = reference()
            assert owner is not None
            return Region(*args, **kwargs).bind(owner)

        self.native: Native[Lane] = Native(directory, slots, spin_s, make_region)
        self._automatic: Automatic[Plan] = Automatic()
        self._connecting = threading.Lock()
        self._patience = Patience()
        self._closing = threading.Event()
        self._turn = Turn()
        self._connect(deadline, wait=False)
        # Not at exit: daemon threads that call until then would all print that it was closed. The process ends it, too.
        weakref.finalize(self, self.native.close).atexit = False

    # --- models ----------------------------------------------------------------------------------------------------

    def models(self) -> dict[str, ModelMetadata]:
        """Every model of the broker by name, with its state."""
        return self._run(self.native.models)

    def model(self, name: str, version: str | int = "") -> Model:
        """A model to call. Raises InferError when the broker does not serve it."""
        name, version = model_text(name), version_text(version)
        self._run(lambda link: self.native.model(link, name, version))
        return Model(self, self.native.known, name, version)

    def statistics(self, model: str = "", version: str | int = "") -> list[dict[str, Any]]:
        """Triton's model statistics (counts, durations in ns), of one model or all."""
        return self._run(lambda link: self.native.statistics(link, model, version))

    def load(self, model: str, timeout: float = CALL_S, *, config: LoadConfig = None, files: LoadFiles = None) -> None:
        """Load a model, or reload it; returns when it is ready.

        `config`: the configuration to use in place of the repository's, as a dict or JSON text. `files`: path below the
        model's directory → contents; then the model consists of these alone, and needs a `config`.
        """
        text, contents = load_arguments(config, files)
        self._run(lambda link: self.native.load(link, model, text, contents), timeout)

    def unload(self, model: str, timeout: float = CALL_S, *, unload_dependents: bool = False) -> None:
        """Unload a model; requests it has accepted are finished. `unload_dependents`: and members that only it used."""
        self._run(lambda link: self.native.unload(link, model, unload_dependents), timeout)

    def keep_loaded(
        self, model: str, version: str | int = "", timeout: float = CALL_S
    ) -> contextlib.AbstractContextManager[Model]:
        """A `with` block in which nobody unloads the model; it is loaded first if need be (control mode explicit).

        Gives the model to call. While leases are held on it, or on an ensemble that uses it, requests to unload it are
        refused, the holder's own included, and --model-memory-limit does not make it go. `timeout`: for the load. A
        lease ends with the block, the client or its process. Raises InferError when the model cannot be had.
        """
        return kept(self, self._run, model, version, timeout)

    # --- regions ---------------------------------------------------------------------------------------------------

    def create_region(self, name: str, byte_size: int) -> Region:
        """New shared memory that models read and write in place."""
        return _own(self._run(lambda link: self.native.create_region(link, name, byte_size)))

    def register_system_shm(self, name: str, key: str, byte_size: int, offset: int = 0) -> Region:
        """POSIX shared memory that exists already; `key` is its name below /dev/shm. It is never unlinked."""
        return _own(self._run(lambda link: self.native.register_system(link, name, key, byte_size, offset)))

    def register_cuda_shm(
        self,
        name: str,
        tensor: object = None,
        *,
        pointer: int | None = None,
        byte_size: int | None = None,
        device: str | None = None,
    ) -> CudaRegion:
        """GPU memory: an array of torch, cupy, numba, jax …, or `pointer` and `byte_size`; it may lie inside a block.

        `device`: the UUID of its GPU, to be checked. Raises InferError: UNSUPPORTED where CUDA is not available, and
        for memory of an allocator that cannot share it, saying which and what to use instead. A request on it waits
        for the GPU's work of this process, or for one stream (`Plan.after`). The memory is held, and must not be freed,
        until `unregister` has returned.
        """
        exported = export(text(name, "name"), tensor, pointer, byte_size, device)
        return self._run(lambda link: register(self.native.regions, name, exported))

    def alloc_cuda(self, name: str, byte_size: int, device: str | None = None) -> CudaRegion:
        """New GPU memory that models read and write in place, of the first GPU or the one with UUID `device`.

        `region.cuda_array(shape, dtype)` is it for torch, cupy and others. The memory comes in steps of 2 MiB.
        """
        exported = allocate(text(name, "name"), byte_size, device)
        return self._run(lambda link: register(self.native.regions, name, exported))

    def open_region(self, token: str, name: str | None = None) -> Region:
        """A region that another session of the same uid shared; `name` is what it is called here."""
        return _own(self._run(lambda link: self.native.open_region(link, name, token)))

    def share(self, region: MappedRegion) -> str:
        """As `region.share()`."""
        return self._run(lambda link: self.native.share(link, region))

    def regions(self) -> list[RegionRecord]:
        """The regions of this session as the broker knows them."""
        return self._run(self.native.list_regions)

    def unregister(self, name: str | None = None) -> None:
        """Retire one region, or all. Requests that run end as usual, arrays stay valid."""
        self._run(lambda link: self.native.unregister(link, name))

    # --- inference -------------------------------------------------------------------------------------------------

    def prepare(
        self,
        model: str,
        inputs: Mapping[str, TensorRef],
        outputs: Outputs = None,
        slots: Slots = 1,
        version: str | int = "",
        parameters: Mapping[str, Parameter] | None = None,
    ) -> Plan:
        """Check a request once, to run it many times.

        Outputs that are not placed get places in the client's own memory. `slots` is how many positions the tensors
        have, or a pair for inputs and outputs. `parameters`: of every request, for models with code of their own: bool,
        int, float and str by name, at most 64. Raises InferError with what does not fit the model or its region.
        """
        plan = Plan(self, recipe(model, inputs, outputs, slots, version, BUDGET, parameters))
        self._run(lambda link: self.native.prepare(link, plan))
        return plan

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
        """Run a model on arrays, or on tensors in regions; arrays are copied once.

        The first request of a kind (model, datatypes, shapes, parameters) prepares a plan, the next use it. Preparing,
        and the channel that a thread's first request opens, go on past a short `timeout`, each for a second at most.
        """
        deadline_ns = 0 if timeout is None else deadline_ns_of(timeout)
        asked = Request(model, version, inputs, outputs, parameters)
        if priority.__class__ is not int:
            priority = whole(priority, "priority", 0, MAX_PRIORITY)
        try:
            return self._infer(asked, deadline_ns, priority)
        except PlanOutdated:
            with told_apart(model):
                return self._infer(asked, deadline_ns, priority)

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
        """Send a request; iterate over what comes: any number of responses of a decoupled model, one of any other.

        Arguments are those of `infer`, except that outputs of a decoupled model cannot be placed, only named; see
        `Stream` for what the iteration gives and raises, `Plan.stream` for `timeout`.
        """
        deadline_ns = 0 if timeout is None else deadline_ns_of(timeout)
        asked = Request(model, version, inputs, outputs, parameters)
        options = (0, whole(priority, "priority", 0, MAX_PRIORITY), 0, False, False)
        plan = self._plan(asked, deadline_ns)

        def again(error: InferError) -> Source | None:
            if (source := plan.regrown(error, deadline_ns, 0, options, asked.values)) is not None:
                return source
            self._automatic.failed(asked.key, plan, error)
            if not isinstance(error, PlanOutdated):
                return None
            return self._plan(asked, deadline_ns).source(deadline_ns, 0, options, asked.values)

        try:
            return Stream(plan.source(deadline_ns, 0, options, asked.values), again)
        except InferError as error:
            self._automatic.failed(asked.key, plan, error)
            raise

    # --- life ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the session. Arrays, results included, stay valid. May be called again."""
        self._closing.set()
        self._automatic.clear()
        self.native.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def bind(self, plan: Plan, deadline_ns: int) -> Bound[Lane]:
        """What this thread needs to submit requests of `plan`."""
        return self._run_for(deadline_ns, RECONNECT_S, lambda link: self.native.bind(link, plan))

    def bind_at(self, spread: Spread[Lane], worker: str, deadline_ns: int) -> Bound[Lane] | None:
        """What this thread needs to submit to one more worker. None: the session of `spread` has ended."""
        return self._run_for(deadline_ns, RECONNECT_S, lambda link: self.native.binder.bind_at(link, spread, worker))

    def bind_missing(self, spread: Spread[Lane], deadline_ns: int) -> None:
        """Try the workers again that were not up."""
        self._run_for(deadline_ns, RECONNECT_S, lambda link: self.native.binder.bind_missing(link, spread))

    def grow(self, plan: Plan, needed: RoomNeeded, deadline_ns: int) -> None:
        """Give an output of `plan` more room."""
        self._run_for(deadline_ns, CALL_S, lambda link: self.native.grow(link, plan, needed))

    def give_events(self, plan: Plan, ring: Ring, deadline_ns: int) -> None:
        """Let requests of `plan` name events of `ring`."""
        self._run_for(deadline_ns, CALL_S, lambda link: self.native.give_events(link, plan, ring))

    def release(self, prepared: Prepared[Lane]) -> None:
        """Tell the broker that a plan will not be used any more, unless the session it was prepared on has ended."""
        link = prepared.link
        if not self.native.closed and link is self.native.link:
            self.native.check()
            session, procedure = link.session, self.native.release(link, prepared)
            assert isinstance(session, SyncSession)
            with contextlib.suppress(ConnectionLost):
                self._turn.run(lambda: session.drive(procedure, time.monotonic() + CALL_S))

    # --- inside ----------------------------------------------------------------------------------------------------

    def _infer(self, asked: Request, deadline_ns: int, priority: int) -> InferResult:
        plan = self._automatic.find(asked.key) or self._plan(asked, deadline_ns)
        try:
            return plan.infer_arrays(asked.values, deadline_ns, priority)
        except Crowded as crowded:
            bank = crowded.bank
        except InferError as error:
            self._automatic.failed(asked.key, plan, error)
            raise with_remedy(error) from None
        self._automatic.widen(asked.key, plan, bank, lambda made: self._prepared(made, deadline_ns))
        return self._infer(asked, deadline_ns, priority)

    def _plan(self, asked: Request, deadline_ns: int) -> Plan:
        plan = self._automatic.find(asked.key)
        if plan is None:
            fresh = self._prepared(asked.recipe(BUDGET, widens=True), deadline_ns)
            plan = self._automatic.keep(asked.key, fresh, fresh.places_byte_size)
        return plan

    def _prepared(self, made: Recipe, deadline_ns: int) -> Plan:
        plan = Plan(self, made)
        self._run_for(deadline_ns, CALL_S, lambda link: self.native.prepare(link, plan))
        return plan

    def _run(self, make: Callable[[Link[Lane]], Procedure[T]], timeout: float = CALL_S) -> T:
        deadline = time.monotonic() + seconds(timeout)
        return self._turn.run(lambda: self._run_until(deadline, make))

    def _run_for(self, deadline_ns: int, patience_s: float, make: Callable[[Link[Lane]], Procedure[T]]) -> T:
        """What a request needs: until its deadline or a little beyond (`Patience`), without one for `patience_s`."""
        deadline = deadline_ns * 1e-9 if deadline_ns else time.monotonic() + patience_s
        return self._turn.run(lambda: self._run_until(deadline, make, self._patience))

    def _run_until(
        self, deadline: float, make: Callable[[Link[Lane]], Procedure[T]], patience: Patience | None = None
    ) -> T:
        while True:
            self.native.check()
            link = self.native.link
            fresh = link is None
            if link is None:
                link = self._connect(deadline, patience, wait=True)
            session = link.session
            assert isinstance(session, SyncSession)
            try:
                return drive(session, make(link), deadline, patience)
            except ConnectionLost:
                self.native.lose(link)
                if fresh or self.native.closed:
                    raise

    def _connect(self, deadline: float, patience: Patience | None = None, *, wait: bool) -> Link[Lane]:
        """The session, made anew unless another thread was faster. `wait`: for a broker that was there before."""
        if not self._connecting.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise InferError(
                Code.UNAVAILABLE,
                f"timeout expired while another thread connects to the broker in {self.native.directory}",
            )
        try:
            until = min(deadline, time.monotonic() + RECONNECT_S) if wait else deadline
            while self.native.link is None:
                session = SyncSession(self._dial(until, wait=wait), self.native.directory)
                try:
                    welcome = drive(session, self.native.greet(), deadline, patience)
                    # Of all regions: that it takes longer than whoever comes first has must not be their end.
                    session.drive(self.native.attach(), max(deadline, time.monotonic() + RECONNECT_S))
                    session.drive(self.native.leases.attach(), deadline)
                except BaseException as error:
                    session.close()
                    # One that is just going down answers no more; its successor will.
                    if not (wait and isinstance(error, ConnectionLost) and time.monotonic() < until):
                        raise
                else:
                    self.native.link = Link(self.native.lose, session, Lanes(welcome.max_channels))
            return self.native.link
        finally:
            self._connecting.release()

    def _dial(self, until: float, *, wait: bool) -> socket.socket:
        while True:
            try:
                if (sock := dial(self.native.directory)) is not None:
                    return sock
                problem = InferError(Code.UNAVAILABLE, f"the broker in {self.native.directory} is too busy to answer")
            except Absent as absent:
                if not wait:
                    raise fresh(absent.error) from None
                problem = absent.error
            remaining = until - time.monotonic()
            if remaining <= 0:
                raise fresh(problem)
            if self._closing.wait(min(remaining, RETRY_S)):
                self.native.check()


def _own(region: MappedRegion) -> Region:
    assert isinstance(region, Region)
    return region
