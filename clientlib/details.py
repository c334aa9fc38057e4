"""What Triton's wires have no field for: said to clients of this library alone, which ask for it by a header.

The gateways send it (`broker.gateway.grpc.calls`, `.grpc.stream`, `.http.models`), `clientlib.remote` reads it. Without
it, from another server, errors lack the model file's column and responses in a stream that are errors lack a code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from shm.message_values import ModelMetadata, TensorMetadata

HEADER, VALUE = "tensorbroker-details", "1"
CODE = "tensorbroker_code"  # a parameter of a response in a gRPC stream: the code of the error that it is
_PARAMETER = "tensorbroker.details"  # of a configuration: what a native client is told of the model, as JSON


def asked(headers: Mapping[str, str]) -> bool:
    """Does a request with these headers (names in lower case) ask for it?"""
    return headers.get(HEADER) == VALUE


def add_to(config: dict[str, Any], metadata: ModelMetadata) -> None:
    """Put what checks need of `metadata` into a configuration in Triton's JSON form."""
    known = replace(
        metadata,
        versions=(),
        workers=(),
        reason="",
        inputs=_checked(metadata.inputs),
        outputs=_checked(metadata.outputs),
    )
    config.setdefault("parameters", {})[_PARAMETER] = {"string_value": msgspec.json.encode(known).decode()}


def merged(metadata: ModelMetadata, config: Mapping[str, Any]) -> ModelMetadata:
    """`metadata` of the wire with what `config`, which was asked for next, says beyond it."""
    policy = config.get("model_transaction_policy") or {}
    optional = {tensor.get("name") for tensor in config.get("input") or () if tensor.get("optional")}
    inputs = tuple(replace(each, optional=True) if each.name in optional else each for each in metadata.inputs)
    model = replace(
        metadata,
        max_batch_size=int(config.get("max_batch_size", 0)),
        decoupled=bool(policy.get("decoupled", False)),
        inputs=inputs,
    )
    parameter = (config.get("parameters") or {}).get(_PARAMETER) or {}
    try:
        known = msgspec.json.decode(parameter.get("string_value", ""), type=ModelMetadata)
    except msgspec.MsgspecError:
        return model
    return replace(
        model,
        inputs=known.inputs,
        outputs=known.outputs,
        max_batch_size_completed=known.max_batch_size_completed,
        correlation=known.correlation,
        reads_parameters=known.reads_parameters,
    )


def _checked(tensors: tuple[TensorMetadata, ...]) -> tuple[TensorMetadata, ...]:
    return tuple(replace(tensor, zero_copy=False, zero_copy_reason="") for tensor in tensors)
