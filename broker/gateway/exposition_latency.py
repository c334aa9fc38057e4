"""Triton's opt-in metrics of how requests' durations are distributed. Used by `broker.gateway.exposition`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric, SummaryMetricFamily

from broker.gateway.exposition_parts import MODEL, Row, labels_of
from shm.statistics import BOUNDS_NS

FIRST_RESPONSE_MS = (100, 500, 2000, 5000)  # Triton's default buckets; all of them are bounds that are counted
QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)  # Triton's default
_PARTS = ("queue", "compute_input", "compute_infer", "compute_output")


def first_response(models: Sequence[Row]) -> Metric:
    """With the buckets that a model's `model_metrics` ask for, else Triton's default ones."""
    family = HistogramMetricFamily(
        "nv_inference_first_response_histogram_ms",
        "Requests by milliseconds until their first response",
        labels=MODEL,
    )
    for row in models:
        own = row.get("first_response")
        bounds, below, total_ns = (
            _defaults(row) if own is None else (own["buckets"], accumulate(own["counts"]), own["ns"])
        )
        names = [*(str(float(bound)) for bound in bounds), "+Inf"]
        buckets = [(name, float(count)) for name, count in zip(names, below, strict=True)]
        family.add_metric(labels_of(row), buckets, total_ns / 1e6)
    return family


def _defaults(row: Row) -> tuple[Sequence[float], Iterable[int], int]:
    """Bounds in ms, how many requests up to each and in all, and the sum of their durations in ns."""
    below = dict(zip(BOUNDS_NS, accumulate(row["latency"]), strict=False))
    counts = [below[bound * 1_000_000] for bound in FIRST_RESPONSE_MS]
    return FIRST_RESPONSE_MS, [*counts, sum(row["latency"])], row["inference_stats"]["success"]["ns"]


def summaries(models: Sequence[Row], quantiles: Sequence[float]) -> Iterator[Metric]:
    """Of all time. Quantiles exist for whole requests only, interpolated between the bounds that are counted."""
    for part, name in (("success", "request"), *((part, part) for part in _PARTS)):
        family = SummaryMetricFamily(
            f"nv_inference_{name}_summary_us", f"Microseconds of successful requests: {name}", labels=MODEL
        )
        for row in models:
            stats = row["inference_stats"][part]
            labels = dict(zip(MODEL, labels_of(row), strict=True))
            for quantile in quantiles if part == "success" else ():
                value = quantile_ns(row["latency"], quantile) / 1000
                family.add_sample(family.name, {**labels, "quantile": str(quantile)}, value)
            family.add_metric(labels_of(row), stats["count"], stats["ns"] / 1000)
        yield family


def quantile_ns(latency: Sequence[int], quantile: float) -> float:
    """The duration that `quantile` of all requests did not exceed; NaN without any. At most the highest bound."""
    if not any(latency):
        return float("nan")
    wanted, below, lower = quantile * sum(latency), 0, 0
    for upper, count in zip(BOUNDS_NS, latency, strict=False):
        if count and below + count >= wanted:
            return float(lower + (upper - lower) * (wanted - below) / count)
        below, lower = below + count, upper
    return float(BOUNDS_NS[-1])
