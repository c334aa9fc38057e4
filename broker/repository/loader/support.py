"""What a configuration says that has no meaning here.

Called by `load` on the text as written. Such fields are accepted, so that a model repository works unchanged, and each
is named once, so that nobody waits for its effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tritonclient.grpc import model_config_pb2

_NO_MEANING = "it has no meaning here"
_TOP = {
    "cc_model_filenames": "one model file serves every device",
    "model_operations": "custom operators are not loaded",
    "model_repository_agents": "no agent runs",
    "model_metrics": "the buckets of histograms are fixed",
}
_OPTIMIZATION = {
    "graph": "the runtime's own default level is used",
    "execution_accelerators": "none is loaded",
    "priority": _NO_MEANING,
    "cuda": _NO_MEANING,
    "gather_kernel_buffer_threshold": _NO_MEANING,
    "eager_batching": _NO_MEANING,
}
_INSTANCE_GROUP = ("secondary_devices", "host_policy")
_STATE = {
    "use_same_buffer_for_input_output": "input and output state have memory of their own",
    "use_growable_memory": "state memory always grows as needed",
}


def ignored(config: model_config_pb2.ModelConfig) -> list[str]:
    """One sentence per field that is accepted and has no effect."""
    return [f"{field} is ignored: {why}" for field, why in dict(_ignored(config)).items()]


def _ignored(config: model_config_pb2.ModelConfig) -> Iterator[tuple[str, str]]:
    for field, why in _TOP.items():
        if is_set(config, field):
            yield field, why
    for field, why in _OPTIMIZATION.items():
        if is_set(config.optimization, field):
            yield f"optimization.{field}", why
    for group in config.instance_group:
        for field in _INSTANCE_GROUP:
            if is_set(group, field):
                yield f"instance_group.{field}", _NO_MEANING
    for state in config.sequence_batching.state:
        for field, why in _STATE.items():
            if is_set(state, field):
                yield f"sequence_batching.state.{field}", why
    for step in config.ensemble_scheduling.step:
        if step.model_namespace:
            yield "ensemble_scheduling.step.model_namespace", "a model name is unique over all repositories"
    for tensor in (*config.input, *config.output):
        if tensor.is_non_linear_format_io:
            yield "is_non_linear_format_io", _NO_MEANING


def is_set(message: Any, field: str) -> bool:
    """Is the field there with anything but its default value?"""
    return any(descriptor.name == field for descriptor, _ in message.ListFields())
