"""The rules of Triton for a configuration, with Triton's words.

Called by `load` on a completed and normalised configuration, before it is compared with the model file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

from tritonclient.grpc import model_config_pb2

from broker.repository.loader.backend import CUSTOM_BACKEND
from broker.repository.loader.failure import ModelError
from broker.repository.loader.files import named
from broker.repository.loader.shape_edits import products
from broker.repository.loader.validate_scheduling import (
    scheduling_rules,
    validate_microseconds,
    validate_preferred,
)
from broker.repository.scan import ModelDirectory

MAX_INSTANCES = 1024  # of one model: each is a loaded copy and a thread
MAX_RANK = 63  # plus the batch dimension; a request's shape has at most 64
MAX_NAME = 256  # characters of a tensor name, as in requests
MAX_BATCH = 65534  # rows of a batch: positions and rows travel as 16 bits

_DYNAMIC = "dynamic_batching[0]"  # where its fields stand, as in `ModelError.field`

_Config: TypeAlias = model_config_pb2.ModelConfig
_Group = model_config_pb2.ModelInstanceGroup
_Input = model_config_pb2.ModelInput
_Policy = model_config_pb2.ModelQueuePolicy


def validate(
    config: _Config, model: ModelDirectory, gpus: Sequence[int], scalars: frozenset[str], no_gpus: str = ""
) -> None:
    """Raise ModelError at the first rule that is broken.

    `scalars`: tensors that have no dimensions in the model file; for them alone an empty reshape is right.
    """
    for rule in (*tensor_rules(config, model, scalars), *setting_rules(config, model, gpus, no_gpus)):
        rule()


def setting_rules(
    config: _Config, model: ModelDirectory, gpus: Sequence[int], no_gpus: str
) -> Iterator[Callable[[], None]]:
    """The rules for what stands beside tensors: each raises ModelError if it is broken, and needs no other."""
    if config.HasField("dynamic_batching"):
        yield from _dynamic_rules(config)
    yield from scheduling_rules(config)
    own_code = os.path.isfile(os.path.join(model.path, CUSTOM_BACKEND))
    gpu_only = config.platform == "tensorrt_plan" and not own_code
    yield partial(_validate_instance_groups, config, gpus, no_gpus, gpu_only)


def tensor_rules(config: _Config, model: ModelDirectory, scalars: frozenset[str]) -> Iterator[Callable[[], None]]:
    """The rules for `max_batch_size`, `input` and `output`, as `setting_rules`."""
    yield partial(_validate_batch_size, config)
    for kind, texts in (("input", config.input), ("output", config.output)):
        yield partial(_validate_present, config, kind)
        seen: set[str] = set()
        for text in texts:
            yield partial(_validate_tensor, config, kind, text, scalars)
            yield partial(_validate_once, config, kind, text, seen)
    for text in config.input:
        yield partial(_validate_format, config, text)
    for text in config.output:
        yield partial(_validate_label_file, text, model)


def _validate_batch_size(config: _Config) -> None:
    if config.max_batch_size < 0:
        raise ModelError(f"'max_batch_size' must be non-negative value for {config.name}")
    if config.max_batch_size > MAX_BATCH:
        raise ModelError(f"'max_batch_size' must be at most {MAX_BATCH} for {config.name}, got {config.max_batch_size}")


def _validate_present(config: _Config, kind: str) -> None:
    if not getattr(config, kind):
        raise ModelError(
            f"must specify one or more '{kind}'s for {config.name}: nothing could be taken from a model file"
            f'\n    fix: in config.pbtxt: {kind} {{ name: "…" data_type: TYPE_FP32 dims: [ -1 ] }}'
        )


def _validate_once(config: _Config, kind: str, text: Any, seen: set[str]) -> None:
    if text.name in seen:
        raise ModelError(f"model {kind} '{text.name}' is specified more than once for {config.name}")
    seen.add(text.name)


def _validate_format(config: _Config, text: Any) -> None:
    if text.format in (_Input.FORMAT_NHWC, _Input.FORMAT_NCHW) and len(text.dims) != 3:
        raise ModelError(f"model input NHWC/NCHW require 3 dims for {config.name}, '{text.name}' has {len(text.dims)}")


def _validate_tensor(config: _Config, kind: str, text: Any, scalars: frozenset[str]) -> None:
    if not text.name:
        raise ModelError(f"model {kind} must specify 'name' for {config.name}")
    prefix = f"model {kind} '{text.name[:MAX_NAME]}' "
    if len(text.name) > MAX_NAME:
        raise ModelError(f"{prefix}has a name of more than {MAX_NAME} characters")
    if text.data_type not in model_config_pb2.DataType.values() or text.data_type == model_config_pb2.TYPE_INVALID:
        raise ModelError(f"{prefix}must specify 'data_type' for {config.name}")
    if not text.dims:
        raise ModelError(
            f"{prefix}must specify 'dims' for {config.name}: no model file says how many dimensions it has"
        )
    if any(dim < 1 and dim != -1 for dim in text.dims):
        raise ModelError(
            f"{prefix}dimension must be integer >= 1, or -1 to indicate a variable-size dimension for {config.name}"
        )
    if len(text.dims) > MAX_RANK or len(text.reshape.shape) > MAX_RANK:
        raise ModelError(f"{prefix}has more than {MAX_RANK} dimensions")
    if text.HasField("reshape"):
        _validate_reshape(config, text, prefix, scalars)


def _validate_reshape(config: _Config, text: Any, prefix: str, scalars: frozenset[str]) -> None:
    dims, shape = list(text.dims), list(text.reshape.shape)
    if any(dim < 1 and dim != -1 for dim in shape):
        raise ModelError(
            f"{prefix}reshape dimensions must be integer >= 1, or -1 to indicate a variable-size dimension for "
            f"{config.name}"
        )
    if not shape and config.max_batch_size == 0 and text.name not in scalars:
        raise ModelError(
            f"{prefix}cannot have empty reshape for non-batching model as scalar tensors are not supported for "
            f"{config.name}"
        )
    if (-1 in dims) != (-1 in shape):
        raise ModelError(f"{prefix}has different size for dims and reshape for {config.name}")
    if dims.count(-1) != shape.count(-1):
        raise ModelError(
            f"{prefix}has different number of variable-size dimensions for dims and reshape for {config.name}"
        )
    if products(dims) != products(shape):
        raise ModelError(f"{prefix}has different size for dims and reshape for {config.name}")


def _validate_label_file(text: Any, model: ModelDirectory) -> None:
    if not text.label_filename:
        return
    path = named(model, model.path, text.label_filename)
    if path is None or not os.path.isfile(path):
        raise ModelError(
            f"model output '{text.name}' has label_filename {text.label_filename!r}, which is no file in {model.path}"
        )


def _dynamic_rules(config: _Config) -> Iterator[Callable[[], None]]:
    batching, name = config.dynamic_batching, config.name
    policies = [batching.default_queue_policy, *batching.priority_queue_policy.values()]
    what = "dynamic batching preferred size"
    for size in dict.fromkeys(batching.preferred_batch_size):
        yield partial(validate_preferred, size, config.max_batch_size, what, name, _DYNAMIC)
    yield partial(_validate_priority_levels, batching, name)
    for level in batching.priority_queue_policy:
        yield partial(_validate_policy_level, level, batching.priority_levels, name)
    if batching.preserve_ordering:
        yield partial(_validate_one_level, batching.priority_levels, name)
        yield partial(_validate_no_delay, policies, name)
    yield partial(_validate_timeout_actions, policies, name)
    yield partial(validate_microseconds, "max_queue_delay_microseconds", batching.max_queue_delay_microseconds, name)
    for limit in dict.fromkeys(policy.default_timeout_microseconds for policy in policies):
        yield partial(validate_microseconds, "default_timeout_microseconds", limit, name)


def _validate_priority_levels(batching: Any, name: str) -> None:
    levels = batching.priority_levels
    if levels > 2**16:
        raise ModelError(
            f"dynamic batching priority levels must be at most {2**16} for {name}, got {levels}",
            f"{_DYNAMIC}.priority_levels",
        )
    if levels and not 1 <= batching.default_priority_level <= levels:
        raise ModelError(
            f"default priority level must be in range [1, {levels}] for {name}, got {batching.default_priority_level}"
            f"\n    fix: default_priority_level: {min(levels, max(1, batching.default_priority_level))}",
            f"{_DYNAMIC}.{'default_priority_level' if batching.default_priority_level else 'priority_levels'}",
        )


def _validate_policy_level(level: int, levels: int, name: str) -> None:
    if not 1 <= level <= levels:
        raise ModelError(
            f"priority queue policy must have priority level in range [1, {levels}] for {name}"
            f"\n    fix: {f'key: 1 to {levels}, or ' if levels else ''}priority_levels: {max(1, level)} or more",
            f"{_DYNAMIC}.priority_queue_policy",
            str(level),
        )


def _validate_one_level(levels: int, name: str) -> None:
    if levels > 1:
        raise ModelError(f"Only one priority level is allowed when 'preserve_ordering' is true for {name}")


def _validate_no_delay(policies: Sequence[Any], name: str) -> None:
    if any(policy.timeout_action == _Policy.DELAY for policy in policies):
        raise ModelError(
            f"Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for {name}"
        )


def _validate_timeout_actions(policies: Sequence[Any], name: str) -> None:
    if any(policy.timeout_action not in _Policy.TimeoutAction.values() for policy in policies):
        raise ModelError(
            f"queue policy must have timeout_action REJECT or DELAY for {name}", f"{_DYNAMIC}.default_queue_policy"
        )


def _validate_instance_groups(config: _Config, gpus: Sequence[int], no_gpus: str, gpu_only: bool) -> None:
    for index, group in enumerate(config.instance_group):
        title = f"instance group {group.name} of model {config.name}"
        field = f"instance_group[{index}]"
        if group.kind not in _Group.Kind.values():
            raise ModelError(f"{title} has an unknown kind {group.kind}")
        if group.count < 1:
            raise ModelError(
                f"{title} has count {group.count}, it must be positive\n    fix: count: 1",
                f"{field}.count",
                str(group.count),
            )
        for problem, name in _gpu_problems(group, gpu_only, gpus, no_gpus and f": {no_gpus}"):
            raise ModelError(f"{title} {problem}", f"{field}.{name}")
        _validate_profiles(config, group, f"{title} and platform {config.platform}")
    names = config.parameters["worker_group"].string_value.split(",") if "worker_group" in config.parameters else ()
    if len(names) > max(1, len(config.instance_group)):
        raise ModelError(
            f"parameter worker_group of model {config.name} names {len(names)} groups, one for each instance_group, of "
            f"which there are {len(config.instance_group)}",
            "parameters",
            "worker_group",
        )
    instances = sum(group.count * max(1, len(group.gpus)) for group in config.instance_group)
    if instances > MAX_INSTANCES:
        raise ModelError(
            f"instance groups of model {config.name} ask for {instances} instances, the limit is {MAX_INSTANCES}",
            "instance_group",
        )


def _validate_profiles(config: _Config, group: Any, title: str) -> None:
    if group.profile and config.platform != "tensorrt_plan" and config.backend != "tensorrt":
        # Triton's text has no space there.
        raise ModelError(f"{title}specifies profile field which is only supported for TensorRT models")
    for profile in group.profile:
        if not profile:
            raise ModelError("profile name must not be empty")
        if not profile.removeprefix("-").isdecimal() or not profile.isascii():
            raise ModelError(f"unable to parse '{profile}': stoi")
        if profile.startswith("-") or len(profile) > 9:
            raise ModelError(
                f"{title} specifies invalid profile {profile}. The field should contain the string representation of a "
                "non-negative integer."
            )


def _gpu_problems(group: Any, gpu_only: bool, gpus: Sequence[int], why: str) -> Iterator[tuple[str, str]]:
    """What is wrong, and in which field of the group."""
    kind = _Group.Kind.Name(group.kind)
    if group.kind != _Group.KIND_GPU:
        if group.gpus and group.kind == _Group.KIND_CPU:
            yield f"has kind {kind} but specifies one or more GPUs\n    fix: leave 'gpus' out", "gpus"
        if gpu_only:
            rest = "\n    fix: kind: KIND_GPU" if gpus else f", there is none here{why}"
            yield f"has kind {kind}, but 'tensorrt_plan' needs a GPU{rest}", "kind"
        return
    if not gpus:
        fix = f"kind: KIND_CPU{', without gpus' if group.gpus else ''}"
        need = "tensorrt_plan needs a GPU, there is none here" if gpu_only else f"fix: {fix}"
        yield f"has kind {kind} but no GPUs are available{why}\n    {need}", "kind"
    for gpu in group.gpus:
        if gpu not in gpus:
            available = ", ".join(map(str, gpus))
            yield (
                f"specifies invalid or unsupported gpu id {gpu}. GPUs with at least the minimum required CUDA compute "
                f"compatibility of 6.000000 are: {available}{why}",
                "gpus",
            )
