"""Reloads: which model a plan runs on while one replaces another, and that a closed plan stays closed."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import onnx
import pytest

from broker.repository.scheduling import Control, SequenceBatching
from broker.worker import models as worker_models
from broker.worker.loop import Loop
from broker.worker.messages import LoadInstances
from broker.worker.model import LoadedModel, not_loaded
from broker.worker.models import ModelTable, changed
from broker.worker.plans import adopt
from shm import statistics
from shm.errors import Code
from tests.fakes import models
from tests.fakes.loaded import Loaded, spec
from tests.fakes.loading import config_of
from tests.unit.test_execute_batches import BATCHING, X, results, rows_at

Load = Callable[..., Loaded]
CORRELATION = Control(name="id", kind="CONTROL_SEQUENCE_CORRID", datatype="BYTES")


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    with contextlib.ExitStack() as opened:

        def load(model: onnx.ModelProto) -> Loaded:
            config = config_of(tmp_path / str(len(list(tmp_path.iterdir()))), model, BATCHING)
            return opened.enter_context(Loaded(config))

        yield load


@pytest.fixture
def table() -> Iterator[ModelTable]:
    watch = os.eventfd(0, os.EFD_NONBLOCK)
    loop = Loop(memoryview(bytearray(4096)).cast("Q"), lambda channel: None, watch)
    yield ModelTable(loop)
    os.close(loop.hot_set._wake)
    os.close(watch)


def load_into(table: ModelTable, loaded: Loaded) -> LoadedModel:
    """The model of `loaded` once more, not published."""
    message = LoadInstances(config=loaded.model.config, version=1, generation=1, blocks=(0,))
    return table.load(message, [loaded.page.block(0)])


def test_queued_requests_of_a_replaced_model_run_on_it_and_leave_nothing(load):
    loaded = load(models.add1())
    memory = loaded.memory()
    plan = rows_at(loaded, memory)
    loaded.infer(plan)
    replacement = loaded.load(loaded.model.config)
    adopt(plan, replacement, loaded.signatures)
    assert not plan.bindings
    loaded.infer(plan, 1)
    loaded.run(loaded.request(plan, 2), loaded.request(plan, 3))
    assert results(memory)[:4] == [1, 2, 3, 4]
    assert not plan.bindings, "a binding would keep the old model in memory"
    loaded.run(loaded.request(plan, 4), model=replacement)
    loaded.run(loaded.request(plan, 5), loaded.request(plan, 6), model=replacement)
    assert results(memory)[4:7] == [5, 6, 7]
    assert len(plan.bindings) == 2
    assert loaded.count(statistics.SUCCESS) == 7
    replacement.close()


def test_the_policy_is_that_of_the_model_that_runs(load):
    """A reload that allows what was copied before must not lift the copy for what is still queued."""
    loaded = load(models.topk())
    memory = loaded.memory()
    outputs = [spec("values", (1, 2), offset=4096)]
    plan = loaded.plan(memory, [spec("x", (1, 4), stride=16)], outputs, positions=8, rows=1)
    free = loaded.load(loaded.model.config)
    free.copied = frozenset()
    adopt(plan, free, loaded.signatures)
    assert plan.adjacent
    memory.put(0, X)
    memory.put(16, 2 * X)
    loaded.run(loaded.request(plan, 0), loaded.request(plan, 1))
    assert memory.get(4096, (2, 2)).tolist() == [[4, 3], [8, 6]]
    assert loaded.copied()["gather"] == 32
    loaded.infer(plan)
    assert loaded.copied()["policy"] == 16
    free.close()


def test_a_reload_rebinds_plans_or_closes_those_that_do_not_fit(load, table):
    loaded, other = load(models.add1()), load(models.two_input())
    memory = loaded.memory()
    plan = rows_at(loaded, memory)
    plan.model = None
    published = [load_into(table, what) for what in (loaded, loaded, other, loaded)]
    for model in published[:2]:
        table.publish(model, lambda: [plan])
        assert (plan.closed, plan.model) == (None, model)
        loaded.run(loaded.request(plan), model=model)
    table.publish(published[2], lambda: [plan])
    assert plan.closed == changed("m")
    assert not plan.bindings
    assert not plan.simple
    table.publish(published[3], lambda: [plan])
    assert (plan.closed, plan.model) == (None, published[3])
    loaded.run(loaded.request(plan), model=published[3])
    table.unload("m", 1, lambda: [plan])
    assert plan.closed == not_loaded("m")
    assert not plan.bindings
    assert table.instances == 0
    for model in published:
        model.close()


@pytest.mark.parametrize("missing", [False, True])
def test_a_load_does_not_open_a_plan_that_is_closed_meanwhile(load, table, monkeypatch, missing):
    loaded = load(models.add1())
    plan = rows_at(loaded, loaded.memory())
    models_of = [load_into(table, loaded) for _ in range(2)]
    if not missing:
        table.publish(models_of[0], lambda: [plan])
    else:
        plan.close(not_loaded("m"))
    gone = (Code.NOT_FOUND, "the region went")
    closing = threading.Thread(target=table.close, args=(plan, gone))

    def adopt_slowly(*args: object) -> None:
        closing.start()
        closing.join(0.05)  # it ends only when the load is through with the plan
        adopt(*args)

    monkeypatch.setattr(worker_models, "adopt", adopt_slowly)
    table.publish(models_of[1], lambda: [plan])
    closing.join()
    assert plan.closed == gone
    assert not plan.simple
    monkeypatch.setattr(worker_models, "adopt", adopt)
    table.publish(models_of[0], lambda: [plan])
    assert plan.closed == gone, "for good"
    for model in models_of:
        model.close()


def test_a_plan_without_a_model_is_closed_for_good_too(load, table):
    loaded = load(models.add1())
    plan = rows_at(loaded, loaded.memory())
    plan.close(not_loaded("m"))
    table.close(plan, (Code.NOT_FOUND, "the plan was released"))
    model = load_into(table, loaded)
    table.publish(model, lambda: [plan])
    assert plan.closed == (Code.NOT_FOUND, "the plan was released")
    model.close()


def test_signatures_are_bounded_and_only_cost_batches(load, table, monkeypatch):
    monkeypatch.setattr(worker_models, "MAX_SIGNATURES", 3)
    loaded = load(models.add1())
    memory = loaded.memory()
    table.publish(load_into(table, loaded), list)
    plans = []
    for size in (1, 2, 3, 4, 5, 6, 7, 1):
        plan = loaded.plan(memory, [spec("x", (1, size))], [spec("y", (1, size), offset=4096)], rows=1)
        plan.model = None
        table.bind(plan)
        plans.append(plan)
        assert len(table._signatures) <= 4
    assert plans[0].signature == plans[-1].signature
    assert plans[0].signature is not plans[-1].signature
    assert plans[0].signature != plans[1].signature


@pytest.mark.parametrize(
    "change", ["none", "decoupled", "not decoupled", "batch", "input", "dims", "needed", "output", "outputs", "id"]
)
def test_a_plan_that_was_checked_against_the_model_before_is_closed(load, table, change):
    loaded = load(models.add1())
    config = loaded.model.config
    (x,), (y,) = config.input, config.output
    if change == "not decoupled":
        config = msgspec.structs.replace(config, decoupled=True)
    if change == "needed":
        config = msgspec.structs.replace(config, input=(msgspec.structs.replace(x, optional=True),))
    changes = {
        "decoupled": {"decoupled": True},
        "not decoupled": {"decoupled": False},
        "batch": {"max_batch_size": 0},
        "input": {"input": (msgspec.structs.replace(x, datatype="INT32"),)},
        "dims": {"input": (msgspec.structs.replace(x, dims=(8,)),)},
        "needed": {"input": (x,)},
        "output": {"output": (msgspec.structs.replace(y, datatype="INT32"),)},
        "outputs": {"output": (msgspec.structs.replace(y, name="z"),)},
        "id": {"sequence_batching": SequenceBatching(control_input=(CORRELATION,))},
    }
    loaded.model.config = msgspec.structs.replace(config, **changes.get(change, {}))
    model = load_into(table, loaded)
    memory = loaded.memory()
    plan = loaded.plan(memory, [spec("x", (1, 4))], [spec("y", (1, 4), offset=4096)], rows=1)
    plan.interface = config.interface
    plan.model, plan.closed = None, not_loaded("m")
    table.publish(model, list)
    table.bind(plan)
    assert plan.closed == (None if change == "none" else changed("m"))
    model.close()
