"""Plans as the worker holds them: where each tensor's positions lie, what may run together, what must not overlap.

A plan is bound once and used by every channel of its session. Everything that can be decided at binding is decided
there, so that admission is a few comparisons.
"""

from __future__ import annotations

from typing import Any, final

import numpy as np
import numpy.typing as npt

from broker.worker.messages import BindPlan, PlanTensor
from broker.worker.model import LoadedModel, not_loaded
from broker.worker.overlap import Crowds
from broker.worker.regions import Region, RegionTable
from shm import datatypes, views
from shm.admission import Verdict
from shm.errors import Code, InferError
from shm.parameters import key_of
from shm.views import Placement

Bytes = npt.NDArray[np.uint8]


@final
class PlacedTensor:
    """A tensor of a plan on mapped memory."""

    __slots__ = ("_span", "aligned", "datatype", "name", "open", "place", "region", "row_bytes", "seen", "shape")

    def __init__(self, tensor: PlanTensor, region: Region, place: Placement, batched: bool) -> None:
        spec = tensor.spec
        self.name = spec.name
        self.datatype = spec.datatype
        self.shape = spec.shape
        self.region = region
        self.place = place
        self.open = -1 in spec.shape or spec.datatype == "BYTES"
        self.seen: tuple[int, tuple[int, ...]] = (-1, ())  # rows and shape of the last result that was checked
        item = 1 if spec.datatype == "BYTES" else datatypes.element_size(spec.datatype)
        address = region.bytes.__array_interface__["data"][0] + place.offset
        self.aligned = address % item == 0 and place.stride % item == 0
        self._span = region.identity, place.shifted(region.info.offset)
        self.row_bytes = place.byte_size // spec.shape[0] if batched and not self.open and spec.shape[0] > 0 else 0

    def memory(self, position: int, rows: int = 0) -> Bytes:
        """The bytes of one position, or of its first `rows` rows."""
        start = self.place.offset + position * self.place.stride
        size = rows * self.row_bytes if rows and self.row_bytes else self.place.byte_size
        return self.region.bytes[start : start + size]

    def snapshot(self, position: int, rows: int = 0) -> bytes | memoryview:
        """What `memory` has, as it is now, without the risk that a truncated file is."""
        start = self.place.offset + position * self.place.stride
        size = rows * self.row_bytes if rows and self.row_bytes else self.place.byte_size
        return self.region.snapshot(start, size)

    def copy_out(self, position: int, rows: int, into: Bytes) -> str:
        """Copy one position, or its first `rows` rows, out of a client's memory; the reason that it counts under."""
        if self.region.gpu is None:
            into[:] = self.memory(position, rows)
            return "policy"
        self.region.gpu.read(self.place.offset + position * self.place.stride, into)
        return "transfer"

    def copy_in(self, position: int, data: Bytes) -> str:
        """The other way round."""
        if self.region.gpu is None:
            self.memory(position)[: data.size] = data
            return "output"
        self.region.gpu.write(self.place.offset + position * self.place.stride, data)
        return "transfer"

    def make_room(self, byte_size: int) -> bool:
        """Make an open output in private memory exactly as large as a result. False: the memory is a client's."""
        if self.region.info.kind != "private":
            return False
        self.region.grow(byte_size)
        self.place = Placement(0, 0, byte_size, 1, byte_size)
        return True

    def shape_of(self, rows: int) -> tuple[int, ...]:
        """The tensor's shape with its batch dimension set to `rows` (0: as prepared)."""
        return (rows, *self.shape[1:]) if rows and self.shape else self.shape

    def span(self) -> tuple[tuple[int, int], Placement]:
        """Identity of the memory and the place counted from the start of its file, to compare across regions."""
        return self._span


@final
class Plan:
    """Implements `shm.worker_channel.BoundPlan`."""

    __slots__ = (
        "adjacent",
        "bindings",
        "busy",
        "closed",
        "credit",
        "crowded",
        "crowds",
        "events",
        "generation",
        "index",
        "input_positions",
        "inputs",
        "interface",
        "key",
        "layout",
        "model",
        "model_name",
        "output_positions",
        "outputs",
        "owner",
        "parameters",
        "pinned",
        "reads",
        "refused_until_ns",
        "responses",
        "retryable",
        "rows",
        "session",
        "shared",
        "signature",
        "simple",
        "staged",
        "step",
        "version",
        "windows",
    )

    def __init__(self, message: BindPlan, regions: RegionTable, crowds: Crowds) -> None:
        self.session, self.index, self.generation = message.session, message.index, message.generation
        self.key = message.index | message.generation << 32
        self.model_name = message.model
        self.version = 0 if message.follow_latest else message.version
        self.model: LoadedModel | None = None
        self.input_positions, self.output_positions = message.input_positions, message.output_positions
        self.rows = message.rows
        self.interface = message.interface
        self.owner = message.owner
        self.step = message.step  # of an ensemble in another worker: it keeps its model
        self.pinned: LoadedModel | None = None
        self.parameters = message.parameters
        self.responses = message.responses  # places for them in one output position; 0: one response
        self.retryable = message.retryable
        self.refused_until_ns = message.refused_until_ns
        self.closed: Verdict | None = not_loaded(message.model)
        self.busy = bytearray(message.output_positions)
        self.reads: dict[int, int] = {}
        self.inputs = tuple(_placed(t, regions, message.input_positions, False, message) for t in message.inputs)
        self.outputs = tuple(_placed(t, regions, message.output_positions, True, message) for t in message.outputs)
        # How many parts of responses were taken, where a channel's count does not tell; see `shm.messages.PrepareStep`.
        self.credit = None if message.credit is None else _placed(message.credit, regions, 1, False, message)
        self.shared = tuple({t.region for t in (*self.inputs, *self.outputs) if t.region.info.kind == "system"})
        tensors = (*self.inputs, *self.outputs)
        self.windows = tuple({t.region.gpu for t in tensors if t.region.gpu is not None})  # memory of GPUs
        self.staged = bool(self.windows)  # it is copied to the host and back around a run
        self.events = None if message.events is None else _region(regions, message.events, "its events")
        self.crowds = crowds
        self.crowded = False
        self.bindings: dict[tuple[int, int, int, int], Any] = {}  # Execution, by instance number, positions, rows
        self.signature: object = None
        self.layout: object = None  # the same, and equal outputs
        self.simple = False
        self.adjacent = False

    def conflict(self, input_position: int, output_position: int) -> str:
        """Promise 1: an output range may not overlap any range of a live request.

        A crowded plan's range is taken if the answer is "": nobody else may get it before the channel has.
        """
        if self.busy[output_position]:
            return f"output position {output_position} overlaps the output of a request that is still in flight"
        if self.crowded:
            return self.crowds.claim(self, input_position, output_position)
        return ""

    def close(self, verdict: Verdict) -> None:
        """Take no request any more."""
        self.closed = verdict
        self.simple = False

    def simplify(self) -> None:
        """Decide again whether admission may skip everything but the busy flag, and a lone request the queue."""
        self.simple = not (self.closed or self.crowded or self.staged or self.events)

    def changed_size(self) -> str:
        """The name of a system region of this plan that was truncated, or ""."""
        for region in self.shared:
            if region.changed_size():
                return region.info.name
        return ""

    def names(self, region: Region) -> bool:
        """Does any tensor lie in `region`, or are its events there?"""
        tensors = (*self.inputs, *self.outputs) if self.credit is None else (*self.inputs, *self.outputs, self.credit)
        return self.events is region or any(tensor.region is region for tensor in tensors)

    def forget_bindings(self) -> None:
        """Let go of the model it was bound to."""
        self.bindings = {}

    def forget_memory(self) -> None:
        """Let go of every mapping. No request of the plan is live and none will be admitted."""
        self.forget_bindings()
        self.inputs = self.outputs = ()
        self.credit = None
        self.shared = ()
        self.windows = ()
        self.events = None


def adopt(plan: Plan, model: LoadedModel, signatures: dict[object, object]) -> None:
    """Bind `plan` to `model` (again, after a reload): everything that depends on the loaded model follows."""
    plan.model = model
    plan.closed = None
    plan.forget_bindings()
    for tensor in plan.outputs:
        tensor.seen = (-1, ())
    tensors = (*plan.inputs, *plan.outputs)
    together = (
        model.config.max_batch_size > 1
        and plan.rows > 0
        and not any(t.datatype == "BYTES" for t in tensors)
        and not any(t.open for t in plan.inputs)
    )
    key: tuple[object, ...] = tuple((t.name, t.datatype, t.shape[1:]) for t in plan.inputs)
    assembly = model.assembly
    if assembly is not None:  # which copies every input, strings too, and lets the runtime allocate every output
        together = model.config.max_batch_size > 1 and plan.rows > 0
        key = tuple((t.name, t.datatype, () if t.name in assembly.loose else t.shape[1:]) for t in plan.inputs)
    if model.reads_parameters and plan.parameters:
        key = (*key, key_of(plan.parameters))
    plan.signature = signatures.setdefault(key, key) if together else None
    wanted = (key, *((t.name, t.shape[1:]) for t in plan.outputs))
    plan.layout = signatures.setdefault(wanted, wanted) if together else None
    plan.adjacent = (
        together
        and assembly is None
        and not any(t.name in model.copied for t in plan.inputs)
        and not any(t.open or not t.aligned or t.place.stride != t.place.byte_size for t in tensors)
    )
    if plan.windows:
        plan.closed = _off_limits(plan, model)
        if plan.closed is None and model.ensemble is None:
            model.reach_gpus()
        plan.staged = not _in_place(plan, model)
    plan.simplify()


def _in_place(plan: Plan, model: LoadedModel) -> bool:
    """May its model be given pointers of the GPU? Every instance must be on one, and each request stand for itself."""
    if model.assembly is not None or model.streams is not None or model.cached is not None:
        return False
    if any(tensor.datatype == datatypes.BYTES for tensor in (*plan.inputs, *plan.outputs)):
        return False
    return all(getattr(instance.runtime, "lane", None) is not None for instance in model.instances)


def _off_limits(plan: Plan, model: LoadedModel) -> Verdict | None:
    """A decoupled model's responses: a place is written again when its client has copied out what lay there, and of
    GPU memory nobody copies out. A decoupled ensemble reads its client's memory as long as it has branches.
    """
    if model.streams is None:
        return None
    if model.ensemble is not None:
        return Code.UNSUPPORTED, f"ensemble '{model.name}' is decoupled and cannot use GPU memory: use create_region()"
    if any(tensor.region.gpu is not None for tensor in plan.outputs):
        return (
            Code.UNSUPPORTED,
            f"model '{model.name}' is decoupled: each of its responses would overwrite the one before in GPU memory; "
            "have its outputs in host memory and copy each response to the GPU",
        )
    return None


def _placed(tensor: PlanTensor, regions: RegionTable, positions: int, output: bool, message: BindPlan) -> PlacedTensor:
    region = _region(regions, (tensor.region, tensor.generation), tensor.spec.region)
    place = views.resolve(tensor.spec, region.info.byte_size, positions, output=output)
    return PlacedTensor(tensor, region, place, message.rows > 0)


def _region(regions: RegionTable, key: tuple[int, int], name: str) -> Region:
    region = regions.get(*key)
    if region is None:
        raise InferError(Code.NOT_FOUND, f"Unable to find shared memory region: '{name}'")
    return region
