"""The prepared plans of a gateway, least recently used out first, and how one is made from a request.

A plan fixes the model's version, every tensor's name, datatype and shape, and where it lies: in the request (then it
is copied to a place of the gateway's own) or in a principal's region. Requests that differ in nothing else share it,
and all checks that do not depend on the data were done when it was made. Used by `broker.gateway.inference`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, final

from broker.gateway import correlation, validation
from broker.gateway.kserve import InferRequest
from broker.gateway.places import Places
from broker.gateway.regions import Alias
from clientlib import shapes
from clientlib.async_client import AsyncClient
from clientlib.async_plans import AsyncPlan
from clientlib.recipe import ArrayInput, Budget, Recipe
from clientlib.region import MappedRegion, TensorRef
from shm import datatypes, model_fit
from shm.errors import Code, InferError
from shm.message_values import ModelMetadata
from shm.parameters import Parameter, is_reserved
from shm.parameters import check as check_parameters

MAX_PLANS = 512
MAX_BYTES = 256 << 20  # of places, for all plans but the last
FIRST = Budget(places=2, byte_size=0)  # of a plan that may never be used again; others wait while both run
BUDGET = Budget(places=64, byte_size=8 << 20, least=5)  # of one whose requests come at the same time
# Steps of sequences that have no slot yet keep their places, and those of the others, which make room, must find some.
STEPS = Budget(places=1024, byte_size=64 << 20, least=16)

Aliases = Mapping[str, Alias]  # by the principal's name


class Target(NamedTuple):
    """An output that goes to a region: where, and how much room its owner says there is."""

    alias: Alias
    offset: int
    byte_size: int

    @property
    def on_gpu(self) -> bool:
        """Is it memory of a GPU?"""
        return self.alias.region.kind == "cuda"


@final
class Entry:
    """A plan and what a request needs beside it.

    `outputs`: name and datatype in the order of the answer. `targets`: those outputs that go to regions. `direct`: the
    model writes these itself; else the result is made in the gateway's memory and copied. `small`: it has two places;
    `growing`: it is getting more. `inside`: requests that have or want a place. `entering`: see `PlanCache.room`.
    `ensemble`: its responses tell the sequence that they belong to.
    `decoupled`: there may be any number of responses to a request, which come one by one.
    `text_id`: the sequence id is an input, the last one.
    `on_gpu`: some of `targets` are memory of a GPU, which only the model's worker can write.
    `regions`: the numbers of the aliases that it reads and writes.
    `labels`: the class names of outputs that have some, as the last request that asked for classes found them.
    """

    __slots__ = (
        "_places",
        "batched",
        "byte_size",
        "decoupled",
        "direct",
        "ensemble",
        "entering",
        "growing",
        "inside",
        "labels",
        "on_gpu",
        "outputs",
        "plan",
        "regions",
        "small",
        "targets",
        "text_id",
        "turns",
        "version",
    )

    def __init__(
        self,
        plan: AsyncPlan,
        model: ModelMetadata,
        outputs: Sequence[str],
        targets: Mapping[str, Target],
        *,
        direct: bool,
        text_id: bool = False,
    ) -> None:
        self.plan = plan
        self.byte_size = plan.places_byte_size
        datatypes_of = {tensor.name: tensor.datatype for tensor in model.outputs}
        self.version = model.version
        self.outputs = tuple((name, datatypes_of[name]) for name in outputs)
        self.targets = targets
        self.regions: frozenset[int] = frozenset()
        self.batched = model.max_batch_size > 0
        self.decoupled = model.decoupled
        self.ensemble = model.platform == "ensemble"
        self.direct = direct
        self.on_gpu = any(target.on_gpu for target in targets.values())
        self.small = True
        self.growing: asyncio.Task[None] | None = None
        self.inside = 0
        self.entering = asyncio.Lock()
        self._places = Places()
        self.text_id = text_id
        self.labels: Mapping[str, Sequence[bytes]] = {}
        # In one order for everybody, so that no two requests wait for each other.
        places = sorted({(t.alias.number, t.offset): t for t in targets.values()}.items(), key=lambda item: item[0])
        self.turns = tuple(target.alias.turn(target.offset) for _, target in places)

    async def place(self, party: int, deadline_ns: int) -> Places | None:
        """Wait for a request's place; None: it needs none. Raises InferError UNAVAILABLE at the deadline."""
        bank = self.plan.prepared.layout.bank if self.plan.prepared is not None else None
        if bank is None:
            return None
        await self._places.enter(bank.places, party, deadline_ns)
        return self._places

    @property
    def tight(self) -> bool:
        """Must one more request wait for a place, although there could be more of them?"""
        if not self.small:
            return self.growing is not None
        return self.plan.crowded or (self.inside >= FIRST.places and self.plan.places_byte_size > 0)


@final
class PlanCache:
    """All entries by key. On one event loop."""

    def __init__(self, client: AsyncClient, max_plans: int = MAX_PLANS, max_bytes: int = MAX_BYTES) -> None:
        self._client = client
        self._max_plans, self._max_bytes = max_plans, max_bytes
        self._entries: OrderedDict[Hashable, Entry] = OrderedDict()
        self._making: dict[Hashable, asyncio.Task[Entry]] = {}
        self._of_region: dict[int, set[Hashable]] = {}  # keys by the number of an alias
        self.byte_size = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: Hashable) -> Entry | None:
        """The entry of a key, used now."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
            if entry.byte_size != entry.plan.places_byte_size:  # a result needed more room than was reserved
                self.byte_size += entry.plan.places_byte_size - entry.byte_size
                entry.byte_size = entry.plan.places_byte_size
                self._shrink()
        return entry

    async def get(self, key: Hashable, make: Callable[[], Coroutine[Any, Any, Entry]]) -> Entry:
        """The entry of a key. Of those who come at the same time one makes it, whatever becomes of that one."""
        task = self._making.get(key)
        if task is None:
            task = self._making[key] = asyncio.get_running_loop().create_task(self._make(key, make()))
            task.add_done_callback(_retrieve)  # all who wait may have left
        return await asyncio.shield(task)

    async def grow(self, entry: Entry) -> None:
        """Give a plan more places, once requests of its kind come at the same time. Whoever finds it `tight` waits
        for that: who took his turn in the old places would wait for a whole run.
        """
        if entry.small:
            entry.small = False
            if entry.plan.places_byte_size * 2 > self._max_bytes:
                return  # four of 512 MiB at once made it keep 4 GiB; they take turns
            entry.growing = asyncio.get_running_loop().create_task(self._grow(entry))
        if entry.growing is not None:
            await asyncio.shield(entry.growing)
            entry.growing = None

    @contextlib.asynccontextmanager
    async def room(self, entry: Entry) -> AsyncIterator[None]:
        """Inside, one request that may last for minutes takes its place: it does not wait for those of others."""
        async with entry.entering:
            if entry.plan.crowded:
                await self._grow(entry)
            yield

    async def _grow(self, entry: Entry) -> None:
        # Without room, or without its model, it stays as it is: what is wrong the next request will be told.
        with contextlib.suppress(InferError):
            entry.plan = await self._client.prepare_recipe(dataclasses.replace(entry.plan.recipe, budget=BUDGET))

    async def _make(self, key: Hashable, making: Coroutine[Any, Any, Entry]) -> Entry:
        try:
            entry = await making
        finally:
            del self._making[key]
        self._remove(key)
        self._entries[key] = entry
        for number in entry.regions:
            self._of_region.setdefault(number, set()).add(key)
        self.byte_size += entry.byte_size
        self._shrink()
        return entry

    def drop(self, key: Hashable, entry: Entry | None = None) -> None:
        """Forget an entry that does not work any more, unless it has been replaced. None: whichever there is."""
        if entry is None or self._entries.get(key) is entry:
            self._remove(key)

    def drop_of(self, alias: Alias) -> None:
        """Forget the entries on a region that is gone: nobody can ask for them, and whoever gives a new worker its
        plans would be refused these.
        """
        for key in tuple(self._of_region.get(alias.number, ())):
            self._remove(key)

    def _shrink(self) -> None:
        while len(self._entries) > self._max_plans or (self.byte_size > self._max_bytes and len(self._entries) > 1):
            self._remove(next(iter(self._entries)))

    def _remove(self, key: Hashable) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:  # its plan goes with its last request
            self.byte_size -= entry.byte_size
            for number in entry.regions:
                keys = self._of_region[number]
                keys.discard(key)
                if not keys:
                    del self._of_region[number]


def key_of(request: InferRequest, version: str, aliases: Aliases) -> Hashable:
    """Everything that the plan of a request fixes."""
    parts: list[Hashable] = [request.model, version]
    if request.sequence_id:
        parts.append(correlation.key_of(request))
    for tensor in request.inputs:
        parts += (tensor.name, tensor.datatype, tensor.shape)
        if tensor.region:
            parts += (aliases[tensor.region].number, tensor.offset, tensor.byte_size)
        else:
            parts.append(-1 if tensor.data is None else memoryview(tensor.data).nbytes)
    if request.outputs:
        parts.append(None)  # no input is called that
        for output in request.outputs:
            parts.append(output.name)
            if output.region:
                parts += (aliases[output.region].number, output.offset, output.byte_size)
    return tuple(parts)


def _retrieve(task: asyncio.Task[Entry]) -> None:
    if not task.cancelled():
        task.exception()


async def prepare(
    client: AsyncClient, model: ModelMetadata, request: InferRequest, aliases: Aliases, *, direct: bool
) -> Entry:
    """Check `request` against `model` and prepare its plan. Raises InferError with Triton's texts.

    `aliases` has every region that the request names, with the ranges checked.
    """
    outputs = validation.check(model, request)
    correlation.check(model, request)
    given, (model, request) = model, correlation.with_text(model, request)
    targets = {o.name: Target(aliases[o.region], o.offset, o.byte_size) for o in outputs if o.region}
    if model.decoupled:
        _check_decoupled(model, targets)
    places = _places(model, request, targets)
    _check_overlap(model, request, places, aliases)
    if (
        not direct
        or model.decoupled
        or any(place.byte_size == 0 and shapes.is_open(place.datatype, place.shape) for place in places.values())
    ):
        places = {}
    inputs: dict[str, TensorRef | ArrayInput] = {}
    for tensor in request.inputs:
        size = validation.given_byte_size(tensor, model.name)
        if tensor.region:
            # Stride 0: the same bytes, whichever place the other inputs are copied to.
            region = aliases[tensor.region].region
            inputs[tensor.name] = TensorRef(region, tensor.datatype, tensor.shape, tensor.offset, 0, size)
        else:
            inputs[tensor.name] = ArrayInput(tensor.datatype, tensor.shape, size)
    where = {output.name: places.get(output.name) for output in outputs}
    # Steps of a sequence keep their order in one plan; while another took its place one could overtake others.
    budget = STEPS if request.sequence_id else FIRST
    own = given_parameters(request) if model.reads_parameters else {}
    check_parameters(own)
    recipe = Recipe(model.name, model.version, inputs, where, 1, 1, budget, raw=True, parameters=own)
    plan = await client.prepare_recipe(recipe, model)
    entry = Entry(plan, model, list(where), targets, direct=len(places) == len(targets), text_id=model is not given)
    entry.small = budget is FIRST
    entry.regions = frozenset(alias.number for alias in aliases.values())
    return entry


def given_parameters(request: InferRequest) -> dict[str, Parameter]:
    """What a request says to its model beside its tensors."""
    return {name: value for name, value in request.parameters.items() if not is_reserved(name)}


def _places(model: ModelMetadata, request: InferRequest, targets: Mapping[str, Target]) -> dict[str, TensorRef]:
    """Where the model itself can write results. Raises InferError INTERNAL when one is known to be too large.

    An output whose size only running the model tells gets all the room that its owner named.
    """
    given = {tensor.name: tensor.shape for tensor in request.inputs}
    rows, sizes = shapes.batch_rows(model, given), model_fit.symbol_sizes(model, given)
    known = {tensor.name: tensor for tensor in model.outputs}
    places = {}
    for name, target in targets.items():
        metadata = known[name]
        shape = model_fit.output_shape(metadata, rows, sizes)
        room = target.byte_size
        if not shapes.is_open(metadata.datatype, shape):
            room = datatypes.byte_size(metadata.datatype, shape)
            check_room(name, target, room)
        elif target.on_gpu:
            check_room(name, target, max(room, 1))  # without any nothing says where the model could write
        places[name] = TensorRef(target.alias.region, metadata.datatype, shape, target.offset, room, room)
    return places


def _check_decoupled(model: ModelMetadata, targets: Mapping[str, Target]) -> None:
    """Each response goes where the one before went, when that has been sent: the gateway writes it, which reaches no
    GPU, and the worker does not know when that is.
    """
    for name, target in targets.items():
        if target.on_gpu:
            raise InferError(
                Code.UNSUPPORTED,
                f"output '{name}' of decoupled model '{model.name}' cannot be written to CUDA shared memory region "
                f"'{target.alias.name}': use system shared memory, or none, and copy each response to the GPU",
            )


def check_room(name: str, target: Target, needed: int) -> None:
    """Raises InferError INTERNAL when a result of `needed` bytes does not fit."""
    if needed > target.byte_size:
        raise InferError(
            Code.INTERNAL,
            f"shared memory size specified with the request for output '{name}' ({target.byte_size} bytes) should be "
            f"at least {needed} bytes to hold the results",
        )


def _check_overlap(
    model: ModelMetadata, request: InferRequest, places: Mapping[str, TensorRef], aliases: Aliases
) -> None:
    """No output may lie over an input or another output of the same request."""
    read = [
        ("input", tensor.name, _range(aliases[tensor.region].region, tensor.offset, tensor.byte_size))
        for tensor in request.inputs
        if tensor.region
    ]
    written = [("output", name, _range(ref.region, ref.offset, ref.byte_size)) for name, ref in places.items()]
    for index, (_, name, (memory, start, end)) in enumerate(written):
        for kind, other, (other_memory, other_start, other_end) in (*read, *written[:index]):
            if memory == other_memory and max(start, other_start) < min(end, other_end):
                raise InferError(
                    Code.INVALID_ARG,
                    f"overlapping tensors for model '{model.name}': output '{name}' overlaps {kind} '{other}'; give "
                    "each a range of its own",
                )


def _range(region: MappedRegion, offset: int, byte_size: int) -> tuple[tuple[int, int], int, int]:
    """The memory, and start and end in its file."""
    return region.identity, region.offset + offset, region.offset + offset + byte_size
