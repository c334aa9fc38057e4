"""From a request to its answer: resolve what it names, find or prepare its plan, run it, build the response.

The hot path is a look into two caches (regions, plans) and one submission: a request of a kind that was seen before
asks the broker nothing. Used by `broker.gateway.service`, on one event loop.

Outputs in a region are written by the model itself (`Entry.direct`). While a live request writes the same range, as
load generators do that use one output region for all their requests, a request runs with results in the gateway's own
memory, and they are written to the region when it is free: no request is refused, and every answer is whole. Memory of
a GPU is not written here: such a request waits until the range is free (`broker.gateway.turns.in_turn`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Final, NamedTuple, final

import numpy as np
import numpy.typing as npt

from broker.gateway import correlation, validation
from broker.gateway.answers import is_about_the_model, is_gone, response_of, told
from broker.gateway.kserve import Caller, InferRequest, InferResponse, Transport, one_answer_only
from broker.gateway.labels import Labels
from broker.gateway.lasting import Holder, Lasting
from broker.gateway.offenders import Offenders
from broker.gateway.plan_cache import Entry, PlanCache, check_room, given_parameters, key_of, prepare
from broker.gateway.regions import Alias, OutsideRegion, RegionCache, Writer, check_range
from broker.gateway.streaming import AnyResponses, OneResponse, ResponseStream, Run
from broker.gateway.timeouts import deadline_of, queue_timeout_of, until
from broker.gateway.turns import Queues, give_back_all, in_turn, take_all
from clientlib.async_client import AsyncClient
from clientlib.failures import RangeInUse
from clientlib.results import InferResult
from clientlib.submission import MAX_PRIORITY
from shm.errors import Code, InferError, shortened
from shm.message_values import ModelMetadata
from shm.messages import GetModel, Models
from shm.parameters import key_of as parameters_key

LATEST_S: Final = 1.0  # how long "the latest version" is taken for known: other gateways load models too


class _Resolved(NamedTuple):
    """What a request names: `version` is a number, `aliases` are by the principal's names."""

    version: str
    model: ModelMetadata | None  # if it had to be asked for
    aliases: Mapping[str, Alias]
    key: Hashable


@final
class Inference:
    """Runs requests. `copied` is told of bytes that were copied, as `broker.gateway.service` has it."""

    def __init__(self, client: AsyncClient, regions: RegionCache, copied: Callable[[str, int], None]) -> None:
        self._client = client
        self._regions = regions
        self.plans = PlanCache(client)
        regions.dropped = self.plans.drop_of
        self._lasting = Lasting()
        self._offenders = Offenders()
        self._copied = copied
        self._latest: dict[str, tuple[str, float]] = {}  # version and when it was heard, by model
        self._looking: dict[str, asyncio.Task[None]] = {}
        self._heard: dict[tuple[str, str], ModelMetadata] = {}  # by model and version, as last heard
        self._steps = Queues()  # of the steps of a sequence that are being resolved
        self._labels = Labels(client)

    async def infer(self, request: InferRequest, caller: Caller) -> InferResponse:
        """Run one request. Raises InferError with Triton's texts; all but those of lookups name the request's id."""
        deadline_ns = deadline_of(request, caller)
        request.party = 0 if request.sequence_id else caller.party  # steps of a sequence keep their order
        try:
            resolved = await self._resolve_in_turn(request, caller, deadline_ns)
            return await self._infer(request, caller, resolved, deadline_ns)
        except InferError as error:
            raise await self._first(error, request, caller.transport) from None

    async def _first(self, error: InferError, request: InferRequest, transport: Transport) -> InferError:
        """Of all that is wrong what is told: as in Triton, that the model is decoupled comes before the rest."""
        if error.code == Code.UNAVAILABLE.name or is_about_the_model(error):
            return error  # no reason to ask for the model
        model = self._heard.get((request.model, request.version or self._latest_version(request.model)))
        model = model or await self.metadata(request.model, request.version)
        return one_answer_only(transport) if model.decoupled else error

    async def stream(self, request: InferRequest, caller: Caller) -> ResponseStream:
        """Check one request, and have its responses come: for models of both kinds. Raises InferError as `infer`.

        What can be known of a request before it runs is raised here; what comes later is a response.
        """
        deadline_ns = deadline_of(request, caller)
        request.party = 0 if request.sequence_id else caller.party
        resolved = await self._resolve_in_turn(request, caller, deadline_ns)
        try:
            entry = await self._entry(resolved.key, request, resolved, deadline_ns)
        except InferError as error:
            if not is_gone(error):
                raise told(error, request, resolved.aliases.values()) from None
            resolved = await self._resolve_anew(request, caller, resolved)
            try:
                entry = await self._entry(resolved.key, request, resolved, deadline_ns)
            except InferError as again:
                raise told(again, request, resolved.aliases.values()) from None
        if not entry.decoupled:
            return OneResponse(request, partial(self._infer, request, caller, resolved, deadline_ns))
        begin = partial(self._begin, request, caller, resolved, deadline_ns)
        return AnyResponses(request, begin, self._lasting, Holder(caller.connection, caller.identity))

    async def _infer(
        self, request: InferRequest, caller: Caller, resolved: _Resolved, deadline_ns: int
    ) -> InferResponse:
        try:
            self._offenders.check(caller, request.model)
            return await self._run(request, resolved, caller.transport, deadline_ns)
        except InferError as error:
            self._offenders.ended(error, caller, request.model)
            if not is_gone(error):
                raise told(error, request, resolved.aliases.values()) from None
        resolved = await self._resolve_anew(request, caller, resolved)
        try:
            return await self._run(request, resolved, caller.transport, deadline_ns)
        except InferError as error:
            raise told(error, request, resolved.aliases.values()) from None

    async def metadata(self, model: str, version: str) -> ModelMetadata:
        """One model version, "" for the latest. Raises InferError with Triton's lookup texts."""
        reply, _ = await self._client.call(GetModel(model=model, version=shortened(version)))
        assert isinstance(reply, Models)
        (found,) = reply.models
        if not version:
            self._latest[model] = found.version, time.monotonic()
        self._heard[model, found.version] = found
        return found

    def forget_latest(self, model: str) -> None:
        """It was loaded or unloaded here."""
        self._latest.pop(model, None)
        self._labels.forget(model)
        self._heard = {key: found for key, found in self._heard.items() if key[0] != model}

    # --- what a request names --------------------------------------------------------------------------------------

    async def _resolve(self, request: InferRequest, caller: Caller) -> _Resolved:
        version = request.version or self._latest_version(request.model)
        model = None
        if not version:
            model = await self.metadata(request.model, "")
            version = model.version
        aliases: dict[str, Alias] = {}
        for tensor in request.inputs:
            if tensor.region:
                alias = await self._open(tensor.region, caller, aliases)
                try:
                    check_range(tensor.region, alias.region.byte_size, tensor.offset, tensor.byte_size)
                except OutsideRegion as outside:
                    raise await self._better_word(outside, request, version) from None
        for output in request.outputs or ():
            if output.region:
                alias = await self._open(output.region, caller, aliases)
                check_range(output.region, alias.region.byte_size, output.offset, output.byte_size)
        key: Hashable = key_of(request, version, aliases)
        if request.parameters:
            heard = self._heard.get((request.model, version))
            if heard is None:  # or the version is written in another way, as "01"
                heard = model = await self.metadata(request.model, version)
            if heard.reads_parameters and (given := given_parameters(request)):
                key = (key, parameters_key(given))
        return _Resolved(version, model, aliases, key)

    async def _resolve_in_turn(self, request: InferRequest, caller: Caller, deadline_ns: int) -> _Resolved:
        """`_resolve`; no step overtakes one of its sequence that waits for what is there when the later one comes."""
        if not request.sequence_id:
            return await self._resolve(request, caller)
        async with self._steps.turn((request.model, request.sequence_id)):
            resolved = await self._resolve(request, caller)
            with contextlib.suppress(InferError):  # `_run` meets it again
                entry = await self._entry(resolved.key, request, resolved, deadline_ns)
                await entry.plan.ready(deadline_ns)
            return resolved

    async def _open(self, name: str, caller: Caller, aliases: dict[str, Alias]) -> Alias:
        alias = aliases.get(name)
        if alias is None:
            principal = caller.principal
            alias = self._regions.find(principal, name) if principal is not None else None
            alias = aliases[name] = alias or await self._regions.open(caller, name)
        return alias

    async def _better_word(self, outside: InferError, request: InferRequest, version: str) -> InferError:
        """That a size is wrong says more than where its range ends: clients keep the offset of the tensor before."""
        try:
            validation.check(await self.metadata(request.model, version), request)
        except InferError as error:
            if error.message.startswith(validation.SIZE_MISMATCH):
                return told(error, request, ())
        return outside

    def _latest_version(self, model: str) -> str:
        """The version that "" means, "" when that is not known. When a look is due it is taken beside."""
        known = self._latest.get(model)
        if known is None:
            return ""
        version, heard = known
        if time.monotonic() - heard > LATEST_S and model not in self._looking:
            self._looking[model] = asyncio.get_running_loop().create_task(self._look(model))
        return version

    async def _look(self, model: str) -> None:
        try:
            await self.metadata(model, "")
        except InferError:
            self.forget_latest(model)  # the next request is told why
        finally:
            del self._looking[model]

    async def _resolve_anew(self, request: InferRequest, caller: Caller, before: _Resolved) -> _Resolved:
        """What it named is gone: ask for everything."""
        self.forget_latest(request.model)
        for alias in before.aliases.values():
            self._regions.forget(alias)
        return await self._resolve(request, caller)

    # --- plans -----------------------------------------------------------------------------------------------------

    async def _run(
        self, request: InferRequest, resolved: _Resolved, transport: Transport, deadline_ns: int
    ) -> InferResponse:
        key = resolved.key
        entry = await self._entry(key, request, resolved, deadline_ns)
        if entry.decoupled:
            raise one_answer_only(transport)
        try:
            if not entry.targets:
                if entry.tight:
                    await self._grow(entry, deadline_ns)
                return response_of(entry, request, await self._submit(entry, request, deadline_ns))
            if entry.on_gpu:
                run = partial(self._submit, entry, request, deadline_ns)
                return response_of(entry, request, await in_turn(entry.turns, run, deadline_ns))
            if entry.direct:
                result = await self._run_direct(entry, request, deadline_ns)
                if result is not None:
                    return response_of(entry, request, result)
                key = ("copy", key)
                entry = await self._entry(key, request, resolved, deadline_ns, direct=False)
            if entry.tight:
                await self._grow(entry, deadline_ns)
            return await self._run_and_copy(entry, request, deadline_ns)
        except InferError as error:
            if is_gone(error):
                self.plans.drop(key, entry)
            raise

    async def _grow(self, entry: Entry, deadline_ns: int) -> None:
        async with until(deadline_ns):
            await self.plans.grow(entry)

    async def _entry(
        self, key: Hashable, request: InferRequest, resolved: _Resolved, deadline_ns: int, *, direct: bool = True
    ) -> Entry:
        entry = self.plans.find(key) or await self._prepare(key, request, resolved, deadline_ns, direct=direct)
        if any(output.classes > 0 for output in request.outputs or ()):
            entry.labels = await self._labels.of(request.model, entry.version)
        return entry

    async def _prepare(
        self, key: Hashable, request: InferRequest, resolved: _Resolved, deadline_ns: int, *, direct: bool = True
    ) -> Entry:
        """The plan of a kind of request that was not seen lately."""

        async def make() -> Entry:
            model = resolved.model or await self.metadata(request.model, resolved.version)
            return await prepare(self._client, model, request, resolved.aliases, direct=direct)

        async with until(deadline_ns):
            return await self.plans.get(key, make)

    async def _run_and_copy(self, entry: Entry, request: InferRequest, deadline_ns: int) -> InferResponse:
        """Results in memory of the gateway's own; then, whole, in the regions."""
        writers = await self._writers(entry)
        result = await self._submit(entry, request, deadline_ns)
        await self._write(entry, writers, result, deadline_ns)
        return response_of(entry, request, result)

    async def _writers(self, entry: Entry) -> Mapping[str, Writer]:
        """Before it runs: a region that is unregistered meanwhile still gets what was asked for before."""
        return {name: await self._regions.writer(target.alias) for name, target in entry.targets.items()}

    async def _write(self, entry: Entry, writers: Mapping[str, Writer], result: InferResult, deadline_ns: int) -> None:
        """The outputs that go to regions, each whole, in turn with others who write there."""
        targets = {name: target for name, target in entry.targets.items() if name in result}
        for name, target in targets.items():
            check_room(name, target, result[name].nbytes)
        async with until(deadline_ns):
            await take_all(entry.turns)
        try:
            for name, target in targets.items():
                writers[name].write(target.alias, target.offset, result[name].data)
                self._copied("shared_output", result[name].nbytes)
        finally:
            give_back_all(entry.turns)

    # --- running ---------------------------------------------------------------------------------------------------

    async def _run_direct(self, entry: Entry, request: InferRequest, deadline_ns: int) -> InferResult | None:
        """The model writes to the regions. None, and nothing has run, when another request is doing so."""
        turns = entry.turns
        for turn in turns:
            if not turn.free:
                return None
        await take_all(turns)  # without waiting
        try:
            return await self._submit(entry, request, deadline_ns)
        except RangeInUse:
            return None
        finally:
            give_back_all(turns)

    async def _submit(self, entry: Entry, request: InferRequest, deadline_ns: int) -> InferResult:
        values, inline = self._values(entry, request)
        sequence = correlation.sequence_of(request) if request.sequence_id else correlation.NO_SEQUENCE
        timeout_ns = queue_timeout_of(request, deadline_ns)
        submitted = 0 if request.trace is None else request.trace.submitted()
        entry.inside += 1
        place = None
        try:
            place = await entry.place(request.party, deadline_ns)
            result = await entry.plan.infer_arrays(
                values, deadline_ns, _priority(request), sequence, timeout_ns, request.party
            )
        finally:
            entry.inside -= 1
            if place is not None:
                place.leave(request.party)
        if request.trace is not None and not entry.ensemble:  # whose steps are other requests
            request.trace.computed(submitted, result.timing)
        if result.copied_here > inline:
            self._copied("kept_output", result.copied_here - inline)
        return result

    def _values(self, entry: Entry, request: InferRequest) -> tuple[list[npt.NDArray[np.uint8]], int]:
        """The inputs that came with the request, and how many bytes the client will copy of them."""
        values = [np.frombuffer(tensor.data, np.uint8) for tensor in request.inputs if tensor.data is not None]
        if entry.text_id:
            values.append(np.frombuffer(correlation.text_bytes(request), np.uint8))
        inline = sum([value.nbytes for value in values])
        if inline:
            self._copied("inline_input", inline)  # whatever becomes of the request
        return values, inline

    # --- decoupled models ------------------------------------------------------------------------------------------

    async def _begin(
        self, request: InferRequest, caller: Caller, resolved: _Resolved, deadline_ns: int, *, anew: bool
    ) -> Run:
        """Submit a request whose responses come one by one. `anew`: its plan was gone, and it has not run."""
        if anew:
            self.plans.drop(resolved.key)
            resolved = await self._resolve_anew(request, caller, resolved)
        try:
            self._offenders.check(caller, request.model)
            entry = await self._entry(resolved.key, request, resolved, deadline_ns)
            if not entry.decoupled:  # it was reloaded as another kind of model
                raise InferError(Code.UNAVAILABLE, f"model '{request.model}' was reloaded meanwhile: ask again")
            writers = await self._writers(entry)
            values, inline = self._values(entry, request)
            sequence = correlation.sequence_of(request) if request.sequence_id else correlation.NO_SEQUENCE
            timeout_ns = queue_timeout_of(request, deadline_ns)
            async with self.plans.room(entry):
                stream = entry.plan.stream_arrays(
                    values, deadline_ns, _priority(request), sequence, timeout_ns, request.party
                )
                await stream  # it is sent
        except InferError as error:
            if is_gone(error) and not anew:
                return await self._begin(request, caller, resolved, deadline_ns, anew=True)
            raise told(error, request, resolved.aliases.values()) from None

        async def deliver(result: InferResult) -> InferResponse:
            nonlocal inline
            await self._write(entry, writers, result, deadline_ns)
            if result.copied_here > inline:
                self._copied("kept_output", result.copied_here - inline)
            inline = 0  # they were copied once
            return response_of(entry, request, result)

        aliases = tuple(resolved.aliases.values())
        return Run(stream, aliases, deliver, lambda error: self._offenders.ended(error, caller, request.model))


def _priority(request: InferRequest) -> int:
    """More than any model has levels means its default."""
    return request.priority if 0 <= request.priority <= MAX_PRIORITY else 0
