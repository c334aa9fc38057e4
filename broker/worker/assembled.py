"""Runs batches of models with an `Assembly`: rows in slot order, controls, states, ragged inputs, scattered outputs.

Called by `execute.run_batch`. Inputs are copied into the instance's own memory, the runtime allocates every output. A
state is kept only with the answer of the request that made it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import final

import numpy as np

from broker.worker.assembly import (
    Array,
    Assembly,
    Row,
    Shape,
    batch_input,
    check_state,
    name_sequence,
    scattered,
)
from broker.worker.backends import Binding, Operand
from broker.worker.binding import check_rows, deliver, watched_results
from broker.worker.given import said
from broker.worker.model import Instance
from broker.worker.plans import PlacedTensor, Plan
from broker.worker.running import check_sizes, fail, run_watched
from broker.worker.sequence import Sequence as SequenceRecord
from broker.worker.undelivered import Kept, worth_keeping
from shm import datatypes, statistics
from shm.admission import Request
from shm.errors import Code, InferError, forget_frames, is_too_small
from shm.parameters import key_of

MAX_BINDINGS = 32  # per instance: clients choose the shapes, so there is no end to them
_now = time.monotonic_ns


def run_assembled(instance: Instance, assembly: Assembly, rows: Sequence[Row], now: int) -> None:
    """Run the rows; all that cannot share a run (other shapes, other inputs) run one after the other.

    Those of another run are empty slots in this one. What is not stateful and fails runs again one by one.
    """
    for row in rows:
        if row is not None:
            row.queue_ns = now - row.arrival
            row.note = b""
            if isinstance(row.sequence, Kept):  # a batch of its own
                _hand_over(instance, row, row.sequence)
                return
    for key in _keys(instance, assembly, rows):
        part = [row if row is not None and row in key else None for row in rows]
        if not assembly.stateful:
            part = [row for row in part if row is not None]
        _run_part(instance, assembly, part, again=not assembly.stateful and len(part) > 1)


def _hand_over(instance: Instance, request: Request, kept: Kept) -> None:
    """Answer a request for what a step has given that has run. What does not fit now either is an error."""
    plan = request.plan
    assert isinstance(plan, Plan)
    began = _now()
    try:
        check_sizes(plan)
        for tensor in plan.outputs:
            if tensor.name not in kept.outputs:
                text = f"output '{tensor.name}' was not asked for when this step was run"
                raise InferError(Code.INVALID_ARG, text)
        arrays = [kept.outputs[tensor.name] for tensor in plan.outputs]
        request.copied = deliver(instance.model, request, plan.outputs, arrays)
    except Exception as error:
        fail(instance, request, error, began)
        return
    request.give(kept.given)
    kept.record.states.update(kept.states)
    request.output_ns = _now() - began
    instance.count_copy("output", request.copied)
    instance.block[statistics.SUCCESS] += 1


def _keys(instance: Instance, assembly: Assembly, rows: Sequence[Row]) -> list[list[Request]]:
    """The requests by what they can share; those whose input cannot be read end here."""
    groups: dict[object, list[Request]] = {}
    for row in rows:
        if row is None:
            continue
        plan = row.plan
        assert isinstance(plan, Plan)
        began = _now()
        try:
            check_sizes(plan)
            if assembly.padder is not None:
                assembly.padder.length(plan.inputs)
            for tensor in plan.inputs:
                if tensor.datatype == datatypes.BYTES:
                    _check_strings(plan, tensor, row)
        except Exception as error:
            fail(instance, row, error, began)
            continue
        key = (
            tuple((t.name, t.datatype, t.shape[1:] if t.name not in assembly.loose else ()) for t in plan.inputs),
            tuple(assembly.state_of(state, row).shape for state in assembly.states),
            0 if assembly.batched else id(row),
            key_of(plan.parameters) if plan.parameters and instance.model.reads_parameters else (),
        )
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def _check_strings(plan: Plan, tensor: PlacedTensor, row: Request) -> None:
    count = datatypes.element_count(tensor.shape_of(row.rows))
    what = f"inference input '{tensor.name}' for model '{plan.model_name}'"
    datatypes.decode_bytes(tensor.memory(row.input_position, row.rows), count, what)


def _run_part(instance: Instance, assembly: Assembly, rows: list[Row], again: bool) -> None:
    began = _now()
    requests = [row for row in rows if row is not None]
    try:
        batch = _Batch(instance, assembly, rows)
        binding = batch.bind()
        copied = _now()
        ran = run_watched(instance, binding.run, batch.total, copied)
        parts = batch.cut(binding)
        given = said(instance.model, binding, rows) if instance.model.gives_parameters else None
    except Exception as error:
        for request in requests:
            if again:
                _run_part(instance, assembly, [request], again=False)
            else:
                fail(instance, request, error, began)
        forget_frames(error)
        return
    instance.count_copy("gather", batch.copied)
    done = []
    for at, row in enumerate(rows):
        if row is None:
            continue
        try:
            batch.finish(row, at, parts, b"" if given is None else given[at])
            done.append(row)
        except Exception as error:
            fail(instance, row, error, began)
    ended = _now()
    for request in done:
        request.input_ns, request.infer_ns, request.output_ns = copied - began, ran - copied, ended - ran
    if done:
        real = sum(request.rows for request in done)
        queued = sum(request.queue_ns for request in done)
        instance.count_batch(len(done), real, queued, copied - began, ran - copied, ended - ran, batch.total)


@final
class _Batch:
    """One run: its operands, and what becomes of its outputs."""

    __slots__ = (
        "_assembly",
        "_inputs",
        "_instance",
        "_lengths",
        "_outputs",
        "_padded_to",
        "_plan",
        "_rows",
        "_sizes",
        "copied",
        "total",
    )

    def __init__(self, instance: Instance, assembly: Assembly, rows: Sequence[Row]) -> None:
        self._instance, self._assembly, self._rows = instance, assembly, rows
        self._sizes = [(row.rows if row else 1) if assembly.batched else 0 for row in rows]
        self.total = sum(self._sizes)
        self.copied = 0
        first = next(row for row in rows if row is not None)
        assert isinstance(first.plan, Plan)
        self._plan = first.plan
        self._inputs: list[Operand] = []
        padder = assembly.padder
        self._lengths = [] if padder is None else [padder.length(row.plan.inputs) for row in rows]  # type: ignore[union-attr]
        self._padded_to = 0 if padder is None else padder.size_for(self._lengths)
        for index, tensor in enumerate(self._plan.inputs):
            self._gather(index, tensor)
        carried = {tensor.name for tensor in self._plan.inputs}  # an id that is a string
        for control in assembly.controls:
            if control.name in carried:
                self._name_sequences(control.name)
                continue
            self._add(control.name, control.datatype, assembly.control(control, rows, self._sizes))
        for state in assembly.states:
            known = assembly.state_of(state, first)
            values = [
                assembly.null_state(state, known) if row is None else assembly.state_of(state, row) for row in rows
            ]
            self._add(state.input_name, state.datatype, np.concatenate(values) if assembly.batched else values[0])
        for made in assembly.batch_inputs:
            array = batch_input(made, self._shapes(made.source_input[0]), self._sizes)
            for name in made.target_name:
                self._add(name, made.datatype, array)
        if padder is not None:
            for helper, array in padder.made(self._lengths, self._sizes, self._padded_to):
                self._add(helper.name, helper.datatype, array)
        self._outputs = self._wanted()

    def _name_sequences(self, carried: str) -> None:
        """Where the ids are strings, and the model wants to be told of sequences that end."""
        if self._instance.model.endings is None:
            return
        index = next(i for i, tensor in enumerate(self._plan.inputs) if tensor.name == carried)
        for row in self._rows:
            if row is not None:
                memory = self._tensor(row, index).memory(row.input_position, row.rows)
                name_sequence(row, *datatypes.decode_bytes(memory, 1, carried))

    def _tensor(self, row: Request, index: int) -> PlacedTensor:
        assert isinstance(row.plan, Plan)
        return row.plan.inputs[index]

    def _shapes(self, name: str) -> list[Shape]:
        index = next((i for i, tensor in enumerate(self._plan.inputs) if tensor.name == name), None)
        if index is None:
            raise InferError(Code.INVALID_ARG, f"input '{name}' is needed to make this batch, but it was not sent")
        # An empty slot is as one of the others, as in Triton.
        return [
            self._plan.inputs[index].shape_of(1) if row is None else self._tensor(row, index).shape_of(row.rows)
            for row in self._rows
        ]

    def _gather(self, index: int, tensor: PlacedTensor) -> None:
        model, name = self._instance.model, tensor.name
        parts = []
        for row, size in zip(self._rows, self._sizes, strict=True):
            if row is None:
                count = datatypes.element_count(tensor.shape_of(size)) if size else 0
                item = 4 if tensor.datatype == datatypes.BYTES else datatypes.element_size(tensor.datatype)
                parts.append(np.zeros(count * item, np.uint8))
                continue
            memory = self._tensor(row, index).memory(row.input_position, row.rows)
            row.copied = memory.size if not index else row.copied + memory.size
            self.copied += memory.size
            parts.append(memory)
        padder = self._assembly.padder
        if padder is not None and name in padder.axes:
            shape: Shape = padder.padded(tensor.shape_of(self.total), name, self._padded_to)
            buffer = self._instance.scratch("input", name, datatypes.byte_size(tensor.datatype, shape))
            padder.fill(buffer, name, shape, list(zip(parts, self._shapes(name), strict=True)))
            self._inputs.append(Operand(name, tensor.datatype, shape, buffer))
            return
        if name in self._assembly.ragged and self._assembly.batched:
            shape = (sum(datatypes.element_count(shape) for shape in self._shapes(name)),)
        else:
            shape = model.shape(name, tensor.shape_of(self.total))
        buffer = self._instance.scratch("input", name, sum(part.size for part in parts))
        np.concatenate(parts, out=buffer)
        self._inputs.append(Operand(name, tensor.datatype, shape, buffer))

    def _add(self, name: str, datatype: str, array: Array) -> None:
        if datatype == datatypes.BYTES:
            memory = np.frombuffer(datatypes.encode_bytes(array), np.uint8)
        else:
            raw = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
            memory = self._instance.scratch("input", name, raw.size)
            memory[:] = raw
        self._inputs.append(Operand(name, datatype, tuple(array.shape), memory))

    def _wanted(self) -> list[Operand]:
        model, wanted = self._instance.model, {}
        for row in self._rows:
            if row is not None:
                assert isinstance(row.plan, Plan)
                for tensor in row.plan.outputs:
                    shape = tensor.shape_of(self.total)
                    if self._assembly.padder is not None:
                        shape = self._assembly.padder.padded(shape, tensor.name, self._padded_to)
                    if tensor.name not in self._assembly.scatter:
                        shape = model.shape(tensor.name, shape)
                    wanted[tensor.name] = Operand(tensor.name, tensor.datatype, shape, None)
        for state in self._assembly.states:
            shape = (self.total, *state.dims) if self._assembly.batched else state.dims
            wanted.setdefault(state.output_name, Operand(state.output_name, state.datatype, shape, None))
        return list(wanted.values())

    def bind(self) -> Binding:
        """The operands lie where those of the last batch did: the binding is mostly known. Strings never stay."""
        instance = self._instance
        if any(operand.datatype == datatypes.BYTES for operand in (*self._inputs, *self._outputs)):
            return instance.bind(self._inputs, self._outputs, self.total, self._plan.parameters)
        known = self._assembly.bindings.setdefault(instance.number, {})
        key = (
            tuple(
                (o.name, o.shape, o.memory.__array_interface__["data"][0]) for o in self._inputs if o.memory is not None
            ),
            tuple((o.name, o.shape) for o in self._outputs),
            key_of(self._plan.parameters) if instance.model.reads_parameters else (),
        )
        found: Binding | None = known.get(key)
        if found is None:
            if len(known) >= MAX_BINDINGS:
                known.pop(next(iter(known)))
            found = known[key] = instance.bind(self._inputs, self._outputs, self.total, self._plan.parameters)
        return found

    def cut(self, binding: Binding) -> dict[str, list[Array]]:
        """Each output by row of the batch (one entry per request or empty slot)."""
        cut: dict[str, list[Array]] = {}
        results = watched_results(self._instance, binding, len(self._outputs), self.total)
        for operand, array in zip(self._outputs, results, strict=True):
            by = self._assembly.scatter.get(operand.name)
            if by is not None:
                cut[operand.name] = scattered(operand.name, array, by[1], self._shapes(by[0]))
            elif not self._assembly.batched:
                cut[operand.name] = [array]
            else:
                check_rows(self._instance.model, operand.name, array, self.total)
                ends = np.cumsum(self._sizes)
                cut[operand.name] = [array[end - size : end] for end, size in zip(ends, self._sizes, strict=True)]
                self._cut_back(operand.name, cut[operand.name])
        return cut

    def _cut_back(self, name: str, parts: list[Array]) -> None:
        padder = self._assembly.padder
        if padder is not None:
            for at, length in enumerate(self._lengths):
                parts[at] = padder.cut(name, parts[at], length, self._padded_to)

    def finish(self, row: Request, at: int, parts: dict[str, list[Array]], given: bytes) -> None:
        """Deliver the row's outputs, then keep its sequence's states: an answer that failed changes nothing.

        `given`: the parameters of its response, packed.
        """
        plan, instance = row.plan, self._instance
        assert isinstance(plan, Plan)
        try:
            delivered = deliver(instance.model, row, plan.outputs, [parts[tensor.name][at] for tensor in plan.outputs])
        except InferError as error:
            if isinstance(row.sequence, SequenceRecord) and is_too_small(error.message):
                outputs = {tensor.name: parts[tensor.name][at] for tensor in plan.outputs}
                states = {state.input_name: parts[state.output_name][at] for state in self._assembly.states}
                for state in self._assembly.states:
                    check_state(instance.model.config, state, states[state.input_name])
                if worth_keeping(array.nbytes for array in (*outputs.values(), *states.values())):
                    row.sequence.kept = Kept(row.sequence, outputs, states, given)
            raise
        row.give(given)
        instance.count_copy("output", delivered)
        row.copied += delivered
        if row.sequence is not None:
            states = row.sequence.states  # type: ignore[attr-defined]
            made = {state: parts[state.output_name][at] for state in self._assembly.states}
            for state, array in made.items():
                check_state(instance.model.config, state, array)
            for state, array in made.items():
                states[state.input_name] = array.copy()
