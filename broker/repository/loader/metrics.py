"""What a configuration says about its model's metrics: `metric_tags` and `model_metrics`.

Rules for `validate`, values for `convert`, and for `support` what of it has no effect.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

from tritonclient.grpc import model_config_pb2

from broker.repository.loader.failure import ModelError
from shm.statistics import OWN_BUCKETS

FAMILY = "nv_inference_first_response_histogram_ms"  # the one whose buckets can be chosen, as in Triton
MAX_MS = 1e9  # of a bucket: as nanoseconds still a signed 64-bit number
MIN_MS = 1e-6
_TAG = re.compile(r"[A-Za-z0-9_]{1,64}")

_Config: TypeAlias = model_config_pb2.ModelConfig


def metric_rules(config: _Config) -> Iterator[Callable[[], None]]:
    """Each raises ModelError if it is broken, and needs none of the others."""
    for key in config.metric_tags:
        yield partial(_validate_tag, config, key)
    yield partial(_validate_buckets, config)


def buckets(config: _Config) -> tuple[float, ...]:
    """Those of FAMILY, in ms; (): the default ones. The last `metric_control` that names it counts."""
    chosen: tuple[float, ...] = ()
    for control in config.model_metrics.metric_control:
        if control.metric_identifier.family == FAMILY:
            chosen = tuple(control.histogram_options.buckets)
    return chosen


def other_families(config: _Config) -> list[str]:
    """Those that are named, and whose buckets cannot be chosen."""
    named = (control.metric_identifier.family for control in config.model_metrics.metric_control)
    return [family for family in dict.fromkeys(named) if family != FAMILY]


def _validate_tag(config: _Config, key: str) -> None:
    if not _TAG.fullmatch(key):
        raise ModelError(f"metric tag {key[:64]!r} must have 1 to 64 letters, digits or _ for {config.name}")


def _validate_buckets(config: _Config) -> None:
    found = buckets(config)
    what = f"model_metrics: the buckets of {FAMILY} must be"
    if len(found) > OWN_BUCKETS:
        raise ModelError(f"{what} at most {OWN_BUCKETS} for {config.name}, got {len(found)}", "model_metrics")
    for bound in found:
        if not (math.isfinite(bound) and MIN_MS <= bound <= MAX_MS):
            raise ModelError(
                f"{what} numbers of milliseconds from {MIN_MS:g} to {MAX_MS:g} for {config.name}, got {bound:g}",
                "model_metrics",
            )
    for before, bound in itertools.pairwise(found):
        if bound <= before:
            raise ModelError(f"{what} ascending for {config.name}, got {bound:g} after {before:g}", "model_metrics")
