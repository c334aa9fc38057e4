"""Does a request fit a model's metadata? One set of checks and texts, for whoever prepares requests.

The broker asks for native clients when they prepare (`broker.plan_check`), the clients over a wire ask by themselves
(`clientlib.remote.core`), so that both say the same. Triton's checks; its texts come first, what they leave out after
them. Errors are INVALID_ARG. Shapes are tuples of dimensions, with the batch dimension in front where the model has
one. The gateways answer others' clients with Triton's texts alone: `broker.gateway.validation`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from shm.datatypes import BYTES, shape_text
from shm.errors import Code, InferError
from shm.message_values import ModelMetadata, TensorMetadata
from shm.mismatch import dims_text, fits, request_fix, side_by_side

Shape = tuple[int, ...]
MAX_QUOTED = 20  # names listed in an error
_COLUMNS = ("config.pbtxt", "model file", "request")
_BATCH_NOTE = (
    " NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try setting "
    "max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)


class Tensor(Protocol):
    """An input that is sent, or the place of an output."""

    @property
    def name(self) -> str:
        """As the request calls it."""

    @property
    def datatype(self) -> str:
        """Triton's name of it."""

    @property
    def shape(self) -> Shape:
        """-1: open."""


class Known(Protocol):
    """An input of a model."""

    @property
    def name(self) -> str:
        """As the configuration calls it."""

    @property
    def optional(self) -> bool:
        """May a request leave it out?"""


class Given(NamedTuple):
    """A `Tensor` and no more."""

    name: str
    datatype: str
    shape: Shape


def check_inputs(model: ModelMetadata, given: Sequence[Tensor]) -> int:
    """Names, batch size, datatypes, shapes. Returns the rows of one request, 0 for models without a batch dimension."""
    check_inputs_named(model.name, model.inputs, [tensor.name for tensor in given])
    rows = _batch_size(model, given)
    for tensor in given:
        _check_input(model, named(model.inputs, tensor.name), tensor)
    return rows


def check_outputs_named(model: ModelMetadata, names: Sequence[str]) -> None:
    """Are these outputs of the model, each once, and is there at least one?"""
    known = [tensor.name for tensor in model.outputs]
    if not names:
        raise refuse(f"a plan needs at least one output, model '{model.name}' has {quoted(known)}")
    for name in names:
        if name not in known:
            raise refuse(
                f"unexpected inference output '{name}' for model '{model.name}', the model has outputs {quoted(known)}"
            )
    _check_unique(names, "output")


def check_output(model: ModelMetadata, place: Tensor, rows: int, sizes: Mapping[str, int]) -> None:
    """The place of an output that the model has. `rows`: of `check_inputs`; `sizes`: of `symbol_sizes`."""
    metadata = named(model.outputs, place.name)
    check_output_datatype(model, place)
    expected = output_shape(metadata, rows, sizes)
    # Strings are measured by their bytes, so their room says enough; elsewhere an open size must be the model's doing.
    allowed = len(expected) == len(place.shape) and all(
        want in (-1, dim) or (dim == -1 and place.datatype == BYTES)
        for want, dim in zip(expected, place.shape, strict=True)
    )
    if not allowed:
        raise refuse(
            f"unexpected shape for output '{place.name}' for model '{model.name}'. Expected {shape_text(expected)}, "
            f"got {shape_text(place.shape)}; the model's own shape is {shape_text(metadata.shape)} and the inputs of "
            "this plan fix the rest"
        )


def check_output_datatype(model: ModelMetadata, place: Tensor) -> None:
    """Of the place of an output that the model has."""
    expected = named(model.outputs, place.name).datatype
    if place.datatype != expected:
        raise refuse(
            f"inference output '{place.name}' data-type is '{place.datatype}', but model '{model.name}' gives "
            f"'{expected}'"
        )


def symbol_sizes(model: ModelMetadata, inputs: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Sizes of the model file's named dimensions, as the inputs' shapes (by name) fix them.

    A name to which inputs give different sizes is left out: runtimes tolerate that, so it decides nothing.
    """
    sizes: dict[str, int] = {}
    torn = set()
    for tensor in model.inputs:
        for symbol, size in zip(tensor.symbols, inputs.get(tensor.name, ()), strict=False):
            if symbol and not symbol.startswith("?") and sizes.setdefault(symbol, size) != size:
                torn.add(symbol)
    return {symbol: size for symbol, size in sizes.items() if symbol not in torn}


def output_shape(metadata: TensorMetadata, rows: int, sizes: Mapping[str, int]) -> Shape:
    """The output's shape as far as it follows from the inputs; -1 where only running the model tells."""
    symbols = metadata.symbols or ("",) * len(metadata.shape)
    shape = [sizes.get(symbol, -1) if dim == -1 else dim for dim, symbol in zip(metadata.shape, symbols, strict=True)]
    if rows and shape:
        shape[0] = rows
    return tuple(shape)


def named(tensors: Sequence[TensorMetadata], name: str) -> TensorMetadata:
    """The one of that name, which there is."""
    return next(tensor for tensor in tensors if tensor.name == name)


def quoted(names: Sequence[str]) -> str:
    """Names as errors list them."""
    more = f",… and {len(names) - MAX_QUOTED} more" if len(names) > MAX_QUOTED else ""
    return f"[{','.join(map(repr, names[:MAX_QUOTED]))}{more}]"


def refuse(message: str) -> InferError:
    """The error for a request that does not fit."""
    return InferError(Code.INVALID_ARG, message)


# --- inputs -------------------------------------------------------------------------------------------------------


def check_inputs_named(model: str, inputs: Sequence[Known], names: Sequence[str]) -> None:
    """Are `names` inputs of the model, which has `inputs`, each once, and is there all that it needs?"""
    _check_unique(names, "input")
    known = [tensor.name for tensor in inputs]
    missing = [tensor.name for tensor in inputs if not tensor.optional and tensor.name not in names]
    unknown = [name for name in names if name not in known]
    required = sum(not tensor.optional for tensor in inputs)
    if not required <= len(names) <= len(known):
        expected = (
            f"expected {required} inputs but got {len(names)} inputs"
            if required == len(known)
            else f"expected number of inputs between {required} and {len(known)} but got {len(names)} inputs"
        )
        raise refuse(
            f"{expected} for model '{model}'. Got input(s) {quoted(names)}, "
            + (
                f"but missing required input(s) {quoted(missing)}. Please provide all required input(s)."
                if missing
                else f"of which the model does not have {quoted(unknown)}: it has {quoted(known)}"
            )
        )
    if unknown:
        raise refuse(
            f"unexpected inference input '{unknown[0]}' for model '{model}', the model has inputs {quoted(known)}"
        )
    if missing:
        raise refuse(f"missing required input(s) {quoted(missing)} for model '{model}'")


def _batch_size(model: ModelMetadata, given: Sequence[Tensor]) -> int:
    if model.max_batch_size == 0:
        return 0
    rows, first = -1, ""
    for tensor in given:
        if not tensor.shape:
            raise refuse(
                f"input '{tensor.name}' has no shape but model requires batch dimension for '{model.name}'"
                + _shapes(model, tensor)
            )
        _check_specified(model, tensor)
        if rows not in (-1, tensor.shape[0]):
            raise refuse(
                f"input '{tensor.name}' batch size does not match other inputs for '{model.name}': '{first}' has "
                f"{rows} rows, '{tensor.name}' {tensor.shape[0]}"
            )
        rows, first = tensor.shape[0], first or tensor.name
    if rows > model.max_batch_size:
        raise refuse(
            f"inference request batch-size must be <= {model.max_batch_size} for '{model.name}', got {rows}"
            + (f". NOTE:{note}" if (note := _completed_note(model)) else "")
            + "".join(_shapes(model, tensor) for tensor in given[:1])
        )
    if rows == 0:
        raise refuse(f"inference request batch-size must be >= 1 for '{model.name}', got 0")
    return max(rows, 1)


def _check_input(model: ModelMetadata, metadata: TensorMetadata, tensor: Tensor) -> None:
    if tensor.datatype != metadata.datatype:
        raise refuse(
            f"inference input '{tensor.name}' data-type is '{tensor.datatype}', but model '{model.name}' expects "
            f"'{metadata.datatype}'"
            + side_by_side(
                _COLUMNS,
                [("data_type", metadata.datatype, metadata.datatype, tensor.datatype)],
                f"send '{tensor.name}' as {metadata.datatype}",
            )
        )
    _check_specified(model, tensor)
    if not fits(metadata.shape, tensor.shape):
        raise refuse(
            f"unexpected shape for input '{tensor.name}' for model '{model.name}'. Expected "
            f"{shape_text(metadata.shape)}, got {shape_text(tensor.shape)}."
            + (_BATCH_NOTE + _completed_note(model) if model.max_batch_size else "")
            + _shapes(model, tensor)
        )


def _shapes(model: ModelMetadata, tensor: Tensor) -> str:
    """Configuration, model file and request, side by side."""
    metadata = named(model.inputs, tensor.name)
    inner = metadata.shape[1:] if model.max_batch_size else metadata.shape
    rows = [
        ("max_batch_size", str(model.max_batch_size), "", ""),
        ("dims", dims_text(inner), "", ""),
        ("shape", shape_text(metadata.shape), metadata.file_shape, shape_text(tensor.shape)),
    ]
    fix = request_fix(metadata.shape, tensor.shape, metadata.file_shape, model.max_batch_size)
    return side_by_side(_COLUMNS, rows, fix)


def _completed_note(model: ModelMetadata) -> str:
    if not model.max_batch_size_completed:
        return ""
    return (
        f" max_batch_size was set to {model.max_batch_size} by auto-completion: put `max_batch_size: 0` in "
        "config.pbtxt to turn it off"
    )


def _check_specified(model: ModelMetadata, tensor: Tensor) -> None:
    if -1 in tensor.shape:
        raise refuse(
            f"All input dimensions should be specified for input '{tensor.name}' for model '{model.name}', got "
            f"{shape_text(tensor.shape)}"
        )


def _check_unique(names: Iterable[str], kind: str) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise refuse(f"{kind} '{name}' already exists in request")
