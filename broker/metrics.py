"""The document behind GetMetrics: every number of the broker's that /metrics shows, without the names it has there.

Made on request from the parts that own the facts, for gateways (`broker.gateway.metrics` gives the names). Durations
are in nanoseconds, histograms are counts up to each bound of `shm.statistics.BOUNDS_NS` and one above, counters never
go back while the broker runs.

    models      model_stats, and: latency, failures by Triton's reason, load_s (how long the latest load took), cached
                (are answers kept?), memory_bytes (`broker.model_sizes`), leases (on the model, any version), tags
                (of metric_tags), first_response (where it has buckets of its own: buckets in ms, counts, ns)
    model_memory_limit  bytes, --model-memory-limit; 0: none
    transports  native, http, grpc, zmq → requests, and for gateways' ones: failed, ns, latency
    copied_bytes  reason → what gateways copied (a model's own `copied_bytes` are its workers')
    regions     kind → count, byte_size               region_limit  bytes, --region-memory
    clients     session → requests under way          sessions      how many are open
    workers     key → restarts, lost_wakeups, requests, refused, recovered, in_flight
    cache       of all workers: byte_size (0: there is none), used, entries, hits, misses, evictions, lookup_ns,
                insertion_ns
    gpu_memory  key of a worker that has opened some, or pinned regions for a GPU → opens, closes, evictions,
                open_bytes, peer_bytes, pinned_bytes
    gpus        UUID → total_memory, bytes; used_memory where a worker has come to use it
    client_gpu_bytes  session → bytes of its CUDA regions
    gateways    index → restarts, hangs (restarts of one that gave no sign of life)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from itertools import islice
from typing import Any, Protocol, final

from broker.channels import Channels
from broker.leases import Leases
from broker.model_memory import ModelMemory
from broker.records import CLIENT
from broker.registry import Registry
from broker.repository.config import ModelConfig
from broker.statistics_blocks import StatisticsBlocks
from shm.gateway_counters import GatewayCounters, copied_bytes, totals
from shm.statistics import (
    CACHE_ALL_HITS,
    CACHE_ALL_MISSES,
    CACHE_ENTRIES,
    CACHE_EVICTIONS,
    CACHE_INSERTION_NS,
    CACHE_LOOKUP_NS,
    CACHE_SIZE,
    CACHE_USED,
    GPU_CLOSES,
    GPU_EVICTIONS,
    GPU_OPEN_BYTES,
    GPU_OPENS,
    GPU_PEER_BYTES,
    GPU_USED,
    GPU_WAIT_NS,
    GPU_WAITS,
    IN_FLIGHT,
    LOST_WAKEUPS,
    PINNED_BYTES,
    RECOVERED,
    REFUSED,
    TAKEN,
)

_CACHE_WORDS = {
    "byte_size": CACHE_SIZE,
    "used": CACHE_USED,
    "entries": CACHE_ENTRIES,
    "evictions": CACHE_EVICTIONS,
    "hits": CACHE_ALL_HITS,
    "misses": CACHE_ALL_MISSES,
    "lookup_ns": CACHE_LOOKUP_NS,
    "insertion_ns": CACHE_INSERTION_NS,
}
MAX_CLIENTS = 1000  # shown one by one
_WORKER_WORDS = {
    "lost_wakeups": LOST_WAKEUPS,
    "requests": TAKEN,
    "refused": REFUSED,
    "recovered": RECOVERED,
    "in_flight": IN_FLIGHT,
}
_GPU_WORDS = {
    "opens": GPU_OPENS,
    "closes": GPU_CLOSES,
    "evictions": GPU_EVICTIONS,
    "open_bytes": GPU_OPEN_BYTES,
    "peer_bytes": GPU_PEER_BYTES,
    "pinned_bytes": PINNED_BYTES,
    "waits": GPU_WAITS,
    "wait_ns": GPU_WAIT_NS,
}


class Models(Protocol):
    """What is asked of the models."""

    leases: Leases
    memory: ModelMemory

    def statistics(self) -> list[dict[str, Any]]:
        """`model_stats` of every version that is ready."""

    def load_seconds(self, model: str, version: int) -> float:
        """How long its latest successful load took."""

    def configured(self, model: str, version: int) -> ModelConfig | None:
        """With which configuration it serves."""


class Worker(Protocol):
    """What is asked of a worker."""

    key: str
    restarts: int


class Gateways(Protocol):
    """What is asked of the gateways."""

    @property
    def counters(self) -> list[GatewayCounters]:
        """One per gateway, whatever becomes of its processes."""

    def rows(self) -> list[dict[str, object]]:
        """One per gateway: `index`, `restarts`, `hangs`."""


@final
class MetricsDocument:
    """Call it for a fresh document: plain data that msgpack can carry."""

    def __init__(
        self,
        *,
        models: Models,
        blocks: StatisticsBlocks,
        workers: Iterable[Worker],
        registry: Registry,
        channels: Channels,
        sessions: Sized,
        gateways: Gateways,
        gpus: Callable[[], dict[str, Any]] = lambda: {"gpus": []},
    ) -> None:
        """`gpus`: as the status document has them."""
        self._gpus = gpus
        self._models = models
        self._blocks = blocks
        self._workers = workers
        self._registry = registry
        self._channels = channels
        self._sessions = sessions
        self._gateways = gateways

    def __call__(self) -> dict[str, Any]:
        """The document of this moment."""
        return {
            "models": [self._model(row) for row in self._models.statistics()],
            "model_memory_limit": self._models.memory.limit,
            "transports": self._transports(),
            "copied_bytes": copied_bytes(self._gateways.counters),
            "regions": self._regions(),
            "region_limit": self._registry.quota.limit,
            "clients": {str(session): count for session, count in islice(self._depths(), MAX_CLIENTS)},
            "sessions": len(self._sessions),
            "workers": {worker.key: self._worker(worker) for worker in self._workers},
            "cache": self._cache(),
            "gpu_memory": dict(self._gpu_memory()),
            "gpus": {gpu["uuid"]: self._gpu(gpu) for gpu in self._gpus()["gpus"]},
            "client_gpu_bytes": dict(islice(self._client_gpu_bytes().items(), MAX_CLIENTS)),
            "gateways": {
                str(row["index"]): {"restarts": row["restarts"], "hangs": row["hangs"]} for row in self._gateways.rows()
            },
        }

    def _model(self, row: dict[str, Any]) -> dict[str, Any]:
        name, version = row["name"], int(row["version"])
        distribution = self._blocks.distribution(name, version)
        failed = row["inference_stats"]["fail"]["count"]
        config = self._models.configured(name, version)
        return {
            **row,
            **(self._of_configuration(config, version) if config is not None else {}),
            "latency": distribution["latency"],
            "cached": distribution["cached"],
            "failures": {
                "REJECTED": row["expired"],  # refused while it was queued
                "CANCELED": row["cancelled"],
                "BACKEND": failed - distribution["refused_early"],
                "OTHER": distribution["refused_early"],
            },
            "load_s": self._models.load_seconds(name, version),
            "memory_bytes": self._models.memory.sizes.of(name, version),
            "leases": self._models.leases.count(name),
        }

    def _of_configuration(self, config: ModelConfig, version: int) -> dict[str, Any]:
        document: dict[str, Any] = {"tags": config.metric_tags}
        if buckets := config.first_response_buckets:
            counted = self._blocks.own_distribution(config.name, version, len(buckets))
            document["first_response"] = {"buckets": buckets, **counted}
        return document

    def _cache(self) -> dict[str, int]:
        blocks = [self._blocks.of_worker(worker.key) for worker in self._workers]
        before = self._blocks.cached_before
        return {name: before[word] + sum(block[word] for block in blocks) for name, word in _CACHE_WORDS.items()}

    def _gpu_memory(self) -> Iterator[tuple[str, dict[str, int]]]:
        for worker in self._workers:
            words = self._blocks.of_worker(worker.key)
            if words[GPU_OPENS] or words[PINNED_BYTES]:
                yield worker.key, {name: words[word] for name, word in _GPU_WORDS.items()}

    def _gpu(self, gpu: Mapping[str, Any]) -> dict[str, int]:
        own = [worker.key for worker in self._workers if worker.key.startswith(f"gpu{gpu['ordinal']}/")]
        used = max((self._blocks.of_worker(key)[GPU_USED] for key in own), default=0)
        return {"total_memory": gpu["total_memory"], **({"used_memory": used} if used else {})}

    def _transports(self) -> dict[str, dict[str, Any]]:
        native = {"requests": self._channels.completed()[CLIENT]}
        return {"native": native, **totals(self._gateways.counters)}

    def _regions(self) -> dict[str, dict[str, int]]:
        kinds: dict[str, dict[str, int]] = {kind: {"count": 0, "byte_size": 0} for kind in ("pool", "system")}
        for entry in self._registry:
            if entry.source is None:  # what was opened by a token is its owner's memory
                kind = kinds.setdefault(entry.kind, {"count": 0, "byte_size": 0})
                kind["count"] += 1
                kind["byte_size"] += entry.byte_size
        return kinds

    def _client_gpu_bytes(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for entry in self._registry:
            if entry.kind == "cuda" and entry.source is None:
                total[str(entry.session)] = total.get(str(entry.session), 0) + entry.byte_size
        return total

    def _depths(self) -> Iterator[tuple[int, int]]:
        yield from sorted(self._channels.under_way().items())

    def _worker(self, worker: Worker) -> dict[str, int]:
        words = self._blocks.of_worker(worker.key)
        return {"restarts": worker.restarts, **{name: words[word] for name, word in _WORKER_WORDS.items()}}
