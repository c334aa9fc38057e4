"""Prometheus's text from the document of `broker.metrics`: Triton's names, labels, types and units, then our own.

Triton's counters have no `_total`, which the client library appends to every counter's name: they are made as gauges,
and the type is set right in the text. Our own names begin with `tensorbroker_` and follow Prometheus's conventions
(seconds, bytes, `_total`). Used by `broker.gateway.metrics`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, final

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from broker.gateway.exposition_cache import cache_families
from broker.gateway.exposition_latency import QUANTILES, first_response, summaries
from broker.gateway.exposition_parts import MODEL, PlainCounter, Row, counter, labels_of, tagged
from shm.statistics import BOUNDS_NS

Document = Mapping[str, Any]

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
_INTEGERS = re.compile(rb"(?m)^([^#\n].* \d+)\.0$")  # Triton writes 3, the client library 3.0


@final
class Config(NamedTuple):
    """What of --metrics-config has an effect."""

    counters: bool = True  # counter_latencies
    histograms: bool = False  # histogram_latencies
    summaries: bool = False  # summary_latencies
    quantiles: tuple[float, ...] = QUANTILES  # summary_quantiles

    @classmethod
    def parse(cls, settings: Mapping[str, str]) -> Config:
        """`settings`: as given. Quantiles' errors are Triton's estimator's and of no use here. Raises ValueError."""

        def on(name: str, default: bool) -> bool:
            return settings[name].lower() in ("true", "on", "1") if name in settings else default

        quantiles: tuple[float, ...] = QUANTILES
        if "summary_quantiles" in settings:
            pairs = [pair.partition(":")[0] for pair in settings["summary_quantiles"].split(",")]
            quantiles = tuple(float(quantile) for quantile in pairs)
            if not all(0 <= quantile <= 1 for quantile in quantiles):
                raise ValueError(f"quantiles must be in [0, 1]: {settings['summary_quantiles']}")
        return cls(
            on("counter_latencies", True), on("histogram_latencies", False), on("summary_latencies", False), quantiles
        )


def text(document: Document, config: Config, host: Mapping[str, float]) -> bytes:
    """The exposition. `host`: nv_cpu_… gauges by name."""
    models = document["models"]
    cache = cache_families(document["cache"], models, durations=config.counters, summaries=config.summaries)
    tritons = tagged([*_triton(models, config), *cache], models)
    families = [*tritons, *_host(host), *_ours(document)]
    return _INTEGERS.sub(rb"\1", _plain_counters(generate_latest(_Families(families)), families))


class _Families:
    """A collector of what is there already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """As `prometheus_client.registry.Collector`."""
        return self._families


def _plain_counters(exposition: bytes, families: Iterable[Metric]) -> bytes:
    # Lines begin so nowhere else: in help texts and label values the client library escapes line ends.
    for family in families:
        if isinstance(family, PlainCounter):
            name = family.name.encode()
            exposition = exposition.replace(b"\n# TYPE %b gauge\n" % name, b"\n# TYPE %b counter\n" % name, 1)
    return exposition


# --- Triton's -----------------------------------------------------------------------------------------------------


def _triton(models: Sequence[Row], config: Config) -> Iterator[Metric]:
    yield counter(
        "nv_inference_request_success",
        "Requests that ended with a result",
        models,
        lambda row: row["inference_stats"]["success"]["count"],
    )
    failures = PlainCounter(
        "nv_inference_request_failure",
        "Requests that ended without one, by reason",
        labels=(*MODEL, "reason"),
    )
    for row in models:
        for reason, count in row["failures"].items():
            failures.add_metric((*labels_of(row), reason), count)
    yield failures
    yield counter(
        "nv_inference_count",
        "Rows that models have run on: a request of batch size n counts n times",
        models,
        lambda row: row["inference_count"],
    )
    yield counter(
        "nv_inference_exec_count",
        "Runs of models: a batch of requests is one",
        models,
        lambda row: row["execution_count"],
    )
    if config.counters:
        yield from _durations(models)
    pending = GaugeMetricFamily(
        "nv_inference_pending_request_count",
        "Requests that wait for the model now",
        labels=MODEL,
    )
    load = GaugeMetricFamily(
        "nv_model_load_duration_secs", "How long the latest load of the model took, in seconds", labels=MODEL
    )
    for row in models:
        pending.add_metric(labels_of(row), row["pending"])
        load.add_metric(labels_of(row), row["load_s"])
    yield pending
    yield load
    if config.histograms:
        yield first_response(models)
    if config.summaries:
        yield from summaries(models, config.quantiles)
    for name, what in (("total", "size"), ("used", "part in use")):
        pool = GaugeMetricFamily(f"nv_pinned_memory_pool_{name}_bytes", f"Bytes of the pinned memory pool: {what}")
        pool.add_metric((), 0)  # there is no such pool: tensors stay in clients' memory
        yield pool


def _durations(models: Sequence[Row]) -> Iterator[Metric]:
    texts = {
        "success": ("request", "in all"),
        "queue": ("queue", "waiting for the model"),
        "compute_input": ("compute_input", "bringing inputs to the model"),
        "compute_infer": ("compute_infer", "running the model"),
        "compute_output": ("compute_output", "bringing outputs to the client"),
    }
    for part, (name, what) in texts.items():
        documentation = f"Microseconds of successful requests {what}"
        family = PlainCounter(f"nv_inference_{name}_duration_us", documentation, labels=MODEL)
        for row in models:
            family.add_metric(labels_of(row), row["inference_stats"][part]["ns"] // 1000)
        yield family


def _host(host: Mapping[str, float]) -> Iterator[Metric]:
    texts = {
        "nv_cpu_utilization": "Share of all processors that was busy lately, 0 to 1",
        "nv_cpu_memory_total_bytes": "Bytes of memory that the host has",
        "nv_cpu_memory_used_bytes": "Bytes of memory that are not available for use",
    }
    for name, value in host.items():
        family = GaugeMetricFamily(name, texts[name])
        family.add_metric((), value)
        yield family


# --- our own ------------------------------------------------------------------------------------------------------


def _ours(document: Document) -> Iterator[Metric]:
    models = document["models"]
    yield from _traffic(document["transports"])
    yield _histogram(
        "tensorbroker_request_duration_seconds",
        "Successful requests by time in the worker, from taken to answered",
        MODEL,
        ((labels_of(row), row["latency"], row["inference_stats"]["success"]["ns"]) for row in models),
    )
    yield _batch_sizes(models)
    depth = GaugeMetricFamily("tensorbroker_model_queue_depth", "Requests that wait for the model now", labels=MODEL)
    retried = CounterMetricFamily(
        "tensorbroker_retried_requests", "Requests run again after their worker had died", labels=MODEL
    )
    closed = CounterMetricFamily(
        "tensorbroker_closed_batches",
        "Batches that were formed, by why they were closed: full, preferred, delay, idle",
        labels=(*MODEL, "reason"),
    )
    copied = CounterMetricFamily(
        "tensorbroker_copied_bytes",
        "Bytes of tensors that were copied, and why: by workers for a model, or by gateways (no model)",
        labels=(*MODEL, "reason"),
    )
    yield from _kept(document)
    for row in models:
        depth.add_metric(labels_of(row), row["pending"])
        retried.add_metric(labels_of(row), row["retried"])
        for reason, count in row["closed_batches"].items():
            closed.add_metric((*labels_of(row), reason), count)
        for reason, count in row["copied_bytes"].items():
            copied.add_metric((*labels_of(row), reason), count)
    for reason, count in document["copied_bytes"].items():
        copied.add_metric(("", "", reason), count)  # to Prometheus the same as no label
    yield from (closed, depth, retried, copied)
    yield _labelled(
        GaugeMetricFamily,
        "client_queue_depth",
        "Requests of a session that are queued or run now (the sessions that have channels)",
        "session",
        document["clients"],
    )
    yield from _memory(document)
    yield from _processes(document)
    yield from _gpu_memory(document)


def _traffic(transports: Mapping[str, Row]) -> Iterator[Metric]:
    counts = {name: row["requests"] for name, row in transports.items()}
    failed = {name: row["failed"] for name, row in transports.items() if "failed" in row}
    yield _labelled(
        CounterMetricFamily, "requests", "Inference requests that have ended, by transport", "transport", counts
    )
    yield _labelled(
        CounterMetricFamily, "failed_requests", "Those of a gateway that ended with an error", "transport", failed
    )
    yield _histogram(
        "tensorbroker_gateway_duration_seconds",
        "Requests of a gateway by time from decoded to answered",
        ("transport",),
        (((name,), row["latency"], row["ns"]) for name, row in transports.items() if "latency" in row),
    )


def _batch_sizes(models: Sequence[Row]) -> Metric:
    family = HistogramMetricFamily("tensorbroker_batch_size", "Model executions by their rows", labels=MODEL)
    for row in models:
        executions = [(each["batch_size"], each["compute_infer"]["count"]) for each in row["batch_stats"]]
        buckets = [
            (str(float(bound)), float(sum(count for size, count in executions if size <= bound)))
            for bound in BATCH_SIZES
        ]
        buckets.append(("+Inf", float(sum(count for _, count in executions))))
        family.add_metric(labels_of(row), buckets, row["inference_count"])
    return family


def _memory(document: Document) -> Iterator[Metric]:
    regions = document["regions"]
    counts = {kind: row["count"] for kind, row in regions.items()}
    sizes = {kind: row["byte_size"] for kind, row in regions.items()}
    yield _labelled(GaugeMetricFamily, "regions", "Registered regions", "kind", counts)
    yield _labelled(GaugeMetricFamily, "region_bytes", "Bytes of registered regions", "kind", sizes)
    limit = GaugeMetricFamily("tensorbroker_region_limit_bytes", "Limit on memory held for clients (--region-memory)")
    limit.add_metric((), document["region_limit"])
    sessions = GaugeMetricFamily("tensorbroker_sessions", "Open sessions, those of gateways included")
    sessions.add_metric((), document["sessions"])
    yield from (limit, sessions)


def _kept(document: Document) -> Iterator[Metric]:
    size = GaugeMetricFamily(
        "tensorbroker_model_memory_bytes", "What the model takes of the host's memory", labels=MODEL
    )
    leases = GaugeMetricFamily("tensorbroker_model_leases", "Leases that keep the model loaded", labels=MODEL)
    for row in document["models"]:
        size.add_metric(labels_of(row), row["memory_bytes"])
        leases.add_metric(labels_of(row), row["leases"])
    limit = GaugeMetricFamily("tensorbroker_model_memory_limit_bytes", "Limit on all of them (--model-memory-limit)")
    limit.add_metric((), document["model_memory_limit"])
    yield from (size, leases, limit)


def _processes(document: Document) -> Iterator[Metric]:
    workers, gateways = document["workers"], document["gateways"]
    for name, key, documentation in (
        ("worker_restarts", "restarts", "Worker processes that were replaced"),
        ("lost_wakeups", "lost_wakeups", "Sleeps that ended by their bound with work present; anything but 0 is a bug"),
        ("worker_requests", "requests", "Requests that a worker has taken"),
        ("worker_refused_entries", "refused", "Entries of channels that broke a rule"),
        ("worker_recovered_requests", "recovered", "Requests taken over from a worker that died"),
    ):
        values = {worker: row[key] for worker, row in workers.items()}
        yield _labelled(CounterMetricFamily, name, documentation, "worker", values)
    flying = {worker: row["in_flight"] for worker, row in workers.items()}
    yield _labelled(
        GaugeMetricFamily, "worker_in_flight", "Requests that a worker has queued and runs", "worker", flying
    )
    for name, key, documentation in (
        ("gateway_restarts", "restarts", "Gateway processes that were replaced"),
        ("gateway_hangs", "hangs", "Those of them that had given no sign of life"),
    ):
        values = {gateway: row[key] for gateway, row in gateways.items()}
        yield _labelled(CounterMetricFamily, name, documentation, "gateway", values)


def _gpu_memory(document: Document) -> Iterator[Metric]:
    for key in ("total", "used"):
        family = GaugeMetricFamily(f"nv_gpu_memory_{key}_bytes", f"GPU {key} memory, in bytes", labels=("gpu_uuid",))
        for uuid, row in document.get("gpus", {}).items():
            if f"{key}_memory" in row:
                family.add_metric((uuid,), row[f"{key}_memory"])
        if family.samples:
            yield family
    clients = document.get("client_gpu_bytes", {})
    documentation = "Bytes of GPU memory that a session has registered"
    yield _labelled(GaugeMetricFamily, "client_gpu_bytes", documentation, "session", clients)
    workers = document["gpu_memory"]
    for kind, name, key, documentation in (
        (CounterMetricFamily, "gpu_memory_opens", "opens", "Allocations of clients on a GPU that a worker has opened"),
        (CounterMetricFamily, "gpu_memory_closes", "closes", "Of those, the ones that it has closed"),
        (CounterMetricFamily, "gpu_memory_evictions", "evictions", "Closed because their client had freed them"),
        (GaugeMetricFamily, "gpu_memory_open_bytes", "open_bytes", "Bytes of those that are open"),
        (GaugeMetricFamily, "gpu_memory_peer_bytes", "peer_bytes", "Bytes of those that are on other GPUs"),
        (GaugeMetricFamily, "pinned_bytes", "pinned_bytes", "Bytes of host memory that is pinned for GPUs"),
        (CounterMetricFamily, "gpu_producer_waits", "waits", "Requests whose client's stream was not done yet"),
    ):
        yield _labelled(kind, name, documentation, "worker", {worker: row[key] for worker, row in workers.items()})
    documentation, waited = "Waiting for clients' streams", {key: row["wait_ns"] / 1e9 for key, row in workers.items()}
    yield _labelled(CounterMetricFamily, "gpu_producer_wait_seconds", documentation, "worker", waited)


# --- parts --------------------------------------------------------------------------------------------------------


def _labelled(kind: Any, name: str, documentation: str, label: str, values: Mapping[str, float]) -> Metric:
    family: Metric = kind(f"tensorbroker_{name}", documentation, labels=(label,))
    for key, value in values.items():
        family.add_metric((key,), value)  # type: ignore[attr-defined]
    return family


def _histogram(
    name: str,
    documentation: str,
    labels: Sequence[str],
    rows: Iterable[tuple[Sequence[str], Sequence[int], int]],
) -> Metric:
    """Of durations: `rows` are label values, counts by the bounds of `BOUNDS_NS`, and the sum in ns."""
    family = HistogramMetricFamily(name, documentation, labels=labels)
    for values, latency, total_ns in rows:
        below = [float(count) for count in accumulate(latency)]
        bounds = [*(str(bound / 1e9) for bound in BOUNDS_NS), "+Inf"]
        family.add_metric(values, list(zip(bounds, below, strict=True)), total_ns / 1e9)
    return family
