"""The final zero-copy verdict per input: the graph policy over all served versions, then the configuration's word.

Called by `load`. The parameter `zero_copy_inputs` (names separated by commas, or `all`) is the operator's statement
that the model is safe with memory that clients rewrite; it overrides the policy for everything but BYTES.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tritonclient.grpc import model_config_pb2

from broker.repository.loader.backend import ENSEMBLE
from broker.repository.loader.failure import ModelError
from broker.repository.loader.zero_copy import Verdict

PARAMETER = "zero_copy_inputs"


def verdicts(
    config: model_config_pb2.ModelConfig, policies: Sequence[tuple[int, Mapping[str, Verdict]]]
) -> dict[str, Verdict]:
    """`policies`: (version, policy of its graph), newest first; empty for a backend that shows no graph."""
    granted = _granted(config)
    found: dict[str, Verdict] = {}
    for text in config.input:
        if text.data_type == model_config_pb2.TYPE_STRING:
            found[text.name] = Verdict(False, "copied: BYTES elements are parsed before use")
        elif text.name in granted:
            found[text.name] = Verdict(True, f"zero-copy: granted by parameter {PARAMETER} in config.pbtxt")
        elif text.is_shape_tensor:
            found[text.name] = Verdict(False, "copied: a shape tensor decides how much memory is touched")
        else:
            found[text.name] = _by_graph(config, text.name, policies)
    return found


def _by_graph(
    config: model_config_pb2.ModelConfig, name: str, policies: Sequence[tuple[int, Mapping[str, Verdict]]]
) -> Verdict:
    if config.platform == ENSEMBLE:
        return Verdict(False, "read by its steps, by each as that model reads it")
    if not policies:
        return Verdict(
            False, f"copied: backend '{config.backend}' shows no graph; parameter {PARAMETER} in config.pbtxt grants it"
        )
    newest = policies[0][0]
    for version, policy in policies:
        verdict = policy[name]
        if not verdict.allowed:
            where = "" if version == newest else f" (version {version})"
            return Verdict(False, verdict.reason + where)
    return policies[0][1][name]


def _granted(config: model_config_pb2.ModelConfig) -> frozenset[str]:
    if PARAMETER not in config.parameters:
        return frozenset()
    names = [text.name for text in config.input]
    value = config.parameters[PARAMETER].string_value
    asked = [name.strip() for name in value.split(",") if name.strip()]
    if asked == ["all"] and "all" not in names:
        return frozenset(names)
    if unknown := [name for name in asked if name not in names]:
        raise ModelError(
            f"parameter {PARAMETER} of model '{config.name}' names {', '.join(map(repr, unknown))}; inputs are: "
            f"{', '.join(names)} (or 'all')"
        )
    for text in config.input:
        if text.name in asked and text.data_type == model_config_pb2.TYPE_STRING:
            raise ModelError(
                f"parameter {PARAMETER} of model '{config.name}' names '{text.name}', but BYTES are always copied: "
                "their elements are parsed before use"
            )
    return frozenset(asked)
