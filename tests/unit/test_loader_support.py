"""What a configuration asks for and this version cannot do: refused where answers would be wrong, else noted."""

from __future__ import annotations

import msgspec
import pytest

from tests.fakes import models
from tests.fakes.loading import config_of, reason_of


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("sequence_batching { }", "sequence_batching"),
        ("sequence_batching { oldest { max_candidate_sequences: 4 } }", "sequence_batching"),
        ('ensemble_scheduling { step { model_name: "other" model_version: -1 } }', "ensemble_scheduling"),
        ('platform: "ensemble"', "ensemble_scheduling"),
        ("model_transaction_policy { decoupled: true }", "model_transaction_policy.decoupled"),
        ('batch_input { kind: BATCH_ELEMENT_COUNT target_name: "x" source_input: "x" }', "batch_input"),
        ('batch_output { target_name: "y" source_input: "x" }', "batch_output"),
        ('input { name: "x" allow_ragged_batch: true }', "allow_ragged_batch of input 'x'"),
    ],
)
def test_what_would_change_answers_is_refused(tmp_path, text, what):
    assert f"{what} is not supported by this version: " in reason_of(tmp_path, models.add1(), text)


def test_everything_that_is_refused_is_named_at_once(tmp_path):
    reason = reason_of(tmp_path, models.add1(), "sequence_batching { } model_transaction_policy { decoupled: true }")
    assert reason.count("is not supported by this version") == 2


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("response_cache { enable: true }", "response_cache"),
        ('model_warmup { name: "first" batch_size: 1 }', "model_warmup"),
        ("dynamic_batching { preserve_ordering: true }", "dynamic_batching.preserve_ordering"),
        (
            "dynamic_batching { default_queue_policy { max_queue_size: 3 timeout_action: DELAY } }",
            "dynamic_batching.default_queue_policy (timeout_action, max_queue_size)",
        ),
        (
            "dynamic_batching { priority_levels: 2 default_priority_level: 1 "
            "priority_queue_policy { key: 2 value { default_timeout_microseconds: 7 allow_timeout_override: true } } }",
            "dynamic_batching.priority_queue_policy[2] (default_timeout_microseconds, allow_timeout_override)",
        ),
    ],
)
def test_what_only_costs_a_guarantee_is_noted(tmp_path, text, what):
    (note,) = config_of(tmp_path, models.add1(), f"max_batch_size: 4 {text}").notes
    assert note.startswith(f"{what} has no effect yet: ")


def test_defaults_and_what_is_switched_off_are_not_noted(tmp_path):
    text = "response_cache { } dynamic_batching { default_queue_policy { } } model_transaction_policy { }"
    assert config_of(tmp_path, models.add1(), f"max_batch_size: 4 {text}").notes == ()


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
