"""`AsyncClient`: the library for event loops. The same verbs as `Client`, awaitable; no threads.

A client lives on the loop on which it was connected.
"""
# ruff: noqa: ASYNC109 (the arguments are those of `Client`)

from __future__ import annotations

import asyncio
import contextlib
import socket
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar, final

from clientlib.arguments import LoadConfig, LoadFiles, load_arguments, model_text, text, version_text, whole
from clientlib.async_claims import check_loop, turn
from clientlib.async_lane import AsyncLane, LoopLanes
from clientlib.async_plans import AsyncPlan
from clientlib.async_reach import AsyncReach
from clientlib.async_session import AsyncSession
from clientlib.async_streams import AsyncSource, AsyncStream
from clientlib.automatic import Automatic, Inputs, Request, told_apart
from clientlib.callable_model import AsyncModel
from clientlib.client import CALL_S, MAX_SLOTS, RECONNECT_S
from clientlib.cuda_export import allocate, export
from clientlib.cuda_order import Ring
from clientlib.cuda_region import CudaRegion, register
from clientlib.failures import PlanOutdated, RoomNeeded, with_remedy
from clientlib.homes import Homes
from clientlib.leases import kept_async
from clientlib.link import Bound, Link, Prepared
from clientlib.native import Native
from clientlib.process import StaysHere
from clientlib.recipe import Budget, Outputs, Recipe, Slots, recipe
from clientlib.region import AsyncRegion, MappedRegion, NamedRegion, TensorRef
from clientlib.results import InferResult
from clientlib.session import Answer
from clientlib.spread import Spread
from clientlib.submission import MAX_PRIORITY, deadline_ns_of
from shm.errors import ConnectionLost, InferError
from shm.messages import Message, ModelMetadata, RegionInfo, RegionRecord
from shm.parameters import Parameter

T = TypeVar("T")
BUDGET = Budget(places=512, byte_size=16 << 20)  # a loop has hundreds of requests in flight where a thread has one


@final
class AsyncClient(StaysHere):
    """A connection to the broker for one event loop; made by `connect_async`."""

    elsewhere = "await clientlib.connect_async() in the other process"

    def __init__(self, directory: str, slots: int) -> None:
        reference = weakref.ref(self)

        def make_region(*args: Any, **kwargs: Any) -> MappedRegion:
            owner = reference()
            assert owner is not None
            return AsyncRegion(*args, **kwargs).bind(owner)

        self.native: Native[AsyncLane] = Native(directory, slots, 0.0, make_region)
        self.loop = asyncio.get_running_loop()
        self._automatic: Automatic[AsyncPlan] = Automatic()
        self._preparing: dict[object, asyncio.Lock] = {}
        self._reach = AsyncReach(self.native, self.loop)
        self._opening = asyncio.Lock()
        self._binding: set[asyncio.Task[None]] = set()
        self.lost = asyncio.Event()  # of adopted clients: the session has ended, and with it the client

    async def start(self, timeout: float) -> None:
        """Connect for the first time. Called by `connect_async`."""
        await self._reach.connect(self.loop.time() + timeout, wait=False)

    @classmethod
    async def adopt(
        cls,
        sock: socket.socket,
        *,
        slots: int = 1024,
        timeout: float = 30,
        alone: bool = False,
        on_notice: Callable[[Message], None] | None = None,
    ) -> AsyncClient:
        """A client on a session that is connected already, as the broker gives one to a gateway. Takes `sock` over.

        It never reconnects: when the session has ended, `lost` is set and the client is closed. `on_notice` is given
        what the broker says unasked: `Exiting`, `Goodbye`. `alone`: there is no other gateway.
        """
        client = cls("the other end of its socket", whole(slots, "slots", 1, MAX_SLOTS))
        sock.setblocking(False)
        session = AsyncSession(sock, client.native.directory, client.loop, on_notice, client._ended)
        try:
            welcome = await session.drive(client.native.greet(), client.loop.time() + timeout)
        except BaseException:
            session.close()
            raise
        # Gateways answer for clients that know of one broker only: the steps of a sequence may come by several of them.
        lanes = LoopLanes(welcome.max_channels)
        client.native.link = Link(client.native.lose, session, lanes, Homes(shared=True, alone=alone))
        return client

    async def call(
        self, message: Message, expects: int = 0, timeout: float = CALL_S, fds: Sequence[int] = ()
    ) -> Answer:
        """One message of the session protocol; the reply and its `expects` descriptors, which are the caller's.

        `fds` go with the message, and stay the caller's.
        """
        return await self._reach.run(lambda link: self.native.call(link, message, expects, fds), timeout)

    # --- models ----------------------------------------------------------------------------------------------------

    async def models(self) -> dict[str, ModelMetadata]:
        """Every model of the broker by name, with its state."""
        return await self._reach.run(self.native.models)

    async def model(self, name: str, version: str | int = "") -> AsyncModel:
        """A model to call. Raises InferError when the broker does not serve it."""
        name, version = model_text(name), version_text(version)
        await self._reach.run(lambda link: self.native.model(link, name, version))
        return AsyncModel(self, self.native.known, name, version)

    async def statistics(self, model: str = "", version: str | int = "") -> list[dict[str, Any]]:
        """Triton's model statistics (counts, durations in ns), of one model or all."""
        return await self._reach.run(lambda link: self.native.statistics(link, model, version))

    async def load(
        self, model: str, timeout: float = CALL_S, *, config: LoadConfig = None, files: LoadFiles = None
    ) -> None:
        """Load or reload a model; returns when it is ready. `config`, `files`: see `clientlib.arguments`."""
        given = load_arguments(config, files)
        await self._reach.run(lambda link: self.native.load(link, model, *given), timeout)

    async def unload(self, model: str, timeout: float = CALL_S, *, unload_dependents: bool = False) -> None:
        """Unload a model; requests it has accepted are finished. `unload_dependents`: and members that only it used."""
        await self._reach.run(lambda link: self.native.unload(link, model, unload_dependents), timeout)

    def keep_loaded(
        self, model: str, version: str | int = "", timeout: float = CALL_S
    ) -> contextlib.AbstractAsyncContextManager[AsyncModel]:
        """`async with`; otherwise as `Client.keep_loaded`."""
        return kept_async(self, self._reach.run, model, version, timeout)

    # --- regions ---------------------------------------------------------------------------------------------------

    async def create_region(self, name: str, byte_size: int) -> AsyncRegion:
        """New shared memory that models read and write in place."""
        return _own(await self._reach.run(lambda link: self.native.create_region(link, name, byte_size)))

    async def register_system_shm(self, name: str, key: str, byte_size: int, offset: int = 0) -> AsyncRegion:
        """POSIX shared memory that exists already; `key` is its name below /dev/shm. It is never unlinked."""
        return _own(await self._reach.run(lambda link: self.native.register_system(link, name, key, byte_size, offset)))

    async def register_cuda_shm(
        self,
        name: str,
        tensor: object = None,
        *,
        pointer: int | None = None,
        byte_size: int | None = None,
        device: str | None = None,
    ) -> CudaRegion:
        """GPU memory. As `Client.register_cuda_shm`."""
        exported = await asyncio.to_thread(export, text(name, "name"), tensor, pointer, byte_size, device)
        return await self._reach.run(lambda link: register(self.native.regions, name, exported))

    async def alloc_cuda(self, name: str, byte_size: int, device: str | None = None) -> CudaRegion:
        """New GPU memory. As `Client.alloc_cuda`."""
        exported = await asyncio.to_thread(allocate, text(name, "name"), byte_size, device)
        return await self._reach.run(lambda link: register(self.native.regions, name, exported))

    async def open_region(self, token: str, name: str | None = None) -> AsyncRegion:
        """A region that another session of the same uid shared; `name` is what it is called here."""
        return _own(await self._reach.run(lambda link: self.native.open_region(link, name, token)))

    async def share(self, region: MappedRegion) -> str:
        """As `region.share()`."""
        return await self._reach.run(lambda link: self.native.share(link, region))

    async def regions(self) -> list[RegionRecord]:
        """The regions of this session as the broker knows them."""
        return await self._reach.run(self.native.list_regions)

    async def unregister(self, name: str | None = None) -> None:
        """Retire one region, or all. Requests that run end as usual, arrays stay valid."""
        await self._reach.run(lambda link: self.native.unregister(link, name))

    # --- inference -------------------------------------------------------------------------------------------------

    async def prepare(
        self,
        model: str,
        inputs: Mapping[str, TensorRef],
        outputs: Outputs = None,
        slots: Slots = 1,
        version: str | int = "",
        parameters: Mapping[str, Parameter] | None = None,
    ) -> AsyncPlan:
        """Check a request once, to run it many times. As `Client.prepare`."""
        plan = AsyncPlan(self, recipe(model, inputs, outputs, slots, version, BUDGET, parameters))
        await self._reach.run(lambda link: self.native.prepare(link, plan))
        return plan

    async def infer(
        self,
        model: str,
        inputs: Inputs,
        outputs: Outputs = None,
        timeout: float | None = None,
        priority: int = 0,
        parameters: Mapping[str, Parameter] | None = None,
        version: str | int = "",
    ) -> InferResult:
        """Run a model on arrays, or on tensors in regions; arrays are copied once. As `Client.infer`."""
        deadline_ns = 0 if timeout is None else deadline_ns_of(timeout)
        asked = Request(model, version, inputs, outputs, parameters)
        if priority.__class__ is not int:
            priority = whole(priority, "priority", 0, MAX_PRIORITY)
        try:
            return await self._infer(asked, deadline_ns, priority)
        except PlanOutdated:
            with told_apart(model):
                return await self._infer(asked, deadline_ns, priority)

    def stream(
        self,
        model: str,
        inputs: Inputs,
        outputs: Outputs = None,
        timeout: float | None = None,
        priority: int = 0,
        parameters: Mapping[str, Parameter] | None = None,
        version: str | int = "",
    ) -> AsyncStream:
        """A request to iterate over with `async for`: any number of responses of a decoupled model, one of any other.

        It is sent when the stream is first awaited; `timeout` counts from here. As `Client.stream`.
        """
        deadline_ns = 0 if timeout is None else deadline_ns_of(timeout)
        asked = Request(model, version, inputs, outputs, parameters)
        options = (0, whole(priority, "priority", 0, MAX_PRIORITY), 0, False, False)

        plan: AsyncPlan

        async def begin() -> AsyncSource:
            nonlocal plan
            plan = await self._plan(asked, deadline_ns)
            try:
                return await plan.source(deadline_ns, 0, options, asked.values)
            except InferError as error:
                self._automatic.failed(asked.key, plan, error)
                raise

        async def again(error: InferError) -> AsyncSource | None:
            if (source := await plan.regrown(error, deadline_ns, 0, options, asked.values)) is not None:
                return source
            self._automatic.failed(asked.key, plan, error)
            return await begin() if isinstance(error, PlanOutdated) else None

        return AsyncStream(begin, again)

    # --- life ------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """End the session. Arrays, results included, stay valid. May be called again.

        Raises InferError on another loop while the client's own runs. When that has ended, any loop will do.
        """
        if self.loop.is_running():
            check_loop(self.loop)
        self._automatic.clear()
        self.native.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def prepare_recipe(self, made: Recipe, model: ModelMetadata | None = None) -> AsyncPlan:
        """A plan for `infer_arrays`: what `infer` prepares by itself, kept by the caller instead.

        `model`: the recipe's, when the caller has just heard of it.
        """
        plan = AsyncPlan(self, made)
        await self._reach.run(lambda link: self.native.prepare(link, plan, model))
        return plan

    def name_region(self, info: RegionInfo, identity: tuple[int, int]) -> MappedRegion:
        """A region that the broker has opened here by `info`, without its memory: for plans alone.

        `identity` is the (device, inode) of its file. `forget_region` is its end.
        """
        region: MappedRegion = NamedRegion(info.name, info.byte_size, info.offset, identity, kind=info.kind)
        self.native.regions[info.name] = region
        return region

    def forget_region(self, region: MappedRegion) -> None:
        """No new plan may use it. The broker is not told."""
        region.retired = "forgotten"
        if self.native.regions.get(region.name) is region:
            del self.native.regions[region.name]

    async def bind(self, plan: AsyncPlan, deadline_ns: int) -> Bound[AsyncLane]:
        """What the loop needs to submit requests of `plan`."""
        link, prepared = self.native.link, plan.prepared
        if prepared is not None and prepared.link is link and link.lanes.mine(prepared.worker) is not None:
            return await self._reach.run_for(deadline_ns, RECONNECT_S, lambda link: self.native.bind(link, plan))
        # Hundreds of plans may be used for the first time at once: one opens the channel, for all.
        with self._reach.patiently(deadline_ns, RECONNECT_S) as ends:
            async with turn(self._opening, ends - self.loop.time(), "opens a channel"):
                return await self._reach.run_until(ends, lambda link: self.native.bind(link, plan))

    async def bind_at(self, spread: Spread[AsyncLane], worker: str, deadline_ns: int) -> Bound[AsyncLane] | None:
        """What the loop needs to submit to one more worker. None: the session of `spread` has ended."""
        return await self._reach.run_for(
            deadline_ns, RECONNECT_S, lambda link: self.native.binder.bind_at(link, spread, worker)
        )

    def bind_missing(self, spread: Spread[AsyncLane]) -> None:
        """Try the workers again that were not up, beside whatever else goes on."""

        async def bind() -> None:
            with contextlib.suppress(InferError):
                await self._reach.run(lambda link: self.native.binder.bind_missing(link, spread))

        task = self.loop.create_task(bind())
        self._binding.add(task)
        task.add_done_callback(self._binding.discard)

    async def grow(self, plan: AsyncPlan, needed: RoomNeeded, deadline_ns: int) -> None:
        """Give an output of `plan` more room."""
        await self._reach.run_for(deadline_ns, CALL_S, lambda link: self.native.grow(link, plan, needed))

    async def give_events(self, plan: AsyncPlan, ring: Ring, deadline_ns: int) -> None:
        """Let requests of `plan` name events of `ring`."""
        await self._reach.run_for(deadline_ns, CALL_S, lambda link: self.native.give_events(link, plan, ring))

    async def release(self, prepared: Prepared[AsyncLane]) -> None:
        """Tell the broker that a plan will not be used any more, unless the session it was prepared on has ended."""
        if self.native.closed:
            return
        self._reach.check()
        link = prepared.link
        if link is self.native.link:
            assert isinstance(link.session, AsyncSession)
            with contextlib.suppress(ConnectionLost):
                await link.session.drive(self.native.release(link, prepared), self.loop.time() + CALL_S)

    # --- inside ----------------------------------------------------------------------------------------------------

    async def _infer(self, asked: Request, deadline_ns: int, priority: int) -> InferResult:
        plan = self._automatic.find(asked.key) or await self._plan(asked, deadline_ns)
        try:
            return await plan.infer_arrays(asked.values, deadline_ns, priority)
        except InferError as error:
            self._automatic.failed(asked.key, plan, error)
            raise with_remedy(error) from None

    async def _plan(self, asked: Request, deadline_ns: int) -> AsyncPlan:
        plan = self._automatic.find(asked.key)
        if plan is None:
            check_loop(self.loop)
            # Hundreds of requests of a new kind may come at once: one prepares, the others wait for its plan.
            lock = self._preparing.setdefault(asked.key, asyncio.Lock())
            try:
                with self._reach.patiently(deadline_ns, CALL_S) as ends:
                    async with turn(lock, ends - self.loop.time(), "prepares the same request"):
                        plan = self._automatic.find(asked.key)
                        if plan is None:
                            fresh = plan = AsyncPlan(self, asked.recipe(BUDGET))
                            await self._reach.run_until(ends, lambda link: self.native.prepare(link, fresh))
                            plan = self._automatic.keep(asked.key, fresh, fresh.places_byte_size)
            finally:
                if not lock.locked():  # else somebody prepares, and it was our wait that ended
                    self._preparing.pop(asked.key, None)
        return plan

    def _ended(self) -> None:
        """The session of an adopted client is no more."""
        self.native.close()
        self.lost.set()


def _own(region: MappedRegion) -> AsyncRegion:
    assert isinstance(region, AsyncRegion)
    return region
