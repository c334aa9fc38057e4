"""Auto-completion of an ONNX model's configuration, and the comparison of what it says with what the file has.

`complete` fills absent fields only; `compare` runs always, so a contradiction is an error at load and never at the
first request. Both are called by `load`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from tritonclient.grpc import model_config_pb2

from broker.repository.loader.failure import ModelError
from broker.repository.loader.onnx_file import FileTensor, Signature

TensorText: TypeAlias = model_config_pb2.ModelInput | model_config_pb2.ModelOutput


def complete(
    config: model_config_pb2.ModelConfig, signature: Signature, states_max_batch_size: bool, default_max_batch_size: int
) -> list[str]:
    """Fill `max_batch_size`, the scheduler, `input` and `output` from the model file. Returns notes.

    Raises ModelError when `max_batch_size` asks for batching that the file cannot do.
    """
    notes: list[str] = []
    if config.max_batch_size > 0 and config.input and config.output and not _has_gaps(config):
        return notes  # complete as written: no scheduler is added to a configuration that has none
    if config.max_batch_size > 0:
        _require_batchable(config, signature)
    elif signature.is_batchable and not states_max_batch_size and not _dims_include_batch(config, signature):
        config.max_batch_size = default_max_batch_size
        notes.append(f"max_batch_size is not set and the model can batch: {default_max_batch_size} is used")
    if config.max_batch_size > 1 and config.WhichOneof("scheduling_choice") is None:
        config.dynamic_batching.SetInParent()
    batch = 1 if config.max_batch_size > 0 else 0
    for tensors, texts in ((signature.inputs, config.input), (signature.outputs, config.output)):
        if not texts:
            for tensor in tensors:
                texts.add(name=tensor.name)
        by_name = {tensor.name: tensor for tensor in tensors}
        for text in texts:
            if text.name in by_name:
                _fill(text, by_name[text.name], batch)
    return notes


def compare(config: model_config_pb2.ModelConfig, signature: Signature, path: str) -> None:
    """Raise ModelError, with both sides shown, where the configuration contradicts the model file."""
    _compare_names(config, signature)
    for kind, texts, tensors in (
        ("input", config.input, signature.inputs),
        ("output", config.output, signature.outputs),
    ):
        by_name = {tensor.name: tensor for tensor in tensors}
        for text in texts:
            tensor = by_name[text.name]
            declared = model_config_pb2.DataType.Name(text.data_type)
            if declared != tensor.data_type:
                raise ModelError(
                    f"unable to load model '{config.name}', configuration expects datatype {declared} for {kind} "
                    f"'{text.name}', model provides {tensor.data_type}\n    fix: data_type: {tensor.data_type}"
                )
            if tensor.shape is not None:
                _compare_shape(config, text, tensor, path)


def shape_in_file(config: model_config_pb2.ModelConfig, text: TensorText) -> tuple[int, ...]:
    """The shape that the configuration promises the model: batch dimension, then `reshape` or `dims`."""
    inner = text.reshape.shape if text.HasField("reshape") else text.dims
    return ((-1,) if config.max_batch_size > 0 else ()) + tuple(inner)


def is_scalar(config: model_config_pb2.ModelConfig, text: TensorText, tensor: FileTensor) -> bool:
    """A rank-0 tensor of the file, which a configuration spells as dims: [ 1 ]."""
    return tensor.shape == () and config.max_batch_size == 0 and tuple(text.dims) == (1,)


def _has_gaps(config: model_config_pb2.ModelConfig) -> bool:
    return any(not text.dims or not text.data_type for texts in (config.input, config.output) for text in texts)


def _fill(text: TensorText, tensor: FileTensor, batch: int) -> None:
    if not text.data_type:
        text.data_type = model_config_pb2.DataType.Value(tensor.data_type)
    if text.dims or tensor.shape is None:
        return
    inner = tensor.shape[batch:]
    if inner:
        text.dims.extend(inner)
    else:  # `dims` cannot be empty: one element per request, of which the model sees none of the dimensions
        text.dims.append(1)
        text.reshape.SetInParent()


def _dims_include_batch(config: model_config_pb2.ModelConfig, signature: Signature) -> bool:
    """Does any `dims` have the file's full rank? Then its author counts the first dimension, and means no batching."""
    ranks = {tensor.name: len(tensor.shape) for tensor in (*signature.inputs, *signature.outputs) if tensor.shape}
    return any(
        len(text.reshape.shape if text.HasField("reshape") else text.dims) == ranks.get(text.name)
        for texts in (config.input, config.output)
        for text in texts
    )


def _require_batchable(config: model_config_pb2.ModelConfig, signature: Signature) -> None:
    allowed = (-1, 1) if config.max_batch_size == 1 else (-1,)
    tensors = (*signature.inputs, *signature.outputs)
    fixed = [
        tensor for tensor in tensors if tensor.shape is not None and tensor.shape[:1] not in {(a,) for a in allowed}
    ]
    if fixed:
        lines = "".join(f"\n    '{tensor.name}' has shape {show(tensor.shape, tensor.symbols)}" for tensor in fixed[:8])
        one = all(tensor.shape is not None and tensor.shape[:1] in ((1,), (-1,)) for tensor in tensors)
        raise ModelError(
            f"autofill failed for model '{config.name}': model does not support batching while non-zero "
            f"max_batch_size is specified\n    config.pbtxt has max_batch_size: {config.max_batch_size}, so the first "
            f"dimension of every tensor must be variable in the model file, but{lines}\n    fix: max_batch_size: "
            + ("1" if one else "0, with the first dimension written in dims")
            + ", or export the model with a variable first dimension"
        )


def _compare_names(config: model_config_pb2.ModelConfig, signature: Signature) -> None:
    for kind, texts, tensors in (
        ("input", config.input, signature.inputs),
        ("output", config.output, signature.outputs),
    ):
        allowed = [tensor.name for tensor in tensors]
        for text in texts:
            if text.name not in allowed:
                raise ModelError(
                    f"unable to load model '{config.name}', unexpected inference {kind} '{text.name}', allowed "
                    f"{kind}s are: {', '.join(allowed)}"
                )
        named = {text.name for text in texts}
        # Outputs that nobody asks for are not computed; an input that nobody sends cannot be left out.
        if kind == "input" and (missing := [name for name in allowed if name not in named]):
            raise ModelError(
                f"unable to load model '{config.name}', configuration expects {len(texts)} inputs, model provides "
                f"{len(allowed)}\n    missing in config.pbtxt: {', '.join(missing)}"
            )


def _compare_shape(config: model_config_pb2.ModelConfig, text: TensorText, tensor: FileTensor, path: str) -> None:
    file_shape = tensor.shape or ()
    declared = shape_in_file(config, text)
    if is_scalar(config, text, tensor):
        return
    batched = config.max_batch_size > 0
    prefix = f"model '{config.name}', tensor '{text.name}': "
    if batched and file_shape[:1] != (-1,) and not (file_shape[:1] == (1,) and config.max_batch_size == 1):
        what = (
            "for the model to support batching the shape should have at least 1 dimension and the first dimension must "
            f"be -1; but shape expected by the model is {show(file_shape)}"
        )
        fix = f"max_batch_size: 0 and dims: {_dims(file_shape)}"
    elif len(declared) == len(file_shape) and all(
        there in (-1, here) for here, there in zip(declared[batched:], file_shape[batched:], strict=True)
    ):
        return
    else:
        making = (
            " (an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape, making "
            f"complete shape {show(declared)})"
            if batched
            else f" (shape {show(declared)})"
        )
        what = (
            f"the model expects {len(file_shape)} dimensions (shape {show(file_shape)}) but the model configuration "
            f"specifies {len(declared)} dimensions{making}"
        )
        fix = _fix(config, text, file_shape)
    raise ModelError(
        f"{prefix}{what}\n    config.pbtxt: max_batch_size: {config.max_batch_size}, dims: {_dims(text.dims)}"
        + (f", reshape: {_dims(text.reshape.shape)}" if text.HasField("reshape") else "")
        + f"\n    {path}: {show(file_shape, tensor.symbols)}\n    fix: {fix}"
    )


def _fix(config: model_config_pb2.ModelConfig, text: TensorText, file_shape: tuple[int, ...]) -> str:
    dims = tuple(text.dims)
    if config.max_batch_size > 0:
        inner = file_shape[1:]
        if not inner:
            return "dims: [ 1 ] and reshape { shape: [ ] }"
        if len(dims) == len(file_shape):
            return f"leave the batch dimension out (max_batch_size > 0 adds it): dims: {_dims(inner)}"
        return f"dims: {_dims(inner)}"
    if len(dims) + 1 == len(file_shape) and file_shape[0] == -1:
        return f"max_batch_size: 1 or more, or count the first dimension as well: dims: {_dims(file_shape)}"
    return f"dims: {_dims(file_shape)}" if file_shape else "dims: [ 1 ]"


def show(shape: Sequence[int] | None, symbols: Sequence[str] = ()) -> str:
    """Triton's way to print a shape, with the file's own names where it has any: [N,3,-1]."""
    return "[" + ",".join(_sizes(shape or (), symbols)) + "]"


def _sizes(shape: Sequence[int], symbols: Sequence[str]) -> Iterator[str]:
    for axis, size in enumerate(shape):
        yield (symbols[axis] if axis < len(symbols) else "") or str(size)


def _dims(shape: Sequence[int]) -> str:
    return "[ " + ", ".join(map(str, shape)) + " ]"
