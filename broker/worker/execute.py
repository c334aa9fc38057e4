"""Runs one batch: in place where the rows lie right, else through one counted copy each way.

Called by the loop from any of its threads, with an instance that is the caller's alone. Every request of the batch gets
its ending here; publishing it is the loop's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from broker.worker.assembled import run_assembled
from broker.worker.assembly import Row
from broker.worker.backends import Binding, Operand, Reshaped
from broker.worker.binding import (
    Execution,
    bind,
    check_in_place,
    check_rows,
    client_shape,
    deliver,
    execution_of,
    remember,
    serialized,
    watched_results,
)
from broker.worker.buffers import BatchBuffers
from broker.worker.cache import Output, Response
from broker.worker.decoupled import run_streams
from broker.worker.gathered import gather, run_union
from broker.worker.given import give
from broker.worker.model import Instance
from broker.worker.plans import Bytes, Plan
from broker.worker.running import check_sizes, fail, neighbours, run_watched
from shm.admission import Request
from shm.errors import forget_frames

_now = time.monotonic_ns


def run_batch(instance: Instance, requests: list[Request], rows: Sequence[Row] = ()) -> None:
    """Run `requests` together; a batch that raises is run again row by row, so that only the bad one fails.

    `rows`: the same in slot order with None for empty slots, of models whose batches have them. A batch of a sequence
    model that raises has failed: running it again could take a step twice.
    """
    instance.flush()  # in time, because whoever runs it next may be another thread
    runner = instance.model.runner
    if runner is not None:
        runner.run(instance, requests, rows, _run)
    else:
        _run(instance, requests, rows)


def _run(instance: Instance, requests: list[Request], rows: Sequence[Row]) -> None:
    now = _now()
    streams = instance.model.streams
    if streams is not None:
        run_streams(instance, streams, requests, now)
        return
    ensemble = instance.model.ensemble
    if ensemble is not None:  # the suspect of a recovery, alone
        for request in requests:
            ensemble.run_alone(request)
        return
    assembly = instance.model.assembly
    if assembly is not None:
        run_assembled(instance, assembly, rows or requests, now)
        return
    if len(requests) > 1:
        try:
            _run_together(instance, requests, now)
            return
        except Exception as error:
            forget_frames(error)  # whatever the runtime raised: which row caused it shows when each runs alone
    for request in requests:
        request.queue_ns = now - request.arrival
        _run_alone(instance, request)


def _run_alone(instance: Instance, request: Request) -> None:
    plan = request.plan
    assert isinstance(plan, Plan)
    request.note = b""
    began = _now()
    try:
        check_sizes(plan)
        execution = execution_of(plan, instance, request.input_position, request.output_position, request.rows)
        try:
            _run_execution(instance, request, execution, began)
        except Exception as error:
            if not (isinstance(error, Reshaped) or _reshaped(plan)):
                raise
            # An output came out in another shape than the plan says: the runtime allocates, to learn which.
            opened = bind(plan, instance, request.input_position, request.output_position, request.rows, all_open=True)
            _run_execution(instance, request, opened, began)
    except Exception as error:
        fail(instance, request, error, began)


def _run_execution(instance: Instance, request: Request, execution: Execution, began: int) -> None:
    rows = request.rows
    for target, source, reason in execution.copies:
        target[:] = source
        instance.count_copy(reason, source.size)
    copied = _now() if execution.copies else began
    ran = run_watched(instance, execution.run, rows, copied)
    if not execution.typical_ns:
        check_in_place(instance.model, execution)
    execution.measured(ran - copied)
    request.copied = execution.copied
    ended = ran
    if execution.opens:
        results = watched_results(instance, execution.binding, len(execution.opens), rows)
        delivered = deliver(instance.model, request, execution.opens, results)
        if instance.model.gives_parameters:
            give(instance.model, execution.binding, (request,))
        if instance.model.cached is not None:
            _keep(instance, request, [copy for copy, _, _ in execution.copies], results)
        instance.count_copy("output", delivered)
        request.copied += delivered
        ended = _now()
    elif instance.model.gives_parameters:
        give(instance.model, execution.binding, (request,))
    request.input_ns, request.infer_ns, request.output_ns = copied - began, ran - copied, ended - ran
    instance.count_batch(1, rows, request.queue_ns, request.input_ns, request.infer_ns, request.output_ns)


def _reshaped(plan: Plan) -> bool:
    """Could a run in place fail only because an output came out in another shape than the plan says?"""
    model = plan.model
    return model is not None and any(t.name in model.uncertain and not t.open for t in plan.outputs)


def _run_together(instance: Instance, requests: list[Request], now: int) -> None:
    for plan in {request.plan for request in requests}:
        assert isinstance(plan, Plan)
        check_sizes(plan)
    first = _adjacent(instance, requests)
    if first is not None:
        _run_adjacent(instance, requests, *first, now)
        return
    layout = requests[0].plan.layout  # type: ignore[union-attr]
    if all(request.plan.layout is layout for request in requests):  # type: ignore[union-attr]
        _run_gathered(instance, requests, now)
    else:
        run_union(instance, requests, now)


def _adjacent(instance: Instance, requests: list[Request]) -> tuple[int, int] | None:
    """First input and output position, if the requests may run as one block of their plan."""
    plan = requests[0].plan
    assert isinstance(plan, Plan)
    if not plan.adjacent or plan.model is not instance.model:  # a replaced model may have wanted copies
        return None
    return neighbours(requests)


def _run_adjacent(
    instance: Instance, requests: list[Request], input_position: int, output_position: int, now: int
) -> None:
    plan = requests[0].plan
    assert isinstance(plan, Plan)
    count = len(requests)
    key = (instance.number, input_position, output_position, -count)
    execution = plan.bindings.get(key)
    if execution is None:
        execution = bind(plan, instance, input_position, output_position, plan.rows, count)
        remember(plan, key, execution)
    began = _now()
    rows = plan.rows * count
    took = run_watched(instance, execution.run, rows, began) - began
    if not execution.typical_ns:
        check_in_place(instance.model, execution)
    execution.measured(took)
    if instance.model.gives_parameters:
        give(instance.model, execution.binding, sorted(requests, key=lambda request: request.input_position))
    queued = 0
    for request in requests:
        request.queue_ns = waited = now - request.arrival
        request.infer_ns = took
        queued += waited
    instance.count_batch(count, rows, queued, 0, took, 0)


def _run_gathered(instance: Instance, requests: list[Request], now: int) -> None:
    began = _now()
    buffers = _buffers(instance, requests[0])
    rows, gathered = gather(requests, buffers)
    binding = _batch_binding(instance, requests[0], buffers, rows)
    copied = _now()
    ran = run_watched(instance, binding.run, rows, copied)
    results = watched_results(instance, binding, sum(buffer is None for buffer in buffers.outputs), rows)
    scattered = _scatter(instance, requests, buffers, results, rows)
    if instance.model.gives_parameters:
        give(instance.model, binding, requests)
    if instance.model.cached is not None:
        _keep_rows(instance, requests, buffers, results)
    ended = _now()
    instance.count_copy("gather", gathered)
    instance.count_copy("scatter", scattered)
    queued = 0
    for request in requests:
        request.queue_ns = waited = now - request.arrival
        request.input_ns, request.infer_ns, request.output_ns = copied - began, ran - copied, ended - ran
        queued += waited
    instance.count_batch(len(requests), rows, queued, copied - began, ran - copied, ended - ran)


def _keep(
    instance: Instance, request: Request, inputs: Sequence[Bytes], outputs: Sequence[npt.NDArray[np.generic]]
) -> None:
    """For the response cache: `inputs` is what the model has seen, `outputs` what it made of it."""
    plan, model = request.plan, instance.model
    assert isinstance(plan, Plan)
    assert model.cached is not None
    kept = []
    for tensor, array in zip(plan.outputs, outputs, strict=True):
        kept.append(Output(tensor.name, client_shape(model, tensor, array), serialized(tensor, array).tobytes()))
    model.cached.keep(plan, request.rows, inputs, Response(tuple(kept), request.parameters), instance.block)


def _keep_rows(
    instance: Instance, requests: list[Request], buffers: BatchBuffers, opened: list[npt.NDArray[np.generic]]
) -> None:
    """The same of each request of a batch, whose rows lie side by side."""
    cached, row = instance.model.cached, 0
    assert cached is not None
    for request in requests:
        plan, rows, arrays = request.plan, request.rows, iter(opened)
        assert isinstance(plan, Plan)
        kept = []
        for tensor, buffer in zip(plan.outputs, buffers.outputs, strict=True):
            if buffer is None:
                array = next(arrays)[row : row + rows]
                kept.append(Output(tensor.name, tuple(array.shape), serialized(tensor, array).tobytes()))
            else:
                part = buffer[row * tensor.row_bytes : (row + rows) * tensor.row_bytes]
                kept.append(Output(tensor.name, tensor.shape_of(rows), part.tobytes()))
        inputs = [
            buffer[row * tensor.row_bytes : (row + rows) * tensor.row_bytes]
            for tensor, buffer in zip(plan.inputs, buffers.inputs, strict=True)
        ]
        cached.keep(plan, rows, inputs, Response(tuple(kept), request.parameters), instance.block)
        row += rows


def _scatter(
    instance: Instance,
    requests: list[Request],
    buffers: BatchBuffers,
    opened: list[npt.NDArray[np.generic]],
    rows: int,
) -> int:
    first = requests[0].plan
    assert isinstance(first, Plan)
    names = [tensor.name for tensor, buffer in zip(first.outputs, buffers.outputs, strict=True) if buffer is None]
    for name, array in zip(names, opened, strict=True):
        check_rows(instance.model, name, array, rows)
    row = scattered = 0
    for request in requests:
        plan = request.plan
        assert isinstance(plan, Plan)
        copied = 0
        for tensor, buffer in zip(plan.outputs, buffers.outputs, strict=True):
            if buffer is not None:
                target = tensor.memory(request.output_position, request.rows)
                target[:] = buffer[row * tensor.row_bytes : row * tensor.row_bytes + target.size]
                copied += target.size
        if opened:
            tensors = [tensor for tensor in plan.outputs if tensor.open]
            copied += deliver(instance.model, request, tensors, [array[row : row + request.rows] for array in opened])
        request.copied += copied
        scattered += copied
        row += request.rows
    return scattered


def _buffers(instance: Instance, request: Request) -> BatchBuffers:
    plan = request.plan
    assert isinstance(plan, Plan)
    found = instance.buffers.get(plan.layout)
    if found is None:
        most = instance.model.config.max_batch_size
        found = BatchBuffers(
            [instance.scratch("input", t.name, t.row_bytes * most) for t in plan.inputs],
            [None if t.open else instance.scratch("output", t.name, t.row_bytes * most) for t in plan.outputs],
        )
        instance.keep_buffers(plan.layout, found)
    return found


def _batch_binding(instance: Instance, request: Request, buffers: BatchBuffers, rows: int) -> Binding:
    plan = request.plan
    assert isinstance(plan, Plan)
    found = buffers.bindings.get(rows)
    if found is None:
        shape = instance.model.shape
        inputs = [
            Operand(t.name, t.datatype, shape(t.name, t.shape_of(rows)), b[: rows * t.row_bytes])
            for t, b in zip(plan.inputs, buffers.inputs, strict=True)
        ]
        outputs = [
            Operand(t.name, t.datatype, shape(t.name, t.shape_of(rows)), None if b is None else b[: rows * t.row_bytes])
            for t, b in zip(plan.outputs, buffers.outputs, strict=True)
        ]
        found = buffers.bindings[rows] = instance.bind(inputs, outputs, rows, plan.parameters)
    return found
