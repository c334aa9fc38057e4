"""Does this request fit the model? Triton's checks on plain data, in Triton's order and words.

Called by `broker.gateway.inference` when it meets a kind of request for the first time; what only the data can tell
(the lengths of strings) the worker checks with every request. Errors are INVALID_ARG, without the request id.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from broker.gateway.kserve import InferRequest, InputTensor, RequestedOutput
from shm.datatypes import BYTES, DATATYPES, byte_size, element_size, shape_text
from shm.errors import Code, InferError
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
    for tensor in request.inputs:
        if tensor.name not in known:
            raise _refuse(f"unexpected inference input '{tensor.name}' for model '{model.name}'")
        _check_input(model, known[tensor.name], tensor)
    return outputs


def given_byte_size(tensor: InputTensor, model: str) -> int:
    """Bytes that came with an input, or that it says lie in its region."""
    if tensor.region:
        return tensor.byte_size
    if tensor.data is None:
        raise _refuse(f"unable to find data for input tensor '{tensor.name}' for model '{model}' in request.")
    return memoryview(tensor.data).nbytes


def _refuse(message: str) -> InferError:
    return InferError(Code.INVALID_ARG, message)


def _outputs(model: ModelMetadata, asked: Sequence[RequestedOutput] | None) -> list[RequestedOutput]:
    known = {tensor.name for tensor in model.outputs}
    if not asked:
        return [RequestedOutput(tensor.name) for tensor in model.outputs]
    chosen: set[str] = set()
    for output in asked:
        if output.name in chosen:
            raise _refuse(f"output '{output.name}' already exists in request")
        if output.name not in known:
            raise _refuse(f"unexpected inference output '{output.name}' for model '{model.name}'")
        chosen.add(output.name)
    return list(asked)


def _check_inputs_named(model: ModelMetadata, given: Sequence[InputTensor]) -> None:
    names = [tensor.name for tensor in given]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise _refuse(f"input '{name}' already exists in request")
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
    raise _refuse(
        f"{expected} for model '{model.name}'. Got input(s) {_quoted(names)}, but missing required input(s) "
        f"{_quoted(missing)}. Please provide all required input(s)."
    )


def _check_batch(model: ModelMetadata, given: Sequence[InputTensor]) -> None:
    rows = None
    for tensor in given:
        if not tensor.shape:
            raise _refuse(f"input '{tensor.name}' has no shape but model requires batch dimension for '{model.name}'")
        if rows is not None and tensor.shape[0] != rows:
            raise _refuse(f"input '{tensor.name}' batch size does not match other inputs for '{model.name}'")
        rows = tensor.shape[0]
    if rows is not None and rows > model.max_batch_size:
        raise _refuse(f"inference request batch-size must be <= {model.max_batch_size} for '{model.name}'")


def _check_input(model: ModelMetadata, expected: TensorMetadata, tensor: InputTensor) -> None:
    where = f"input '{tensor.name}' for model '{model.name}'"
    if tensor.datatype != expected.datatype:
        raise _refuse(
            f"inference input '{tensor.name}' data-type is '{tensor.datatype}', but model '{model.name}' expects "
            f"'{expected.datatype}'"
        )
    if any(dim < 0 for dim in tensor.shape):
        raise _refuse(f"All input dimensions should be specified for {where}, got {shape_text(tensor.shape)}")
    fits = len(tensor.shape) == len(expected.shape) and all(
        want in (-1, dim) for want, dim in zip(expected.shape, tensor.shape, strict=True)
    )
    if not fits:
        raise _refuse(
            f"unexpected shape for {where}. Expected {shape_text(expected.shape)}, got {shape_text(tensor.shape)}."
            + (_BATCH_NOTE if model.max_batch_size else "")
        )
    _check_byte_size(model, tensor, where)


def _check_byte_size(model: ModelMetadata, tensor: InputTensor, where: str) -> None:
    came = given_byte_size(tensor, model.name)
    if math.prod(tensor.shape) > MAX_ELEMENTS:
        raise _refuse(
            f"invalid shape for input '{tensor.name}': shape {shape_text(tensor.shape)} causes total element count to "
            f"exceed maximum size of {MAX_ELEMENTS}"
        )
    if tensor.datatype == BYTES or tensor.datatype not in DATATYPES:
        return
    count, each = math.prod(tensor.shape), element_size(tensor.datatype)
    if count > MAX_ELEMENTS // each:
        raise _refuse(
            f"byte size overflow for input '{tensor.name}': element count ({count}) * data type size ({each}) exceeds "
            f"maximum allowed size ({MAX_ELEMENTS})"
        )
    if came != count * each:
        raise _refuse(f"{SIZE_MISMATCH} for {where}. Expected {count * each}, got {came}")
    byte_size(tensor.datatype, tensor.shape)  # also where a dimension of 0 hides others that no runtime can take


def _quoted(names: Sequence[str]) -> str:
    return f"[{','.join(map(repr, names))}]"
