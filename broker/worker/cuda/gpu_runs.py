"""Runs of a model on a GPU: one request on its own memory, or several whose rows are put together there.

Called by `broker.worker.cuda.execute`. Operands are bound where they lie; the binding copies what lies on the host
(`broker.worker.cuda.staging.Places`). Rows of a batch go straight into their places on the GPU, from wherever they are.

Which inputs a model may read in place is no question here (`LoadedModel.copied` is about the host): kernels read a
value once, so a client that rewrites it meanwhile gains nothing over one that sends it.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from typing import NamedTuple, cast, final

from broker.worker.backends import GpuBinding, OnGpu, Operand
from broker.worker.binding import place_for
from broker.worker.cuda.in_place import measured
from broker.worker.cuda.staging import DeviceBuffer
from broker.worker.cuda.streams import Lane
from broker.worker.gathered import union
from broker.worker.model import Instance, LoadedModel
from broker.worker.plans import PlacedTensor, Plan
from broker.worker.running import check_sizes, fail, neighbours, run_watched
from shm.admission import Request
from shm.datatypes import shape_text
from shm.errors import Code, InferError

Shape = tuple[int, ...]
Result = tuple[OnGpu, Shape]
MAX_BINDINGS = 4096  # per plan; as of bindings on the host
MAX_KINDS = 32  # of batches per instance: clients choose the shapes, so there is no end to them
_now = time.monotonic_ns


class _Alone(NamedTuple):
    """A binding of one request's position."""

    binding: GpuBinding
    opens: tuple[PlacedTensor, ...]  # outputs whose size the run tells


# --- one request ----------------------------------------------------------------------------------------------------


def run_alone(instance: Instance, lane: Lane, request: Request) -> None:
    """In place as far as its memory is the GPU's. The request gets its ending."""
    plan = request.plan
    assert isinstance(plan, Plan)
    request.note = b""
    began = _now()
    try:
        check_sizes(plan)
        binding, opens = _binding_of(plan, instance, request)
        ran = run_watched(instance, binding.run, request.rows, began)
        request.copied = count_moved(instance, lane)
        if not request.copied and not opens:
            measured(plan, instance, request, binding, ran - began)
        ended = ran
        if opens:
            request.copied += deliver(instance.model, lane, request, opens, binding.places(), "output")
            count_moved(instance, lane)
            ended = _now()
        request.input_ns, request.infer_ns, request.output_ns = 0, ran - began, ended - ran
        instance.count_batch(1, request.rows, request.queue_ns, 0, ran - began, ended - ran)
    except Exception as error:
        lane.check()
        fail(instance, request, error, began)


def _binding_of(plan: Plan, instance: Instance, request: Request) -> _Alone:
    """The cached binding; its key is not one that the loop's hot path looks for."""
    key = (-instance.number, request.input_position, request.output_position, request.rows)
    found: _Alone | None = plan.bindings.get(key)
    if found is None:
        found = _bind(plan, instance, request)
        _remember(plan, instance, key, found)
    return found


def _remember(plan: Plan, instance: Instance, key: tuple[int, int, int, int], binding: object) -> None:
    """For the next run on these positions. Not what a replaced or unloaded model still has queued."""
    if plan.closed is None and plan.model is instance.model:
        if len(plan.bindings) >= MAX_BINDINGS:
            plan.bindings.clear()
        plan.bindings[key] = binding


def _bind(plan: Plan, instance: Instance, request: Request) -> _Alone:
    shape, rows = instance.model.shape, request.rows
    inputs = [
        _operand(tensor, shape(tensor.name, tensor.shape_of(rows)), request.input_position, rows)
        for tensor in plan.inputs
    ]
    outputs = []
    for tensor in plan.outputs:
        dims = shape(tensor.name, tensor.shape_of(rows))
        if tensor.open:
            outputs.append(Operand(tensor.name, tensor.datatype, dims, None))
        else:
            outputs.append(_operand(tensor, dims, request.output_position, rows))
    made = instance.bind(inputs, outputs, rows, plan.parameters)
    return _Alone(cast(GpuBinding, made), tuple(tensor for tensor in plan.outputs if tensor.open))


def _operand(tensor: PlacedTensor, shape: Shape, position: int, rows: int) -> Operand:
    place = on_gpu(tensor, position, rows)
    memory = tensor.memory(position, rows) if place is None else None
    return Operand(tensor.name, tensor.datatype, shape, memory, place)


def on_gpu(tensor: PlacedTensor, position: int, rows: int) -> OnGpu | None:
    """Where a position of a tensor lies on the GPU; None: on the host."""
    window = tensor.region.gpu
    if window is None:
        return None
    size = rows * tensor.row_bytes if rows and tensor.row_bytes else tensor.place.byte_size
    return OnGpu(window.pointer + tensor.place.offset + position * tensor.place.stride, size, window.far)


def count_moved(instance: Instance, lane: Lane) -> int:
    """Count what the last runs of the instance have copied; returns the bytes."""
    if not lane.moved:
        return 0
    for reason, byte_size in lane.moved.items():
        instance.count_copy(reason, byte_size)
    total = lane.moved.total()
    lane.moved.clear()
    return total


# --- several --------------------------------------------------------------------------------------------------------


@final
class _Batch:
    """Memory of the GPU where rows of one kind lie side by side, and the bindings on it by row count.

    `outputs`: None for those whose size the run tells.
    """

    __slots__ = ("bindings", "inputs", "outputs")

    def __init__(self, inputs: list[DeviceBuffer], outputs: dict[str, DeviceBuffer | None]) -> None:
        self.inputs, self.outputs = inputs, outputs
        self.bindings: dict[int, GpuBinding] = {}


@final
class Batches:
    """An instance's, by kind: input shapes and the outputs that are wanted."""

    __slots__ = ("_kinds",)

    def __init__(self) -> None:
        self._kinds: dict[object, _Batch] = {}

    def get(self, instance: Instance, plan: Plan, wanted: dict[str, PlacedTensor]) -> _Batch:
        """Raises InferError UNAVAILABLE where the GPU has no memory for it."""
        key = (plan.signature, *((name, tensor.open) for name, tensor in wanted.items()))
        found = self._kinds.get(key)
        if found is None:
            scratch, most = instance.runtime.scratch, instance.model.config.max_batch_size  # type: ignore[attr-defined]
            found = _Batch(
                [scratch.get("rows in", tensor.name, tensor.row_bytes * most) for tensor in plan.inputs],
                {
                    name: None if tensor.open else scratch.get("rows out", name, tensor.row_bytes * most)
                    for name, tensor in wanted.items()
                },
            )
            if len(self._kinds) >= MAX_KINDS:
                self._kinds.pop(next(iter(self._kinds)))
            self._kinds[key] = found
        return found


def run_together(instance: Instance, lane: Lane, batches: Batches, requests: Sequence[Request], now: int) -> bool:
    """Run them as one batch. False: that failed, none has ended; which of them is the reason shows one by one."""
    try:
        _run_together(instance, lane, batches, requests, now)
    except Exception:
        lane.check()
        return False
    return True


def _run_together(instance: Instance, lane: Lane, batches: Batches, requests: Sequence[Request], now: int) -> None:
    began = _now()
    first = requests[0].plan
    assert isinstance(first, Plan)
    for plan in {request.plan for request in requests}:
        assert isinstance(plan, Plan)
        check_sizes(plan)
    block = neighbours(requests) if _in_blocks(first) else None
    if block is not None:
        _run_block(instance, lane, requests, block, now)
        return
    lane.enter()
    wanted = union(requests)
    batch = batches.get(instance, first, wanted)
    rows = _gather(instance, lane, batch, requests)
    binding = _batch_binding(instance, first, wanted, batch, rows)
    copied = _now()
    ran = run_watched(instance, binding.run, rows, copied)
    _scatter(instance, lane, batch, wanted, requests, binding.places(), rows)
    ended = _now()
    queued = 0
    for request in requests:
        request.queue_ns = waited = now - request.arrival
        request.input_ns, request.infer_ns, request.output_ns = copied - began, ran - copied, ended - ran
        queued += waited
    instance.count_batch(len(requests), rows, queued, copied - began, ran - copied, ended - ran)


def _in_blocks(plan: Plan) -> bool:
    """Do neighbouring positions of all its tensors lie side by side on the GPU?"""
    return all(
        tensor.region.gpu is not None and not tensor.open and tensor.place.stride == tensor.place.byte_size
        for tensor in (*plan.inputs, *plan.outputs)
    )


def _run_block(instance: Instance, lane: Lane, requests: Sequence[Request], block: tuple[int, int], now: int) -> None:
    """Neighbouring positions of one plan, in place."""
    plan, (input_position, output_position) = requests[0].plan, block
    assert isinstance(plan, Plan)
    count = len(requests)
    rows = plan.rows * count
    key = (-instance.number, input_position, output_position, -count)
    binding: GpuBinding | None = plan.bindings.get(key)
    if binding is None:
        inputs = [_block(instance, tensor, input_position, count, rows) for tensor in plan.inputs]
        outputs = [_block(instance, tensor, output_position, count, rows) for tensor in plan.outputs]
        binding = cast(GpuBinding, instance.bind(inputs, outputs, rows, plan.parameters))
        _remember(plan, instance, key, binding)
    began = _now()
    took = run_watched(instance, binding.run, rows, began) - began
    copied = count_moved(instance, lane)  # of places that are not aligned
    queued = 0
    for request in requests:
        request.queue_ns = waited = now - request.arrival
        request.infer_ns, request.copied = took, copied // count
        queued += waited
    instance.count_batch(count, rows, queued, 0, took, 0)


def _block(instance: Instance, tensor: PlacedTensor, position: int, count: int, rows: int) -> Operand:
    place = on_gpu(tensor, position, 0)
    assert place is not None
    shape = instance.model.shape(tensor.name, tensor.shape_of(rows))
    return Operand(tensor.name, tensor.datatype, shape, None, OnGpu(place.pointer, count * place.size, place.far))


def _gather(instance: Instance, lane: Lane, batch: _Batch, requests: Sequence[Request]) -> int:
    """Enqueue the copies of all rows to their places; returns how many rows."""
    row = 0
    for request in requests:
        plan = request.plan
        assert isinstance(plan, Plan)
        request.copied = 0
        for tensor, buffer in zip(plan.inputs, batch.inputs, strict=True):
            target = buffer.pointer + row * tensor.row_bytes
            place = on_gpu(tensor, request.input_position, request.rows)
            if place is not None:
                lane.copy(target, place.pointer, place.size)
                lane.moved["peer" if place.far else "gather"] += place.size
                request.copied += place.size
            else:
                memory = tensor.memory(request.input_position, request.rows)
                lane.copy_in(target, memory)
                lane.moved["gather"] += memory.size
                request.copied += memory.size
        row += request.rows
    count_moved(instance, lane)
    return row


def _batch_binding(
    instance: Instance, plan: Plan, wanted: dict[str, PlacedTensor], batch: _Batch, rows: int
) -> GpuBinding:
    found = batch.bindings.get(rows)
    if found is None:
        inputs = [
            _rows(instance, tensor, buffer, rows) for tensor, buffer in zip(plan.inputs, batch.inputs, strict=True)
        ]
        outputs = [_rows(instance, tensor, batch.outputs[name], rows) for name, tensor in wanted.items()]
        found = batch.bindings[rows] = cast(GpuBinding, instance.bind(inputs, outputs, rows, plan.parameters))
    return found


def _rows(instance: Instance, tensor: PlacedTensor, buffer: DeviceBuffer | None, rows: int) -> Operand:
    place = None if buffer is None else OnGpu(buffer.pointer, rows * tensor.row_bytes)
    shape = instance.model.shape(tensor.name, tensor.shape_of(rows))
    return Operand(tensor.name, tensor.datatype, shape, None, place)


def _scatter(
    instance: Instance,
    lane: Lane,
    batch: _Batch,
    wanted: dict[str, PlacedTensor],
    requests: Sequence[Request],
    results: Sequence[Result],
    rows: int,
) -> None:
    """Copy every request's rows to its memory, and wait for it."""
    opened = dict(zip((name for name, buffer in batch.outputs.items() if buffer is None), results, strict=True))
    for name, (_, shape) in opened.items():
        if not shape or shape[0] != rows:
            raise InferError(Code.INTERNAL, f"output '{name}' of a batch of {rows} rows has shape {shape_text(shape)}")
    row = 0
    for request in requests:
        plan = request.plan
        assert isinstance(plan, Plan)
        moved = 0
        for tensor in plan.outputs:
            buffer = batch.outputs[tensor.name]
            if buffer is not None:
                size = request.rows * tensor.row_bytes
                moved += _give(lane, tensor, request, OnGpu(buffer.pointer + row * tensor.row_bytes, size), "scatter")
        own = [tensor for tensor in plan.outputs if tensor.name in opened]
        if own:
            parts = [_part(opened[tensor.name], row, request.rows) for tensor in own]
            moved += deliver(instance.model, lane, request, own, parts, "scatter")
        request.copied += moved
        row += request.rows
    lane.finish()
    count_moved(instance, lane)


def _part(result: Result, row: int, rows: int) -> Result:
    place, shape = result
    each = place.size // shape[0]
    return OnGpu(place.pointer + row * each, rows * each), (rows, *shape[1:])


# --- results --------------------------------------------------------------------------------------------------------


def deliver(
    model: LoadedModel,
    lane: Lane,
    request: Request,
    tensors: Sequence[PlacedTensor],
    results: Sequence[Result],
    reason: str,
) -> int:
    """Copy what the runtime allocated to where the plan wants it; nothing is written unless everything fits.

    Returns the bytes copied, which go into `Lane.moved` by `reason`. The true shapes of open outputs go into the
    request's note.
    """
    note: list[int] = []
    if len(results) != len(tensors):
        raise InferError(
            Code.INTERNAL, f"model '{model.name}' gave {len(results)} results, {len(tensors)} outputs wait for one"
        )
    for tensor, (place, given) in zip(tensors, results, strict=True):
        reshape = model.reshapes.get(tensor.name)
        shape = given if reshape is None else reshape.to_client(tensor.name, given)
        note.extend(place_for(model, request, tensor, shape, place.size))
    copied = sum(
        _give(lane, tensor, request, place, reason) for tensor, (place, _) in zip(tensors, results, strict=True)
    )
    lane.finish()
    request.note = struct.pack(f"<{len(note)}Q", *note)
    return copied


def _give(lane: Lane, tensor: PlacedTensor, request: Request, source: OnGpu, reason: str) -> int:
    """Enqueue the copy of a result to its place."""
    if source.size:
        target = on_gpu(tensor, request.output_position, 0)
        if target is not None:
            lane.copy(target.pointer, source.pointer, source.size)
            reason = "peer" if target.far else reason
        else:
            lane.copy_out(tensor.memory(request.output_position)[: source.size], source.pointer)
        lane.moved[reason] += source.size
    return source.size
