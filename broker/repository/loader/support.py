"""What a configuration asks for and this version cannot do.

Called by `load` on the text as written. Where leaving it out would change answers the model is refused; where it only
costs a guarantee or speed the model is served, and a note names what has no effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tritonclient.grpc import model_config_pb2

from broker.repository.loader.failure import ModelError

_QUEUE_POLICY = ("timeout_action", "default_timeout_microseconds", "allow_timeout_override", "max_queue_size")


def check_support(config: model_config_pb2.ModelConfig) -> list[str]:
    """Returns notes. Raises ModelError that names everything whose absence would give wrong answers."""
    reasons = [f"{what} is not supported by this version: {why}" for what, why in _refused(config)]
    if reasons:
        raise ModelError(f"failed to load '{config.name}': " + "; ".join(reasons))
    return [f"{what} has no effect yet: {why}" for what, why in _without_effect(config)]


def _refused(config: model_config_pb2.ModelConfig) -> Iterator[tuple[str, str]]:
    if config.HasField("ensemble_scheduling") or "ensemble" in (config.platform, config.backend):
        yield "ensemble_scheduling", "call the models one after another, or join them to one model file"
    if config.HasField("sequence_batching"):
        yield "sequence_batching", "no state would be kept between the requests of a sequence"
    if config.model_transaction_policy.decoupled:
        yield "model_transaction_policy.decoupled", "a request gets exactly one response"
    if config.batch_input:
        yield (
            "batch_input",
            "nothing would fill " + ", ".join(n for item in config.batch_input for n in item.target_name),
        )
    if config.batch_output:
        yield "batch_output", "a batch's outputs would not be cut by the requests' own shapes"
    for tensor in config.input:
        if tensor.allow_ragged_batch:
            yield f"allow_ragged_batch of input '{tensor.name}'", "the model would not get its rows laid end to end"


def _without_effect(config: model_config_pb2.ModelConfig) -> Iterator[tuple[str, str]]:
    if config.response_cache.enable:
        yield "response_cache", "every request is run"
    if config.model_warmup:
        yield "model_warmup", "the first requests may take longer"
    batching = config.dynamic_batching
    if batching.preserve_ordering:
        yield "dynamic_batching.preserve_ordering", "several instances may answer in another order"
    yield from _policy("default_queue_policy", batching.default_queue_policy)
    for level, policy in sorted(batching.priority_queue_policy.items()):
        yield from _policy(f"priority_queue_policy[{level}]", policy)


def _policy(name: str, policy: Any) -> Iterator[tuple[str, str]]:
    given = [field for field in _QUEUE_POLICY if getattr(policy, field)]
    if given:
        fields = ", ".join(given)
        yield f"dynamic_batching.{name} ({fields})", "requests wait until they run or their own timeout has passed"
