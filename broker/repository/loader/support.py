"""What a configuration says that has no meaning here.

Called by `load` on the text as written, once its backend is known. Such fields are accepted, so that a model repository
works unchanged, and each is named once, so that nobody waits for its effect.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

from tritonclient.grpc import model_config_pb2

from broker.repository.loader.metrics import FAMILY, other_families

GRAPH_LEVELS = (-1, 0, 1, 2)  # what Triton's ONNX Runtime backend knows
_NO_MEANING = "it has no meaning here"
_PINNED = "tensors stay in clients' memory; what a GPU reads there is pinned as needed"
_TOP = {
    "cc_model_filenames": "one model file serves every device",
    "model_operations": "custom operators are not loaded",
    "model_repository_agents": "no agent runs",
}
_OPTIMIZATION = {
    "execution_accelerators": "none is loaded",
    "priority": _NO_MEANING,
    "cuda": _NO_MEANING,
    "gather_kernel_buffer_threshold": _NO_MEANING,
    "eager_batching": _NO_MEANING,
    "input_pinned_memory": _PINNED,
    "output_pinned_memory": _PINNED,
}
_NO_STRATEGY = "batches are formed as dynamic_batching says, libraries for that are not loaded"
_STRATEGY = "batchstrategy.so"
_PARAMETERS = {
    "TRITON_BATCH_STRATEGY_PATH": _NO_STRATEGY,
    "memory.enable_memory_arena_shrinkage": "the arena keeps what it has",
}
_INSTANCE_GROUP = {
    "secondary_devices": _NO_MEANING,
    "host_policy": _NO_MEANING,
    "passive": "its instances run requests as all others do",
}
_STATE = {
    "use_same_buffer_for_input_output": "input and output state have memory of their own",
    "use_growable_memory": "state memory always grows as needed",
}


def ignored(config: model_config_pb2.ModelConfig) -> list[str]:
    """One sentence per field that is accepted and has no effect."""
    return [f"{field} is ignored: {why}" for field, why in dict(_ignored(config)).items()]


def ignored_files(directories: Iterable[str]) -> list[str]:
    """The same for files of a model and its versions."""
    paths = (os.path.join(directory, _STRATEGY) for directory in directories)
    return [f"{path} is ignored: {_NO_STRATEGY}" for path in paths if os.path.lexists(path)]


def _ignored(config: model_config_pb2.ModelConfig) -> Iterator[tuple[str, str]]:
    for field, why in _TOP.items():
        if is_set(config, field):
            yield field, why
    for field, why in _OPTIMIZATION.items():
        if is_set(config.optimization, field):
            yield f"optimization.{field}", why
    yield from _graph_level(config)
    for group in config.instance_group:
        for field, why in _INSTANCE_GROUP.items():
            if is_set(group, field):
                yield f"instance_group.{field}", why
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
    for family in other_families(config):
        yield f"model_metrics of '{family}'", f"only the buckets of {FAMILY} can be chosen"
    for name, why in _PARAMETERS.items():
        if name in config.parameters:
            yield f"parameter {name}", why


def _graph_level(config: model_config_pb2.ModelConfig) -> Iterator[tuple[str, str]]:
    level = config.optimization.graph.level
    if config.backend != "onnxruntime" and level:
        yield "optimization.graph", f"backend '{config.backend or config.platform}' has no such levels"
    elif level not in GRAPH_LEVELS:
        yield "optimization.graph", f"level {level} is none of -1 (basic), 0 (all), 1 (extended), 2 (none)"


def is_set(message: Any, field: str) -> bool:
    """Is the field there with anything but its default value?"""
    return any(descriptor.name == field for descriptor, _ in message.ListFields())
