"""Runs a batch of a decoupled model: every request of it becomes a `Stream` that the model answers when it likes.

Called by `broker.worker.execute`, in an instance's thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from broker.worker.answers import Answers
from broker.worker.assembly import StatesSent, name_sequence
from broker.worker.backends import OWN_CODE, Operand, bind
from broker.worker.binding import results_of
from broker.worker.given import of_rows
from broker.worker.model import Instance
from broker.worker.plans import Bytes, PlacedTensor, Plan
from broker.worker.running import answer, check_sizes
from broker.worker.stream import Stream, Taker
from broker.worker.streams import Streams
from broker.worker.tracebacks import complain
from shm import datatypes, statistics
from shm.admission import Request
from shm.errors import Code, InferError, forget_frames
from shm.worker_channel import WorkerChannel

_now = time.monotonic_ns


class Branches(Protocol):
    """What a step of a decoupled member comes from, instead of a client's channel: `broker.worker.ensembles.flow`."""

    def taker(self, step: Request, streams: Streams) -> Taker:
        """Where its responses go. Raises InferError where there may be one only."""


def taker_of(instance: Instance, streams: Streams, request: Request, now: int) -> Taker | None:
    """Where the responses to `request` go: its client's memory, or an ensemble. None: nowhere, and it has ended."""
    if isinstance(request.channel, WorkerChannel):
        answers = Answers(instance, streams, request, now)
        streams.begin(answers, instance.block)
        return answers
    ensemble: Branches = request.channel  # type: ignore[assignment]
    try:
        return ensemble.taker(request, streams)
    except InferError as error:
        request.fail(Code[error.code], error.message)
        request.channel.complete((request,))
        return None


def run_streams(instance: Instance, streams: Streams, requests: Sequence[Request], now: int) -> None:
    """Give a batch to the model. Every request gets its ending from its stream, here or later, in any thread."""
    given: list[Stream] = []
    begun: list[Request] = []
    running: list[Answers] = []
    for request in requests:
        earlier = streams.again.pop(request, None)
        if earlier is not None and earlier.over:
            continue
        request.queue_ns = now - request.arrival
        taker = earlier or taker_of(instance, streams, request, now)
        if taker is None:
            continue
        try:
            inputs = _inputs(instance, streams, request)
            assert isinstance(request.plan, Plan)
            names = [tensor.name for tensor in request.plan.outputs]
            kept = taker.kept if isinstance(taker, Answers) else None
            parameters, states = request.plan.parameters, _states(instance, streams, request)
            given.append(Stream(taker, inputs, names, request.request_id, request.rows, kept, parameters, states))
        except Exception as error:
            taker.fail(answer(instance, error))
        else:
            begun.append(request)
            if isinstance(taker, Answers):
                taker.runs(True)
                running.append(taker)
    if not given:
        return
    streams.run(instance, begun, lambda: _execute(instance, streams, given))
    for answers in running:
        answers.runs(False)
    with streams.lock:
        _count_execution(instance.block, requests, now)


def _execute(instance: Instance, live: Streams, given: list[Stream]) -> None:
    execute = getattr(instance.runtime, "execute", None)
    # A backend that knows nothing of streams runs one request after the other: only the bad one fails.
    batches = [given] if execute is not None else [[stream] for stream in given]
    for streams in batches:
        try:
            with OWN_CODE:
                if execute is not None:
                    execute(streams)
                else:
                    _run_once(instance, live, *streams)
        except Exception as error:
            complain(instance.model.config, error)
            failure = answer(instance, error)
            forget_frames(error)  # the backend may hold it
            for stream in streams:
                stream.fail(failure)


def _inputs(instance: Instance, streams: Streams, request: Request) -> dict[str, npt.NDArray[Any]]:
    """Copies, because what the model keeps of them may outlive the request."""
    plan = request.plan
    assert isinstance(plan, Plan)
    check_sizes(plan)
    arrays: dict[str, npt.NDArray[Any]] = {}
    for tensor in plan.inputs:
        memory = tensor.memory(request.input_position, request.rows).copy()
        request.copied += memory.size
        with streams.lock:
            instance.count_copy("policy", memory.size)
        shape = instance.model.shape(tensor.name, tensor.shape_of(request.rows))
        arrays[tensor.name] = _array(tensor, shape, memory)
    if streams.assembly is not None:
        for control in streams.assembly.controls:
            if control.name not in arrays:  # an id that is a string comes with the request
                arrays[control.name] = streams.assembly.control(control, [request], [request.rows])
            elif instance.model.endings is not None:
                name_sequence(request, arrays[control.name].item())
        for state in streams.assembly.states:
            arrays[state.input_name] = streams.assembly.state_of(state, request).copy()
    return arrays


def _states(instance: Instance, streams: Streams, request: Request) -> StatesSent | None:
    """Where the model's states go, if it has some."""
    if streams.assembly is None or not streams.assembly.states:
        return None
    return StatesSent(instance.model.config, streams.assembly, request.sequence)


def _array(tensor: PlacedTensor, shape: tuple[int, ...], memory: Bytes) -> npt.NDArray[Any]:
    if tensor.datatype == datatypes.BYTES:
        count = datatypes.element_count(shape)
        return datatypes.decode_bytes(memory, count, f"inference input '{tensor.name}'").reshape(shape)
    return memory.view(datatypes.numpy_dtype(tensor.datatype)).reshape(shape)


def _run_once(instance: Instance, streams: Streams, stream: Stream) -> None:
    """A backend that knows nothing of streams: one response, the final one."""
    datatype = {tensor.name: tensor.datatype for tensor in instance.model.config.input}
    inputs = [
        Operand(name, datatype.get(name) or datatypes.datatype_of(array.dtype), tuple(array.shape), _memory(array))
        for name, array in stream.inputs.items()
    ]
    batch = (stream.rows,) if stream.rows else ()
    configured = {tensor.name: tensor for tensor in instance.model.config.output}
    outputs = [
        Operand(name, configured[name].datatype, (*batch, *configured[name].dims), None) for name in stream.outputs
    ]
    assembly = streams.assembly
    for state in assembly.states if assembly is not None else ():
        if state.output_name not in stream.outputs:
            outputs.append(Operand(state.output_name, state.datatype, (*batch, *state.dims), None))
    binding = bind(instance.runtime, inputs, outputs, stream.parameters)
    binding.run()
    names = [operand.name for operand in outputs]
    results = results_of(instance.model, binding, len(names))
    sent = dict(zip(names, map(np.asarray, results), strict=True))
    (given,) = of_rows(instance.model, binding, [stream.rows])
    stream.send(sent, final=True, parameters=given)


def _memory(array: npt.NDArray[Any]) -> Bytes:
    if array.dtype.hasobject:
        return np.frombuffer(datatypes.encode_bytes(array), np.uint8)
    return array.reshape(-1).view(np.uint8)


def _count_execution(block: memoryview, requests: Iterable[Request], began: int) -> None:
    """One run of the model: what Triton counts of it, whatever is sent when."""
    rows = sum(request.rows or 1 for request in requests)
    took = _now() - began
    block[statistics.EXECUTIONS] += 1
    at = statistics.BATCHES + 4 * (min(rows, statistics.MAX_BATCH) - 1)
    block[at] += 1
    block[at + 2] += took
