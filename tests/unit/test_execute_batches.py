"""Batches on the real runtime: neighbours in place, others gathered and scattered, and what one bad row may cost."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from broker.worker import model as worker_model
from broker.worker.counting import follow
from broker.worker.plans import Plan
from shm import statistics
from shm.errors import Code
from tests.fakes import models
from tests.fakes.loaded import Loaded, Memory, shapes_of, spec, text_of
from tests.fakes.loading import config_of
from tests.fakes.models import tensor

Load = Callable[..., Loaded]
X = np.array([[1, 2, 3, 4]], np.float32)
BATCHING = "max_batch_size: 8\ndynamic_batching {}\n"


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    opened: list[Loaded] = []

    def load(model: onnx.ModelProto, config: str | None = BATCHING) -> Loaded:
        opened.append(Loaded(config_of(tmp_path / str(len(opened)), model, config)))
        return opened[-1]

    yield load
    for loaded in opened:
        loaded.__exit__(None, None, None)


def rows_at(loaded: Loaded, memory: Memory, at: int = 0, stride: int = 16, rows: int = 1) -> Plan:
    """A plan of eight positions, inputs from `at` and outputs 4096 bytes on; what lies at position k is k, k, …"""
    plan = loaded.plan(
        memory,
        [spec("x", (rows, 4), offset=at, stride=stride)],
        [spec("y", (rows, 4), offset=at + 4096, stride=stride)],
        positions=8,
        rows=rows,
    )
    for position in range(8):
        memory.put(at + position * stride, np.full((rows, 4), position, np.float32))
    return plan


def results(memory: Memory, at: int = 0, stride: int = 16) -> list[float]:
    """The first element of every output position."""
    return [float(memory.get(at + 4096 + position * stride, (1,))[0]) for position in range(8)]


@pytest.mark.parametrize("order", [(2, 3, 4), (4, 2, 3), (3, 4, 2)])
def test_neighbours_run_in_place_in_whatever_order_they_came(load, order):
    loaded = load(models.add1())
    memory = loaded.memory()
    plan = rows_at(loaded, memory)
    requests = [loaded.request(plan, position) for position in order]
    loaded.run(*requests)
    assert results(memory) == [0, 0, 3, 4, 5, 0, 0, 0]
    assert [request.code for request in requests] == [Code.OK] * 3
    assert [request.copied for request in requests] == [0, 0, 0]
    assert loaded.copied() == {}
    assert loaded.batches() == {3: 1}
    assert loaded.count(statistics.SUCCESS) == loaded.count(statistics.INFERENCES) == 3
    assert loaded.count(statistics.EXECUTIONS) == 1
    took = requests[0].infer_ns
    assert [request.infer_ns for request in requests] == [took] * 3
    assert loaded.count(statistics.INFER_NS) == 3 * took  # each spent the whole batch's time
    loaded.run(*[loaded.request(plan, position) for position in order])
    assert len(plan.bindings) == 1


def test_neighbours_may_be_shifted(load):
    loaded = load(models.add1())
    memory = loaded.memory()
    plan = rows_at(loaded, memory)
    loaded.run(*[loaded.request(plan, position, position - 2) for position in (5, 6, 7)])
    assert results(memory) == [0, 0, 0, 6, 7, 8, 0, 0]
    assert loaded.copied() == {}


def test_neighbours_of_several_rows(load):
    loaded = load(models.add1())
    memory = loaded.memory()
    plan = rows_at(loaded, memory, stride=32, rows=2)
    loaded.run(loaded.request(plan, 1), loaded.request(plan, 2))
    assert results(memory, stride=32) == [0, 2, 3, 0, 0, 0, 0, 0]
    assert loaded.batches() == {4: 1}
    assert loaded.copied() == {}


@pytest.mark.parametrize(
    "pairs",
    [
        [(0, 0), (2, 2)],  # a gap
        [(0, 1), (1, 0)],  # crossed
        [(0, 0), (1, 2)],  # outputs apart
        [(3, 3), (3, 4)],  # one input twice
        [(7, 0), (0, 1)],  # around the end
    ],
)
def test_what_only_looks_like_neighbours_is_gathered(load, pairs):
    loaded = load(models.add1())
    memory = loaded.memory()
    plan = rows_at(loaded, memory)
    requests = [loaded.request(plan, i, o) for i, o in pairs]
    loaded.run(*requests)
    for i, o in pairs:
        assert results(memory)[o] == i + 1
    assert [request.copied for request in requests] == [32, 32]
    assert loaded.copied() == {"gather": 32, "scatter": 32}
    assert loaded.batches() == {2: 1}


def test_fewer_rows_than_prepared_are_no_neighbours(load):
    loaded = load(models.add1())
    memory = loaded.memory()
    plan = rows_at(loaded, memory, stride=32, rows=2)
    memory.bytes[4096:4160] = 0xEE
    loaded.run(loaded.request(plan, 0, rows=1), loaded.request(plan, 1, rows=2))
    assert memory.get(4096, (1, 4)).tolist() == [[1] * 4]
    assert memory.bytes[4112:4128].tolist() == [0xEE] * 16
    assert memory.get(4128, (2, 4)).tolist() == [[2] * 4] * 2
    assert loaded.batches() == {3: 1}
    assert loaded.copied() == {"gather": 48, "scatter": 48}


def test_rows_that_are_not_back_to_back_are_gathered(load):
    loaded = load(models.add1())
    memory = loaded.memory()
    plan = rows_at(loaded, memory, stride=64)
    loaded.run(loaded.request(plan, 0), loaded.request(plan, 1))
    assert results(memory, stride=64)[:2] == [1, 2]
    assert loaded.copied() == {"gather": 32, "scatter": 32}


def test_plans_of_two_sessions_share_a_batch(load):
    loaded = load(models.add1())
    mine, theirs = loaded.memory(), loaded.memory()
    plans = rows_at(loaded, mine), rows_at(loaded, theirs, at=1)  # the other is misaligned, which gathering mends
    assert plans[0].signature is plans[1].signature
    requests = [loaded.request(plans[k % 2], k) for k in range(4)]
    loaded.run(*requests)
    assert results(mine)[:4] == [1, 0, 3, 0]
    assert results(theirs, at=1)[:4] == [0, 2, 0, 4]
    assert loaded.copied() == {"gather": 64, "scatter": 64}
    assert loaded.batches() == {4: 1}


def test_copied_inputs_are_gathered_never_in_place(load):
    loaded = load(models.gather())
    memory = loaded.memory()
    inputs = [spec("index", (1, 2), "INT64", stride=16)]
    plan = loaded.plan(memory, inputs, [spec("y", (1, 2, 4), offset=4096)], positions=8, rows=1)
    for position in range(8):
        memory.put(16 * position, np.array([[position, position + 8]], np.int64))
    loaded.run(loaded.request(plan, 0), loaded.request(plan, 1))
    assert memory.get(4096, (2, 2, 4))[:, :, 0].tolist() == [[0, 8], [1, 9]]
    assert loaded.copied() == {"gather": 32, "scatter": 64}


def test_only_the_bad_row_fails(load):
    loaded = load(models.gather())
    memory = loaded.memory()
    inputs = [spec("index", (1, 2), "INT64", stride=16)]
    plan = loaded.plan(memory, inputs, [spec("y", (1, 2, 4), offset=4096)], positions=4, rows=1)
    for position, index in enumerate((1, 99, 3)):
        memory.put(16 * position, np.array([[index, 0]], np.int64))
    requests = [loaded.request(plan, position) for position in range(3)]
    loaded.run(*requests)
    assert [request.code for request in requests] == [Code.OK, Code.INTERNAL, Code.OK]
    assert "idx=99" in text_of(requests[1])
    assert memory.get(4096, (3, 2, 4))[:, 0, 0].tolist() == [1, 0, 3]
    assert (loaded.count(statistics.SUCCESS), loaded.count(statistics.FAIL)) == (2, 1)
    assert loaded.batches() == {1: 2}
    assert loaded.count(statistics.BATCH) == 0
    assert [request.note for request in requests[::2]] == [b"", b""]


def test_every_success_is_counted_once_by_its_duration(load):
    loaded = load(models.gather())
    instance = loaded.model.instances[0]
    instance.count_batch(4, 4, 4 * 15_000, 1_000, 3_000, 500)  # each waited 15 µs and took 4.5
    instance.count_inline(1, 9_000)
    instance.count_inline(1, 3_000_000_000)
    latency = [loaded.count(statistics.LATENCY + at) for at in range(statistics.LATENCIES)]
    assert {bound: n for bound, n in zip(statistics.BOUNDS_NS, latency, strict=False) if n} == {
        10_000: 1,
        20_000: 4,
        5_000_000_000: 1,
    }
    assert sum(latency) == loaded.count(statistics.SUCCESS)
    assert loaded.count(statistics.INFER_NS) == 4 * 3_000 + 9_000 + 3_000_000_000


def open_rows() -> onnx.ModelProto:
    """The first columns of x, as many as its largest value says. x: FP32 [batch, 4], y: FP32 [batch, ?]."""
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["top"], keepdims=0),
        helper.make_node("Cast", ["top"], ["whole"], to=TensorProto.INT64),
        helper.make_node("Unsqueeze", ["whole", "zero"], ["end"]),
        helper.make_node("Slice", ["x", "zero", "end", "one"], ["y"]),
    ]
    constants = {"zero": np.zeros(1, np.int64), "one": np.ones(1, np.int64)}
    return models.build(nodes, [tensor("x", ["batch", 4])], [tensor("y", ["batch", None])], constants)


def test_open_outputs_of_a_batch_are_split_by_rows(load):
    loaded = load(open_rows())
    memory = loaded.memory()
    small, large = (
        loaded.plan(
            memory,
            [spec("x", (rows, 4), offset=at)],
            [spec("y", (rows, -1), offset=at + 4096, byte_size=64)],
            rows=rows,
        )
        for rows, at in ((1, 0), (2, 512))
    )
    memory.put(0, np.array([[0, 1, 2, 3]], np.float32))  # the largest of all decides: three columns are left
    memory.put(512, np.array([[1, 1, 1, 1], [2, 0, 2, 0]], np.float32))
    requests = [loaded.request(small), loaded.request(large)]
    loaded.run(*requests)
    assert [shapes_of(request) for request in requests] == [[(1, 3)], [(2, 3)]]
    assert memory.get(4096, (1, 3)).tolist() == [[0, 1, 2]]
    assert memory.get(4608, (2, 3)).tolist() == [[1, 1, 1], [2, 0, 2]]
    assert loaded.copied() == {"gather": 48, "scatter": 36}
    assert [request.copied for request in requests] == [28, 56]


def test_room_that_is_too_small_fails_its_own_request_only(load):
    loaded = load(open_rows())
    memory = loaded.memory()
    plans = [
        loaded.plan(
            memory, [spec("x", (1, 4), offset=at)], [spec("y", (1, -1), offset=at + 4096, byte_size=room)], rows=1
        )
        for at, room in ((0, 16), (512, 4), (1024, 16))
    ]
    for at in (0, 512, 1024):
        memory.put(at, np.full((1, 4), 2, np.float32))
    requests = [loaded.request(plan) for plan in plans]
    loaded.run(*requests)
    assert [request.code for request in requests] == [Code.OK, Code.INVALID_ARG, Code.OK]
    assert "'y' (4 bytes) should be at least 8 bytes" in text_of(requests[1])
    assert [shapes_of(request) for request in requests[::2]] == [[(1, 2)], [(1, 2)]]


def test_a_truncated_region_fails_its_own_requests_only(load):
    loaded = load(models.add1())
    fd = os.memfd_create("test-system", os.MFD_CLOEXEC)
    os.ftruncate(fd, 16384)
    theirs, mine = loaded.memory(16384, fd=fd, kind="system"), loaded.memory()
    bad, good = rows_at(loaded, theirs), rows_at(loaded, mine)
    os.ftruncate(fd, 4096)
    requests = [loaded.request(good, 1), loaded.request(bad, 1), loaded.request(good, 3)]
    loaded.run(*requests)
    assert [request.code for request in requests] == [Code.OK, Code.INTERNAL, Code.OK]
    assert "changed size" in text_of(requests[1])
    assert results(mine) == [0, 2, 0, 4, 0, 0, 0, 0]
    os.close(fd)


def test_all_plans_of_an_instance_copy_to_the_same_memory(load):
    loaded = load(models.gather(), None)
    memory = loaded.memory()
    plans = []
    for size in range(1, 200):
        outputs = [spec("y", (1, size, 4), offset=4096)]
        plans.append(loaded.plan(memory, [spec("index", (1, size), "INT64")], outputs, rows=1))
    memory.put(0, np.arange(200, dtype=np.int64) % 64)
    for plan in plans + plans[::-1]:
        loaded.infer(plan)
        size = plan.inputs[0].shape[1]
        assert memory.get(4096, (1, size, 4))[0, :, 0].tolist() == [k % 64 for k in range(size)]
    stagings = [plan.bindings[next(iter(plan.bindings))].copies[0][0] for plan in plans]
    owners = {id(staging.base): staging.base for staging in stagings}.values()
    assert sum(owner.nbytes for owner in owners) < 4 * 200 * 8 + 64 * len(owners)
    (instance,) = loaded.model.instances
    assert np.shares_memory(instance.scratch("input", "index", 8), stagings[-1])
    assert not np.shares_memory(instance.scratch("output", "index", 8), stagings[-1])


def test_batches_of_all_signatures_are_gathered_in_the_same_memory(load):
    loaded = load(models.add1())
    memory = loaded.memory()
    for size in (8, 1, 5, 8):
        inputs, outputs = [spec("x", (1, size), stride=64)], [spec("y", (1, size), offset=4096, stride=64)]
        plan = loaded.plan(memory, inputs, outputs, positions=2, rows=1)
        for position in range(2):
            memory.put(64 * position, np.full((1, size), size * 10 + position, np.float32))
        loaded.run(loaded.request(plan, 0), loaded.request(plan, 1))
        assert memory.get(4096, (1, size)).tolist() == [[size * 10 + 1] * size]
        assert memory.get(4160, (1, size)).tolist() == [[size * 10 + 2] * size]
    kept = list(loaded.model.instances[0].buffers.values())
    assert len(kept) == 3
    for other in kept[1:]:
        assert np.shares_memory(kept[0].inputs[0], other.inputs[0])
        assert np.shares_memory(kept[0].outputs[0], other.outputs[0])


def test_buffers_are_kept_for_some_signatures_only(load, monkeypatch):
    monkeypatch.setattr(worker_model, "MAX_KINDS", 2)
    loaded = load(models.add1())
    memory = loaded.memory()
    for size in (1, 2, 3, 1):
        inputs, outputs = [spec("x", (1, size), stride=64)], [spec("y", (1, size), offset=4096, stride=64)]
        plan = loaded.plan(memory, inputs, outputs, positions=2, rows=1)
        for position in range(2):
            memory.put(64 * position, np.full((1, size), size * 10 + position, np.float32))
        loaded.run(loaded.request(plan, 0), loaded.request(plan, 1))
        assert memory.get(4096, (1, size)).tolist() == [[size * 10 + 1] * size]
        assert memory.get(4160, (1, size)).tolist() == [[size * 10 + 2] * size]
        assert len(loaded.model.instances[0].buffers) <= 2
    assert loaded.batches() == {2: 4}


def test_what_a_run_takes_is_not_what_it_takes_when_its_core_is_taken_away():
    known = 0
    for took in [4_000] * 3 + [5_000_000] + [4_000] * 8:
        known = follow(known, took)
    assert known < 10_000
    for took in [1_000_000] * 40:
        known = follow(known, took)
    assert known > 800_000
