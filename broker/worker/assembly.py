"""What a model adds to its batches beside clients' tensors: sequence controls, implicit state, ragged inputs, padding.

One `Assembly` per loaded model that has any of it (`LoadedModel.assembly`), made from the configuration when the model
is loaded; `assembled` runs batches with it. Field names and kinds are Triton's (model_config.proto).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from broker.repository.config import ModelConfig
from broker.repository.scheduling import BatchInput, BatchOutput, Control, State
from broker.worker.backends.builtin import COUNTED, COUNTS
from broker.worker.padding import Padder
from shm import datatypes
from shm.admission import Request
from shm.errors import Code, InferError
from shm.layout import SEQUENCE_END, SEQUENCE_START

Row = Request | None  # as in broker.worker.queues: None is an empty slot of a sequence batch
Array = npt.NDArray[Any]
Shape = tuple[int, ...]

_FLAGS = {"CONTROL_SEQUENCE_START": SEQUENCE_START, "CONTROL_SEQUENCE_END": SEQUENCE_END}


@final
class Assembly:
    """The facts of one model version. `stateful`: a batch that failed may not run again, row by row or otherwise.

    `scatter`: output → the input whose shapes cut it (BATCH_SCATTER_WITH_INPUT_SHAPE), with the output's dims.
    """

    __slots__ = (
        "batch_inputs",
        "batched",
        "bindings",
        "controls",
        "initial",
        "loose",
        "padder",
        "ragged",
        "scatter",
        "stateful",
        "states",
    )

    def __init__(self, config: ModelConfig) -> None:
        sequence = config.sequence_batching
        self.batched = config.max_batch_size > 0
        self.stateful = sequence is not None
        self.controls: tuple[Control, ...] = sequence.control_input if sequence else ()
        self.states: tuple[State, ...] = sequence.state if sequence else ()
        self.initial = {state.input_name: _initial(state, self.batched) for state in self.states}
        self.ragged = frozenset(tensor.name for tensor in config.input if tensor.allow_ragged_batch)
        self.padder = None if config.padding is None else Padder(config, config.padding)
        # Inputs that may have other shapes in each request of a batch.
        self.loose = self.ragged if self.padder is None else frozenset(self.padder.axes)
        self.batch_inputs: tuple[BatchInput, ...] = (*config.batch_input, *_counts(config, self.ragged))
        dims = {tensor.name: tensor.dims for tensor in config.output}
        self.scatter: dict[str, tuple[str, Shape]] = {
            target: (output.source_input[0], (-1, *dims.get(target, ())) if self.batched else dims.get(target, ()))
            for output in (*config.batch_output, *_cuts(config, self.ragged))
            for target in output.target_name
        }
        self.bindings: dict[int, dict[object, Any]] = {}  # Binding, by instance number, then shapes and addresses

    def control(self, control: Control, rows: Sequence[Row], sizes: Sequence[int]) -> Array:
        """A control input: one value a row, shape [rows, 1], or [1] without a batch dimension."""
        values: list[Any] = []
        for row, size in zip(rows, sizes, strict=True):
            values.extend([_control_value(control, row)] * max(size, 1))
        return _typed(values, control.datatype).reshape((-1, 1) if self.batched else (-1,))

    def state_of(self, state: State, row: Row) -> Array:
        """What a row's state input holds: its sequence's last output, or what a sequence starts with."""
        if row is None or row.sequence is None or _flags(row) & SEQUENCE_START:
            return self.initial[state.input_name]
        found: Array = row.sequence.states.get(state.input_name, self.initial[state.input_name])  # type: ignore[attr-defined]
        return found

    def null_state(self, state: State, like: Array) -> Array:
        """An empty slot's: zeros in the shape that the others have."""
        return _zeros(state.datatype, like.shape)


@final
class StatesSent:
    """Takes the states out of what a decoupled model sends: the next step of its sequence reads what was sent last.

    A state that is an output as well is also sent, as in Triton.
    """

    __slots__ = ("_config", "_kept", "_states")

    def __init__(self, config: ModelConfig, assembly: Assembly, sequence: Any) -> None:
        self._states = {state.output_name: state for state in assembly.states}
        self._config = config
        self._kept: dict[str, Array] = sequence.states

    def take(self, outputs: Mapping[str, Array]) -> dict[str, Array]:
        """What is left for the client. Raises InferError for a state of another datatype or shape."""
        states = {name: np.asarray(array) for name, array in outputs.items() if name in self._states}
        for name, array in states.items():
            check_state(self._config, self._states[name], array)
        for name, array in states.items():
            self._kept[self._states[name].input_name] = array.copy()
        also = {tensor.name for tensor in self._config.output}
        return {name: array for name, array in outputs.items() if name not in states or name in also}


def check_state(config: ModelConfig, state: State, array: Array) -> None:
    """Raises InferError for what a model gives as the state of one step, in another datatype or shape."""
    dims = (1, *state.dims) if config.max_batch_size else state.dims
    wanted = object if state.datatype == datatypes.BYTES else datatypes.numpy_dtype(state.datatype)
    fits = array.ndim == len(dims) and all(dim in (-1, size) for dim, size in zip(dims, array.shape, strict=True))
    if not fits or array.dtype != wanted:
        raise InferError(
            Code.INVALID_ARG,
            f"state '{state.output_name}' of model '{config.name}' is {state.datatype} "
            f"{datatypes.shape_text(dims)}, got {array.dtype} {datatypes.shape_text(array.shape)}",
        )


def assembly_of(config: ModelConfig) -> Assembly | None:
    """None for a model whose batches are clients' rows and nothing else. Raises InferError for unusable states."""
    ragged = any(tensor.allow_ragged_batch for tensor in config.input)
    helpers = config.batch_input or config.batch_output or config.padding
    if config.sequence_batching is None and not (ragged or helpers):
        return None
    return Assembly(config)


def name_sequence(row: Request, text: bytes) -> None:
    """Its id is a string, which came with it: by that its model is told of the sequence's end."""
    if row.sequence is not None and not row.sequence.text:  # type: ignore[attr-defined]
        row.sequence.text = text.decode(errors="replace")  # type: ignore[attr-defined]


def batch_input(batch: BatchInput, shapes: Sequence[Shape], sizes: Sequence[int]) -> Array:
    """A helper input of a ragged batch. `shapes`: of the source input in each request; `sizes`: their rows."""
    dtype = datatypes.numpy_dtype(batch.datatype)
    counts = [datatypes.element_count(shape) for shape in shapes]
    if batch.kind == "BATCH_ELEMENT_COUNT":
        return np.array(counts, dtype)
    if batch.kind == "BATCH_ACCUMULATED_ELEMENT_COUNT":
        return np.cumsum(counts).astype(dtype)
    if batch.kind == "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO":
        return np.cumsum([0, *counts]).astype(dtype)
    if batch.kind == "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE":
        return np.zeros(max(counts), dtype)  # only its length says something
    if batch.kind in ("BATCH_ITEM_SHAPE", "BATCH_ITEM_SHAPE_FLATTEN"):
        items = [shape[1:] for shape, size in zip(shapes, sizes, strict=True) for _ in range(size)]
        array = np.array(items, dtype).reshape(len(items), -1)
        return array if batch.kind == "BATCH_ITEM_SHAPE" else array.reshape(-1)
    raise InferError(Code.UNSUPPORTED, f"batch input kind '{batch.kind}' is not supported")


def scattered(name: str, array: Array, dims: Shape, shapes: Sequence[Shape]) -> list[Array]:
    """Cut a flat output by the shapes that an input has in each request: its -1 dims are the input's there."""
    flat, parts, at = array.reshape(-1), [], 0
    for shape in shapes:
        if len(shape) < len(dims):
            raise InferError(
                Code.INTERNAL,
                f"output '{name}' with dims {datatypes.shape_text(dims)} cannot be cut by an input of shape"
                f" {datatypes.shape_text(shape)}",
            )
        own = tuple(shape[axis] if dim == -1 else dim for axis, dim in enumerate(dims))
        count = datatypes.element_count(own)
        if at + count > flat.size:
            break
        parts.append(flat[at : at + count].reshape(own))
        at += count
    if at != flat.size or len(parts) != len(shapes):
        raise InferError(
            Code.INTERNAL,
            f"output '{name}' has {flat.size} elements, the shapes of the input that cuts it ask for another number",
        )
    return parts


def _control_value(control: Control, row: Row) -> Any:
    if control.kind == "CONTROL_SEQUENCE_CORRID":
        if control.datatype == datatypes.BYTES:
            return _text_id(row)
        return 0 if row is None else _id(row) & 0xFFFFFFFFFFFFFFFF
    on = row is not None and (control.kind == "CONTROL_SEQUENCE_READY" or bool(_flags(row) & _FLAGS[control.kind]))
    return control.on if on else control.off


def _cuts(config: ModelConfig, ragged: frozenset[str]) -> list[BatchOutput]:
    """Triton's own backends look at requests one by one: an output for a ragged input has that request's shape."""
    if config.backend not in ("identity", *COUNTED):
        return []
    kind, given = "BATCH_SCATTER_WITH_INPUT_SHAPE", {output.name for output in config.output}
    pairs = [(name.replace("INPUT", "OUTPUT", 1), name) for name in sorted(ragged)]
    return [BatchOutput(kind=kind, target_name=(out,), source_input=(name,)) for out, name in pairs if out in given]


def _counts(config: ModelConfig, ragged: frozenset[str]) -> list[BatchInput]:
    """The same where the backend must know how many elements each request has."""
    if config.backend not in COUNTED:
        return []
    kind = "BATCH_ELEMENT_COUNT"
    return [
        BatchInput(kind=kind, target_name=(name + COUNTS,), datatype="INT32", source_input=(name,))
        for name in sorted(ragged)
    ]


def _flags(row: Request) -> int:
    """Those of a run that is not the request's first are not its own."""
    given: int | None = None if row.sequence is None else row.sequence.run_flags  # type: ignore[attr-defined]
    return row.flags if given is None else given


def _id(row: Request) -> int:
    number: int = row.sequence_id if row.sequence is None else row.sequence.id  # type: ignore[attr-defined]
    return number


def _text_id(row: Row) -> bytes:
    if row is None:
        return b""
    text: str | bytes = "" if row.sequence is None else row.sequence.text  # type: ignore[attr-defined]
    return text if isinstance(text, bytes) else (text or str(_id(row))).encode()


def _typed(values: list[Any], datatype: str) -> Array:
    if datatype == datatypes.BYTES:
        array = np.empty(len(values), object)
        array[:] = values
        return array
    dtype = datatypes.numpy_dtype(datatype)
    # An identifier keeps its low bits in a smaller type, as in Triton.
    return (
        np.array(values, np.uint64).astype(dtype)
        if dtype.kind in "iu" and dtype.itemsize == 8
        else _small(values, dtype)
    )


def _small(values: list[Any], dtype: np.dtype[Any]) -> Array:
    if dtype.kind in "iu":
        return np.array([int(value) & 0xFFFFFFFF for value in values], np.uint32).astype(dtype)
    return np.array(values).astype(dtype)


def _zeros(datatype: str, shape: Shape) -> Array:
    if datatype == datatypes.BYTES:
        return np.full(shape, b"", object)
    return np.zeros(shape, datatypes.numpy_dtype(datatype))


def _initial(state: State, batched: bool) -> Array:
    """The state before the first step; variable dims are 1 where no initial state gives them a size."""
    initial = state.initial_state
    dims = tuple(1 if dim == -1 else dim for dim in (initial.dims if initial else state.dims))
    shape = (1, *dims) if batched else dims
    if initial is None or not initial.data:
        return _zeros(state.datatype, shape)
    count = datatypes.element_count(shape)
    if state.datatype == datatypes.BYTES:
        return datatypes.decode_bytes(initial.data, count, f"initial state '{initial.name}'").reshape(shape)
    wanted = datatypes.byte_size(state.datatype, shape)
    if len(initial.data) != wanted:
        raise InferError(
            Code.INVALID_ARG,
            f"initial state '{initial.name}' of state '{state.input_name}' has {len(initial.data)} bytes, its dims"
            f" {datatypes.shape_text(dims)} of {state.datatype} are {wanted}",
        )
    return np.frombuffer(initial.data, datatypes.numpy_dtype(state.datatype)).reshape(shape)
