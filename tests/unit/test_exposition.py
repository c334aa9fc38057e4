"""/metrics: what a document becomes, read back by the parser that Prometheus's own client has."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from broker.gateway import exposition
from broker.gateway.exposition import Config
from broker.gateway.exposition_latency import quantile_ns
from shm.gateway_counters import COPIES
from shm.statistics import BOUNDS_NS, LATENCIES, REASONS, bucket

DEFAULT = Config()
DOCUMENT = Path(__file__).parents[2] / "docs/metrics.md"
DURATIONS = ("success", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")


def latency(*durations_ns: int) -> list[int]:
    counts = [0] * LATENCIES
    for ns in durations_ns:
        counts[bucket(ns)] += 1
    return counts


def model(name: str = "m", **changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": name,
        "version": "3",
        "inference_count": 12,
        "execution_count": 4,
        "inference_stats": {part: {"count": 4, "ns": 1_000_999 * at} for at, part in enumerate(DURATIONS, 1)},
        "batch_stats": [
            {"batch_size": 1, "compute_infer": {"count": 2, "ns": 1}},
            {"batch_size": 5, "compute_infer": {"count": 1, "ns": 1}},
            {"batch_size": 100, "compute_infer": {"count": 1, "ns": 1}},
        ],
        "retried": 1,
        "pending": 7,
        "closed_batches": {"full": 2, "preferred": 0, "delay": 1, "idle": 5},
        "copied_bytes": {"gather": 4096, "scatter": 0},
        "latency": latency(9_000, 150_000, 150_000, 3_000_000_000),
        "failures": {"REJECTED": 1, "CANCELED": 2, "BACKEND": 3, "OTHER": 0},
        "load_s": 0.25,
        "memory_bytes": 4096,
        "leases": 2,
        "cached": True,
    }
    return {**row, **changes}


def document(*models: dict[str, Any]) -> dict[str, Any]:
    return {
        "models": list(models),
        "transports": {
            "native": {"requests": 1000},
            "http": {"requests": 5, "failed": 1, "ns": 2_000_000_000, "latency": latency(20_000, 15_000_000_000)},
        },
        "copied_bytes": {"inline_input": 64, "response": 32},
        "regions": {"pool": {"count": 2, "byte_size": 8192}, "system": {"count": 1, "byte_size": 4096}},
        "region_limit": 1 << 40,
        "model_memory_limit": 8192,
        "clients": {"17": 3},
        "sessions": 2,
        "workers": {
            "cpu/default": {
                "restarts": 1,
                "lost_wakeups": 0,
                "requests": 1005,
                "refused": 2,
                "recovered": 3,
                "in_flight": 4,
            }
        },
        "gateways": {"0": {"restarts": 5, "hangs": 2}},
        "gpus": {"GPU-1": {"total_memory": 1 << 37, "used_memory": 1 << 36}, "GPU-2": {"total_memory": 1 << 35}},
        "client_gpu_bytes": {"7": 4096},
        "gpu_memory": {
            "gpu0/default": {
                "opens": 3,
                "closes": 1,
                "evictions": 0,
                "open_bytes": 4096,
                "peer_bytes": 1024,
                "pinned_bytes": 8192,
                "waits": 5,
                "wait_ns": 250_000_000,
            }
        },
        "cache": {
            "byte_size": 1000,
            "used": 250,
            "entries": 3,
            "evictions": 2,
            "hits": 5,
            "misses": 7,
            "lookup_ns": 8_000,
            "insertion_ns": 9_000,
        },
    }


def families(
    found: dict[str, Any], config: Config = DEFAULT, host: dict[str, float] | None = None
) -> dict[str, tuple[str, dict[str, float]]]:
    """name → type, and value by `name{labels}`."""
    text = exposition.text(found, config, host or {}).decode()
    read = {}
    for family in text_string_to_metric_families(text):
        samples = {}
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            # The parser gives every counter the suffix that Triton's lack.
            name = sample.name.removesuffix("_total") if sample.name.startswith("nv_") else sample.name
            samples[f"{name}{{{labels}}}" if labels else name] = sample.value
        assert family.documentation
        read[family.name] = (family.type, samples)
    return read


def test_tritons_counters_have_tritons_names_and_the_type_of_counters() -> None:
    text = exposition.text(document(model()), Config(), {}).decode()
    assert '\n# TYPE nv_inference_count counter\nnv_inference_count{model="m",version="3"} 12\n' in text
    assert "nv_inference_count_total" not in text
    for name in ("request_success", "exec_count", "request_duration_us", "queue_duration_us"):
        assert f"# TYPE nv_inference_{name} counter\n" in text
    assert "# TYPE nv_inference_pending_request_count gauge\n" in text
    assert "# TYPE nv_model_load_duration_secs gauge\n" in text


def test_tritons_values_and_units() -> None:
    found = families(document(model()))
    labels = "{model=m,version=3}"
    values = {
        "nv_inference_request_success": 4,
        "nv_inference_count": 12,
        "nv_inference_exec_count": 4,
        "nv_inference_request_duration_us": 1000,
        "nv_inference_queue_duration_us": 2001,
        "nv_inference_compute_input_duration_us": 3002,
        "nv_inference_compute_infer_duration_us": 4003,
        "nv_inference_compute_output_duration_us": 5004,
        "nv_inference_pending_request_count": 7,
        "nv_model_load_duration_secs": 0.25,
    }
    assert {name: found[name][1][name + labels] for name in values} == values
    assert found["nv_inference_request_failure"][1] == {
        f"nv_inference_request_failure{{model=m,reason={reason},version=3}}": count
        for reason, count in (("REJECTED", 1), ("CANCELED", 2), ("BACKEND", 3), ("OTHER", 0))
    }
    assert found["nv_pinned_memory_pool_total_bytes"][1] == {"nv_pinned_memory_pool_total_bytes": 0}


def test_a_model_has_all_its_series_before_its_first_request() -> None:
    zero = {part: {"count": 0, "ns": 0} for part in DURATIONS}
    failures = dict.fromkeys(("REJECTED", "CANCELED", "BACKEND", "OTHER"), 0)
    found = families(document(model(inference_stats=zero, failures=failures, batch_stats=[], latency=latency())))
    assert len(found["nv_inference_request_failure"][1]) == 4
    assert found["tensorbroker_batch_size"][1]["tensorbroker_batch_size_count{model=m,version=3}"] == 0


def test_our_own_series() -> None:
    found = families(document(model()))
    values = {name: value for kind, samples in found.values() for name, value in samples.items()}
    expected = {
        "tensorbroker_requests_total{transport=native}": 1000,
        "tensorbroker_requests_total{transport=http}": 5,
        "tensorbroker_failed_requests_total{transport=http}": 1,
        "tensorbroker_regions{kind=pool}": 2,
        "tensorbroker_region_bytes{kind=system}": 4096,
        "tensorbroker_region_limit_bytes": 1 << 40,
        "tensorbroker_sessions": 2,
        "tensorbroker_closed_batches_total{model=m,reason=delay,version=3}": 1,
        "tensorbroker_closed_batches_total{model=m,reason=idle,version=3}": 5,
        "tensorbroker_copied_bytes_total{model=m,reason=gather,version=3}": 4096,
        "tensorbroker_copied_bytes_total{model=,reason=inline_input,version=}": 64,
        "tensorbroker_model_queue_depth{model=m,version=3}": 7,
        "tensorbroker_model_memory_bytes{model=m,version=3}": 4096,
        "tensorbroker_model_leases{model=m,version=3}": 2,
        "tensorbroker_model_memory_limit_bytes": 8192,
        "tensorbroker_client_queue_depth{session=17}": 3,
        "tensorbroker_worker_restarts_total{worker=cpu/default}": 1,
        "tensorbroker_lost_wakeups_total{worker=cpu/default}": 0,
        "tensorbroker_gateway_restarts_total{gateway=0}": 5,
        "tensorbroker_gateway_hangs_total{gateway=0}": 2,
        "nv_gpu_memory_total_bytes{gpu_uuid=GPU-1}": 1 << 37,
        "nv_gpu_memory_total_bytes{gpu_uuid=GPU-2}": 1 << 35,
        "nv_gpu_memory_used_bytes{gpu_uuid=GPU-1}": 1 << 36,
        "tensorbroker_client_gpu_bytes{session=7}": 4096,
        "tensorbroker_gpu_memory_opens_total{worker=gpu0/default}": 3,
        "tensorbroker_gpu_memory_open_bytes{worker=gpu0/default}": 4096,
        "tensorbroker_gpu_memory_peer_bytes{worker=gpu0/default}": 1024,
        "tensorbroker_pinned_bytes{worker=gpu0/default}": 8192,
        "tensorbroker_gpu_producer_waits_total{worker=gpu0/default}": 5,
        "tensorbroker_gpu_producer_wait_seconds_total{worker=gpu0/default}": 0.25,
        "tensorbroker_retried_requests_total{model=m,version=3}": 1,
    }
    assert {name: values.get(name) for name in expected} == expected
    assert found["tensorbroker_requests"][0] == "counter"
    assert "tensorbroker_failed_requests_total{transport=native}" not in values


def test_histograms_are_cumulative_and_in_base_units() -> None:
    found = families(document(model()))
    kind, samples = found["tensorbroker_request_duration_seconds"]
    assert kind == "histogram"
    name = "tensorbroker_request_duration_seconds"
    assert samples[f"{name}_bucket{{le=1e-05,model=m,version=3}}"] == 1
    assert samples[f"{name}_bucket{{le=0.0002,model=m,version=3}}"] == 3
    assert samples[f"{name}_bucket{{le=2.0,model=m,version=3}}"] == 3
    assert samples[f"{name}_bucket{{le=+Inf,model=m,version=3}}"] == 4
    assert samples[f"{name}_count{{model=m,version=3}}"] == 4
    assert samples[f"{name}_sum{{model=m,version=3}}"] == pytest.approx(0.001000999)
    assert sum("_bucket" in sample for sample in samples) == LATENCIES
    gateway = found["tensorbroker_gateway_duration_seconds"][1]
    assert gateway["tensorbroker_gateway_duration_seconds_bucket{le=10.0,transport=http}"] == 1
    assert gateway["tensorbroker_gateway_duration_seconds_count{transport=http}"] == 2
    batch = found["tensorbroker_batch_size"][1]
    at = {le: batch[f"tensorbroker_batch_size_bucket{{le={le},model=m,version=3}}"] for le in ("1.0", "4.0", "8.0")}
    assert at == {"1.0": 2, "4.0": 2, "8.0": 3}
    assert batch["tensorbroker_batch_size_count{model=m,version=3}"] == 4
    assert batch["tensorbroker_batch_size_sum{model=m,version=3}"] == 12


def test_what_metrics_config_asks_for() -> None:
    found = families(document(model()))
    assert not any("summary" in name or "first_response" in name for name in found)
    settings = {"counter_latencies": "false", "histogram_latencies": "ON", "summary_latencies": "1"}
    found = families(document(model()), Config.parse({**settings, "summary_quantiles": "0.25:0.05,0.75:0.01"}))
    assert "nv_inference_request_duration_us" not in found
    kind, samples = found["nv_inference_first_response_histogram_ms"]
    assert kind == "histogram"
    name = "nv_inference_first_response_histogram_ms_bucket"
    assert {le: samples[f"{name}{{le={le},model=m,version=3}}"] for le in ("100.0", "2000.0", "5000.0", "+Inf")} == {
        "100.0": 3,
        "2000.0": 3,
        "5000.0": 4,
        "+Inf": 4,
    }
    kind, samples = found["nv_inference_request_summary_us"]
    assert kind == "summary"
    assert samples["nv_inference_request_summary_us_count{model=m,version=3}"] == 4
    assert samples["nv_inference_request_summary_us{model=m,quantile=0.25,version=3}"] == 10
    assert samples["nv_inference_request_summary_us{model=m,quantile=0.75,version=3}"] == 200
    assert samples.keys() & {"nv_inference_request_summary_us{model=m,quantile=0.5,version=3}"} == set()
    queue = found["nv_inference_queue_summary_us"][1]
    assert queue["nv_inference_queue_summary_us_sum{model=m,version=3}"] == pytest.approx(2001.998)


@pytest.mark.parametrize("quantiles", ["x:0.1", "1.5:0.1", "-0.1:0.1", ""])
def test_quantiles_that_are_none_are_refused(quantiles: str) -> None:
    with pytest.raises(ValueError, match=r"float|quantiles"):
        Config.parse({"summary_quantiles": quantiles})


def test_quantiles_lie_between_the_bounds() -> None:
    assert quantile_ns(latency(*[15_000] * 4), 0.5) == 15_000
    assert quantile_ns(latency(*[1_000] * 4), 1.0) == BOUNDS_NS[0]
    assert quantile_ns(latency(10**12), 0.5) == BOUNDS_NS[-1]
    assert math.isnan(quantile_ns(latency(), 0.5))


def test_the_hosts_gauges() -> None:
    found = families(document(), host={"nv_cpu_utilization": 0.5})
    assert found["nv_cpu_utilization"] == ("gauge", {"nv_cpu_utilization": 0.5})
    assert "nv_cpu_utilization" not in families(document())


def test_names_that_nobody_expects_are_escaped() -> None:
    name = 'a"\n# TYPE nv_inference_exec_count gauge\n\\'
    found = families(document(model(name)))
    kind, samples = found["nv_inference_exec_count"]
    assert (kind, len(samples)) == ("counter", 1)


def test_the_cache_shows_only_where_there_is_one_and_models_only_where_answers_are_kept() -> None:
    cached, other = model(), model("other", cached=False)
    shown = families(document(cached, other))
    hits = {"nv_cache_num_hits_per_model{model=m,version=3}": 4.0}
    assert shown["nv_cache_num_hits_per_model"] == ("counter", hits)
    assert shown["nv_cache_util"] == ("gauge", {"nv_cache_util": 0.25})
    assert shown["nv_cache_num_lookups"] == ("gauge", {"nv_cache_num_lookups": 12.0})
    assert shown["nv_cache_lookup_duration"] == ("gauge", {"nv_cache_lookup_duration": 8.0})
    without = document(cached, other)
    without["cache"]["byte_size"] = 0
    assert [name for name in families(without) if name.startswith("nv_cache")] == []


def documented() -> dict[str, tuple[str, str]]:
    """docs/metrics.md: type and labels by name, as its tables of what is exposed have them."""
    rows = (line.split("|")[1:4] for line in DOCUMENT.read_text().splitlines() if line.startswith("| `"))
    return {
        name.strip(" `"): (kind.strip(), labels.strip())
        for name, kind, labels in rows
        if kind.strip() in ("counter", "gauge", "histogram", "summary")
    }


def test_the_document_names_what_is_exposed_and_nothing_else() -> None:
    everything = Config(counters=True, histograms=True, summaries=True)
    host = dict.fromkeys(("nv_cpu_utilization", "nv_cpu_memory_total_bytes", "nv_cpu_memory_used_bytes"), 1.0)
    exposed = {}
    for family in text_string_to_metric_families(exposition.text(document(model()), everything, host).decode()):
        names = {name: None for sample in family.samples for name in sample.labels if name != "le"}
        suffix = "_total" if family.type == "counter" and family.name.startswith("tensorbroker_") else ""
        exposed[family.name + suffix] = family.type, sorted(names)
    told = {name: (kind, sorted(filter(None, labels.split(", ")))) for name, (kind, labels) in documented().items()}
    assert told == exposed


def test_the_document_names_every_reason_to_copy() -> None:
    text = DOCUMENT.read_text().partition("### Copied bytes")[2]
    assert [reason for reason in (*COPIES, *REASONS) if f"`{reason}`" not in text] == []
