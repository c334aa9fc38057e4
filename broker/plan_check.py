"""Is this prepared request one that the model can run? Triton's checks, with Triton's texts, on plain data.

Called by `broker.plans` once per plan. Knows metadata and regions; not sessions, workers or descriptors. What only the
data can tell (string lengths, values) is checked by the worker, per request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from broker.records import RegionEntry
from broker.repository.mismatch import dims_text, fits, request_fix, side_by_side
from broker.worker.messages import PlanTensor
from shm import parameters, views
from shm.datatypes import BYTES, shape_text
from shm.errors import Code, InferError
from shm.messages import ModelMetadata, Prepare, TensorMetadata, TensorSpec
from shm.views import Placement

# The completion's note holds the rank and dimensions of every output whose shape the plan leaves open.
MAX_OPEN_WORDS = 62
_COLUMNS = ("config.pbtxt", "model file", "request")
MAX_QUOTED = 20  # names listed in an error

_BATCH_NOTE = (
    " NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try setting "
    "max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)


class CheckedPlan(NamedTuple):
    """What a worker needs of a plan. `rows` is the batch dimension of one position, 0 for models without one."""

    inputs: tuple[PlanTensor, ...]
    outputs: tuple[PlanTensor, ...]
    regions: tuple[RegionEntry, ...]
    rows: int


class _Placed(NamedTuple):
    spec: TensorSpec
    entry: RegionEntry
    place: Placement  # counted from the start of the file, so that regions of one file compare


def check(model: ModelMetadata, request: Prepare, find: Callable[[str], RegionEntry]) -> CheckedPlan:
    """Check `request` against `model`. `find` gives the session's region of a name or raises NOT_FOUND.

    Raises InferError (INVALID_ARG, NOT_FOUND) naming the tensor, what was expected and what came.
    """
    _check_responses(model, request)
    parameters.check(request.parameters)
    correlation = model.correlation
    text = correlation.name if correlation is not None and correlation.datatype == BYTES else None
    if correlation is not None and any(spec.name == text for spec in request.inputs):
        model = replace(model, inputs=(*model.inputs, correlation))
    _check_inputs_named(model, request.inputs)
    rows = _batch_size(model, request.inputs)
    for spec in request.inputs:
        _check_input(model, _named(model.inputs, spec.name), spec)
    sizes = symbol_sizes(model, request.inputs)
    _check_outputs_named(model, request.outputs)
    for spec in request.outputs:
        _check_output(model, _named(model.outputs, spec.name), spec, rows, sizes, request.responses)
    _check_note(model, request.outputs, 2 if request.responses else 1)
    inputs = [_place(model, spec, find, request.input_positions, output=False) for spec in request.inputs]
    outputs = [_place(model, spec, find, request.output_positions, output=True) for spec in request.outputs]
    _check_overlap(model, inputs, outputs, request.output_positions)
    entries = {placed.entry.generation: placed.entry for placed in (*inputs, *outputs)}
    return CheckedPlan(_tensors(inputs), _tensors(outputs), tuple(entries.values()), rows)


def symbol_sizes(model: ModelMetadata, inputs: Iterable[TensorSpec]) -> dict[str, int]:
    """Sizes of the model file's named dimensions, as these inputs fix them.

    A name to which inputs give different sizes is left out: runtimes tolerate that, so it decides nothing.
    """
    sizes: dict[str, int] = {}
    torn = set()
    for spec in inputs:
        metadata = _named(model.inputs, spec.name)
        for symbol, size in zip(metadata.symbols, spec.shape, strict=False):
            if symbol and not symbol.startswith("?") and sizes.setdefault(symbol, size) != size:
                torn.add(symbol)
    return {symbol: size for symbol, size in sizes.items() if symbol not in torn}


def _named(tensors: Sequence[TensorMetadata], name: str) -> TensorMetadata:
    return next(tensor for tensor in tensors if tensor.name == name)


def _refuse(message: str) -> InferError:
    return InferError(Code.INVALID_ARG, message)


# --- inputs -------------------------------------------------------------------------------------------------------


def _check_inputs_named(model: ModelMetadata, specs: Sequence[TensorSpec]) -> None:
    names = [spec.name for spec in specs]
    _check_unique(names, "input")
    known = [tensor.name for tensor in model.inputs]
    missing = [tensor.name for tensor in model.inputs if not tensor.optional and tensor.name not in names]
    required = sum(not tensor.optional for tensor in model.inputs)
    if not required <= len(names) <= len(known):
        expected = (
            f"expected {required} inputs but got {len(names)} inputs"
            if required == len(known)
            else f"expected number of inputs between {required} and {len(known)} but got {len(names)} inputs"
        )
        raise _refuse(
            f"{expected} for model '{model.name}'. Got input(s) {_quoted(names)}, but missing required input(s) "
            f"{_quoted(missing)}. Please provide all required input(s)."
        )
    for name in names:
        if name not in known:
            raise _refuse(
                f"unexpected inference input '{name}' for model '{model.name}', the model has inputs {_quoted(known)}"
            )
    if missing:
        raise _refuse(f"missing required input(s) {_quoted(missing)} for model '{model.name}'")


def _batch_size(model: ModelMetadata, specs: Sequence[TensorSpec]) -> int:
    if model.max_batch_size == 0:
        return 0
    rows = -1
    for spec in specs:
        if not spec.shape:
            raise _refuse(f"input '{spec.name}' has no shape but model requires batch dimension for '{model.name}'")
        _check_specified(model, spec)
        if rows not in (-1, spec.shape[0]):
            raise _refuse(f"input '{spec.name}' batch size does not match other inputs for '{model.name}'")
        rows = spec.shape[0]
    if rows > model.max_batch_size:
        raise _refuse(
            f"inference request batch-size must be <= {model.max_batch_size} for '{model.name}', got {rows}"
            + (f". NOTE:{note}" if (note := _completed_note(model)) else "")
            + "".join(_shapes(model, _named(model.inputs, spec.name), spec) for spec in specs[:1])
        )
    if rows == 0:
        raise _refuse(f"inference request batch-size must be >= 1 for '{model.name}', got 0")
    return max(rows, 1)


def _check_input(model: ModelMetadata, metadata: TensorMetadata, spec: TensorSpec) -> None:
    if spec.datatype != metadata.datatype:
        raise _refuse(
            f"inference input '{spec.name}' data-type is '{spec.datatype}', but model '{model.name}' expects "
            f"'{metadata.datatype}'"
            + side_by_side(
                _COLUMNS,
                [("data_type", metadata.datatype, metadata.datatype, spec.datatype)],
                f"send '{spec.name}' as {metadata.datatype}",
            )
        )
    _check_specified(model, spec)
    if not fits(metadata.shape, spec.shape):
        raise _refuse(
            f"unexpected shape for input '{spec.name}' for model '{model.name}'. Expected "
            f"{shape_text(metadata.shape)}, got {shape_text(spec.shape)}."
            + (_BATCH_NOTE + _completed_note(model) if model.max_batch_size else "")
            + _shapes(model, metadata, spec)
        )


def _shapes(model: ModelMetadata, metadata: TensorMetadata, spec: TensorSpec) -> str:
    """Configuration, model file and request, side by side."""
    inner = metadata.shape[1:] if model.max_batch_size else metadata.shape
    rows = [
        ("max_batch_size", str(model.max_batch_size), "", ""),
        ("dims", dims_text(inner), "", ""),
        ("shape", shape_text(metadata.shape), metadata.file_shape, shape_text(spec.shape)),
    ]
    fix = request_fix(metadata.shape, spec.shape, metadata.file_shape, model.max_batch_size)
    return side_by_side(_COLUMNS, rows, fix)


def _completed_note(model: ModelMetadata) -> str:
    if not model.max_batch_size_completed:
        return ""
    return (
        f" max_batch_size was set to {model.max_batch_size} by auto-completion: put `max_batch_size: 0` in "
        "config.pbtxt to turn it off"
    )


def _check_specified(model: ModelMetadata, spec: TensorSpec) -> None:
    if -1 in spec.shape:
        raise _refuse(
            f"All input dimensions should be specified for input '{spec.name}' for model '{model.name}', got "
            f"{shape_text(spec.shape)}"
        )


# --- outputs ------------------------------------------------------------------------------------------------------


def _check_outputs_named(model: ModelMetadata, specs: Sequence[TensorSpec]) -> None:
    known = [tensor.name for tensor in model.outputs]
    names = [spec.name for spec in specs]
    if not names:
        raise _refuse(f"a plan needs at least one output, model '{model.name}' has {_quoted(known)}")
    for name in names:
        if name not in known:
            raise _refuse(
                f"unexpected inference output '{name}' for model '{model.name}', the model has outputs {_quoted(known)}"
            )
    _check_unique(names, "output")


def _check_output(
    model: ModelMetadata,
    metadata: TensorMetadata,
    spec: TensorSpec,
    rows: int,
    sizes: dict[str, int],
    responses: int,
) -> None:
    if spec.datatype != metadata.datatype:
        raise _refuse(
            f"inference output '{spec.name}' data-type is '{spec.datatype}', but model '{model.name}' gives "
            f"'{metadata.datatype}'"
        )
    if responses:
        if spec.shape != (-1,) or spec.byte_size < responses or spec.byte_size % responses:
            raise _refuse(
                f"output '{spec.name}' of the decoupled model '{model.name}' must have the shape [-1] and room for "
                f"{responses} responses of equal size, got {shape_text(spec.shape)} and {spec.byte_size} bytes"
            )
        return
    expected = output_shape(metadata, rows, sizes)
    # Strings are measured by their bytes, so their room says enough; elsewhere an open size must be the model's doing.
    allowed = len(expected) == len(spec.shape) and all(
        want in (-1, dim) or (dim == -1 and spec.datatype == BYTES)
        for want, dim in zip(expected, spec.shape, strict=True)
    )
    if not allowed:
        raise _refuse(
            f"unexpected shape for output '{spec.name}' for model '{model.name}'. Expected {shape_text(expected)}, got "
            f"{shape_text(spec.shape)}; the model's own shape is {shape_text(metadata.shape)} and the inputs of this "
            "plan fix the rest"
        )


def output_shape(metadata: TensorMetadata, rows: int, sizes: dict[str, int]) -> tuple[int, ...]:
    """The output's shape as far as it follows from the inputs; -1 where only running the model tells."""
    symbols = metadata.symbols or ("",) * len(metadata.shape)
    shape = [sizes.get(symbol, -1) if dim == -1 else dim for dim, symbol in zip(metadata.shape, symbols, strict=True)]
    if rows and shape:
        shape[0] = rows
    return tuple(shape)


def _check_responses(model: ModelMetadata, request: Prepare) -> None:
    if model.decoupled and not request.responses:
        raise _refuse(
            f"model '{model.name}' is decoupled (model_transaction_policy): a request may have several responses or "
            "none, so ask for a stream"
        )
    if request.responses and not model.decoupled:
        raise _refuse(f"model '{model.name}' has exactly one response to a request, got places for {request.responses}")


def _check_note(model: ModelMetadata, specs: Sequence[TensorSpec], own: int) -> None:
    """`own`: words of each output beside its dimensions."""
    words = sum(own + len(_named(model.outputs, spec.name).shape) for spec in specs if -1 in spec.shape)
    if words > MAX_OPEN_WORDS:
        raise _refuse(
            f"too many open output dimensions for model '{model.name}': the outputs with a -1 have {words} ranks and "
            f"dimensions together, a result can report {MAX_OPEN_WORDS}. Ask for fewer of them in one plan"
        )


# --- places -------------------------------------------------------------------------------------------------------


def _place(
    model: ModelMetadata, spec: TensorSpec, find: Callable[[str], RegionEntry], positions: int, *, output: bool
) -> _Placed:
    entry = find(spec.region)
    if output and not entry.writable:
        raise _refuse(f"output '{spec.name}' lies in region '{spec.region}', which is read-only")
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
    return _refuse(
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


def _check_unique(names: Sequence[str], kind: str) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise _refuse(f"{kind} '{name}' already exists in request")


def _quoted(names: Sequence[str]) -> str:
    more = f",… and {len(names) - MAX_QUOTED} more" if len(names) > MAX_QUOTED else ""
    return f"[{','.join(map(repr, names[:MAX_QUOTED]))}{more}]"
