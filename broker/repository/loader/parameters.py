"""The parameters that are the broker's own: what their values may be, and what a misspelt name may have meant.

Called by `load`. A backend of the user's own has parameters of its own, so a name that is not known is no error. Some
are read here, the others where they work: in the worker, by `ModelConfig`'s properties, or while schedulers are made.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable

from tritonclient.grpc import model_config_pb2

from broker.repository.config import YES_NO
from broker.repository.loader.convert_scheduling import DROP_OLDEST, drops_oldest
from broker.repository.loader.failure import ModelError
from broker.repository.loader.grants import PARAMETER as ZERO_COPY_INPUTS
from broker.repository.loader.padding import LENGTHS, MASK, PAD_TO, PAD_VALUE

_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}"
_WORKER_GROUP = re.compile(f"{_NAME}(,{_NAME})*")
MAX_QUEUE_BYTES = "max_queue_bytes"
_NO_LIMIT = (
    f"parameter {DROP_OLDEST} has no effect: no queue has a limit; add the parameter {MAX_QUEUE_BYTES}, or "
    "dynamic_batching { default_queue_policy { max_queue_size: … } } (sequences and ensembles drop nothing)"
)
_SHORTEST = 6  # letters of a name that is taken for the beginning of ours


def _worker_group(text: str) -> str:
    if not text or _WORKER_GROUP.fullmatch(text):
        return ""
    return f"parameter worker_group {text!r} must have 1 to 64 letters, digits, _ . -" + (
        " in every name (one per instance_group)" if "," in text else ""
    )


def _retry(text: str) -> str:
    if not text or text.lower() in YES_NO:
        return ""
    return f"parameter retry {text!r} must be one of: {', '.join(YES_NO)}"


def _drop_oldest(text: str) -> str:
    return "" if not text or text.lower() in YES_NO else f"parameter {DROP_OLDEST} {text!r} must be true or false"


def _seconds(text: str) -> str:
    try:
        is_one = math.isfinite(float(text)) and float(text) >= 0
    except ValueError:
        is_one = False
    return "" if is_one else f"model parameter 'hang_timeout_s' must be a number of seconds, got '{text}'"


def _max_queue_bytes(text: str) -> str:
    is_one = not text or (text.isascii() and text.isdigit() and len(text) < 16)
    return "" if is_one else f"parameter {MAX_QUEUE_BYTES} {text!r} must be a number of bytes, 0 for no limit"


def _threads(name: str) -> Callable[[str], str]:
    def rule(text: str) -> str:
        is_one = text.isascii() and text.isdigit() and len(text) < 10
        return "" if is_one else f"model parameter '{name}' must be a number of threads, got '{text}'"

    return rule


def _switch(name: str) -> Callable[[str], str]:
    def rule(text: str) -> str:
        return "" if text in ("0", "1") else f"model parameter '{name}' must be 0 or 1, got '{text}'"

    return rule


def _bytes(name: str) -> Callable[[str], str]:
    def rule(text: str) -> str:
        is_one = text.isascii() and text.isdigit()
        return "" if is_one else f"model parameter '{name}' must be a number of bytes, got '{text}'"

    return rule


def _one_of(name: str, *words: str) -> Callable[[str], str]:
    """By its word, or by the word's number, as Triton has it."""

    def rule(text: str) -> str:
        known = ", ".join(f"{number} ({word})" for number, word in enumerate(words))
        is_one = text in words or text in map(str, range(len(words)))
        return "" if is_one else f"model parameter '{name}' must be one of {known}, got '{text}'"

    return rule


def _yes_or_no(name: str) -> Callable[[str], str]:
    def rule(text: str) -> str:
        return "" if text.lower() in YES_NO else f"model parameter '{name}' must be true or false, got '{text}'"

    return rule


_RULES: dict[str, Callable[[str], str]] = {
    "worker_group": _worker_group,
    "retry": _retry,
    DROP_OLDEST: _drop_oldest,
    MAX_QUEUE_BYTES: _max_queue_bytes,
    "hang_timeout_s": _seconds,
    ZERO_COPY_INPUTS: lambda text: "",  # `grants` knows the inputs
    **{name: lambda text: "" for name in (PAD_TO, PAD_VALUE, MASK, LENGTHS)},  # and `padding`
}
_ONNXRUNTIME: dict[str, Callable[[str], str]] = {
    **{name: _threads(name) for name in ("intra_op_thread_count", "inter_op_thread_count")},
    **{name: _switch(name) for name in ("allow_spinning", "execution_mode", "enable_mem_arena", "enable_mem_pattern")},
    "gpu_mem_limit": _bytes("gpu_mem_limit"),
    "cudnn_conv_algo_search": _one_of("cudnn_conv_algo_search", "EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
    "arena_extend_strategy": _one_of("arena_extend_strategy", "kNextPowerOfTwo", "kSameAsRequested"),
    **{name: _switch(name) for name in ("do_copy_in_default_stream", "session.use_device_allocator_for_initializers")},
}
_TENSORRT: dict[str, Callable[[str], str]] = {"engine_host_code_allowed": _yes_or_no("engine_host_code_allowed")}
_OF_BACKEND = {"onnxruntime": _ONNXRUNTIME, "tensorrt": _TENSORRT}


def check_parameters(config: model_config_pb2.ModelConfig) -> list[str]:
    """A note for every name that looks like one of ours. Raises ModelError for a value that one cannot have."""
    rules = {**_RULES, **_OF_BACKEND.get(config.backend, {})}
    notes = []
    for name, parameter in sorted(config.parameters.items()):
        if name in rules:
            if problem := rules[name](parameter.string_value):
                raise ModelError(problem)
            _check_queue(config, name, parameter.string_value)
            if name == DROP_OLDEST and drops_oldest(config) and not _has_limit(config):
                notes.append(_NO_LIMIT)
        elif meant := _meant(name, list(rules)):
            notes.append(f"parameter '{name}' has no meaning to the broker: did you mean '{meant}'?")
    return notes


def _check_queue(config: model_config_pb2.ModelConfig, name: str, text: str) -> None:
    if name != MAX_QUEUE_BYTES or not text.strip("0"):
        return
    for field in ("sequence_batching", "ensemble_scheduling"):
        if config.HasField(field):
            raise ModelError(
                f"parameter {MAX_QUEUE_BYTES} cannot be combined with {field} for {config.name}: "
                + ("a step that is refused would be missing" if field[0] == "s" else "its requests wait in its members")
            )


def _has_limit(config: model_config_pb2.ModelConfig) -> bool:
    """Is there a queue that can be full?"""
    batching = config.dynamic_batching
    policies = (batching.default_queue_policy, *batching.priority_queue_policy.values())
    most = config.parameters[MAX_QUEUE_BYTES].string_value if MAX_QUEUE_BYTES in config.parameters else ""
    return bool(most.strip("0")) or any(policy.max_queue_size for policy in policies)


def _meant(name: str, known: list[str]) -> str:
    plain = name.lower().replace("-", "_")
    begun = [each for each in known if len(plain) >= _SHORTEST and each.startswith(plain)]
    return next(iter(begun or difflib.get_close_matches(plain, known, n=1, cutoff=0.75)), "")
