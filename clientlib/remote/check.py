"""Does a request fit the model? What the broker checks for native clients when they prepare, with the same texts.

Called by `clientlib.remote.core` with what the server says of the model. The server checks every request again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shm.datatypes import shape_text
from shm.errors import Code, InferError
from shm.messages import ModelMetadata, TensorMetadata

_BATCH_NOTE = (
    " NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try setting "
    "max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)
Tensor = tuple[str, tuple[int, ...]]  # datatype, shape


def check_inputs(model: ModelMetadata, inputs: Mapping[str, Tensor]) -> int:
    """Names, datatypes, shapes. Returns the rows of one request, 0 for a model without a batch dimension."""
    known = {tensor.name: tensor for tensor in model.inputs}
    missing = [name for name, tensor in known.items() if name not in inputs and not tensor.optional]
    required = sum(not tensor.optional for tensor in known.values())
    if not required <= len(inputs) <= len(known):
        expected = (
            f"expected {required} inputs but got {len(inputs)} inputs"
            if required == len(known)
            else f"expected number of inputs between {required} and {len(known)} but got {len(inputs)} inputs"
        )
        raise _refuse(
            f"{expected} for model '{model.name}'. Got input(s) {_quoted(inputs)}, but missing required input(s) "
            f"{_quoted(missing)}. Please provide all required input(s)."
        )
    for name in inputs:
        if name not in known:
            raise _refuse(
                f"unexpected inference input '{name}' for model '{model.name}', the model has inputs {_quoted(known)}"
            )
    rows = _batch_size(model, inputs)
    for name, tensor in inputs.items():
        _check_input(model, known[name], tensor)
    return rows


def check_output(model: ModelMetadata, name: str, tensor: Tensor) -> None:
    """A place for an output: its name and datatype, and its rank."""
    known = {tensor.name: tensor for tensor in model.outputs}
    check_output_names(model, [name])
    expected = known[name]
    if tensor[0] != expected.datatype:
        raise _refuse(
            f"inference output '{name}' data-type is '{tensor[0]}', but model '{model.name}' gives "
            f"'{expected.datatype}'"
        )
    if len(tensor[1]) != len(expected.shape):
        raise _refuse(
            f"unexpected shape for output '{name}' for model '{model.name}'. Expected {shape_text(expected.shape)}, "
            f"got {shape_text(tensor[1])}"
        )


def check_output_names(model: ModelMetadata, names: Sequence[str]) -> None:
    """Are these outputs of the model, and is there at least one?"""
    known = [tensor.name for tensor in model.outputs]
    if not names:
        raise _refuse(f"a plan needs at least one output, model '{model.name}' has {_quoted(known)}")
    for name in names:
        if name not in known:
            raise _refuse(
                f"unexpected inference output '{name}' for model '{model.name}', the model has outputs {_quoted(known)}"
            )


def _batch_size(model: ModelMetadata, inputs: Mapping[str, Tensor]) -> int:
    if model.max_batch_size == 0:
        return 0
    rows = -1
    for name, (_, shape) in inputs.items():
        if not shape:
            raise _refuse(f"input '{name}' has no shape but model requires batch dimension for '{model.name}'")
        if rows not in (-1, shape[0]):
            raise _refuse(f"input '{name}' batch size does not match other inputs for '{model.name}'")
        rows = shape[0]
    if rows > model.max_batch_size:
        raise _refuse(f"inference request batch-size must be <= {model.max_batch_size} for '{model.name}', got {rows}")
    if rows == 0:
        raise _refuse(f"inference request batch-size must be >= 1 for '{model.name}', got 0")
    return max(rows, 1)


def _check_input(model: ModelMetadata, expected: TensorMetadata, tensor: Tensor) -> None:
    datatype, shape = tensor
    if datatype != expected.datatype:
        raise _refuse(
            f"inference input '{expected.name}' data-type is '{datatype}', but model '{model.name}' expects "
            f"'{expected.datatype}'"
        )
    if -1 in shape:
        raise _refuse(
            f"All input dimensions should be specified for input '{expected.name}' for model '{model.name}', got "
            f"{shape_text(shape)}"
        )
    fits = len(expected.shape) == len(shape) and all(
        want in (-1, dim) for want, dim in zip(expected.shape, shape, strict=True)
    )
    if not fits:
        raise _refuse(
            f"unexpected shape for input '{expected.name}' for model '{model.name}'. Expected "
            f"{shape_text(expected.shape)}, got {shape_text(shape)}." + (_BATCH_NOTE if model.max_batch_size else "")
        )


def _quoted(names: Mapping[str, object] | Sequence[str]) -> str:
    return f"[{','.join(map(repr, names))}]"


def _refuse(message: str) -> InferError:
    return InferError(Code.INVALID_ARG, message)
