"""The document behind GetMetrics, from parts that tell what they are told here."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from broker.catalogue import Catalogue
from broker.channels import Channels
from broker.leases import Leases
from broker.metrics import MetricsDocument
from broker.model_memory import ModelMemory
from broker.quota import Quota
from broker.records import GATEWAY, ChannelRecord, Peer
from broker.repository.config import ModelConfig
from broker.statistics_blocks import StatisticsBlocks
from shm import statistics as words
from shm.gateway_counters import COPIES, GatewayCounters
from shm.layout import DONE, LEDGER_CTAIL, MARK, RESPONDED, STARTED, TAKEN
from shm.statistics import StatisticsPage


class Worker:
    key, restarts = "cpu/default", 2

    async def attach_channel(self, record: ChannelRecord) -> None:
        pass

    async def detach_channel(self, channel: int, *, ended: bool = False) -> None:
        pass


class Registry:
    """As much of one as is asked: `entries` are (kind, bytes, opened by a token?)."""

    def __init__(self) -> None:
        self.quota = Quota(1 << 30)
        self.entries: list[tuple[str, int, bool]] = []

    def __iter__(self) -> Iterator[Any]:
        for kind, byte_size, opened in self.entries:
            yield SimpleNamespace(kind=kind, byte_size=byte_size, source=(1, 1) if opened else None)


class Parts:
    def __init__(self) -> None:
        self.blocks = StatisticsBlocks(StatisticsPage.create())
        self.registry = Registry()
        self.channels = Channels(lambda key: Worker(), self.registry.quota)
        self.counters = [GatewayCounters.create()]
        self.leases = Leases()
        self.config: ModelConfig | None = None
        self.memory = ModelMemory(Catalogue(self.blocks), self.blocks, self.leases, 1 << 30, never, lambda name: False)
        self.document = MetricsDocument(
            models=self,
            blocks=self.blocks,
            workers=[Worker()],
            registry=self.registry,  # type: ignore[arg-type]
            channels=self.channels,
            sessions=[1, 2, 3],
            gateways=self,
        )

    def statistics(self) -> list[dict[str, Any]]:
        return [self.blocks.model_stats("m", 1)]

    def load_seconds(self, model: str, version: int) -> float:
        return 0.5

    def configured(self, model: str, version: int) -> ModelConfig | None:
        return self.config

    def rows(self) -> list[dict[str, object]]:
        return [{"index": 0, "pid": 1, "state": "serving", "restarts": 4, "hangs": 1}]

    def close(self) -> None:
        for counters in self.counters:
            counters.close()
        os.close(self.blocks.page.fd)


def model_config(**said: Any) -> ModelConfig:
    return ModelConfig(
        name="m",
        platform="",
        backend="identity",
        directory="",
        versions={},
        default_model_filename="",
        max_batch_size=0,
        input=(),
        output=(),
        instance_group=(),
        **said,
    )


async def never(model: str, why: str) -> None:
    raise AssertionError(f"{model} is unloaded: {why}")


@pytest.fixture
def parts() -> Iterator[Parts]:
    made = Parts()
    yield made
    made.close()


def mark(record: ChannelRecord, states: list[int], completed: int) -> None:
    """As the worker writes its ledger."""
    os.pwrite(record.ledger, completed.to_bytes(8, "little"), 8 * LEDGER_CTAIL)
    for slot, state in enumerate(states):
        os.pwrite(record.ledger, (0x1234 << 16 | 1 << 8 | state).to_bytes(8, "little"), 8 * (MARK + slot))


def test_it_travels_in_a_message(parts: Parts) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(parts.document())) == parts.document()


def test_failures_have_tritons_reasons(parts: Parts) -> None:
    page = parts.blocks.page.block(parts.blocks.take(("m", 1), 1)[0])
    page[words.FAIL], page[words.REFUSED_EARLY], page[words.CANCELLED], page[words.EXPIRED] = 5, 2, 3, 4
    page[words.LATENCY + 1] = 7
    (model,) = parts.document()["models"]
    assert model["failures"] == {"REJECTED": 4, "CANCELED": 3, "BACKEND": 3, "OTHER": 2}
    parts.blocks.lost("m", 1, "", 0)
    assert parts.document()["models"][0]["failures"]["BACKEND"] == 4, "its worker ended"
    assert (model["latency"][1], model["load_s"]) == (7, 0.5)


def test_what_the_configuration_says_about_metrics(parts: Parts) -> None:
    (number,) = parts.blocks.take(("m", 1), 1)
    parts.blocks.bound(("m", 1), [2_000_000, 33_000_000])
    words.count_latency(parts.blocks.page.block(number), 21_000_000, 3)
    assert "first_response" not in parts.document()["models"][0]
    parts.config = model_config(metric_tags={"team": "a"}, first_response_buckets=(2.0, 33.0))
    (row,) = parts.document()["models"]
    assert row["tags"] == {"team": "a"}
    assert row["first_response"] == {"buckets": (2.0, 33.0), "counts": [0, 3, 0], "ns": 63_000_000}


def test_what_models_take_and_who_keeps_them(parts: Parts) -> None:
    parts.memory.sizes.note("m", {1: 4096})
    parts.leases.take(7, 1, "m")
    found = parts.document()
    assert (found["models"][0]["memory_bytes"], found["models"][0]["leases"]) == (4096, 1)
    assert found["model_memory_limit"] == 1 << 30


def test_what_a_region_opened_by_a_token_shows_is_its_owners(parts: Parts) -> None:
    parts.registry.entries = [("pool", 4096, False), ("pool", 4096, True), ("system", 100, False)]
    found = parts.document()
    assert found["regions"] == {"pool": {"count": 1, "byte_size": 4096}, "system": {"count": 1, "byte_size": 100}}
    assert found["region_limit"] == 1 << 30


def test_native_requests_and_queues_are_those_of_the_channels(parts: Parts) -> None:
    async def run() -> None:
        client, gateway = Peer(1, 10, 0), Peer(2, 11, 0, GATEWAY)
        opened = [await parts.channels.open(peer, "w", 8) for peer in (client, client, gateway)]
        for (record, pipe), completed in zip(opened, (10, 20, 400), strict=True):
            os.close(pipe)
            mark(record, [TAKEN, STARTED, RESPONDED, DONE, 0, DONE], completed)
        found = parts.document()
        assert found["transports"]["native"] == {"requests": 30}
        assert found["clients"] == {"1": 6, "2": 3}
        await parts.channels.end(1)
        found = parts.document()
        assert found["transports"]["native"] == {"requests": 30}, "what ended on a closed channel stays counted"
        assert found["clients"] == {"2": 3}
        await parts.channels.end(2)
        assert parts.document()["transports"]["native"] == {"requests": 30}

    asyncio.run(run())


def test_workers_and_gateways(parts: Parts) -> None:
    page = parts.blocks.of_worker("cpu/default")
    page[words.LOST_WAKEUPS], page[words.TAKEN], page[words.REFUSED] = 1, 2, 3
    page[words.RECOVERED], page[words.IN_FLIGHT] = 4, 5
    parts.counters[0].count("zmq", 100, True)
    parts.counters[0].copied("response", 32)
    found = parts.document()
    assert found["workers"] == {
        "cpu/default": {
            "restarts": 2,
            "lost_wakeups": 1,
            "requests": 2,
            "refused": 3,
            "recovered": 4,
            "in_flight": 5,
        }
    }
    assert found["gpu_memory"] == {}
    page[words.GPU_OPENS], page[words.GPU_CLOSES], page[words.GPU_OPEN_BYTES], page[words.PINNED_BYTES] = 6, 7, 8, 9
    page[words.GPU_WAITS], page[words.GPU_WAIT_NS], page[words.GPU_PEER_BYTES] = 10, 11, 4
    assert parts.document()["gpu_memory"] == {
        "cpu/default": {
            "opens": 6,
            "closes": 7,
            "evictions": 0,
            "open_bytes": 8,
            "peer_bytes": 4,
            "pinned_bytes": 9,
            "waits": 10,
            "wait_ns": 11,
        }
    }
    assert found["gateways"] == {"0": {"restarts": 4, "hangs": 1}}
    assert (found["transports"]["zmq"]["requests"], found["transports"]["zmq"]["failed"]) == (1, 1)
    assert found["copied_bytes"] == {**dict.fromkeys(COPIES, 0), "response": 32}
    assert found["sessions"] == 3
