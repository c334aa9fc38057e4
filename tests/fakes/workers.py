"""Workers on a real zygote, with `tests.fakes.link_worker` as the processes, and the fixtures that go with them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from broker.logical_worker import Worker
from broker.records import ChannelRecord, RegionEntry
from broker.repository.config import InstanceGroup, ModelConfig
from broker.statistics_blocks import StatisticsBlocks
from broker.worker.messages import BindPlan
from broker.workers import Workers
from shm.statistics import StatisticsPage
from tests.fakes.channel import PLAN, Twin
from tests.fakes.processes import subreaper, until

ROOT = Path(__file__).parent.parent.parent
KEY = "cpu/default"


class Book:
    """Plans as the coroner sees them."""

    def __init__(self, retryable: bool = True) -> None:
        self.can_retry = retryable
        self.refused: list[tuple[int, str]] = []

    def retryable(self, session: int, plan_word: int) -> bool:
        return self.can_retry

    def streams(self, session: int, plan_word: int) -> bool:
        return not self.can_retry

    def model_of(self, session: int, plan_word: int) -> tuple[str, int] | None:
        return "m", 1

    counted_for = model_of

    def is_one_client(self, session: int) -> bool:
        return True

    def refuse(self, session: int, model: str, until_ns: int) -> None:
        self.refused.append((session, model))


class Journal:
    """What the workers were told."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def entries(self, pid: int | None = None) -> list[dict]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [entry for entry in map(json.loads, lines) if pid in (None, entry["pid"])]

    def types(self, pid: int | None = None) -> list[str]:
        return [entry["type"] for entry in self.entries(pid)]


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    with subreaper():
        yield


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Journal:
    monkeypatch.setenv("TEST_JOURNAL", str(tmp_path / "journal"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return Journal(tmp_path / "journal")


@contextlib.asynccontextmanager
async def running(
    book: Book | None = None, entry: str = "tests.fakes.link_worker", **options
) -> AsyncIterator[Workers]:
    page = StatisticsPage.create()
    workers = Workers(StatisticsBlocks(page), entry=entry, **options)
    workers.plans = book or Book()
    try:
        yield workers
    finally:
        await workers.stop(5.0)
        os.close(page.fd)


def config(name: str = "m", on_load: str = "", **parameters: str) -> ModelConfig:
    return ModelConfig(
        name=name,
        platform="onnxruntime_onnx",
        backend="onnxruntime",
        directory="",
        versions={1: ""},
        default_model_filename="model.onnx",
        max_batch_size=0,
        input=(),
        output=(),
        instance_group=(InstanceGroup(name=name),),
        parameters={"on_load": on_load, **parameters},
    )


async def load(workers: Workers, model: ModelConfig, generation: int = 1) -> Worker:
    worker = workers.start(KEY)
    await worker.load(model, 1, generation, workers.blocks.take((model.name, 1), 1))
    return worker


def region_of(fd: int, byte_size: int = 4096, kind: str = "pool") -> RegionEntry:
    return RegionEntry(
        region=5,
        generation=6,
        name="r",
        kind=kind,
        fd=fd,
        byte_size=byte_size,
        offset=0,
        file_size=byte_size,
        device=0,
        inode=0,
        writable=True,
    )


def plan(index: int = PLAN & 0xFFFFFFFF) -> BindPlan:
    return BindPlan(
        session=9,
        index=index,
        generation=PLAN >> 32,
        model="m",
        version=1,
        inputs=(),
        outputs=(),
        input_positions=1,
        output_positions=1,
        rows=1,
    )


def record_of(twin: Twin) -> ChannelRecord:
    return ChannelRecord(1, 9, twin.slots, twin.memory_fd, twin.ledger_fd, twin.bell_fd, twin.pipe_write)


async def replaced(worker: Worker, pid: int | None) -> int:
    await until(lambda: worker.state == "ready" and worker.pid not in (None, pid))
    assert worker.pid is not None
    return worker.pid
