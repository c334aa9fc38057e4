"""Does this request fit the model? Triton's checks on plain data, in Triton's order and words.

Called by `broker.gateway.inference` when it meets a kind of request for the first time; what only the data can tell
(the lengths of strings) the worker checks with every request. Errors are INVALID_ARG, without the request id, and
know their place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from broker.gateway.kserve import InferRequest, InputTensor, RequestedOutput
from broker.gateway.placed import one_of, refused, tensor_at
from shm.datatypes import BYTES, DATATYPES, byte_size, element_size, shape_text
from shm.errors import shortened
from shm.message_values import ModelMetadata, TensorMetadata

MAX_ELEMENTS = 2**63 - 1
SIZE_MISMATCH = "input byte size mismatch"
_BATCH_NOTE = (
    " NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try setting "
    "max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)


def check(model: ModelMetadata, request: InferRequest) -> list[RequestedOutput]:
    """The outputs that `request` asks for, each once; all of the model's when it names none.

    Raises InferError for whatever does not fit `model`: names, counts, batch size, datatypes, shapes, byte sizes.
    """
    outputs = _outputs(model, request.outputs)
    _check_inputs_named(model, request.inputs)
    if model.max_batch_size:
        _check_batch(model, request.inputs)
    known = {tensor.name: tensor for tensor in model.inputs}
    for index, tensor in enumerate(request.inputs):
        if tensor.name not in known:
            raise refused(
                f"unexpected inference input '{tensor.name}' for model '{model.name}'",
                f"inputs[{index}].name",
                f"expected {one_of(known)}, got '{shortened(tensor.name)}'",
            )
        _check_input(model, known[tensor.name], tensor, index)
    return outputs


def given_byte_size(tensor: InputTensor, model: str) -> int:
    """Bytes that came with an input, or that it says lie in its region."""
    if tensor.region:
        return tensor.byte_size
    if tensor.data is None:
        raise refused(
            f"unable to find data for input tensor '{tensor.name}' for model '{model}' in request.",
            f"input '{shortened(tensor.name)}'",
            "expected data, or a shared memory region, got neither",
        )
    return memoryview(tensor.data).nbytes


def _outputs(model: ModelMetadata, asked: Sequence[RequestedOutput] | None) -> list[RequestedOutput]:
    known = {tensor.name for tensor in model.outputs}
    if not asked:
        return [RequestedOutput(tensor.name) for tensor in model.outputs]
    chosen: set[str] = set()
    for index, output in enumerate(asked):
        place = f"outputs[{index}].name"
        if output.name in chosen:
            raise refused(f"output '{output.name}' already exists in request", place, _twice(output.name))
        if output.name not in known:
            raise refused(
                f"unexpected inference output '{output.name}' for model '{model.name}'",
                place,
                f"expected {one_of(tensor.name for tensor in model.outputs)}, got '{shortened(output.name)}'",
            )
        chosen.add(output.name)
    return list(asked)


def _check_inputs_named(model: ModelMetadata, given: Sequence[InputTensor]) -> None:
    names = [tensor.name for tensor in given]
    seen: set[str] = set()  # there may be very many
    for index, name in enumerate(names):
        if name in seen:
            raise refused(f"input '{name}' already exists in request", f"inputs[{index}].name", _twice(name))
        seen.add(name)
    known = [tensor.name for tensor in model.inputs]
    required = [tensor.name for tensor in model.inputs if not tensor.optional]
    missing = [name for name in required if name not in names]
    wrong_count = not len(required) <= len(names) <= len(known)
    # With the right number of inputs, one that is missing has another in its place: that one is named, further on.
    if not wrong_count and (not missing or any(name not in known for name in names)):
        return
    expected = (
        f"expected {len(known)} inputs but got {len(names)} inputs"
        if len(required) == len(known)
        else f"expected number of inputs between {len(required)} and {len(known)} but got {len(names)} inputs"
    )
    wanted = ", ".join(f"'{each.name}' ({each.datatype} {shape_text(each.shape)})" for each in model.inputs)
    raise refused(
        f"{expected} for model '{model.name}'. Got input(s) {_quoted(names)}, but missing required input(s) "
        f"{_quoted(missing)}. Please provide all required input(s).",
        "inputs",
        f"expected {wanted}, got {', '.join(map(repr, map(shortened, names))) or 'none'}",
    )


def _check_batch(model: ModelMetadata, given: Sequence[InputTensor]) -> None:
    rows = None
    for index, tensor in enumerate(given):
        place = tensor_at("input", index, tensor.name, "shape")
        if not tensor.shape:
            raise refused(
                f"input '{tensor.name}' has no shape but model requires batch dimension for '{model.name}'",
                place,
                "expected a batch dimension in front, got []",
            )
        if rows is not None and tensor.shape[0] != rows:
            raise refused(
                f"input '{tensor.name}' batch size does not match other inputs for '{model.name}'",
                f"{place}[0]",
                f"expected {rows}, as in the inputs before, got {tensor.shape[0]}",
            )
        rows = tensor.shape[0]
    if rows is not None and rows > model.max_batch_size:
        raise refused(
            f"inference request batch-size must be <= {model.max_batch_size} for '{model.name}'",
            tensor_at("input", 0, given[0].name, "shape[0]"),
            f"expected at most {model.max_batch_size} (max_batch_size), got {rows}",
        )


def _check_input(model: ModelMetadata, expected: TensorMetadata, tensor: InputTensor, index: int) -> None:
    where = f"input '{tensor.name}' for model '{model.name}'"
    if tensor.datatype != expected.datatype:
        raise refused(
            f"inference input '{tensor.name}' data-type is '{tensor.datatype}', but model '{model.name}' expects "
            f"'{expected.datatype}'",
            tensor_at("input", index, tensor.name, "datatype"),
            f"expected {expected.datatype}, got {shortened(tensor.datatype)}",
        )
    place = tensor_at("input", index, tensor.name, "shape")
    fit = f"expected {shape_text(expected.shape)}, got {shape_text(tensor.shape)}"
    if any(dim < 0 for dim in tensor.shape):
        text = f"All input dimensions should be specified for {where}, got {shape_text(tensor.shape)}"
        raise refused(text, place, fit)
    fits = len(tensor.shape) == len(expected.shape) and all(
        want in (-1, dim) for want, dim in zip(expected.shape, tensor.shape, strict=True)
    )
    if not fits:
        raise refused(
            f"unexpected shape for {where}. Expected {shape_text(expected.shape)}, got {shape_text(tensor.shape)}."
            + (_BATCH_NOTE if model.max_batch_size else ""),
            place,
            fit,
        )
    _check_byte_size(model, tensor, where, index)


def _check_byte_size(model: ModelMetadata, tensor: InputTensor, where: str, index: int) -> None:
    came = given_byte_size(tensor, model.name)
    place = tensor_at("input", index, tensor.name)
    if math.prod(tensor.shape) > MAX_ELEMENTS:
        raise refused(
            f"invalid shape for input '{tensor.name}': shape {shape_text(tensor.shape)} causes total element count to "
            f"exceed maximum size of {MAX_ELEMENTS}",
            f"{place}.shape",
            f"expected at most {MAX_ELEMENTS} elements, got {math.prod(tensor.shape)}",
        )
    if tensor.datatype == BYTES or tensor.datatype not in DATATYPES:
        return
    count, each = math.prod(tensor.shape), element_size(tensor.datatype)
    if count > MAX_ELEMENTS // each:
        raise refused(
            f"byte size overflow for input '{tensor.name}': element count ({count}) * data type size ({each}) exceeds "
            f"maximum allowed size ({MAX_ELEMENTS})",
            f"{place}.shape",
            f"expected at most {MAX_ELEMENTS} bytes, got {count * each}",
        )
    if came != count * each:
        raise refused(
            f"{SIZE_MISMATCH} for {where}. Expected {count * each}, got {came}",
            place,
            f"expected {count * each} bytes, as its datatype and shape say, got {came}",
        )
    byte_size(tensor.datatype, tensor.shape)  # also where a dimension of 0 hides others that no runtime can take


def _twice(name: str) -> str:
    return f"expected each name once, got '{shortened(name)}' once more"


def _quoted(names: Sequence[str]) -> str:
    return f"[{','.join(map(repr, names))}]"
