"""Triton's rules for one ensemble by itself: what its own text says about steps and the tensors between them.

Called by `load`. Whether the member models exist and their tensors fit is checked where all models are known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from difflib import get_close_matches

from tritonclient.grpc import model_config_pb2

from broker.repository.loader.failure import ModelError
from broker.repository.pbtxt_lines import fields

MAX_STEPS = 256
_REMOVE = "\n    fix: remove it"


def validate_ensemble(config: model_config_pb2.ModelConfig) -> None:
    """Raise ModelError at the first rule that is broken."""
    name = config.name
    if config.model_warmup:
        raise ModelError(f"model_warmup can not be specified for ensemble '{name}'{_REMOVE}", "model_warmup")
    if config.instance_group:
        raise ModelError(f"instance group should not be specified for ensemble '{name}'{_REMOVE}", "instance_group")
    if config.HasField("optimization"):
        raise ModelError(f"optimization should not be specified for ensemble '{name}'{_REMOVE}", "optimization")
    steps = config.ensemble_scheduling.step
    if not steps:
        raise ModelError(f"must specify 'step' for ensemble '{name}'")
    if len(steps) > MAX_STEPS:
        raise ModelError(f"ensemble '{name}' has {len(steps)} steps, at most {MAX_STEPS}")
    for index, step in enumerate(steps):
        for field in ("model_name", "input_map", "output_map"):
            if not getattr(step, field):
                raise ModelError(f"must specify '{field}' in step {index} of ensemble '{name}'")
        if step.model_version < -1 or step.model_version == 0:
            raise ModelError(
                f"model_version {step.model_version} in step {index} of ensemble '{name}' must be -1 or > 0"
            )
    _validate_flow(config)


def check_mapped_once(config: model_config_pb2.ModelConfig, text: str) -> None:
    """Raise ModelError for an input of a member that `text`, which says `config`, gives two tensors: once it is parsed
    only the last one is left, and what is missing then misleads.
    """
    if not config.ensemble_scheduling.step:
        return
    stated = [each for each in fields(text) if ".input_map[" in each.path and each.path.endswith(".key[0]")]
    for index, step in enumerate(config.ensemble_scheduling.step):
        entries = f"ensemble_scheduling[0].step[{index}].input_map["
        keys = Counter(each.value for each in stated if each.path.startswith(entries))
        for key, times in keys.items():
            if times > 1:
                text_start = f"input '{key}' in model '{step.model_name}' is mapped to multiple ensemble tensors"
                raise _in_step(f"{text_start} for ensemble '{config.name}' step {index}", index, "input_map", key)


def _validate_flow(config: model_config_pb2.ModelConfig) -> None:
    """Every tensor is written once, everything written or given is used, and every output can be reached."""
    name, steps = config.name, config.ensemble_scheduling.step
    inputs = [text.name for text in config.input]
    outputs = [text.name for text in config.output]
    writers: dict[str, int] = {}
    for index, step in enumerate(steps):
        for tensor in step.output_map.values():
            if tensor in writers:
                raise ModelError(
                    f"ensemble tensor '{tensor}' can appear in an output map only once for ensemble '{name}' step "
                    f"{index}"
                )
            if tensor in inputs:
                raise ModelError(f"ensemble input '{tensor}' for ensemble '{name}' is written by step {index}")
            writers[tensor] = index
    read = {tensor for step in steps for tensor in step.input_map.values()}
    for tensor in inputs:
        if tensor not in read:
            raise _unused(config, f"ensemble input '{tensor}' for ensemble {name}' is not used", tensor, "input_map")
    for tensor in outputs:
        if tensor not in read and tensor not in writers:
            raise _unused(config, f"ensemble output '{tensor}' for ensemble {name}' is not used", tensor, "output_map")
    _validate_reach(config, writers)
    known = {*inputs, *outputs}
    for step in steps:
        for tensor in (*sorted(step.input_map.values()), *sorted(step.output_map.values())):
            if tensor not in known and (tensor not in read or tensor not in writers):
                raise ModelError(f"ensemble tensor '{tensor}' is unused in ensemble '{name}'")


def _validate_reach(config: model_config_pb2.ModelConfig, writers: dict[str, int]) -> None:
    steps = config.ensemble_scheduling.step
    connected = {text.name for text in config.input}
    while True:
        ready = {
            tensor
            for step in steps
            if connected.issuperset(step.input_map.values())
            for tensor in step.output_map.values()
        }
        if ready <= connected:
            break
        connected |= ready
    for text in config.output:
        if text.name in connected:
            continue
        text_start = f"output '{text.name}' for ensemble '{config.name}' is not written"
        step = steps[writers[text.name]] if text.name in writers else None
        waits = [tensor for tensor in step.input_map.values() if tensor not in connected] if step is not None else []
        if waits:
            tensor = min(waits)
            text_of = f"{text_start}: at least one of its depending tensors, '{tensor}', is not connected"
            raise _unwritten(config, text_of, tensor, writers)
        raise ModelError(text_start)


def _unused(config: model_config_pb2.ModelConfig, text: str, tensor: str, field: str) -> ModelError:
    """For an input that no step's `field` (input_map) has as a value, or an output (output_map): what was meant.

    Either key and value are exchanged, or an entry has another name, which then leads nowhere.
    """
    steps = config.ensemble_scheduling.step
    maps = [dict(getattr(step, field)) for step in steps]
    for index, entries in enumerate(maps):
        if tensor in entries:
            edit = f'{field} {{ key: "{entries[tensor]}" value: "{tensor}" }}'
            fix = f"\n    fix: {edit}: the key is the model's tensor, the value the ensemble's"
            return _in_step(text + fix, index, field, tensor)
    ends = {each.name for each in (*config.input, *config.output)}
    others = {value for step in steps for value in getattr(step, _OTHER[field]).values()}
    loose = [value for entries in maps for value in entries.values() if value not in ends | others]
    if meant := _near(tensor, loose):
        index = next(at for at, entries in enumerate(maps) if meant in entries.values())
        return _in_step(f'{text}\n    fix: value: "{tensor}"', index, field, meant)
    return ModelError(f'{text}\n    no step\'s {field} has the value "{tensor}"')


def _unwritten(config: model_config_pb2.ModelConfig, text: str, tensor: str, writers: Collection[str]) -> ModelError:
    """For a tensor that a step reads and that never gets there."""
    steps = config.ensemble_scheduling.step
    index = next(at for at, step in enumerate(steps) if tensor in step.input_map.values())
    if tensor in writers:  # by a step that waits itself
        return _in_step(text, index, "input_map", tensor)
    given = [*writers, *(each.name for each in config.input)]
    read = {value for step in steps for value in step.input_map.values()} | {each.name for each in config.output}
    meant = _near(tensor, [each for each in given if each not in read]) or _near(tensor, given, only=False)
    fix = f'\n    fix: value: "{meant}"' if meant else f'\n    no step\'s output_map has the value "{tensor}"'
    return _in_step(text + fix, index, "input_map", tensor)


_OTHER = {"input_map": "output_map", "output_map": "input_map"}


def _near(name: str, others: Collection[str], *, only: bool = True) -> str:
    """What of `others` is meant by `name`, or "". `only`: if there is but one, that one."""
    near = get_close_matches(name, others, n=1, cutoff=0.5)
    return near[0] if near else next(iter(others)) if only and len(set(others)) == 1 else ""


def _in_step(text: str, index: int, field: str, value: str) -> ModelError:
    error = ModelError(text)
    error.field, error.value = f"ensemble_scheduling[0].step[{index}].{field}[", value
    return error
