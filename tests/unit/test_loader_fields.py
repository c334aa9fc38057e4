"""Every field of Triton's schema has an effect, and it is known where, or it is reported to have none.

A field that a newer schema brings fails here until somebody decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from broker.repository.loader.support import ignored

ROOT = Path(__file__).parents[2] / "broker"
LOADER = "repository/loader"
LOAD, BACKEND = f"{LOADER}/load.py", f"{LOADER}/backend.py"
CONVERT, SCHEDULING = f"{LOADER}/convert.py", f"{LOADER}/convert_scheduling.py"
SEQUENCES, ASSEMBLY, ASSEMBLED = "worker/sequences.py", "worker/assembly.py", "worker/assembled.py"
BATCHER, LEVELS, STRATEGIES = "worker/batcher.py", "worker/levels.py", "worker/strategies.py"
ENSEMBLES, METRICS = "worker/ensembles/graph.py", f"{LOADER}/metrics.py"

# Message → where its fields have their effect: a file that obeys them by this name, or the part of the loader that
# gives them on under another one.
EFFECTS: dict[str, dict[str, str]] = {
    "ModelConfig": {
        LOAD: "name backend version_policy input output default_model_filename",
        BACKEND: "platform runtime ensemble_scheduling",
        CONVERT: "max_batch_size optimization parameters model_transaction_policy",
        SCHEDULING: "model_warmup instance_group",
        "worker/model.py": "dynamic_batching",
        ASSEMBLY: "batch_input batch_output sequence_batching",
        "worker/models.py": "response_cache",
        "metrics.py": "metric_tags",
        METRICS: "model_metrics",
    },
    "ModelVersionPolicy": {LOAD: "latest all specific"},
    "ModelVersionPolicy.Latest": {LOAD: "num_versions"},
    "ModelVersionPolicy.Specific": {LOAD: "versions"},
    "ModelInput": {
        f"{LOADER}/complete.py": "name data_type dims",
        f"{LOADER}/validate.py": "format",
        "worker/model.py": "reshape",
        "worker/backends/tensorrt_engine.py": "is_shape_tensor",
        ASSEMBLY: "allow_ragged_batch",
        "gateway/validation.py": "optional",
    },
    "ModelOutput": {
        f"{LOADER}/complete.py": "name data_type dims",
        "worker/model.py": "reshape",
        "worker/backends/tensorrt_engine.py": "is_shape_tensor",
        CONVERT: "label_filename",
    },
    "ModelTensorReshape": {CONVERT: "shape"},
    "BatchInput": {ASSEMBLY: "kind target_name source_input", SCHEDULING: "data_type"},
    "BatchOutput": {ASSEMBLY: "kind target_name source_input"},
    "ModelOptimizationPolicy": {CONVERT: "graph"},
    "ModelOptimizationPolicy.Graph": {CONVERT: "level"},
    "ModelDynamicBatching": {
        BATCHER: "preferred_batch_size max_queue_delay_microseconds priority_levels default_priority_level "
        "default_queue_policy priority_queue_policy",
        "worker/model.py": "preserve_ordering",
    },
    "ModelQueuePolicy": {
        LEVELS: "timeout_action default_timeout_microseconds allow_timeout_override max_queue_size",
    },
    "ModelSequenceBatching": {
        SCHEDULING: "direct oldest",
        SEQUENCES: "max_sequence_idle_microseconds iterative_sequence",
        ASSEMBLY: "control_input state",
    },
    "ModelSequenceBatching.StrategyDirect": {
        SEQUENCES: "max_queue_delay_microseconds",
        STRATEGIES: "minimum_slot_utilization",
    },
    "ModelSequenceBatching.StrategyOldest": {
        SEQUENCES: "max_queue_delay_microseconds",
        STRATEGIES: "max_candidate_sequences preferred_batch_size",
        "worker/model.py": "preserve_ordering",
    },
    "ModelSequenceBatching.ControlInput": {SCHEDULING: "name control"},
    "ModelSequenceBatching.Control": {
        f"{LOADER}/validate_scheduling.py": "int32_false_true fp32_false_true bool_false_true",
        SCHEDULING: "kind data_type",
    },
    "ModelSequenceBatching.State": {
        ASSEMBLY: "input_name output_name dims initial_state",
        SCHEDULING: "data_type",
    },
    "ModelSequenceBatching.InitialState": {
        SCHEDULING: "data_type dims data_file name",
        # Without a file a state is zeros.
        f"{LOADER}/validate_scheduling.py": "zero_data",
    },
    "ModelEnsembling": {ENSEMBLES: "step max_inflight_requests"},
    "ModelEnsembling.Step": {"repository/ensembles.py": "model_name model_version input_map output_map"},
    "ModelInstanceGroup": {
        SCHEDULING: "rate_limiter profile",
        "worker/model.py": "name kind count",
        "repository/placement.py": "gpus",
    },
    "ModelRateLimiter": {"worker/rate_limiter.py": "resources priority"},
    "ModelRateLimiter.Resource": {"worker/rate_limiter.py": "name count", SCHEDULING: "global"},
    "ModelParameter": {CONVERT: "string_value"},
    "ModelWarmup": {"worker/warm_up.py": "name batch_size inputs count"},
    "ModelWarmup.Input": {
        "worker/warm_up.py": "dims",
        SCHEDULING: "data_type zero_data random_data input_data_file",
    },
    "ModelTransactionPolicy": {CONVERT: "decoupled"},
    "ModelResponseCache": {CONVERT: "enable"},
    "ModelMetrics": {METRICS: "metric_control"},
    "ModelMetrics.MetricControl": {METRICS: "metric_identifier histogram_options"},
    "ModelMetrics.MetricControl.MetricIdentifier": {METRICS: "family"},
    "ModelMetrics.MetricControl.HistogramOptions": {METRICS: "buckets"},
}

# Message and field → a text that sets it; what is below such a field is reported with it.
REPORTED = {
    "ModelConfig.cc_model_filenames": 'cc_model_filenames { key: "8.0" value: "x" }',
    "ModelConfig.model_operations": 'model_operations { op_library_filename: "x.so" }',
    "ModelConfig.model_repository_agents": 'model_repository_agents { agents { name: "checksum" } }',
    "ModelInput.is_non_linear_format_io": 'input { name: "x" is_non_linear_format_io: true }',
    "ModelOutput.is_non_linear_format_io": 'output { name: "y" is_non_linear_format_io: true }',
    "ModelOptimizationPolicy.priority": "optimization { priority: PRIORITY_MAX }",
    "ModelOptimizationPolicy.cuda": "optimization { cuda { graphs: true } }",
    "ModelOptimizationPolicy.execution_accelerators": "optimization { execution_accelerators { "
    'cpu_execution_accelerator { name: "openvino" } } }',
    "ModelOptimizationPolicy.input_pinned_memory": "optimization { input_pinned_memory { enable: false } }",
    "ModelOptimizationPolicy.output_pinned_memory": "optimization { output_pinned_memory { enable: true } }",
    "ModelOptimizationPolicy.gather_kernel_buffer_threshold": "optimization { gather_kernel_buffer_threshold: 1 }",
    "ModelOptimizationPolicy.eager_batching": "optimization { eager_batching: true }",
    "ModelSequenceBatching.State.use_same_buffer_for_input_output": "sequence_batching { state { "
    "use_same_buffer_for_input_output: true } }",
    "ModelSequenceBatching.State.use_growable_memory": "sequence_batching { state { use_growable_memory: true } }",
    "ModelEnsembling.Step.model_namespace": 'ensemble_scheduling { step { model_namespace: "n" } }',
    "ModelInstanceGroup.secondary_devices": "instance_group { secondary_devices { device_id: 1 } }",
    "ModelInstanceGroup.passive": "instance_group { passive: true }",
    "ModelInstanceGroup.host_policy": 'instance_group { host_policy: "p" }',
}


def fields(message: Any, seen: set[str]) -> Iterator[str]:
    """Every field that can be reached, as "ModelConfig.name", but for what lies below those that are reported."""
    name = message.full_name.removeprefix("inference.")
    if name in seen:
        return
    seen.add(name)
    for field in message.fields:
        path = f"{name}.{field.name}"
        yield path
        inner = field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            inner = inner.fields_by_name["value"].message_type
        if inner is not None and path not in REPORTED:
            yield from fields(inner, seen)


def effects() -> Iterator[tuple[str, str]]:
    for message, places in EFFECTS.items():
        for file, names in places.items():
            yield from ((f"{message}.{name}", file) for name in names.split())


def test_every_field_has_an_effect_or_is_reported():
    decided = [*(path for path, _ in effects()), *REPORTED]
    assert sorted(decided) == sorted(fields(model_config_pb2.ModelConfig.DESCRIPTOR, set()))


@pytest.mark.parametrize(("path", "file"), list(effects()))
def test_where_it_is_said_to_have_an_effect_its_name_is_known(path, file):
    assert re.search(rf"\b{path.rpartition('.')[2]}\b", (ROOT / file).read_text())


@pytest.mark.parametrize(("path", "text"), list(REPORTED.items()))
def test_what_has_none_is_reported_once(path, text):
    (note,) = ignored(text_format.Parse(text, model_config_pb2.ModelConfig(backend="onnxruntime")))
    what, _, why = note.partition(" is ignored: ")
    assert what.rpartition(".")[2] == path.rpartition(".")[2]
    assert why
