"""Auto-completion of an ONNX model's configuration, and the comparison of what it says with what the file has.

`complete` fills absent fields only; `compare` runs always, so a contradiction is an error at load and never at the
first request. Both are called by `load`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any, TypeAlias

from tritonclient.grpc import model_config_pb2

from broker.repository.loader.failure import ModelError
from broker.repository.loader.onnx_file import FileTensor, Signature
from broker.repository.loader.shape_edits import dims_edit, shape_edit
from broker.repository.loader.validate_scheduling import FLAGS
from shm.mismatch import dims_text, side_by_side

TensorText: TypeAlias = model_config_pb2.ModelInput | model_config_pb2.ModelOutput


_COLUMNS = ("config.pbtxt", "model file")
_EXACTLY = "\n    fix: name exactly those of the model file, or leave 'input' out: it is completed from the file"
_IN_SEQUENCES = (
    "\n    fix: name each of them in sequence_batching, as control_input or state, if it is made for the model, or in "
    "'input' if clients send it"
)
_FIELDS = {"batch_input": "target_name", "sequence_batching.state": "input_name"}  # where a made input has its name


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
    elif _is_batchable(config, signature) and not states_max_batch_size and not _dims_include_batch(config, signature):
        config.max_batch_size = default_max_batch_size
        notes.append(f"max_batch_size is not set and the model can batch: {default_max_batch_size} is used")
    if config.max_batch_size > 1 and config.WhichOneof("scheduling_choice") is None:
        config.dynamic_batching.SetInParent()
    batch = 1 if config.max_batch_size > 0 else 0
    for tensors, texts, others in (
        (signature.inputs, config.input, made_inputs(config)),
        (signature.outputs, config.output, {state.output_name for state in config.sequence_batching.state}),
    ):
        if not texts:
            for tensor in tensors:
                if tensor.name not in others:
                    texts.add(name=tensor.name)
        by_name = {tensor.name: tensor for tensor in tensors}
        for text in texts:
            if text.name in by_name:
                _fill(text, by_name[text.name], batch)
    return notes


def made_inputs(config: model_config_pb2.ModelConfig) -> dict[str, str]:
    """Inputs of the model file that no client sends: controls, states, batch helpers; name → what it is."""
    batching = config.sequence_batching
    return (
        {control.name: "sequence_batching.control_input" for control in batching.control_input}
        | {state.input_name: "sequence_batching.state" for state in batching.state}
        | {name: "batch_input" for item in config.batch_input for name in item.target_name}
    )


def compare(
    config: model_config_pb2.ModelConfig, signature: Signature, path: str, written: Collection[str] | None = None
) -> None:
    """Raise ModelError, with both sides shown, where the configuration contradicts the model file.

    `written`: the inputs that the text itself has in `input`, before it was completed; None: all.
    """
    for comparison in comparisons(config, signature, path, written):
        comparison()


def comparisons(
    config: model_config_pb2.ModelConfig, signature: Signature, path: str, written: Collection[str] | None = None
) -> Iterator[Callable[[], None]]:
    """The parts of `compare`: each raises ModelError, and needs none of the others but for tensors to be there."""
    texts = [text.name for text in config.input] if written is None else written
    yield partial(_compare_names, config, signature, texts)
    for kind, texts_of, tensors in (
        ("input", config.input, signature.inputs),
        ("output", config.output, signature.outputs),
    ):
        by_name = {tensor.name: tensor for tensor in tensors}
        for text in texts_of:
            if tensor := by_name.get(text.name):
                yield partial(_compare_type, config, kind, text.data_type, tensor)
                if tensor.shape is not None and not _is_laid_end_to_end(config, text, tensor):
                    yield partial(_compare_shape, config, text, tensor, path)
    if made_inputs(config).keys() <= {tensor.name for tensor in signature.inputs}:
        yield partial(_compare_made, config, signature, path)


def _compare_type(config: model_config_pb2.ModelConfig, kind: str, data_type: int, tensor: FileTensor) -> None:
    declared = model_config_pb2.DataType.Name(data_type)
    if declared != tensor.data_type:
        raise ModelError(
            f"unable to load model '{config.name}', configuration expects datatype {declared} for {kind} "
            f"'{tensor.name}', model provides {tensor.data_type}"
            + side_by_side(_COLUMNS, [("data_type", declared, tensor.data_type)], f"data_type: {tensor.data_type}")
        )


def _compare_made(config: model_config_pb2.ModelConfig, signature: Signature, path: str) -> None:
    """Controls, states and batch helpers: their types, and the shapes of states, as the file has them."""
    inputs = {tensor.name: tensor for tensor in signature.inputs}
    outputs = {tensor.name: tensor for tensor in signature.outputs}
    for control_input in config.sequence_batching.control_input:
        for control in control_input.control:
            flags = [value for field, value in FLAGS.items() if getattr(control, field)]
            _compare_type(config, "control", flags[0] if flags else control.data_type, inputs[control_input.name])
    for item in config.batch_input:
        for name in item.target_name:
            _compare_type(config, "batch input", item.data_type, inputs[name])
    stated = {name for state in config.sequence_batching.state for name in (state.input_name, state.output_name)}
    for state in config.sequence_batching.state:
        for kind, name, tensors in (("input", state.input_name, inputs), ("output", state.output_name, outputs)):
            if name not in tensors:
                raise ModelError(
                    f"unable to load model '{config.name}', unexpected inference {kind} '{name}' of "
                    f"sequence_batching.state, allowed {kind}s are: {', '.join(tensors)}"
                    + _rename(name, _fitting(config, state, tensors, stated), f"{kind}_name", "remove this state")
                )
            _compare_type(config, f"state {kind}", state.data_type, tensors[name])
            if tensors[name].shape is not None:
                text = model_config_pb2.ModelInput(name=name, dims=state.dims)
                _compare_shape(config, text, tensors[name], path)


def _fitting(
    config: model_config_pb2.ModelConfig, state: Any, tensors: Mapping[str, FileTensor], stated: Collection[str]
) -> list[str]:
    """The tensors that `state` could be and that no state is: those it would have no other error with."""
    fitting = []
    for tensor in tensors.values():
        text = model_config_pb2.ModelInput(name=tensor.name, dims=state.dims)
        if tensor.name in stated or model_config_pb2.DataType.Name(state.data_type) != tensor.data_type:
            continue
        with contextlib.suppress(ModelError):
            if tensor.shape is not None:
                _compare_shape(config, text, tensor, "")
            fitting.append(tensor.name)
    return fitting


def _is_laid_end_to_end(config: model_config_pb2.ModelConfig, text: TensorText, tensor: FileTensor) -> bool:
    """A ragged input, or an output cut by `batch_output`, which the file has as one variable dimension."""
    ragged = getattr(text, "allow_ragged_batch", False) or any(
        text.name in item.target_name for item in config.batch_output
    )
    return bool(ragged) and config.max_batch_size > 0 and tensor.shape is not None and tensor.shape[:1] == (-1,)


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


def _batched_tensors(config: model_config_pb2.ModelConfig, signature: Signature) -> list[FileTensor]:
    """Those whose first dimension must be the batch: all but ragged ones and what is made for a whole batch."""
    others = {name for item in config.batch_input for name in item.target_name}
    others |= {name for item in config.batch_output for name in item.target_name}
    others |= {text.name for text in config.input if text.allow_ragged_batch}
    return [tensor for tensor in (*signature.inputs, *signature.outputs) if tensor.name not in others]


def _is_batchable(config: model_config_pb2.ModelConfig, signature: Signature) -> bool:
    """Triton's rule: the first dimension of all inputs and outputs is variable."""
    tensors = _batched_tensors(config, signature)
    return bool(signature.inputs) and all(tensor.shape and tensor.shape[0] == -1 for tensor in tensors)


def _require_batchable(config: model_config_pb2.ModelConfig, signature: Signature) -> None:
    allowed = (-1, 1) if config.max_batch_size == 1 else (-1,)
    tensors = _batched_tensors(config, signature)
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


def _compare_names(config: model_config_pb2.ModelConfig, signature: Signature, written: Collection[str]) -> None:
    made = made_inputs(config)
    named = [*(text.name for text in config.input), *made]
    allowed = [tensor.name for tensor in signature.inputs]
    # Before they are counted: where 'input' is completed from the file, it has the tensor that was meant as well.
    for name, what in made.items():
        if name not in allowed:
            raise ModelError(
                f"unable to load model '{config.name}', unexpected inference input '{name}' of {what}, allowed inputs "
                f"are: {', '.join(allowed)}"
                + _rename(
                    name,
                    _free(config, signature, name, written),
                    _FIELDS.get(what, "name"),
                    _remove(config, what, name),
                )
            )
    # Outputs that nobody asks for are not computed; an input that nobody sends cannot be left out.
    if len(named) != len(allowed):
        lines = (
            ("missing in config.pbtxt", set(allowed) - set(named)),
            ("not in the model file", set(named) - set(allowed)),
        )
        raise ModelError(
            f"unable to load model '{config.name}', configuration expects {len(named)} inputs, model provides "
            f"{len(allowed)}"
            + "".join(f"\n    {what}: {', '.join(sorted(names))}" for what, names in lines if names)
            + (_IN_SEQUENCES if config.HasField("sequence_batching") and lines[0][1] else _EXACTLY)
        )
    for kind, names, known in (
        ("input", named, allowed),
        ("output", [text.name for text in config.output], [tensor.name for tensor in signature.outputs]),
    ):
        for name in names:
            if name not in known:
                raise ModelError(
                    f"unable to load model '{config.name}', unexpected inference {kind} '{name}', allowed "
                    f"{kind}s are: {', '.join(known)}" + _rename(name, [other for other in known if other not in names])
                )


def _free(config: model_config_pb2.ModelConfig, signature: Signature, name: str, written: Collection[str]) -> list[str]:
    """The inputs of the model file that the helper input `name` could be: nothing else in the text is called so, they
    have its type, and clients still have an input to send.
    """
    made = made_inputs(config)
    free = [tensor for tensor in signature.inputs if tensor.name not in made and tensor.name not in written]
    if not written and len(free) == 1:
        return []
    batching = config.sequence_batching
    states = [state for state in batching.state if state.input_name == name]
    if states:
        return _fitting(config, states[0], {tensor.name: tensor for tensor in free}, ())
    types = {item.data_type for item in config.batch_input if name in item.target_name}
    for control in (each for text in batching.control_input if text.name == name for each in text.control):
        flags = {value for field, value in FLAGS.items() if getattr(control, field)}
        types |= flags or {control.data_type}
    names = {model_config_pb2.DataType.Name(data_type) for data_type in types}
    return [tensor.name for tensor in free if tensor.data_type in names]


def _remove(config: model_config_pb2.ModelConfig, what: str, name: str) -> str:
    several = any(name in item.target_name and len(item.target_name) > 1 for item in config.batch_input)
    return f"remove this {'target_name' if several else what.rpartition('.')[2]}"


def _rename(name: str, unused: list[str], field: str = "name", remove: str = "") -> str:
    """The edit that gives `name` one of the names that are `unused`, or else takes it out (`remove`)."""
    near = get_close_matches(name.lower(), [other.lower() for other in unused], n=1, cutoff=0.5)
    meant = [other for other in unused if [other.lower()] == near] or (unused if len(unused) == 1 else [])
    if meant:
        return f'\n    fix: {field}: "{meant[0]}"'
    others = f", or {field}: one of {', '.join(unused[:8])}" if unused else ""
    return f"\n    fix: {remove}{others}" if remove else ""


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
        fix = f"max_batch_size: 0 and {dims_edit(text, file_shape)}"
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
            f"specifies {len(declared)} dimensions{making}" + _which_differ(declared, file_shape, batched)
        )
        fix = shape_edit(config, text, file_shape)
    rows = [("max_batch_size", str(config.max_batch_size), ""), ("dims", dims_text(text.dims), "")]
    if text.HasField("reshape"):
        rows.append(("reshape", dims_text(text.reshape.shape), ""))
    rows.append(("shape", show(declared), show(file_shape, tensor.symbols)))
    raise ModelError(f"{prefix}{what}" + side_by_side(_COLUMNS, rows, fix, f"the model file is {path}"))


def _which_differ(declared: Sequence[int], file_shape: Sequence[int], batched: bool) -> str:
    """Where both sides have as many dimensions: those whose sizes differ."""
    if len(declared) != len(file_shape):
        return ""
    differ = (
        f"dimension {axis} is {there} in the model, {here} in the configuration"
        for axis, (here, there) in enumerate(zip(declared, file_shape, strict=True))
        if axis >= batched and there not in (-1, here)
    )
    return ": " + ", ".join(differ)


def show(shape: Sequence[int] | None, symbols: Sequence[str] = ()) -> str:
    """Triton's way to print a shape, with the file's own names where it has any: [N,3,-1]."""
    return "[" + ",".join(_sizes(shape or (), symbols)) + "]"


def _sizes(shape: Sequence[int], symbols: Sequence[str]) -> Iterator[str]:
    for axis, size in enumerate(shape):
        yield (symbols[axis] if axis < len(symbols) else "") or str(size)
