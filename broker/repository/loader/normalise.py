"""Defaults that every configuration gets, completed from a model file or not.

Called by `load` after auto-completion; they are visible in `GET /v2/models/M/config`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tritonclient.grpc import model_config_pb2

_Group = model_config_pb2.ModelInstanceGroup
_IGNORED = ("cc_model_filenames", "model_operations", "model_repository_agents")


def normalise(config: model_config_pb2.ModelConfig, gpus: Sequence[int]) -> list[str]:
    """Fill version policy, scheduler, optimisation and instance groups in place. Returns notes on ignored fields."""
    if config.version_policy.WhichOneof("policy_choice") is None:
        config.version_policy.latest.num_versions = 1
    if config.HasField("dynamic_batching") and config.max_batch_size > 0:
        batching = config.dynamic_batching
        if not batching.preferred_batch_size:
            batching.preferred_batch_size.append(config.max_batch_size)
    for field in ("input_pinned_memory", "output_pinned_memory"):
        if not config.optimization.HasField(field):
            getattr(config.optimization, field).enable = True
    _fill_instance_groups(config, gpus)
    return [f"{field} is ignored: it has no meaning here" for field in _IGNORED if _is_set(config, field)]


def _is_set(config: model_config_pb2.ModelConfig, field: str) -> bool:
    return any(descriptor.name == field for descriptor, _ in config.ListFields())


def _fill_instance_groups(config: model_config_pb2.ModelConfig, gpus: Sequence[int]) -> None:
    if not config.instance_group:
        config.instance_group.add(name=config.name)
    for index, group in enumerate(config.instance_group):
        group.name = group.name or f"{config.name}_{index}"
        # Triton starts two instances of an ONNX model on the CPU. One is better on one host: ONNX Runtime already
        # spreads a run over the cores, so a second instance contends for them. An explicit count is honoured.
        group.count = group.count or 1
        if group.kind == _Group.KIND_AUTO:
            usable = bool(gpus) and all(gpu in gpus for gpu in group.gpus)
            group.kind = _Group.KIND_GPU if usable else _Group.KIND_CPU
        if group.kind == _Group.KIND_GPU and not group.gpus:
            group.gpus.extend(gpus)
