"""The document of `tensorbroker status --json`: what the broker, its workers, models, sessions and regions are doing.

Made on request from the parts that own the facts; nothing is kept here. It shows no key and no path of a client.
Anybody may ask for it at any time, so it has a size: the first sessions and regions, and how many there are (`quotas`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Protocol, final

import msgspec

from broker.channels import Channels
from broker.control import Models
from broker.listener import Sessions
from broker.model_sizes import resident_bytes
from broker.plans import Plans
from broker.records import RegionEntry, record
from broker.registry import Registry
from shm.errors import InferError
from shm.messages import ModelMetadata
from shm.statistics import IN_FLIGHT, LOST_WAKEUPS, RECOVERED, REFUSED, TAKEN

ROWS = 1000  # of sessions and of regions


class WorkerFacts(Protocol):
    """What is shown of a worker."""

    key: str
    state: str
    silent_s: float
    restarts: int
    last_death: str
    died_ns: int

    @property
    def pid(self) -> int | None:
        """Of the current process."""


@final
class StatusDocument:
    """Call it for a fresh document: plain data that msgpack and JSON can carry."""

    def __init__(
        self,
        *,
        directory: str,
        epoch: str,
        version: str,
        workers: Iterable[WorkerFacts],
        models: Models,
        registry: Registry,
        plans: Plans,
        channels: Channels,
        worker_block: Callable[[str], memoryview],
        cuda: Callable[[], dict[str, Any]] = dict,
        slow_load: Callable[[str, str, int], str] = lambda model, version, now_ns: "",
    ) -> None:
        """`worker_block` gives the words of a worker's own block in the statistics page, `cuda` tells of GPUs,
        `slow_load` of a version's load that takes long (`broker.load_watch`).
        """
        self._slow_load = slow_load
        self._cuda = cuda
        self._broker = {"pid": os.getpid(), "epoch": epoch, "version": version, "directory": directory}
        self._started = time.monotonic()
        self._workers = workers
        self._models = models
        self._registry = registry
        self._plans = plans
        self._channels = channels
        self._worker_block = worker_block
        self.sessions: Sessions | None = None  # set once they exist: they answer with this document
        self.gateways: Callable[[], list[dict[str, object]]] = list  # likewise

    def __call__(self) -> dict[str, Any]:
        """The document of this moment."""
        return {
            "broker": {**self._broker, "uptime_s": round(time.monotonic() - self._started, 3)},
            "workers": [self._worker(worker) for worker in self._workers],
            "gateways": self.gateways(),
            "models": [self._model(model) for model in self._models.all()],
            "sessions": self._sessions(),
            "regions": [self._region(entry) for entry in islice(self._registry, ROWS)],
            "quotas": self._quotas(),
            "counters": self._counters(),
            "cuda": self._cuda(),
        }

    def _worker(self, worker: WorkerFacts) -> dict[str, Any]:
        words = self._worker_block(worker.key)
        memory = resident_bytes(worker.pid, "RssAnon", "RssShmem")  # its own, and what it has touched of regions
        return {
            "key": worker.key,
            "state": worker.state,
            "silent_s": round(worker.silent_s, 1) if worker.state == "ready" and worker.silent_s else None,
            "pid": worker.pid,
            "memory_bytes": None if memory is None else sum(memory),
            "restarts": worker.restarts,
            "last_death": worker.last_death,
            "last_death_age_s": _age_s(worker.died_ns) if worker.last_death else None,
            "in_flight": words[IN_FLIGHT],
            "requests": words[TAKEN],
            "refused": words[REFUSED],
            "recovered": words[RECOVERED],
            "lost_wakeups": words[LOST_WAKEUPS],
        }

    def _model(self, model: ModelMetadata) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "name": model.name,
            "version": model.version,
            "state": model.state,
            "reason": self._slow_load(model.name, model.version, time.monotonic_ns()) or model.reason,
            "workers": list(model.workers),
        }
        try:
            (counters,) = self._models.statistics(model.name, model.version)
        except (InferError, ValueError):
            return facts  # never loaded: there is nothing to count
        ended = {name: counters["inference_stats"][name]["count"] for name in ("success", "fail")}
        own = ("pending", "cancelled", "expired", "retried", "inference_count", "execution_count", "copied_bytes")
        if model.state == "READY":
            facts["memory_bytes"] = self._models.memory.sizes.of(model.name, int(model.version))
            facts["leases"] = self._models.leases.count(model.name)
        return {**facts, **ended, **{name: counters[name] for name in own}}

    def _sessions(self) -> list[dict[str, Any]]:
        channels, rows = self._channels.counts(), []
        for session in islice(self.sessions or (), ROWS):
            number = session.peer.session
            regions, region_bytes = self._registry.usage(number)
            rows.append(
                {
                    "id": number,
                    "pid": session.peer.pid,
                    "uid": session.peer.uid,
                    "library": session.library,
                    "regions": regions,
                    "region_bytes": region_bytes,
                    "channels": channels[number],
                    "plans": self._plans.count(number),
                }
            )
        return rows

    def _region(self, entry: RegionEntry) -> dict[str, Any]:
        return {**msgspec.to_builtins(record(entry, show_key=False)), "session": entry.session}

    def _quotas(self) -> dict[str, Any]:
        quota = self._registry.quota
        return {
            "memory_limit": quota.limit,
            "memory_used": quota.total,
            "regions": len(self._registry),
            "regions_per_uid": quota.max_regions,
            "region_descriptors_per_uid": quota.max_descriptors,
            "cuda_memory_per_uid": quota.cuda_limit,
            "model_memory_limit": self._models.memory.limit,
            "sessions_limit": self.sessions.limit if self.sessions else 0,
            "sessions": len(self.sessions) if self.sessions else 0,
        }

    def _counters(self) -> dict[str, Any]:
        if self.sessions is None:
            return {}
        errors = self.sessions.protocol_errors + sum(session.protocol_errors for session in self.sessions)
        return {
            "sessions_accepted": self.sessions.accepted,
            "sessions_refused": self.sessions.refused,
            "protocol_errors": errors,
        }


def _age_s(since_ns: int) -> float:
    return round((time.monotonic_ns() - since_ns) / 1e9, 3)
