"""`AsyncRemoteClient`: the client of `clientlib.connect_async("grpc://…")` and the like, for event loops.

The same verbs as `clientlib.AsyncClient`, and as `RemoteClient`, awaitable. A client lives on the loop on which it was
connected.
"""
# ruff: noqa: ASYNC109 (the arguments are those of `Client`)

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, TypeVar, final

import numpy.typing as npt

from clientlib import process
from clientlib.address import Address
from clientlib.arguments import LoadConfig, LoadFiles, load_arguments, model_text, seconds, version_text, whole
from clientlib.async_claims import check_loop
from clientlib.async_streams import AsyncSource, AsyncStream
from clientlib.automatic import Inputs, Request
from clientlib.callable_model import AsyncModel
from clientlib.client import CALL_S
from clientlib.failures import NO_CUDA
from clientlib.leases import not_native
from clientlib.pending import expired
from clientlib.process import StaysHere
from clientlib.recipe import Outputs, Slots, recipe
from clientlib.region import AsyncRegion, MappedRegion, TensorRef
from clientlib.remote import opening
from clientlib.remote.async_plans import AsyncRemotePending, AsyncRemotePlan
from clientlib.remote.client import LAST_WORD_S, UNUSED
from clientlib.remote.core import INLINE, Procedure, Remote, deadline_of, patience_s
from clientlib.remote.layout import Layout, move
from clientlib.remote.plans import ended_result, request_of
from clientlib.remote.streams import AsyncRemoteInflow, AsyncRemoteSingle, check_layout
from clientlib.remote.transport import AsyncStreams, AsyncTransport, InferAnswer
from clientlib.results import InferResult
from clientlib.submission import MAX_PRIORITY, Options, deadline_ns_of, remaining_s
from shm.errors import Code, InferError, fresh
from shm.messages import ModelMetadata, RegionRecord
from shm.parameters import Parameter

T = TypeVar("T")


async def connect_async(address: Address, timeout: float, slots: int) -> AsyncRemoteClient:
    """Connect to a server. Called by `clientlib.connect_async`, which describes the arguments."""
    client = AsyncRemoteClient(address, opening.connect_async(address), slots)
    try:
        await client.greet(timeout)
    except BaseException:
        await client.close()
        raise
    return client


@final
class AsyncRemoteClient(StaysHere):
    """A connection to a server for one event loop. What the verbs do: see `Client` and `RemoteClient`."""

    elsewhere = "await clientlib.connect_async() in the other process"

    def __init__(self, address: Address, transport: AsyncTransport, slots: int) -> None:
        reference = weakref.ref(self)

        def make_region(*args: Any, **kwargs: Any) -> MappedRegion:
            owner = reference()
            assert owner is not None
            return AsyncRegion(*args, **kwargs).bind(owner)

        self.remote = Remote(address, transport.wire, transport.shares_memory, make_region)
        self._transport = transport
        self._free = asyncio.Semaphore(slots)
        self._loop = asyncio.get_running_loop()
        self._running: weakref.WeakSet[asyncio.Task[InferAnswer]] = weakref.WeakSet()
        process.tell_after_fork(self)
        weakref.finalize(self, _drop, transport, process.generation)

    async def greet(self, timeout: float) -> None:
        """Ask whether the server is there. Called by `connect_async`."""
        await self._run(self.remote.greet(), timeout)

    # --- models ----------------------------------------------------------------------------------------------------

    async def models(self) -> dict[str, ModelMetadata]:
        """Every model of the server by name, with its state."""
        return await self._run(self.remote.models())

    async def model(self, name: str, version: str | int = "") -> AsyncModel:
        """A model to call. Raises InferError when the server does not serve it."""
        name, version = model_text(name), version_text(version)
        await self._run(self.remote.model(name, version))
        return AsyncModel(self, self.remote.known, name, version)

    async def statistics(self, model: str = "", version: str | int = "") -> list[dict[str, Any]]:
        """Triton's model statistics (counts, durations in ns), of one model or all."""
        return await self._run(self.remote.statistics(model, version))

    async def load(
        self, model: str, timeout: float = CALL_S, *, config: LoadConfig = None, files: LoadFiles = None
    ) -> None:
        """Load or reload a model; returns when it is ready. `config`, `files`: see `clientlib.arguments`."""
        text, contents = load_arguments(config, files)
        await self._run(self.remote.load(model, text, contents), timeout)

    async def unload(self, model: str, timeout: float = CALL_S, *, unload_dependents: bool = False) -> None:
        """Unload a model; requests it has accepted are finished. `unload_dependents`: and members that only it used."""
        await self._run(self.remote.unload(model, unload_dependents), timeout)

    def keep_loaded(
        self, model: str, version: str | int = "", timeout: float = CALL_S
    ) -> AbstractAsyncContextManager[AsyncModel]:
        """Raises InferError UNSUPPORTED: the protocol knows no leases."""
        raise not_native()

    # --- regions ---------------------------------------------------------------------------------------------------

    async def create_region(self, name: str, byte_size: int) -> AsyncRegion:
        """New memory of this host; the server shares it where the transport does."""
        return _own(await self._run(self.remote.create_region(name, byte_size)))

    async def register_system_shm(self, name: str, key: str, byte_size: int, offset: int = 0) -> AsyncRegion:
        """POSIX shared memory of this host that exists already; `key` is its name below /dev/shm."""
        return _own(await self._run(self.remote.register_system(name, key, byte_size, offset)))

    async def register_cuda_shm(self, name: str, tensor: object = None, **_: object) -> AsyncRegion:
        """GPU memory; raises InferError UNSUPPORTED."""
        raise InferError(Code.UNSUPPORTED, f"cannot register '{name}': {NO_CUDA}")

    async def alloc_cuda(self, name: str, byte_size: int, device: str | None = None) -> AsyncRegion:
        """GPU memory; raises InferError UNSUPPORTED."""
        raise InferError(Code.UNSUPPORTED, f"cannot allocate '{name}': {NO_CUDA}")

    async def open_region(self, token: str, name: str | None = None) -> AsyncRegion:
        """A region that another client of the same uid on this host shared."""
        return _own(await self._run(self.remote.open_region(name, token)))

    async def share(self, region: MappedRegion) -> str:
        """As `region.share()`."""
        self.check()
        return self.remote.share(region)

    async def regions(self) -> list[RegionRecord]:
        """The regions of this client."""
        self.check()
        return self.remote.list_regions()

    async def unregister(self, name: str | None = None) -> None:
        """Retire one region, or all. Requests that run end as usual, arrays stay valid."""
        await self._run(self.remote.unregister(name))

    # --- inference -------------------------------------------------------------------------------------------------

    async def prepare(
        self,
        model: str,
        inputs: Mapping[str, TensorRef],
        outputs: Outputs = None,
        slots: Slots = 1,
        version: str | int = "",
        parameters: Mapping[str, Parameter] | None = None,
    ) -> AsyncRemotePlan:
        """Check a request once, to run it many times. Raises InferError with what does not fit."""
        made = recipe(model, inputs, outputs, slots, version, UNUSED, parameters)
        return AsyncRemotePlan(self, await self._run(self.remote.prepare(made)))

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
        """Run a model on arrays, or on tensors in regions."""
        deadline_ns = 0 if timeout is None else deadline_ns_of(timeout)
        asked = Request(model, version, inputs, outputs, parameters)
        options = (0, whole(priority, "priority", 0, MAX_PRIORITY), 0, False, False)
        made = asked.recipe(UNUSED)
        layout = await self._run(self.remote.once(made), patience_s(deadline_ns, CALL_S))
        try:
            return await self.run(layout, deadline_ns, 0, None, options, asked.values)
        except InferError as error:
            if error.code == "NOT_FOUND":
                self.remote.forget(made.model, made.version)  # the model may have changed: ask again next time
            raise await self._run(self.remote.better_word(made, error), LAST_WORD_S) from None

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
        """A request to iterate over with `async for`. As `AsyncClient.stream`, and `RemoteClient.stream`."""
        deadline_ns = 0 if timeout is None else deadline_ns_of(timeout)
        asked = Request(model, version, inputs, outputs, parameters)
        options = (0, whole(priority, "priority", 0, MAX_PRIORITY), 0, False, False)
        made = asked.recipe(UNUSED)

        async def begin() -> AsyncSource:
            layout = await self._run(self.remote.once(made, streamed=True), patience_s(deadline_ns, CALL_S))
            try:
                return await self.source(None, layout, deadline_ns, 0, options, asked.values)
            except InferError as error:
                await failed(error)
                raise

        async def failed(error: InferError) -> None:
            if error.code in ("NOT_FOUND", "INVALID_ARG", "UNSUPPORTED", "UNKNOWN"):
                self.remote.forget(made.model, made.version)

        return AsyncStream(begin, failed)

    # --- life ------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Let go of the server. Arrays, results included, stay valid. May be called again."""
        if self.remote.close():
            for task in tuple(self._running):
                task.cancel()
            await self._transport.close()

    async def __aenter__(self) -> AsyncRemoteClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    def leave_to_parent(self) -> None:
        """In a forked child: nothing of this client works here."""
        self._transport.leave_to_parent()

    def check(self) -> None:
        """Raises InferError when the client was closed, or belongs to another process or loop."""
        self.remote.check()
        check_loop(self._loop)

    # --- inside ----------------------------------------------------------------------------------------------------

    async def source(
        self,
        plan: object,
        layout: Layout,
        deadline_ns: int,
        input_slot: int,
        options: Options,
        values: Sequence[npt.NDArray[Any]] = (),
    ) -> AsyncSource:
        """Send the request of a stream."""
        model = await self._run(self.remote.heard_of(layout.model, layout.version), patience_s(deadline_ns, CALL_S))
        if not model.decoupled:
            return AsyncRemoteSingle(await self.start(plan, layout, deadline_ns, input_slot, None, options, values))
        check_layout(layout, self._transport.wire, streams=isinstance(self._transport, AsyncStreams))
        assert isinstance(self._transport, AsyncStreams)
        await self._take_slot(deadline_ns)
        try:
            request, at, copied = request_of(self.remote, layout, deadline_ns, input_slot, None, options, values)
            layout.ranges.live.pop(at.output_slot, None)  # its inputs are copied into the message at once
            answers = self._transport.stream(request, deadline_of(deadline_ns), self._free.release)
        except BaseException:
            self._free.release()
            raise
        return AsyncRemoteInflow((self, plan), self.remote, layout, answers, copied)

    async def run(
        self,
        layout: Layout,
        deadline_ns: int,
        input_slot: int,
        output_slot: int | None,
        options: Options,
        values: Sequence[npt.NDArray[Any]] = (),
    ) -> InferResult:
        """Run a request and await it."""
        large = layout.shared and sum(value.nbytes for value in values) > INLINE
        if large or (layout.shared and layout.regions):  # those stay in use when the deadline answers the caller
            pending = await self.start(None, layout, deadline_ns, input_slot, output_slot, options, values)
            return await pending.finish()
        await self._take_slot(deadline_ns)
        try:
            request, at, copied = request_of(self.remote, layout, deadline_ns, input_slot, output_slot, options, values)
            end: InferAnswer | InferError
            try:
                end = await self._transport.infer(request, deadline_of(deadline_ns))
            except InferError as error:
                end = fresh(error)
            except BaseException:
                layout.ranges.live.pop(at.output_slot, None)
                raise
        finally:
            self._free.release()
        result = ended_result(layout, at, copied, end)
        if isinstance(result, InferError):
            self.remote.check()  # a client that was closed meanwhile says so
            raise fresh(result)
        return result

    async def start(
        self,
        plan: object,
        layout: Layout,
        deadline_ns: int,
        input_slot: int,
        output_slot: int | None,
        options: Options,
        values: Sequence[npt.NDArray[Any]] = (),
    ) -> AsyncRemotePending:
        """Start a request. Its inputs are read now: the task that sends them begins later."""
        await self._take_slot(deadline_ns)
        scratch = None
        try:
            scratch = await self._run(self.remote.borrow(values), patience_s(deadline_ns, CALL_S))
            request, at, copied = request_of(self.remote, layout, deadline_ns, input_slot, output_slot, options, values)
        except BaseException:
            self.remote.give_back(scratch)
            self._free.release()
            raise
        if scratch is not None:
            move(request, scratch)

        def freed() -> None:
            self.remote.give_back(scratch)
            self._free.release()

        for tensor in request.inputs:
            if tensor.data is not None:
                tensor.data = bytes(tensor.data)
        task = self._loop.create_task(self._transport.infer(request, deadline_of(deadline_ns)))
        self._running.add(task)
        return AsyncRemotePending((self, plan), self.remote, layout, at, copied, deadline_ns, task, freed)

    async def _take_slot(self, deadline_ns: int) -> None:
        if not self._free.locked():
            await self._free.acquire()
            return
        try:
            async with asyncio.timeout(remaining_s(deadline_ns)):
                await self._free.acquire()
        except TimeoutError:
            raise expired() from None

    async def _run(self, steps: Procedure[T], timeout: float = CALL_S) -> T:
        self.check()
        deadline = time.monotonic() + seconds(timeout)
        try:
            word = next(steps)
            while True:
                try:
                    answer: Any = await self._transport.call(word, deadline)
                except BaseException as error:
                    word = steps.throw(error)
                else:
                    word = steps.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result


def _drop(transport: AsyncTransport, made_in: int) -> None:
    if made_in == process.generation:
        transport.drop()


def _own(region: MappedRegion) -> AsyncRegion:
    assert isinstance(region, AsyncRegion)
    return region
