"""Batches whose rows are copied into the instance's memory: requests that do not lie side by side.

`broker.worker.execute` runs those of requests for the same outputs; here are what both share, and the batches of
requests for different ones: the model makes all that any of them wants, each gets what it asked for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from broker.worker.backends import Binding, Operand
from broker.worker.binding import check_rows, client_shape, deliver, serialized, watched_results
from broker.worker.buffers import BatchBuffers
from broker.worker.cache import Output, Response
from broker.worker.given import said
from broker.worker.model import Instance
from broker.worker.plans import PlacedTensor, Plan
from broker.worker.running import run_watched
from shm.admission import Request

_now = time.monotonic_ns


def gather(requests: Sequence[Request], buffers: BatchBuffers) -> tuple[int, int]:
    """Copy the inputs behind each other; returns how many rows, and how many bytes."""
    rows = gathered = 0
    for request in requests:
        plan = request.plan
        assert isinstance(plan, Plan)
        request.copied = 0
        for tensor, buffer in zip(plan.inputs, buffers.inputs, strict=True):
            source = tensor.memory(request.input_position, request.rows)
            buffer[rows * tensor.row_bytes : rows * tensor.row_bytes + source.size] = source
            request.copied += source.size
        gathered += request.copied
        rows += request.rows
    return rows, gathered


def run_union(instance: Instance, requests: Sequence[Request], now: int) -> None:
    """Run requests whose inputs are alike and whose outputs are not. The runtime allocates all outputs."""
    began = _now()
    wanted = union(requests)
    buffers = _buffers(instance, requests[0], wanted)
    rows, gathered = gather(requests, buffers)
    binding = _binding(instance, requests[0], wanted, buffers, rows)
    copied = _now()
    ran = run_watched(instance, binding.run, rows, copied)
    results = dict(zip(wanted, watched_results(instance, binding, len(wanted), rows), strict=True))
    for name, array in results.items():
        check_rows(instance.model, name, array, rows)
    given = said(instance.model, binding, requests) if instance.model.gives_parameters else [b""] * len(requests)
    row = scattered = 0
    for request, parameters in zip(requests, given, strict=True):
        plan = request.plan
        assert isinstance(plan, Plan)
        arrays = [results[tensor.name][row : row + request.rows] for tensor in plan.outputs]
        delivered = deliver(instance.model, request, plan.outputs, arrays)
        request.give(parameters)
        if instance.model.cached is not None:
            inputs = [
                buffer[row * tensor.row_bytes : (row + request.rows) * tensor.row_bytes]
                for tensor, buffer in zip(plan.inputs, buffers.inputs, strict=True)
            ]
            kept = [
                Output(tensor.name, client_shape(instance.model, tensor, array), serialized(tensor, array).tobytes())
                for tensor, array in zip(plan.outputs, arrays, strict=True)
            ]
            response = Response(tuple(kept), parameters)
            instance.model.cached.keep(plan, request.rows, inputs, response, instance.block)
        request.copied += delivered
        scattered += delivered
        row += request.rows
    ended = _now()
    instance.count_copy("gather", gathered)
    instance.count_copy("scatter", scattered)
    queued = 0
    for request in requests:
        request.queue_ns = waited = now - request.arrival
        request.input_ns, request.infer_ns, request.output_ns = copied - began, ran - copied, ended - ran
        queued += waited
    instance.count_batch(len(requests), rows, queued, copied - began, ran - copied, ended - ran)


def union(requests: Sequence[Request]) -> dict[str, PlacedTensor]:
    """Every output that one of them wants, by name; open (its size is not known before the run) if it is for one."""
    wanted: dict[str, PlacedTensor] = {}
    for request in requests:
        plan = request.plan
        assert isinstance(plan, Plan)
        for tensor in plan.outputs:
            if tensor.open or tensor.name not in wanted:
                wanted[tensor.name] = tensor
    return dict(sorted(wanted.items()))


def _buffers(instance: Instance, first: Request, wanted: dict[str, PlacedTensor]) -> BatchBuffers:
    plan = first.plan
    assert isinstance(plan, Plan)
    key = (plan.signature, *wanted)
    found = instance.buffers.get(key)
    if found is None:
        most = instance.model.config.max_batch_size
        found = BatchBuffers(
            [instance.scratch("input", tensor.name, tensor.row_bytes * most) for tensor in plan.inputs],
            [None] * len(wanted),
        )
        instance.keep_buffers(key, found)
    return found


def _binding(
    instance: Instance, first: Request, wanted: dict[str, PlacedTensor], buffers: BatchBuffers, rows: int
) -> Binding:
    plan = first.plan
    assert isinstance(plan, Plan)
    found = buffers.bindings.get(rows)
    if found is None:
        shape = instance.model.shape
        inputs = [
            Operand(t.name, t.datatype, shape(t.name, t.shape_of(rows)), buffer[: rows * t.row_bytes])
            for t, buffer in zip(plan.inputs, buffers.inputs, strict=True)
        ]
        outputs = [Operand(t.name, t.datatype, shape(t.name, t.shape_of(rows)), None) for t in wanted.values()]
        found = buffers.bindings[rows] = instance.bind(inputs, outputs, rows, plan.parameters)
    return found
