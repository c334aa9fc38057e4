"""Triton's rules for what stands beside tensors and instances: sequences, batch helpers, cache, warm-up.

Called by `validate`. Texts are Triton's wherever it has one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

from tritonclient.grpc import model_config_pb2

from broker.repository.loader.failure import ModelError
from broker.repository.loader.metrics import metric_rules

MAX_MICROSECONDS = 2**53 // 1000 * 1000  # as nanoseconds still a signed 64-bit number
MAX_CANDIDATES = 1 << 20  # sequences of one instance: each has a record and maybe state
MAX_STATES = 64
MAX_ELEMENTS = 1 << 30  # of what the worker fills by itself

_Config: TypeAlias = model_config_pb2.ModelConfig
_Control = model_config_pb2.ModelSequenceBatching.Control
FLAGS = {
    "int32_false_true": model_config_pb2.TYPE_INT32,
    "fp32_false_true": model_config_pb2.TYPE_FP32,
    "bool_false_true": model_config_pb2.TYPE_BOOL,
}
_CORRIDS = (
    model_config_pb2.TYPE_UINT64,
    model_config_pb2.TYPE_INT64,
    model_config_pb2.TYPE_UINT32,
    model_config_pb2.TYPE_INT32,
    model_config_pb2.TYPE_STRING,
)
_CONTROLS = "sequence_batching[0].control_input"  # where they stand, as in `ModelError.field`
_NO_CACHE = "\n    fix: remove response_cache"
_ONE_OF = "either 'int32_false_true', 'fp32_false_true' or 'bool_false_true'"


def scheduling_rules(config: _Config) -> Iterator[Callable[[], None]]:
    """Each raises ModelError if it is broken, and needs none of the others."""
    if config.HasField("sequence_batching"):
        yield from _sequence_rules(config)
    yield partial(validate_batch_io, config)
    for group in config.instance_group:
        yield partial(_validate_resources, config, group)
    if config.response_cache.enable:
        yield partial(_validate_cache, config)
    yield from metric_rules(config)
    for index, sample in enumerate(config.model_warmup):
        for key, text in sample.inputs.items():
            what = f"model_warmup {index} input '{key}'"
            yield partial(validate_size, what, text, max(1, sample.batch_size), config.name)


def _validate_resources(config: _Config, group: Any) -> None:
    for resource in group.rate_limiter.resources:
        if not resource.name or resource.count < 1:
            raise ModelError(
                f"rate limiter resources of instance group '{group.name}' must have a name and a count of at least "
                f"1 for {config.name}",
                f"instance_group[{list(config.instance_group).index(group)}].rate_limiter",
            )


def validate_size(what: str, text: Any, rows: int, name: str) -> None:
    """Memory that the worker is to fill must be memory that it may have."""
    if text.data_type in model_config_pb2.DataType.values() and all(dim >= 0 for dim in text.dims):
        elements = math.prod(text.dims) * rows
        if elements > MAX_ELEMENTS:
            raise ModelError(f"{what} has {elements} elements for {name}, at most {MAX_ELEMENTS}")


def _validate_cache(config: _Config) -> None:
    prefix = f"Response Cache does not currently support model {config.name}"
    if config.HasField("sequence_batching"):
        raise ModelError(
            f"{prefix} with sequence batching scheduler. Please disable the response cache.{_NO_CACHE}",
            "response_cache",
        )
    if config.model_transaction_policy.decoupled:
        raise ModelError(
            f"{prefix} with 'decoupled' transaction policy. Please disable the response cache.{_NO_CACHE}",
            "response_cache",
        )


def validate_preferred(size: int, max_batch_size: int, what: str, name: str, scheduler: str) -> None:
    """A preferred batch size of any scheduler. `scheduler`: its field, as in `ModelError.field`."""
    field = f"{scheduler}.preferred_batch_size"
    if size <= 0:
        raise ModelError(f"{what} must be positive for {name}, got {size}\n    fix: leave it out", field, str(size))
    if size > max_batch_size:
        raise ModelError(
            f"{what} must be <= max batch size for {name}: {size} > {max_batch_size}"
            f"\n    fix: leave {size} out, or max_batch_size: {size}",
            field,
            str(size),
        )


def validate_microseconds(field: str, value: int, name: str) -> None:
    """A duration that fits into 64 bits as nanoseconds."""
    if value > MAX_MICROSECONDS:
        raise ModelError(f"'{field}' must be at most {MAX_MICROSECONDS} for {name}, got {value}")


# --- sequences ----------------------------------------------------------------------------------------------------


def _sequence_rules(config: _Config) -> Iterator[Callable[[], None]]:
    """Controls, strategy, and the tensors of implicit state."""
    batching, name = config.sequence_batching, config.name
    names: set[str] = set()
    kinds: set[int] = set()
    for control_input in batching.control_input:
        yield partial(_validate_control, control_input, names, kinds, name)
    if batching.HasField("oldest"):
        oldest, field = batching.oldest, "sequence_batching[0].oldest[0]"
        what = "sequence batching preferred batch size"
        for size in dict.fromkeys(oldest.preferred_batch_size):
            yield partial(validate_preferred, size, config.max_batch_size, what, name, field)
        yield partial(validate_microseconds, "max_queue_delay_microseconds", oldest.max_queue_delay_microseconds, name)
        yield partial(_validate_candidates, oldest.max_candidate_sequences, name)
    else:
        direct = batching.direct
        yield partial(_validate_utilization, direct.minimum_slot_utilization, name)
        yield partial(validate_microseconds, "max_queue_delay_microseconds", direct.max_queue_delay_microseconds, name)
    idle = "max_sequence_idle_microseconds"
    yield partial(validate_microseconds, idle, batching.max_sequence_idle_microseconds, name)
    yield partial(_validate_iterative, config)
    yield partial(_validate_not_ragged, config)
    yield from _state_rules(config)


def _validate_candidates(count: int, name: str) -> None:
    if not 0 <= count <= MAX_CANDIDATES:
        raise ModelError(f"'max_candidate_sequences' must be in range [0, {MAX_CANDIDATES}] for {name}")


def _validate_utilization(share: float, name: str) -> None:
    if not 0.0 <= share <= 1.0:
        raise ModelError(
            f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {name}",
            "sequence_batching[0].direct[0].minimum_slot_utilization",
        )


def _validate_iterative(config: _Config) -> None:
    if config.sequence_batching.iterative_sequence and not config.model_transaction_policy.decoupled:
        raise ModelError(
            f"iterative_sequence needs model_transaction_policy {{ decoupled: true }} for {config.name}: each pass may "
            "respond\n    fix: model_transaction_policy { decoupled: true }",
            "sequence_batching[0].iterative_sequence",
        )


def _validate_not_ragged(config: _Config) -> None:
    if any(text.allow_ragged_batch for text in config.input) and config.sequence_batching.state:
        raise ModelError(f"allow_ragged_batch cannot be combined with sequence_batching.state for {config.name}")


def _validate_control(control_input: Any, names: set[str], kinds: set[int], name: str) -> None:
    """`names`, `kinds`: of those before it, to which its own are added."""
    if not control_input.name:
        raise ModelError(f"sequence batching control tensor must have a name for {name}", _CONTROLS)
    if control_input.name in names or len(control_input.control) > 1:
        raise ModelError(
            f"sequence batching control tensor '{control_input.name}' is specified for multiple control kinds for "
            f"{name}"
        )
    names.add(control_input.name)
    for control in control_input.control:
        kind = control_kind(control)
        if control.kind in kinds:
            raise ModelError(f"sequence batching specifies multiple {kind} tensors for {name}", _CONTROLS, kind)
        kinds.add(control.kind)
        if control.kind == _Control.CONTROL_SEQUENCE_CORRID:
            _validate_corrid(control, name)
        else:
            _validate_flag(control, kind, name)


def control_kind(control: Any) -> str:
    """Its name, or its number as text where the schema has none."""
    known = control.kind in _Control.Kind.values()
    return str(_Control.Kind.Name(control.kind)) if known else str(control.kind)


def _validate_flag(control: Any, kind: str, name: str) -> None:
    given = [field for field in FLAGS if getattr(control, field)]
    if not given:
        raise ModelError(f"sequence batching must specify {_ONE_OF} for {kind} for {name}", _CONTROLS, kind)
    if len(given) > 1:
        raise ModelError(
            "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and "
            f"'bool_false_true' for {kind} for {name}",
            _CONTROLS,
            kind,
        )
    if len(getattr(control, given[0])) != 2:
        raise ModelError(f"sequence batching control '{given[0]}' must have exactly 2 entries for {kind} for {name}")


def _validate_corrid(control: Any, name: str) -> None:
    if any(getattr(control, field) for field in FLAGS):
        raise ModelError(
            f"sequence batching must not specify {_ONE_OF} for CONTROL_SEQUENCE_CORRID for {name}",
            _CONTROLS,
            "CONTROL_SEQUENCE_CORRID",
        )
    if control.data_type not in _CORRIDS:
        raise ModelError(
            f"unexpected data type for control CONTROL_SEQUENCE_CORRID for {name}. Allowed data types are TYPE_UINT64, "
            "TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
            "\n    fix: data_type, as the model file has it for this input",
            _CONTROLS,
            "CONTROL_SEQUENCE_CORRID",
        )


def _state_rules(config: _Config) -> Iterator[Callable[[], None]]:
    name, batching = config.name, config.sequence_batching
    if batching.state:
        yield partial(_validate_state_count, len(batching.state), name)
    inputs = {text.name for text in config.input}
    taken = inputs | {control.name for control in batching.control_input}
    outputs: set[str] = set()
    for state in batching.state:
        yield partial(_validate_state, state, taken, outputs, name)
    for control in batching.control_input:
        yield partial(_validate_control_name, control.name, inputs, name)


def _validate_state_count(count: int, name: str) -> None:
    if count > MAX_STATES:
        raise ModelError(f"sequence batching has {count} states for {name}, at most {MAX_STATES}")


def _validate_state(state: Any, taken: set[str], outputs: set[str], name: str) -> None:
    """`taken`, `outputs`: names that it must not have for its input and its output, to which its own are added."""
    prefix = f"sequence batching state '{state.input_name}'"
    validate_size(prefix, state, 1, name)
    if not state.input_name or not state.output_name:
        raise ModelError(f"sequence batching state must specify 'input_name' and 'output_name' for {name}")
    if state.input_name in taken:
        raise ModelError(f"{prefix} is also an input or a control or another state for {name}")
    if state.output_name in outputs:
        raise ModelError(f"{prefix} has output_name '{state.output_name}', which another state has for {name}")
    taken.add(state.input_name)
    outputs.add(state.output_name)
    _validate_shape(prefix, state, name)
    if len(state.initial_state) > 1:
        raise ModelError(f"{prefix} has {len(state.initial_state)} initial states for {name}, at most one")
    for initial in state.initial_state:
        _validate_initial(prefix, state, initial, name)


def _validate_control_name(control: str, inputs: set[str], name: str) -> None:
    if control in inputs:
        raise ModelError(f"sequence batching control tensor '{control}' is also in 'input' for {name}")


def _validate_initial(prefix: str, state: Any, initial: Any, name: str) -> None:
    where = f"{prefix} initial state '{initial.name}'"
    _validate_shape(where, initial, name)
    if initial.data_type != state.data_type:
        raise ModelError(f"{where} must have the data type of its state for {name}")
    fits = len(initial.dims) == len(state.dims) and all(
        there in (-1, here) for here, there in zip(initial.dims, state.dims, strict=True)
    )
    if -1 in initial.dims or not fits:
        raise ModelError(
            f"{where} has dims {list(initial.dims)}, which must be fixed and fit the state's {list(state.dims)} for "
            f"{name}"
        )
    if initial.WhichOneof("state_data") is None:
        raise ModelError(f"{where} must specify 'zero_data' or 'data_file' for {name}")


def _validate_shape(prefix: str, text: Any, name: str) -> None:
    if text.data_type not in model_config_pb2.DataType.values() or text.data_type == model_config_pb2.TYPE_INVALID:
        raise ModelError(f"{prefix} must specify 'data_type' for {name}")
    if not text.dims:
        raise ModelError(f"{prefix} must specify 'dims' for {name}")
    if any(dim < 1 and dim != -1 for dim in text.dims):
        raise ModelError(
            f"{prefix} dimension must be integer >= 1, or -1 to indicate a variable-size dimension for {name}"
        )


# --- batch helpers ------------------------------------------------------------------------------------------------


def validate_batch_io(config: _Config) -> None:
    """`batch_input` and `batch_output`."""
    inputs = {text.name for text in config.input}
    outputs = {text.name for text in config.output}
    made: set[str] = set()
    for item in config.batch_input:
        _validate_sources("batch input", model_config_pb2.BatchInput.Kind, item, inputs)
        if item.data_type not in (model_config_pb2.TYPE_INT32, model_config_pb2.TYPE_FP32):
            raise ModelError("batch input data type must be TYPE_INT32 or TYPE_FP32")
        if not item.target_name:
            raise ModelError(f"batch input must specify 'target_name' for {config.name}")
        for target in item.target_name:
            if target in made or target in inputs:
                raise ModelError(f"target input name '{target}' can only be specified once")
            made.add(target)
    cut: set[str] = set()
    for item in config.batch_output:
        _validate_sources("batch output", model_config_pb2.BatchOutput.Kind, item, inputs)
        for target in item.target_name:
            if target not in outputs:
                raise ModelError(f"unknown target output name '{target}'")
            if target in cut:
                raise ModelError(f"target output name '{target}' can only be specified once")
            cut.add(target)


def _validate_sources(what: str, kinds: Any, item: Any, inputs: set[str]) -> None:
    if item.kind not in kinds.values():
        raise ModelError(f"unknown {what} kind '{item.kind}'")
    if len(item.source_input) != 1:
        raise ModelError(f"{what} kind '{kinds.Name(item.kind)}' expects 1 source input, got {len(item.source_input)}")
    for source in item.source_input:
        if source not in inputs:
            raise ModelError(f"unknown source input name '{source}'")
