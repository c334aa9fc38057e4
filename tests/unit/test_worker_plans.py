"""Plans as the worker holds them: placement, admission's questions, what may run together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from broker.worker.messages import BindPlan
from broker.worker.plans import Plan, adopt
from shm.errors import Code, InferError
from tests.fakes import models
from tests.fakes.loaded import Loaded, spec
from tests.fakes.loading import config_of


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    config = config_of(tmp_path_factory.mktemp("models"), models.add1(), "max_batch_size: 8\ndynamic_batching {}\n")
    with Loaded(config) as loaded:
        yield loaded


def simple_plan(loaded: Loaded, x: int = 0, y: int = 4096, positions: int = 4, **place: int) -> Plan:
    memory = loaded.memory()
    inputs, outputs = [spec("x", (2, 4), offset=x, stride=32)], [spec("y", (2, 4), offset=y, **place)]
    return loaded.plan(memory, inputs, outputs, positions=positions, rows=2)


def test_where_positions_and_rows_lie(loaded):
    memory = loaded.memory()
    inputs = [spec("x", (2, 4), offset=100, stride=64)]
    plan = loaded.plan(memory, inputs, [spec("y", (2, 4), offset=4096)], positions=3, rows=2)
    (x,), (y,) = plan.inputs, plan.outputs
    base = x.region.bytes.__array_interface__["data"][0]

    def place(block: np.ndarray) -> tuple[int, int]:
        return block.__array_interface__["data"][0] - base, block.size

    assert place(x.memory(0)) == (100, 32)
    assert place(x.memory(2)) == (228, 32)
    assert place(x.memory(1, 1)) == (164, 16)
    assert place(y.memory(2)) == (4160, 32)
    assert x.shape_of(0) == (2, 4)
    assert x.shape_of(1) == (1, 4)


def test_a_region_that_is_not_there_is_named(loaded):
    memory = loaded.memory()
    gone = memory.tensor(spec("x", (1, 4)))
    loaded.regions.retire(memory.info.region, memory.info.generation)
    message = BindPlan(
        session=1,
        index=0,
        generation=1,
        model="m",
        version=1,
        inputs=(gone,),
        outputs=(),
        input_positions=1,
        output_positions=1,
        rows=1,
    )
    with pytest.raises(InferError, match="Unable to find shared memory region: 'r'") as raised:
        Plan(message, loaded.regions, loaded.crowds)
    assert raised.value.code == "NOT_FOUND"


def test_the_bounds_are_checked_again(loaded):
    memory = loaded.memory(4096)
    with pytest.raises(InferError, match="Invalid offset"):
        loaded.plan(memory, [spec("x", (1, 4), offset=4084)], [spec("y", (1, 4))], rows=1)


def test_a_plan_without_a_model_is_closed_until_it_gets_one(loaded):
    plan = simple_plan(loaded)
    assert plan.closed is None
    plan.close((Code.UNAVAILABLE, "gone"))
    assert not plan.simple
    plan.simplify()
    assert not plan.simple
    adopt(plan, loaded.model, loaded.signatures)
    assert plan.closed is None
    assert plan.simple


@pytest.mark.parametrize(
    ("change", "adjacent"),
    [({}, True), ({"stride": 64}, False), ({"y": 4098}, False), ({"y": 4100}, True), ({"x": 2}, False)],
)
def test_neighbours_are_adjacent_only_where_rows_touch_and_are_aligned(loaded, change, adjacent):
    assert simple_plan(loaded, **change).adjacent is adjacent


@pytest.mark.parametrize("model", [models.gather(), models.identity(8)])
def test_copied_inputs_and_strings_are_never_adjacent(tmp_path, model):
    with Loaded(config_of(tmp_path, model)) as loaded:
        (config,) = loaded.model.config.input
        memory = loaded.memory()
        shape, size = ((1, 2), 0) if config.datatype != "BYTES" else ((1, 1), 8)
        inputs = [spec(config.name, shape, config.datatype, stride=16, byte_size=size or 16)]
        out = (1, 2, 4) if config.datatype != "BYTES" else (1, 1)
        datatype = loaded.model.config.output[0].datatype
        outputs = [spec("y", out, datatype, offset=4096, byte_size=size)]
        plan = loaded.plan(memory, inputs, outputs, positions=2, rows=1)
        assert not plan.adjacent
        assert (plan.signature is None) is (config.datatype == "BYTES")


def test_signatures_are_shapes_without_rows(loaded):
    memory = loaded.memory()

    def plan(rows: int, size: int, name: str = "y") -> Plan:
        return loaded.plan(memory, [spec("x", (rows, size))], [spec(name, (rows, size), offset=4096)], rows=rows)

    assert plan(1, 4).signature is plan(3, 4).signature
    assert plan(1, 4).signature is not plan(1, 5).signature
    memory_without_batch = loaded.plan(memory, [spec("x", (1, 4))], [spec("y", (1, 4), offset=4096)], rows=0)
    assert memory_without_batch.signature is None


def test_one_request_per_output_position(loaded):
    plan = simple_plan(loaded)
    assert plan.conflict(0, 1) == ""
    plan.busy[1] = 1
    assert "output position 1" in plan.conflict(0, 1)
    assert plan.conflict(0, 2) == ""


def test_plans_of_different_regions_on_one_memory_meet(loaded):
    """Two sessions map one file under different names, at different offsets."""
    first = loaded.memory(8192)
    second = loaded.memory(4096, fd=first.fd, offset=4096)
    inputs = [spec("x", (1, 4))]
    writer = loaded.plan(first, inputs, [spec("y", (1, 4), offset=4096)], rows=1)
    reader = loaded.plan(second, inputs, [spec("y", (1, 4), offset=64)], rows=1)
    apart = loaded.plan(second, [spec("x", (1, 4), offset=128)], [spec("y", (1, 4), offset=256)], rows=1)
    for plan in (writer, reader, apart):
        loaded.crowds.enter(plan)
    assert (writer.crowded, reader.crowded, apart.crowded) == (True, True, False)
    assert (writer.simple, reader.simple, apart.simple) == (False, False, True)
    assert writer.conflict(0, 0) == ""
    assert "in flight" in reader.conflict(0, 0)
    writer.busy[0] = 0
    assert reader.conflict(0, 0) == ""
    assert "output 'y' overlaps" in writer.conflict(0, 0), "it would write what the reader reads"
    reader.busy[0] = 0
    for plan in (writer, reader, apart):
        loaded.crowds.leave(plan)


def test_forgotten_memory_is_unmapped(tmp_path, loaded):
    memory = loaded.memory()
    inode = str(memory.info.inode)

    def mappings() -> int:
        return sum(line.split()[4] == inode for line in Path("/proc/self/maps").read_text().splitlines())

    plan = loaded.plan(memory, [spec("x", (1, 4))], [spec("y", (1, 4), offset=4096)], rows=1)
    loaded.infer(plan)
    assert plan.names(plan.inputs[0].region)
    loaded.regions.retire(memory.info.region, memory.info.generation)
    memory.bytes = None
    assert mappings() == 1
    plan.forget_memory()
    assert mappings() == 0, "nothing but the plan kept it, and no cycle"
