"""Triton's rules for one ensemble by itself: what its own text says about steps and the tensors between them.

Called by `load`. Whether the member models exist and their tensors fit is checked where all models are known.
"""

from __future__ import annotations

from tritonclient.grpc import model_config_pb2

from broker.repository.loader.failure import ModelError

MAX_STEPS = 256


def validate_ensemble(config: model_config_pb2.ModelConfig) -> None:
    """Raise ModelError at the first rule that is broken."""
    name = config.name
    if config.model_warmup:
        raise ModelError(f"model_warmup can not be specified for ensemble '{name}'")
    if config.instance_group:
        raise ModelError(f"instance group should not be specified for ensemble '{name}'")
    if config.HasField("optimization"):
        raise ModelError(f"optimization should not be specified for ensemble '{name}'")
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
            raise ModelError(f"ensemble input '{tensor}' for ensemble {name}' is not used")
    for tensor in outputs:
        if tensor not in read and tensor not in writers:
            raise ModelError(f"ensemble output '{tensor}' for ensemble {name}' is not used")
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
            raise ModelError(f"{text_start}: at least one of its depending tensors, '{min(waits)}', is not connected")
        raise ModelError(text_start)
