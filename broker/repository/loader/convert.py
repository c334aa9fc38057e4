"""From Triton's protobuf to the plain `ModelConfig` that travels to the broker and its workers, and to Triton's JSON.

Called by `load` at the end. Decides nothing: everything was completed and validated before. Reads label files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from tritonclient.grpc import model_config_pb2

from broker.repository.config import ModelConfig, TensorConfig
from broker.repository.loader import convert_scheduling as scheduling
from broker.repository.loader.complete import is_scalar, show
from broker.repository.loader.files import read_file
from broker.repository.loader.metrics import buckets
from broker.repository.loader.onnx_file import FileTensor, Signature
from broker.repository.loader.origins import Origins
from broker.repository.loader.zero_copy import Verdict
from broker.repository.scan import ModelDirectory

MAX_LABELS = 1 << 20  # bytes; the 21,843 classes of all of ImageNet have half of it

_INT64 = {
    FieldDescriptor.CPPTYPE_INT64,
    FieldDescriptor.CPPTYPE_UINT64,
}


def to_model_config(
    config: model_config_pb2.ModelConfig,
    model: ModelDirectory,
    versions: Mapping[int, str],
    signatures: Sequence[Signature],
    verdicts: Mapping[str, Verdict],
    notes: Sequence[str],
    *,
    stamps: dict[int, str],
    max_batch_size_completed: bool,
    origins: Origins | None,
) -> ModelConfig:
    """`signatures`: one per served version, newest first; empty when no file was read (then nothing is known).

    Raises ModelError for a label, state or warm-up file that cannot be used.
    """
    samples, warm_up_notes = scheduling.warm_up(config, model)
    inputs, outputs = _tensors(config, model, signatures, verdicts)
    return ModelConfig(
        name=config.name,
        platform=config.platform,
        backend=config.backend or config.platform,  # an ensemble has no backend
        directory=model.path,
        versions=dict(versions),
        default_model_filename=config.default_model_filename,
        max_batch_size=config.max_batch_size,
        input=inputs,
        output=outputs,
        instance_group=scheduling.instance_groups(config),
        dynamic_batching=scheduling.dynamic_batching(config),
        sequence_batching=scheduling.sequence_batching(config, model),
        ensemble=scheduling.ensemble(config),
        batch_input=scheduling.batch_inputs(config),
        batch_output=scheduling.batch_outputs(config),
        response_cache=config.response_cache.enable,
        warm_up=samples,
        metric_tags=dict(config.metric_tags),
        first_response_buckets=buckets(config),
        graph_level=config.optimization.graph.level,
        decoupled=config.model_transaction_policy.decoupled,
        stateful=config.HasField("sequence_batching"),
        parameters={key: value.string_value for key, value in config.parameters.items()},
        stamps=stamps,
        json=to_json(config),
        notes=tuple(dict.fromkeys((*notes, *warm_up_notes))),
        max_batch_size_completed=max_batch_size_completed,
        origins={} if origins is None else origins.found,
        explanation="" if origins is None else origins.annotated(config),
    )


def to_json(config: model_config_pb2.ModelConfig) -> str:
    """Triton's JSON form: the schema's field names, defaults included, 64-bit integers as numbers."""
    tree = json_format.MessageToDict(
        config, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    _numbers(tree, config.DESCRIPTOR)
    return json.dumps(tree)


def _numbers(tree: dict[str, Any], descriptor: Any) -> None:
    """protobuf writes 64-bit integers as strings; turn them back, in place."""
    for field in descriptor.fields:
        if field.name not in tree:
            continue
        value = tree[field.name]
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            inner = field.message_type.fields_by_name["value"]
            for item in value.values() if inner.message_type is not None else ():
                _numbers(item, inner.message_type)
        elif field.message_type is not None:
            for item in value if isinstance(value, list) else [value]:
                _numbers(item, field.message_type)
        elif field.cpp_type in _INT64:
            tree[field.name] = [int(item) for item in value] if isinstance(value, list) else int(value)


def _tensors(
    config: model_config_pb2.ModelConfig,
    model: ModelDirectory,
    signatures: Sequence[Signature],
    verdicts: Mapping[str, Verdict],
) -> tuple[tuple[TensorConfig, ...], tuple[TensorConfig, ...]]:
    symbols = [_symbols(config, signature) for signature in signatures] or [_symbols(config, Signature((), ()))]
    # Versions that name their dimensions differently promise nothing together.
    agreed = symbols[0] if all(other == symbols[0] for other in symbols) else _symbols(config, Signature((), ()))
    newest = signatures[0] if signatures else Signature((), ())
    files = {tensor.name: tensor for tensor in (*newest.inputs, *newest.outputs)}
    inputs = tuple(
        TensorConfig(
            **_common(config, text, files.get(text.name), agreed),
            optional=text.optional,
            allow_ragged_batch=text.allow_ragged_batch,
            zero_copy=verdicts[text.name].allowed,
            zero_copy_reason=verdicts[text.name].reason,
        )
        for text in config.input
    )
    outputs = tuple(
        TensorConfig(
            **_common(config, text, files.get(text.name), agreed),
            label_filename=text.label_filename,
            labels=_labels(text, model),
        )
        for text in config.output
    )
    return inputs, outputs


def _labels(text: Any, model: ModelDirectory) -> bytes:
    if not text.label_filename:
        return b""
    return read_file(os.path.join(model.path, text.label_filename), MAX_LABELS, "1 MiB")


def _common(
    config: model_config_pb2.ModelConfig,
    text: Any,
    tensor: FileTensor | None,
    symbols: Mapping[str, tuple[str, ...]],
) -> dict[str, Any]:
    reshape = tuple(text.reshape.shape) if text.HasField("reshape") else None
    if tensor is not None and is_scalar(config, text, tensor):
        reshape = ()
    return {
        "name": text.name,
        "datatype": scheduling.datatype(text.data_type),
        "dims": tuple(text.dims),
        "symbols": symbols[text.name],
        "reshape": reshape,
        "is_shape_tensor": text.is_shape_tensor,
        "file_rank": -1 if tensor is None or tensor.shape is None else len(tensor.shape),
        "file_shape": "" if tensor is None or tensor.shape is None else show(tensor.shape, tensor.symbols),
    }


def _symbols(config: model_config_pb2.ModelConfig, signature: Signature) -> dict[str, tuple[str, ...]]:
    """Per tensor one symbol per entry of `dims`, as `TensorConfig.symbols` describes them."""
    batch = 1 if config.max_batch_size > 0 else 0
    files = {tensor.name: tensor for tensor in (*signature.inputs, *signature.outputs)}
    found: dict[str, tuple[str, ...]] = {}
    carried: set[str] = set()
    for text in config.input:
        found[text.name] = _tensor_symbols(text, files.get(text.name), batch, None)
        carried.update(found[text.name])
    for text in config.output:
        found[text.name] = _tensor_symbols(text, files.get(text.name), batch, carried)
    return found


def _tensor_symbols(
    text: Any,
    tensor: FileTensor | None,
    batch: int,
    carried: set[str] | None,
) -> tuple[str, ...]:
    inner = list(text.reshape.shape) if text.HasField("reshape") else list(text.dims)
    names = tensor.symbols[batch:] if tensor is not None else ()
    # With a reshape the k-th variable dimension of `dims` is the k-th of the file; fixed ones may differ in number.
    variable = iter([names[axis] if axis < len(names) else "" for axis, size in enumerate(inner) if size == -1])
    symbols: list[str] = []
    for axis, size in enumerate(text.dims):
        symbol = next(variable) if size == -1 else ""
        if size == -1 and (not symbol or symbol.startswith("?") or (carried is not None and symbol not in carried)):
            symbol = f"?{text.name}:{axis}"
        symbols.append(symbol)
    return tuple(symbols)
