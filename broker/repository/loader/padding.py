"""`pad_to`: which inputs are padded, what the broker makes beside them, and what cannot work.

Called by `load` on the finished configuration. Inputs that the broker makes leave `input`: clients never send them. The
worker pads (`broker.worker.padding`).
"""

from __future__ import annotations

import math

import numpy as np
from msgspec.structs import replace

from broker.repository.config import ModelConfig, TensorConfig
from broker.repository.loader.failure import ModelError
from broker.repository.scheduling import MadeInput, Padding
from shm.datatypes import BYTES, numpy_dtype

PAD_TO, PAD_VALUE, MASK, LENGTHS = "pad_to", "pad_value", "mask_input", "lengths_input"
MAX_SIZES = 64
MAX_SIZE = 1 << 24


def with_padding(config: ModelConfig) -> ModelConfig:
    """`config` with `padding` set, if it has the parameter `pad_to`. Raises ModelError."""
    if not config.parameters.get(PAD_TO):
        return config
    to = _sizes(config.parameters[PAD_TO])
    _check_company(config)
    mask, lengths = (_made(config, name) for name in (MASK, LENGTHS))
    if mask is not None and lengths is not None and mask.name == lengths.name:
        raise ModelError(f"parameters {MASK} and {LENGTHS} of model '{config.name}' name the same input '{mask.name}'")
    made = {each.name for each in (mask, lengths) if each is not None}
    inputs = tuple(tensor for tensor in config.input if tensor.name not in made)
    padding = Padding(
        to=to,
        value=_value(config, [tensor for tensor in inputs if -1 in tensor.dims]),
        inputs=_padded(config, inputs),
        outputs=_cut(config),
        mask=mask,
        lengths=lengths,
    )
    return replace(config, input=inputs, padding=padding)


def _sizes(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    sizes = [int(part) for part in parts if part.isascii() and part.isdigit() and len(part) < 9]
    rising = all(before < after for before, after in zip([0, *sizes], sizes, strict=False))
    if len(sizes) != len(parts) or not rising or sizes[-1] > MAX_SIZE or len(sizes) > MAX_SIZES:
        raise ModelError(
            f"parameter {PAD_TO} {text[:100]!r} must be at most {MAX_SIZES} sizes in rising order, 1 to {MAX_SIZE},"
            " such as 16,32,64"
        )
    return tuple(sizes)


def _check_company(config: ModelConfig) -> None:
    """What it cannot be combined with."""
    if config.max_batch_size < 1:
        raise ModelError(f"parameter {PAD_TO} needs max_batch_size of at least 1 for {config.name}: batches are padded")
    ragged = any(tensor.allow_ragged_batch for tensor in config.input)
    for what, there in (
        ("sequence_batching", config.sequence_batching is not None),
        ("ensemble_scheduling", config.ensemble is not None),
        ("model_transaction_policy { decoupled: true }", config.decoupled),
        ("response_cache", config.response_cache),
        ("allow_ragged_batch", ragged),
        ("batch_input", bool(config.batch_input)),
        ("batch_output", bool(config.batch_output)),
    ):
        if there:
            raise ModelError(f"parameter {PAD_TO} cannot be combined with {what} for {config.name}")


def _padded(config: ModelConfig, inputs: tuple[TensorConfig, ...]) -> dict[str, int]:
    """The axis of each input that is padded, the batch dimension counted."""
    found: dict[str, int] = {}
    symbols: dict[str, str] = {}
    for tensor in inputs:
        if -1 not in tensor.dims:
            continue
        _check_plain(config, "input", tensor)
        if tensor.dims.count(-1) > 1:
            raise ModelError(
                f"parameter {PAD_TO} pads one variable dimension, input '{tensor.name}' of model '{config.name}' has "
                f"dims {list(tensor.dims)}"
            )
        if tensor.datatype == BYTES:
            raise ModelError(
                f"parameter {PAD_TO} cannot pad input '{tensor.name}' of model '{config.name}': TYPE_STRING"
            )
        axis = tensor.dims.index(-1)
        symbol = tensor.symbols[axis] if tensor.symbols else ""
        if symbol and not symbol.startswith("?"):
            symbols.setdefault(symbol, tensor.name)
        found[tensor.name] = axis + 1
    if not found:
        raise ModelError(f"parameter {PAD_TO} has nothing to pad: no input of model '{config.name}' has a dim of -1")
    if len(symbols) > 1:
        named = ", ".join(f"'{name}' has {symbol}" for symbol, name in symbols.items())
        raise ModelError(
            f"parameter {PAD_TO} pads one variable dimension, the inputs of model '{config.name}' have several: {named}"
        )
    return found


def _cut(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The axes of each output that are cut back, the batch dimension counted."""
    found = {}
    for tensor in config.output:
        axes = tuple(axis + 1 for axis, dim in enumerate(tensor.dims) if dim == -1)
        if axes:
            _check_plain(config, "output", tensor)
            found[tensor.name] = axes
    return found


def _check_plain(config: ModelConfig, kind: str, tensor: TensorConfig) -> None:
    if tensor.reshape is not None and tensor.reshape != tensor.dims:
        raise ModelError(f"parameter {PAD_TO}: {kind} '{tensor.name}' of model '{config.name}' cannot have a reshape")


def _made(config: ModelConfig, parameter: str) -> MadeInput | None:
    name = config.parameters.get(parameter, "")
    if not name:
        return None
    tensor = next((each for each in config.input if each.name == name), None)
    if tensor is None:
        known = ", ".join(each.name for each in config.input)
        raise ModelError(f"parameter {parameter} of model '{config.name}' names '{name}'; inputs are: {known}")
    shape = tensor.dims if tensor.reshape is None else tensor.reshape
    wanted, fits = (
        ("one dim of -1 and others of 1", shape.count(-1) == 1 and set(shape) <= {-1, 1})
        if parameter == MASK
        else ("dims: [ 1 ]", shape in ((), (1,)))
    )
    if not fits or tensor.datatype in (BYTES, "BF16"):
        raise ModelError(
            f"input '{name}' of model '{config.name}', which the broker is to make ({parameter}), must be of numbers "
            f"and have {wanted}; it has data_type {tensor.datatype} and dims {list(shape)}"
        )
    return MadeInput(name=name, datatype=tensor.datatype, shape=shape)


def _value(config: ModelConfig, padded: list[TensorConfig]) -> int | float:
    text = config.parameters.get(PAD_VALUE) or "0"
    try:
        value: int | float = int(text)
    except ValueError:
        try:
            value = float(text)
        except ValueError:
            raise ModelError(
                f"parameter {PAD_VALUE} {text[:100]!r} of model '{config.name}' must be a number"
            ) from None
    for tensor in padded:
        if not _has(tensor.datatype, value):
            raise ModelError(
                f"parameter {PAD_VALUE} {text[:100]!r} is no value that input '{tensor.name}' of model '{config.name}' "
                f"can have: it is {tensor.datatype}"
            )
    return value


def _has(datatype: str, value: int | float) -> bool:
    if datatype == BYTES:
        return True  # refused for a better reason
    if datatype == "BOOL":
        return value in (0, 1)
    dtype = numpy_dtype("FP32" if datatype == "BF16" else datatype)
    if dtype.kind == "f":
        return not math.isfinite(value) or abs(value) <= np.finfo(dtype).max
    bounds = np.iinfo(dtype)
    return isinstance(value, int) and bounds.min <= value <= bounds.max
