"""Defaults that every configuration gets, completed from a model file or not.

Called by `load` after auto-completion; they are visible in `GET /v2/models/M/config`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tritonclient.grpc import model_config_pb2

from broker.repository.loader.backend import ENSEMBLE

_Group = model_config_pb2.ModelInstanceGroup
SEQUENCE_IDLE_US = 1_000_000


def normalise(config: model_config_pb2.ModelConfig, gpus: Sequence[int], *, on_cpu: bool = False) -> bool:
    """Fill version policy, scheduler, optimisation and instance groups in place.

    `on_cpu`: its runtime uses none of the `gpus`. Returns whether instances are on the CPU for this reason.
    """
    if config.version_policy.WhichOneof("policy_choice") is None:
        config.version_policy.latest.num_versions = 1
    _fill_scheduler(config)
    if config.platform == ENSEMBLE:
        config.model_transaction_policy.SetInParent()
        return False  # has no instances and no memory of its own
    for field in ("input_pinned_memory", "output_pinned_memory"):
        if not config.optimization.HasField(field):
            getattr(config.optimization, field).enable = True
    return _fill_instance_groups(config, gpus, on_cpu)


def _fill_scheduler(config: model_config_pb2.ModelConfig) -> None:
    batching = None
    if config.HasField("dynamic_batching"):
        batching = config.dynamic_batching
    elif config.HasField("sequence_batching"):
        sequences = config.sequence_batching
        sequences.max_sequence_idle_microseconds = sequences.max_sequence_idle_microseconds or SEQUENCE_IDLE_US
        batching = sequences.oldest if sequences.HasField("oldest") else None
    if batching is not None and not batching.preferred_batch_size and config.max_batch_size > 0:
        batching.preferred_batch_size.append(config.max_batch_size)


def _fill_instance_groups(config: model_config_pb2.ModelConfig, gpus: Sequence[int], on_cpu: bool) -> bool:
    is_moved = False
    if not config.instance_group:
        config.instance_group.add(name=config.name)
    for index, group in enumerate(config.instance_group):
        group.name = group.name or f"{config.name}_{index}"
        # Triton starts two instances of an ONNX model on the CPU. One is better on one host: ONNX Runtime already
        # spreads a run over the cores, so a second instance contends for them. An explicit count is honoured.
        group.count = group.count or 1
        if group.kind == _Group.KIND_AUTO:
            usable = bool(gpus) and all(gpu in gpus for gpu in group.gpus)
            if usable and on_cpu:
                is_moved, usable = True, False
                del group.gpus[:]
            group.kind = _Group.KIND_GPU if usable else _Group.KIND_CPU
        if group.kind == _Group.KIND_GPU and not group.gpus:
            group.gpus.extend(gpus)
        if group.HasField("rate_limiter"):
            group.rate_limiter.priority = group.rate_limiter.priority or 1
    return is_moved
