"""Is this prepared request one that the model can run? Triton's checks, with Triton's texts, on plain data.

Called by `broker.plans` once per plan. Knows metadata and regions; not sessions, workers or descriptors. What only the
data can tell (string lengths, values) is checked by the worker, per request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from broker.records import RegionEntry
from broker.worker.messages import PlanTensor
from shm import parameters, views
from shm.datatypes import BYTES, shape_text
from shm.errors import InferError
from shm.messages import ModelMetadata, Prepare, TensorSpec
from shm.model_fit import (
    check_inputs,
    check_output,
    check_output_datatype,
    check_outputs_named,
    named,
    refuse,
    symbol_sizes,
)
from shm.views import Placement

# The completion's note holds the rank and dimensions of every output whose shape the plan leaves open.
MAX_OPEN_WORDS = 62


class CheckedPlan(NamedTuple):
    """What a worker needs of a plan. `rows` is the batch dimension of one position, 0 for models without one."""

    inputs: tuple[PlanTensor, ...]
    outputs: tuple[PlanTensor, ...]
    regions: tuple[RegionEntry, ...]
    rows: int
    credit: PlanTensor | None


class _Placed(NamedTuple):
    spec: TensorSpec
    entry: RegionEntry
    place: Placement  # counted from the start of the file, so that regions of one file compare


def check(
    model: ModelMetadata, request: Prepare, find: Callable[[str], RegionEntry], credit: TensorSpec | None = None
) -> CheckedPlan:
    """Check `request` against `model`. `find` gives the session's region of a name or raises NOT_FOUND.
    `credit`: see `shm.messages.PrepareStep`.

    Raises InferError (INVALID_ARG, NOT_FOUND) naming the tensor, what was expected and what came.
    """
    _check_responses(model, request)
    parameters.check(request.parameters)
    correlation = model.correlation
    text = correlation.name if correlation is not None and correlation.datatype == BYTES else None
    if correlation is not None and any(spec.name == text for spec in request.inputs):
        model = replace(model, inputs=(*model.inputs, correlation))
    rows = check_inputs(model, request.inputs)
    sizes = symbol_sizes(model, {spec.name: spec.shape for spec in request.inputs})
    check_outputs_named(model, [spec.name for spec in request.outputs])
    for spec in request.outputs:
        if request.responses:
            _check_stream_place(model, spec, request.responses)
        else:
            check_output(model, spec, rows, sizes)
    _check_note(model, request.outputs, 2 if request.responses else 1)
    inputs = [_place(model, spec, find, request.input_positions, output=False) for spec in request.inputs]
    outputs = [_place(model, spec, find, request.output_positions, output=True) for spec in request.outputs]
    _check_overlap(model, inputs, outputs, request.output_positions)
    credits = [] if credit is None else [_place(model, _one_word(credit), find, 1, output=False)]
    entries = {placed.entry.generation: placed.entry for placed in (*inputs, *outputs, *credits)}
    word = next(iter(_tensors(credits)), None)
    return CheckedPlan(_tensors(inputs), _tensors(outputs), tuple(entries.values()), rows, word)


def _one_word(credit: TensorSpec) -> TensorSpec:
    if (credit.datatype, credit.shape) != ("UINT64", (1,)) or credit.offset % 8:
        raise refuse(f"credit is one aligned UINT64, got {credit.datatype} {shape_text(credit.shape)}")
    return credit


def _check_stream_place(model: ModelMetadata, spec: TensorSpec, responses: int) -> None:
    check_output_datatype(model, spec)
    if spec.shape != (-1,) or spec.byte_size < responses or spec.byte_size % responses:
        raise refuse(
            f"output '{spec.name}' of the decoupled model '{model.name}' must have the shape [-1] and room for "
            f"{responses} responses of equal size, got {shape_text(spec.shape)} and {spec.byte_size} bytes"
        )


def _check_responses(model: ModelMetadata, request: Prepare) -> None:
    if model.decoupled and not request.responses:
        raise refuse(
            f"model '{model.name}' is decoupled (model_transaction_policy): a request may have several responses or "
            "none, so ask for a stream"
        )
    if request.responses and not model.decoupled:
        raise refuse(f"model '{model.name}' has exactly one response to a request, got places for {request.responses}")


def _check_note(model: ModelMetadata, specs: Sequence[TensorSpec], own: int) -> None:
    """`own`: words of each output beside its dimensions."""
    words = sum(own + len(named(model.outputs, spec.name).shape) for spec in specs if -1 in spec.shape)
    if words > MAX_OPEN_WORDS:
        raise refuse(
            f"too many open output dimensions for model '{model.name}': the outputs with a -1 have {words} ranks and "
            f"dimensions together, a result can report {MAX_OPEN_WORDS}. Ask for fewer of them in one plan"
        )


# --- places -------------------------------------------------------------------------------------------------------


def _place(
    model: ModelMetadata, spec: TensorSpec, find: Callable[[str], RegionEntry], positions: int, *, output: bool
) -> _Placed:
    entry = find(spec.region)
    if entry.events is not None:
        raise refuse(f"tensor '{spec.name}' lies in '{spec.region}', which is a ring of events and no memory")
    if output and not entry.writable:
        raise refuse(f"output '{spec.name}' lies in region '{spec.region}', which is read-only")
    place = views.resolve(spec, entry.byte_size, positions, output=output, model=model.name)
    return _Placed(spec, entry, place.shifted(entry.offset))


def _check_overlap(
    model: ModelMetadata, inputs: Sequence[_Placed], outputs: Sequence[_Placed], output_positions: int
) -> None:
    for index, output in enumerate(outputs):
        for other in inputs:
            # A request may pair any input position with any output position.
            if _same_memory(output, other) and views.meets(output.place, other.place):
                raise _overlap(model, output, "input", other)
        for other in outputs[:index]:
            if _same_memory(output, other) and _meet_at_one_position(output.place, other.place, output_positions):
                raise _overlap(model, output, "output", other)


def _same_memory(a: _Placed, b: _Placed) -> bool:
    return (a.entry.device, a.entry.inode) == (b.entry.device, b.entry.inode)


def _meet_at_one_position(a: Placement, b: Placement, positions: int) -> bool:
    """All outputs of one request have the same position; other requests' are the worker's live check."""
    if not views.meets(a, b):
        return False
    # The distance between the two changes evenly with the position: beyond the crossing it only grows.
    step = b.stride - a.stride
    crossing = min(max((a.offset - b.offset) // step, 0), positions - 1) if step else 0
    nearest = {max(crossing - 1, 0), crossing, min(crossing + 1, positions - 1)}
    return any(views.touches(a, k, b, k) for k in nearest)


def _overlap(model: ModelMetadata, output: _Placed, kind: str, other: _Placed) -> InferError:
    return refuse(
        f"overlapping tensors for model '{model.name}': output '{output.spec.name}' ({_range(output)}) overlaps "
        f"{kind} '{other.spec.name}' ({_range(other)}); give each a range of its own"
    )


def _range(placed: _Placed) -> str:
    start = placed.place.offset - placed.entry.offset
    span = f"bytes {start} to {placed.place.end - placed.entry.offset} of region '{placed.spec.region}'"
    return span if placed.place.positions == 1 else f"{span}, {placed.place.positions} positions"


def _tensors(placed: Iterable[_Placed]) -> tuple[PlanTensor, ...]:
    return tuple(
        PlanTensor(spec=tensor.spec, region=tensor.entry.region, generation=tensor.entry.generation)
        for tensor in placed
    )
