"""What a configuration says that has no meaning here is accepted and named once; what has one is not mentioned."""

from __future__ import annotations

import msgspec
import pytest

from tests.fakes import models
from tests.fakes.loading import config_of, reason_of, run


def parameter(name: str, value: str) -> str:
    return f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}'


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('cc_model_filenames { key: "8.0" value: "x" }', "cc_model_filenames"),
        ('model_operations { op_library_filename: "x.so" }', "model_operations"),
        ('model_repository_agents { agents { name: "checksum" } }', "model_repository_agents"),
        ("optimization { cuda { graphs: true } }", "optimization.cuda"),
        ("optimization { graph { level: 3 } }", "optimization.graph"),
        ("optimization { input_pinned_memory { enable: false } }", "optimization.input_pinned_memory"),
        ("optimization { output_pinned_memory { enable: true } }", "optimization.output_pinned_memory"),
        ("instance_group { passive: true } instance_group { passive: true }", "instance_group.passive"),
        (parameter("TRITON_BATCH_STRATEGY_PATH", "/x.so"), "parameter TRITON_BATCH_STRATEGY_PATH"),
        (parameter("memory.enable_memory_arena_shrinkage", "cpu:0"), "parameter memory.enable_memory_arena_shrinkage"),
        ('instance_group { host_policy: "p" } instance_group { host_policy: "q" }', "instance_group.host_policy"),
        ('output { name: "y" is_non_linear_format_io: true }', "is_non_linear_format_io"),
    ],
)
def test_what_has_no_meaning_is_named_once(tmp_path, text, what):
    (note,) = config_of(tmp_path, models.add1(), f"max_batch_size: 4 {text}").notes
    assert note.startswith(f"{what} is ignored: ")


@pytest.mark.parametrize(
    "text",
    [
        "response_cache { enable: true }",
        'model_warmup { batch_size: 1 inputs { key: "x" value { data_type: TYPE_FP32 dims: 3 zero_data: true } } }',
        "dynamic_batching { preserve_ordering: true default_queue_policy { max_queue_size: 3 } }",
        "optimization { graph { level: -1 } }",
        'metric_tags { key: "k" value: "v" }',
        parameter("session.use_device_allocator_for_initializers", "1"),
        "instance_group { rate_limiter { resources { name: 'R' count: 1 } } }",
        "optimization { } instance_group { } model_transaction_policy { }",
    ],
)
def test_what_works_is_not_mentioned(tmp_path, text):
    assert config_of(tmp_path, models.add1(), f"max_batch_size: 4 {text}").notes == ()


def test_libraries_that_form_batches_are_named(tmp_path):
    path = models.write_model(tmp_path, "m", models.add1(), config="max_batch_size: 4") / "1" / "batchstrategy.so"
    path.write_bytes(b"")
    (note,) = run(tmp_path).notes
    assert note.startswith(f"{path} is ignored: batches are formed as dynamic_batching says")


def test_levels_of_a_graph_belong_to_onnx_runtime(tmp_path):
    text = (
        'backend: "identity" optimization { graph { level: 1 } } input { name: "x" data_type: TYPE_FP32 dims: 1 } '
        'output { name: "y" data_type: TYPE_FP32 dims: 1 }'
    )
    note = "optimization.graph is ignored: backend 'identity' has no such levels"
    assert note in config_of(tmp_path, models.add1(), text).notes


@pytest.mark.parametrize(
    ("backend", "text", "retryable"),
    [
        ("onnxruntime", "", True),
        ("onnxruntime", "false", False),
        ("onnxruntime", "No", False),
        ("python", "", False),
        ("python", "true", True),
    ],
)
def test_whether_requests_may_run_twice(tmp_path, backend, text, retryable):
    config = config_of(tmp_path, models.add1(), f'parameters {{ key: "retry" value {{ string_value: "{text}" }} }}')
    assert msgspec.structs.replace(config, backend=backend).retryable is retryable


def test_a_retry_that_means_nothing_is_refused(tmp_path):
    text = 'parameters { key: "retry" value { string_value: "sometimes" } }'
    assert "parameter retry 'sometimes' must be one of: true, 1," in reason_of(tmp_path, models.add1(), text)
