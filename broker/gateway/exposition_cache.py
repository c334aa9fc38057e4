"""The response cache in the exposition, as in Triton: per model where answers are kept, and of the cache as a whole.

There is nothing of it when the server has no cache. Used by `broker.gateway.exposition`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric, SummaryMetricFamily

from broker.gateway.exposition_parts import MODEL, Row, counter, labels_of

_KINDS = {"hit": "answered by the response cache", "miss": "not found in the response cache"}


def cache_families(cache: Row, models: Sequence[Row], *, durations: bool, summaries: bool) -> Iterator[Metric]:
    """`cache` and `models` of the document. The names, types and units are Triton's and its local cache's."""
    if not cache["byte_size"]:
        return
    cached = [row for row in models if row["cached"]]
    for kind, what in _KINDS.items():
        part, plural = f"cache_{kind}", "hits" if kind == "hit" else "misses"
        yield counter(
            f"nv_cache_num_{plural}_per_model",
            f"Requests {what}",
            cached,
            lambda row, part=part: row["inference_stats"][part]["count"],  # type: ignore[misc]
        )
        if durations:
            yield counter(
                f"nv_cache_{kind}_duration_per_model",
                f"Microseconds that the cache took for requests {what}",
                cached,
                lambda row, part=part: row["inference_stats"][part]["ns"] // 1000,  # type: ignore[misc]
            )
        if summaries:
            family = SummaryMetricFamily(
                f"nv_cache_{kind}_summary_per_model", f"Microseconds of requests {what}", labels=MODEL
            )
            for row in cached:
                stats = row["inference_stats"][part]
                family.add_metric(labels_of(row), stats["count"], stats["ns"] / 1000)
            yield family
    for name, documentation, value in (
        ("util", "Share of the cache that is in use, 0 to 1", cache["used"] / cache["byte_size"]),
        ("num_entries", "Responses in the cache", cache["entries"]),
        ("num_lookups", "Times that a response was looked up", cache["hits"] + cache["misses"]),
        ("num_hits", "Responses that were found", cache["hits"]),
        ("num_misses", "Responses that were not", cache["misses"]),
        ("num_evictions", "Responses that went to make room", cache["evictions"]),
        ("lookup_duration", "Microseconds spent looking up", cache["lookup_ns"] // 1000),
        ("insertion_duration", "Microseconds spent putting in", cache["insertion_ns"] // 1000),
    ):
        gauge = GaugeMetricFamily(f"nv_cache_{name}", documentation)
        gauge.add_metric((), value)
        yield gauge
