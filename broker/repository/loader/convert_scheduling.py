"""From Triton's protobuf to the plain data of `broker.repository.scheduling`; reads state and warm-up files.

Called by `convert` on a validated configuration. Data files lie in `<model>/initial_state/` and `<model>/warmup/`.
"""

from __future__ import annotations

import math
import os
from typing import Any, TypeAlias

from tritonclient.grpc import model_config_pb2

from broker.repository.config import MAX_DATA_FILE, YES_NO, InstanceGroup
from broker.repository.loader.failure import ModelError
from broker.repository.loader.files import named, read_file
from broker.repository.loader.validate_scheduling import FLAGS, control_kind
from broker.repository.scan import ModelDirectory
from broker.repository.scheduling import (
    BatchInput,
    BatchOutput,
    Control,
    DynamicBatching,
    Ensemble,
    InitialState,
    QueuePolicy,
    Resource,
    SequenceBatching,
    State,
    Step,
    WarmUp,
    WarmUpInput,
)
from shm.datatypes import BYTES, element_size

DROP_OLDEST = "drop_oldest"  # model parameter: what a full queue gives up
MAX_WARM_UPS = 100_000  # runs of one sample on one instance
_FIELDS = {"warmup": "model_warmup", "initial_state": "sequence_batching[0].state"}  # what has files in which directory
MAX_ALL_DATA = 32 << 20  # bytes of all data files of a model, within what one message of the loader may have

_Config: TypeAlias = model_config_pb2.ModelConfig
_Control = model_config_pb2.ModelSequenceBatching.Control
_Group = model_config_pb2.ModelInstanceGroup
_Policy = model_config_pb2.ModelQueuePolicy


def datatype(data_type: int) -> str:
    """KServe's name of a protobuf DataType."""
    name = str(model_config_pb2.DataType.Name(data_type)).removeprefix("TYPE_")
    return BYTES if name == "STRING" else name


def instance_groups(config: _Config) -> tuple[InstanceGroup, ...]:
    """The execution slots, with what the rate limiter needs of them."""
    return tuple(
        InstanceGroup(
            name=group.name,
            kind=_Group.Kind.Name(group.kind),
            count=group.count,
            gpus=tuple(group.gpus),
            resources=tuple(
                # `global` is a word of Python, so the attribute cannot be written.
                Resource(name=item.name, count=item.count, is_global=getattr(item, "global"))
                for item in group.rate_limiter.resources
            ),
            priority=group.rate_limiter.priority or 1,
            profiles=tuple(dict.fromkeys(map(int, group.profile))),
        )
        for group in config.instance_group
    )


def dynamic_batching(config: _Config) -> DynamicBatching | None:
    """None: each request runs alone."""
    if not config.HasField("dynamic_batching"):
        return None
    batching = config.dynamic_batching
    drop = drops_oldest(config)
    return DynamicBatching(
        preferred_batch_size=tuple(batching.preferred_batch_size),
        max_queue_delay_microseconds=batching.max_queue_delay_microseconds,
        preserve_ordering=batching.preserve_ordering,
        priority_levels=batching.priority_levels,
        default_priority_level=batching.default_priority_level,
        default_queue_policy=_queue_policy(batching.default_queue_policy, drop),
        priority_queue_policy={
            level: _queue_policy(policy, drop) for level, policy in sorted(batching.priority_queue_policy.items())
        },
    )


def drops_oldest(config: _Config) -> bool:
    """The parameter `drop_oldest`, whose text `parameters` has checked."""
    return DROP_OLDEST in config.parameters and YES_NO.get(config.parameters[DROP_OLDEST].string_value.lower(), False)


def _queue_policy(policy: Any, drop_oldest: bool) -> QueuePolicy:
    return QueuePolicy(
        timeout_action=_Policy.TimeoutAction.Name(policy.timeout_action),
        default_timeout_microseconds=policy.default_timeout_microseconds,
        allow_timeout_override=policy.allow_timeout_override,
        max_queue_size=policy.max_queue_size,
        drop_oldest=drop_oldest,
    )


def ensemble(config: _Config) -> Ensemble | None:
    """The steps of an ensemble model."""
    if not config.HasField("ensemble_scheduling"):
        return None
    return Ensemble(
        step=tuple(
            Step(
                model_name=step.model_name,
                model_version=step.model_version,
                input_map=dict(sorted(step.input_map.items())),
                output_map=dict(sorted(step.output_map.items())),
            )
            for step in config.ensemble_scheduling.step
        ),
        max_inflight_requests=config.ensemble_scheduling.max_inflight_requests,
    )


def batch_inputs(config: _Config) -> tuple[BatchInput, ...]:
    """Helper inputs of ragged batches."""
    return tuple(
        BatchInput(
            kind=model_config_pb2.BatchInput.Kind.Name(item.kind),
            target_name=tuple(item.target_name),
            datatype=datatype(item.data_type),
            source_input=tuple(item.source_input),
        )
        for item in config.batch_input
    )


def batch_outputs(config: _Config) -> tuple[BatchOutput, ...]:
    """Outputs cut by the shapes of an input."""
    return tuple(
        BatchOutput(
            kind=model_config_pb2.BatchOutput.Kind.Name(item.kind),
            target_name=tuple(item.target_name),
            source_input=tuple(item.source_input),
        )
        for item in config.batch_output
    )


# --- sequences ----------------------------------------------------------------------------------------------------


def sequence_batching(config: _Config, model: ModelDirectory) -> SequenceBatching | None:
    """Raises ModelError for an initial state whose file is missing or has another size than its shape."""
    if not config.HasField("sequence_batching"):
        return None
    batching = config.sequence_batching
    is_oldest = batching.HasField("oldest")
    strategy = batching.oldest if is_oldest else batching.direct
    return SequenceBatching(
        max_sequence_idle_microseconds=batching.max_sequence_idle_microseconds,
        control_input=tuple(
            _control(control_input.name, control)
            for control_input in batching.control_input
            for control in control_input.control
        ),
        state=tuple(_state(state, model) for state in batching.state),
        oldest=is_oldest,
        max_candidate_sequences=batching.oldest.max_candidate_sequences,
        preferred_batch_size=tuple(batching.oldest.preferred_batch_size),
        max_queue_delay_microseconds=strategy.max_queue_delay_microseconds,
        minimum_slot_utilization=batching.direct.minimum_slot_utilization,
        preserve_ordering=batching.oldest.preserve_ordering,
        iterative_sequence=batching.iterative_sequence,
    )


def _control(name: str, control: Any) -> Control:
    kind = control_kind(control)
    if control.kind == _Control.CONTROL_SEQUENCE_CORRID:
        return Control(name=name, kind=kind, datatype=datatype(control.data_type))
    field = next(field for field in FLAGS if getattr(control, field))
    off, on = getattr(control, field)
    return Control(name=name, kind=kind, datatype=datatype(FLAGS[field]), off=float(off), on=float(on))


def _state(state: Any, model: ModelDirectory) -> State:
    initial = None
    for text in state.initial_state:
        where = f"initial state '{text.name}' of state '{state.input_name}'"
        data, path = b"", ""
        if text.WhichOneof("state_data") == "data_file":
            data, path = _data_file(model, "initial_state", text.data_file, where)
            data = _needed(data, text, f"{where}: initial_state setting", text.data_file)
        initial = InitialState(
            name=text.name, datatype=datatype(text.data_type), dims=tuple(text.dims), data=data, path=path
        )
    return State(
        input_name=state.input_name,
        output_name=state.output_name,
        datatype=datatype(state.data_type),
        dims=tuple(state.dims),
        initial_state=initial,
    )


# --- warm-up ------------------------------------------------------------------------------------------------------


def warm_up(config: _Config, model: ModelDirectory) -> tuple[tuple[WarmUp, ...], list[str]]:
    """The requests, and notes on those that are left out. Raises ModelError for one that cannot be made."""
    found: list[WarmUp] = []
    notes: list[str] = []
    total = 0
    for index, text in enumerate(config.model_warmup):
        name = text.name or f"warmup_{index}"
        if text.batch_size == 0 and config.max_batch_size > 0:
            # Triton's rule: a sample of no rows is how one is switched off.
            notes.append(f"model_warmup '{name}' has batch_size 0 and is skipped")
            continue
        if text.batch_size > max(1, config.max_batch_size):
            raise ModelError(
                f"model_warmup '{name}' has batch_size {text.batch_size}, max_batch_size is {config.max_batch_size} "
                f"for {config.name}"
            )
        inputs = tuple(_warm_up_input(config, model, name, key, text.inputs[key]) for key in sorted(text.inputs))
        total += sum(len(item.data) for item in inputs)
        if total > MAX_ALL_DATA:
            raise ModelError(f"the warm-up files of {config.name} have more than {MAX_ALL_DATA >> 20} MiB together")
        if text.count > MAX_WARM_UPS:
            raise ModelError(f"model_warmup '{name}' has count {text.count}, at most {MAX_WARM_UPS} for {config.name}")
        found.append(WarmUp(name=name, batch_size=max(1, text.batch_size), inputs=inputs, count=text.count or 1))
    return tuple(found), notes


def _warm_up_input(config: _Config, model: ModelDirectory, sample: str, name: str, text: Any) -> WarmUpInput:
    where = f"warmup sample '{sample}' of model '{config.name}', input '{name}'"
    declared = next((tensor for tensor in config.input if tensor.name == name), None)
    controls = {control.name for control in config.sequence_batching.control_input}
    if declared is None and name not in controls:
        known = ", ".join(tensor.name for tensor in config.input)
        raise ModelError(f"{where}: unexpected inference input '{name}', allowed inputs are: {known}")
    if any(dim < 0 for dim in text.dims):
        raise ModelError(f"{where}: warmup setting expects all variable-size dimensions are specified")
    if declared is not None:
        _check_fits(declared, text, where)
    kind = text.WhichOneof("input_data_type")
    data, path = b"", ""
    if kind == "input_data_file":
        data, path = _data_file(model, "warmup", text.input_data_file, where)
        data = _needed(data, text, f"{where}: warmup setting", text.input_data_file)
    elif kind is None:
        raise ModelError(f"{where}: must specify 'zero_data', 'random_data' or 'input_data_file'")
    kinds = {"zero_data": "zero", "random_data": "random", "input_data_file": "file"}
    return WarmUpInput(
        name=name, datatype=datatype(text.data_type), dims=tuple(text.dims), kind=kinds[kind], data=data, path=path
    )


def _check_fits(declared: Any, text: Any, where: str) -> None:
    if text.data_type != declared.data_type:
        raise ModelError(
            f"{where}: data type is {datatype(text.data_type)}, the model's is {datatype(declared.data_type)}"
        )
    fits = len(text.dims) == len(declared.dims) and all(
        there in (-1, here) for here, there in zip(text.dims, declared.dims, strict=True)
    )
    if not fits:
        raise ModelError(f"{where}: dims are {list(text.dims)}, the model's are {list(declared.dims)}")


# --- data files ---------------------------------------------------------------------------------------------------


def _data_file(model: ModelDirectory, directory: str, name: str, where: str) -> tuple[bytes, str]:
    """Its bytes and its path."""
    root = os.path.join(model.path, directory)
    path = named(model, root, name)
    if path is None:
        raise ModelError(f"{where}: data file {name!r} must lie in {root}")
    try:
        return read_file(path, MAX_DATA_FILE, f"{MAX_DATA_FILE >> 20} MiB"), os.path.realpath(path)
    except ModelError as error:
        error.field, error.value = _FIELDS[directory], name
        raise


def _needed(data: bytes, text: Any, where: str, file: str) -> bytes:
    """One batch element, of a file that may have more, as in Triton; all of strings, whose sizes are in the file."""
    kind = datatype(text.data_type)
    if kind == BYTES:
        return data
    expected = math.prod(text.dims) * element_size(kind)
    if len(data) < expected:
        provided = f"the data provided from {file} only has {len(data)} bytes"
        raise ModelError(f"{where} expects {expected} bytes, but {provided}")
    return data[:expected]
