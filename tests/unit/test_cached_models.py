"""Models whose answers are kept, on the real runtime: what is answered without a run, what no client can bring in."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

from broker.worker.cache import ResponseCache
from broker.worker.cached import Cached
from broker.worker.intake import take_in
from broker.worker.plans import Plan, adopt
from shm import statistics
from shm.admission import Request
from tests.fakes import models
from tests.fakes.loaded import Loaded, Memory, shapes_of, spec
from tests.fakes.loading import config_of

BATCHING = "max_batch_size: 8\ndynamic_batching {}\nresponse_cache { enable: true }\n"
X = np.array([[1, 2, 3, 4]], np.float32)


class Channel:
    """Notes what is published."""

    def __init__(self) -> None:
        self.started: list[Request] = []
        self.completed: list[Request] = []

    def start(self, requests: Sequence[Request]) -> None:
        self.started += requests

    def complete(self, requests: Sequence[Request]) -> None:
        self.completed += requests


class CachedModel(Loaded):
    """With a cache of its own."""

    def __init__(self, config, byte_size: int = 1 << 16) -> None:
        super().__init__(config)
        self.words = [0] * 32
        self.channel = Channel()
        self.cache = ResponseCache(byte_size, self.words)
        self.model.keep_answers(Cached(self.cache, self.model.name, 1, 1, self.model.instances[0].block))

    def ask(self, plan: Plan, position: int = 0, rows: int = 0) -> tuple[Request, bool]:
        """As the loop: look it up, else run it. Returns whether it was run."""
        request = self.request(plan, position, rows=rows)
        request.channel = self.channel
        rest = take_in([request])
        if rest:
            self.run(*rest)
            assert not request.code, request.note
        return request, bool(rest)


@pytest.fixture
def loaded(tmp_path: Path) -> Iterator[CachedModel]:
    with CachedModel(config_of(tmp_path, models.add1(), None)) as loaded:
        yield loaded


def add1_plan(loaded: Loaded, memory: Memory, **changes) -> Plan:
    place = {"offset": 256, **changes}
    return loaded.plan(memory, [spec("x", (1, 4), offset=64)], [spec("y", (1, 4), **place)], rows=1)


def test_the_second_time_nothing_runs(loaded):
    memory = loaded.memory()
    plan = add1_plan(loaded, memory)
    memory.put(64, X)
    assert loaded.ask(plan)[1]
    memory.put(256, 0 * X)
    request, ran = loaded.ask(plan)
    assert not ran
    assert np.array_equal(memory.get(256, (1, 4)), X + 1)
    assert loaded.channel.completed == loaded.channel.started == [request]
    assert (request.queue_ns, request.infer_ns, request.copied) == (0, 0, X.nbytes)
    block = loaded.model.instances[0].block
    assert (block[statistics.SUCCESS], block[statistics.CACHE_HITS], block[statistics.CACHE_MISSES]) == (1, 1, 1)
    assert 0 < block[statistics.CACHE_HIT_NS] == request.output_ns
    assert loaded.copied()["cache"] == X.nbytes
    assert (loaded.words[statistics.CACHE_ALL_HITS], loaded.words[statistics.CACHE_ENTRIES]) == (1, 1)


def test_other_clients_and_other_places_are_answered_too(loaded):
    memory, other = loaded.memory(), loaded.memory()
    memory.put(64, X)
    loaded.ask(add1_plan(loaded, memory))
    other.put(64, X)
    assert not loaded.ask(add1_plan(loaded, other, offset=1001))[1]
    assert np.array_equal(other.get(1001, (1, 4)), X + 1)


def test_other_data_is_run(loaded):
    memory = loaded.memory()
    plan = add1_plan(loaded, memory)
    for at in range(3):
        memory.put(64, X * at)
        assert loaded.ask(plan)[1]
        assert np.array_equal(memory.get(256, (1, 4)), X * at + 1)


def test_rows_of_a_batch_are_kept_one_by_one(tmp_path):
    with CachedModel(config_of(tmp_path, models.add1(), BATCHING)) as loaded:
        keep_rows(loaded)


def keep_rows(loaded: CachedModel) -> None:
    memory = loaded.memory()
    plan = loaded.plan(
        memory,
        [spec("x", (2, 4), offset=0, stride=32)],
        [spec("y", (2, 4), offset=512, stride=32)],
        positions=3,
        rows=2,
    )
    data = np.arange(24, dtype=np.float32).reshape(3, 2, 4)
    memory.put(0, data)
    loaded.run(*(loaded.request(plan, at) for at in range(3)))
    assert loaded.batches() == {6: 1}
    memory.put(512, 0 * data)
    for at in (2, 0, 1):
        assert not loaded.ask(plan, at)[1]
    assert np.array_equal(memory.get(512, (3, 2, 4)), data + 1)


def test_what_a_client_writes_while_its_request_is_under_way_is_not_kept(loaded, monkeypatch):
    memory = loaded.memory()
    plan = add1_plan(loaded, memory)
    memory.put(64, X)
    request = loaded.request(plan)
    request.channel = loaded.channel
    assert take_in([request]) == [request]
    memory.put(64, 10 * X)  # after the look-up, before the run
    loaded.run(request)
    memory.put(256, -X)  # after the run
    memory.put(64, X)
    assert loaded.ask(plan)[1]
    assert np.array_equal(memory.get(256, (1, 4)), X + 1)
    memory.put(64, 10 * X)
    assert not loaded.ask(plan)[1]
    assert np.array_equal(memory.get(256, (1, 4)), 10 * X + 1)


def test_shapes_that_only_a_run_tells_are_kept(tmp_path):
    with CachedModel(config_of(tmp_path, models.nonzero(), models.NONZERO_CONFIG)) as loaded:
        memory = loaded.memory()
        memory.put(0, np.array([0, 5, 0, 7], np.float32))
        plan = loaded.plan(memory, [spec("x", (4,), offset=0)], [spec("y", (1, -1), "INT64", offset=256, byte_size=64)])
        first, _ = loaded.ask(plan)
        memory.put(256, np.zeros(8))
        second, ran = loaded.ask(plan)
        assert not ran
        assert shapes_of(first) == shapes_of(second) == [(1, 2)]
        assert np.array_equal(memory.get(256, (1, 2), "INT64"), [[1, 3]])
        small = loaded.plan(memory, [spec("x", (4,), offset=0)], [spec("y", (1, -1), "INT64", offset=256, byte_size=8)])
        request = loaded.request(small)
        request.channel = loaded.channel
        assert take_in([request]) == [request]  # the run says that there is no room


def test_strings_are_kept(tmp_path):
    with CachedModel(config_of(tmp_path, models.identity(TensorProto.STRING, [None]), "max_batch_size: 0\n")) as loaded:
        memory = loaded.memory()
        data = np.frombuffer(b"\3\0\0\0abc\0\0\0\0", np.uint8)
        memory.put(0, data)
        sizes = {"byte_size": data.size}
        plan = loaded.plan(
            memory, [spec("x", (2,), "BYTES", **sizes)], [spec("y", (2,), "BYTES", offset=64, byte_size=32)]
        )
        loaded.ask(plan)
        memory.put(64, np.zeros(4))
        request, ran = loaded.ask(plan)
        assert not ran
        assert memory.bytes[64 : 64 + data.size].tobytes() == data.tobytes()
        assert shapes_of(request) == [(2,)]


def test_a_response_that_is_too_large_is_logged_once(tmp_path, caplog):
    with CachedModel(config_of(tmp_path, models.add1(), None), byte_size=260) as loaded:
        memory = loaded.memory()
        plan = add1_plan(loaded, memory)
        for _ in range(3):
            assert loaded.ask(plan)[1]
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert re.fullmatch(
        r"Failed to insert key \[[0-9a-f]{64}\] into response cache: a response of 16 bytes of model 'm' version 1 is "
        r"not cached, the cache has 260 \(--cache-config local,size=BYTES\); others like it are not mentioned",
        record.getMessage(),
    )


def test_a_truncated_file_is_left_to_the_run(loaded, tmp_path):
    with open(tmp_path / "file", "wb+") as file:
        file.truncate(4096)
        memory = loaded.memory(4096, fd=file.fileno(), kind="system")
        plan = add1_plan(loaded, memory)
        memory.put(64, X)
        assert loaded.ask(plan)[1]
        assert not loaded.ask(plan)[1]
        os.ftruncate(file.fileno(), 0)
        request = loaded.request(plan)
        request.channel = loaded.channel
        assert take_in([request]) == [request]
        loaded.run(request)
        assert b"changed size" in request.note


def test_a_closed_model_leaves_nothing_in_the_cache(loaded):
    memory = loaded.memory()
    loaded.ask(add1_plan(loaded, memory))
    assert len(loaded.cache) == 1
    loaded.model.close()
    assert len(loaded.cache) == 0


def test_a_plan_of_a_model_without_cache_is_left_alone(tmp_path):
    with Loaded(config_of(tmp_path, models.add1(), None)) as loaded:
        plan = add1_plan(loaded, loaded.memory())
        request = loaded.request(plan)
        assert take_in([request]) == [request]
        adopt(plan, loaded.model, loaded.signatures)
