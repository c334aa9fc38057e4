"""Reading an ONNX file: is it one, does it stay in its directory, and which tensors go in and out.

Called by `load`, once per served version. Weights in external files are never read here, only their paths checked.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

import onnx
import onnx.shape_inference
from google.protobuf.message import DecodeError

from broker.repository.loader.failure import ModelError
from broker.repository.loader.files import read_file

MAX_MODEL = 2**31 - 1  # bytes; protobuf's own limit for one message
_BIG_INITIALIZER = 1 << 16  # bytes; shapes, axes and sizes are far smaller

_DATA_TYPES = {
    onnx.TensorProto.BOOL: "TYPE_BOOL",
    onnx.TensorProto.UINT8: "TYPE_UINT8",
    onnx.TensorProto.UINT16: "TYPE_UINT16",
    onnx.TensorProto.UINT32: "TYPE_UINT32",
    onnx.TensorProto.UINT64: "TYPE_UINT64",
    onnx.TensorProto.INT8: "TYPE_INT8",
    onnx.TensorProto.INT16: "TYPE_INT16",
    onnx.TensorProto.INT32: "TYPE_INT32",
    onnx.TensorProto.INT64: "TYPE_INT64",
    onnx.TensorProto.FLOAT16: "TYPE_FP16",
    onnx.TensorProto.FLOAT: "TYPE_FP32",
    onnx.TensorProto.DOUBLE: "TYPE_FP64",
    onnx.TensorProto.STRING: "TYPE_STRING",
    onnx.TensorProto.BFLOAT16: "TYPE_BF16",
}


class FileTensor(NamedTuple):
    """An input or output as the file has it, batch dimension included.

    `shape`: -1 is variable; None when the file does not even give the rank. `symbols`: one per dimension, "" for a
    fixed or unnamed one.
    """

    name: str
    data_type: str  # "TYPE_FP32", …
    shape: tuple[int, ...] | None
    symbols: tuple[str, ...]


class Signature(NamedTuple):
    """All tensors of a model file that a request may name."""

    inputs: tuple[FileTensor, ...]
    outputs: tuple[FileTensor, ...]


def read_model(path: str) -> onnx.ModelProto:
    """Parse the file and check where its weights lie. Raises ModelError."""
    data = read_file(path, MAX_MODEL, "2 GiB: keep the weights in external data files")
    if not data:
        raise ModelError(f"{path}: is empty (0 bytes)")
    if data.startswith(b"version https://git-lfs"):
        raise ModelError(f"{path}: is a Git LFS pointer, not a model: run 'git lfs pull' in the repository")
    try:
        model = onnx.load_model_from_string(data)
    except DecodeError as error:
        raise ModelError(
            f"{path}: is not an ONNX model, or is truncated ({len(data)} bytes{_beginning(data)}): {error}\n    fix: "
            "copy it again, and compare the sizes"
        ) from error
    if not (model.ir_version and model.opset_import and model.HasField("graph") and model.graph.output):
        raise ModelError(f"{path}: is not an ONNX model: it has no graph with outputs, or no opset")
    _check_external_data(model, os.path.dirname(path))
    return model


def _beginning(data: bytes) -> str:
    """What a file that is text begins with: a page that says why the download failed, mostly."""
    start = data[:40].decode("ascii", "replace")
    return f", beginning with {start!r}" if start.replace("\n", "").isprintable() and start.isascii() else ""


def read_signature(model: onnx.ModelProto, path: str, sent: frozenset[str] = frozenset()) -> Signature:
    """Inputs and outputs, with missing output shapes inferred where ONNX can. Drops large weights from `model`.

    `sent`: inputs that the configuration names, which requests may send although the file has values for them.
    """
    values = constants(model, sent)
    inputs = tuple(_tensor(value, "input", path) for value in model.graph.input if value.name not in values)
    outputs = tuple(_tensor(value, "output", path) for value in model.graph.output)
    if any(_is_incomplete(output) for output in outputs):
        outputs = _inferred(model, outputs, path)
    return Signature(inputs, outputs)


def constants(model: onnx.ModelProto, sent: frozenset[str]) -> set[str]:
    """Initializers that no request sends: all but the default values of inputs in `sent`.

    Before IR version 4 every initializer was also listed as an input; runtimes take those for constants.
    """
    names = {tensor.name for tensor in model.graph.initializer}
    names.update(tensor.values.name for tensor in model.graph.sparse_initializer)
    return names if model.ir_version < 4 else names - sent


def _is_incomplete(tensor: FileTensor) -> bool:
    if tensor.shape is None:
        return True
    return any(size == -1 and not symbol for size, symbol in zip(tensor.shape, tensor.symbols, strict=True))


def _inferred(model: onnx.ModelProto, outputs: tuple[FileTensor, ...], path: str) -> tuple[FileTensor, ...]:
    """`outputs` with what shape inference adds. A graph it cannot handle keeps what the file says."""
    for tensor in model.graph.initializer:
        # Inference copies the model; it reads values of shape operands only, never of weights.
        if len(tensor.raw_data) > _BIG_INITIALIZER:
            tensor.ClearField("raw_data")
    try:
        inferred = onnx.shape_inference.infer_shapes(model, check_type=False, strict_mode=False, data_prop=True)
    except Exception:  # onnx raises its own C++ errors, and ValueError beyond 2 GiB
        return outputs
    found = {value.name: _tensor(value, "output", path) for value in inferred.graph.output}
    merged = []
    for output in outputs:
        other = found.get(output.name, output)
        if output.shape is None:
            merged.append(other)
        elif other.shape is not None and len(other.shape) == len(output.shape):
            # Only dimensions that the file leaves open are taken over: its own words come first.
            pairs = [
                (size, symbol) if size != -1 or symbol else (inferred_size, inferred_symbol)
                for size, symbol, inferred_size, inferred_symbol in zip(
                    output.shape, output.symbols, other.shape, other.symbols, strict=True
                )
            ]
            merged.append(
                output._replace(shape=tuple(size for size, _ in pairs), symbols=tuple(symbol for _, symbol in pairs))
            )
        else:
            merged.append(output)
    return tuple(merged)


def _tensor(value: onnx.ValueInfoProto, kind: str, path: str) -> FileTensor:
    which = value.type.WhichOneof("value")
    if which != "tensor_type":
        what = (which or "untyped").removesuffix("_type").replace("_", " ")
        raise ModelError(
            f"{path}: {kind} '{value.name}' is an ONNX {what} value; only tensors can be served: convert it inside the "
            "model (for example SequenceAt or ConcatFromSequence, OptionalGetElement, ZipMap removed at export)"
        )
    tensor = value.type.tensor_type
    if tensor.elem_type not in _DATA_TYPES:
        known = onnx.TensorProto.DataType.values()
        name = onnx.TensorProto.DataType.Name(tensor.elem_type) if tensor.elem_type in known else tensor.elem_type
        raise ModelError(f"{path}: {kind} '{value.name}' has ONNX data type {name}, which no request can carry")
    if not tensor.HasField("shape"):
        return FileTensor(value.name, _DATA_TYPES[tensor.elem_type], None, ())
    shape: list[int] = []
    symbols: list[str] = []
    for dim in tensor.shape.dim:
        fixed = dim.HasField("dim_value") and dim.dim_value >= 0  # -1 is how some exporters spell "variable"
        shape.append(dim.dim_value if fixed else -1)
        symbols.append("" if fixed else dim.dim_param)
    return FileTensor(value.name, _DATA_TYPES[tensor.elem_type], tuple(shape), tuple(symbols))


def _check_external_data(model: onnx.ModelProto, directory: str) -> None:
    """Refuse weights outside `directory`: a model file must not decide what else the worker reads."""
    sizes: dict[str, int] = {}
    for tensor in _tensors_of_model(model):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        entries = {entry.key: entry.value for entry in tensor.external_data}
        location = entries.get("location", "")
        what = f"external data of tensor '{tensor.name}' ({location!r})"
        if location not in sizes:
            sizes[location] = _external_size(directory, location, what)
        try:
            offset, length = int(entries.get("offset") or 0), int(entries.get("length") or 0)
        except ValueError as error:
            raise ModelError(f"{what} has an offset or length that is not a number") from error
        if offset < 0 or length < 0 or offset + length > sizes[location]:
            raise ModelError(
                f"{what} needs bytes {offset} to {offset + length}, the file has {sizes[location]}: is it truncated?"
            )


def _external_size(directory: str, location: str, what: str) -> int:
    parts = location.split("/")
    if not location or "\0" in location or "\\" in location or os.path.isabs(location) or ".." in parts:
        raise ModelError(f"{what} must be a relative path inside the directory of the model file")
    path = directory
    status = None
    for part in parts:
        path = os.path.join(path, part)
        try:
            status = os.lstat(path)
        except OSError as error:
            raise ModelError(f"{what} cannot be found: {error.strerror}: {path}") from error
        if stat.S_ISLNK(status.st_mode):
            raise ModelError(
                f"{what} must not be reached through a symbolic link: {path}\n    fix: copy the file, or make the "
                "version directory the link"
            )
    if status is None or not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{what} is not a regular file: {path}")
    if status.st_nlink > 1:
        raise ModelError(f"{what} must not be a hard link: {path} has {status.st_nlink} names; copy the file instead")
    return status.st_size


def _tensors_of_model(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    yield from _tensors_of_graph(model.graph)
    for function in model.functions:
        for node in function.node:
            yield from _tensors_of_node(node)


def _tensors_of_graph(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        yield from _tensors_of_node(node)


def _tensors_of_node(node: onnx.NodeProto) -> Iterator[onnx.TensorProto]:
    for attribute in node.attribute:
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        if attribute.HasField("sparse_tensor"):
            yield from (attribute.sparse_tensor.values, attribute.sparse_tensor.indices)
        for sparse in attribute.sparse_tensors:
            yield from (sparse.values, sparse.indices)
        if attribute.HasField("g"):
            yield from _tensors_of_graph(attribute.g)
        for graph in attribute.graphs:
            yield from _tensors_of_graph(graph)
