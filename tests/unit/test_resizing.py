"""Reloads that change nothing but the number of instances: the rest of the model is the same object, and goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.repository.config import ModelConfig
from broker.worker import backends, resizing
from broker.worker.loop import Loop
from broker.worker.messages import LoadInstances
from broker.worker.model import LoadedModel
from broker.worker.models import ModelTable
from shm.errors import Code, InferError
from shm.statistics import StatisticsPage
from tests.fakes import models
from tests.fakes.loading import config_of

GROUP = "instance_group {{ count: {} kind: KIND_CPU }}\n"
TENSORS = (("input", "x"), ("output", "y"))
BATCHING = "max_batch_size: 8\ndynamic_batching { }\n"


class Table:
    """A worker's models with one of several instances; `loads` counts those that were loaded."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.page = StatisticsPage.create()
        self.watch = os.eventfd(0, os.EFD_NONBLOCK)
        self.loop = Loop(self.page.block(0), lambda channel: None, self.watch)
        self.table = ModelTable(self.loop)
        self.loads: list[str] = []
        self.fails = ""  # the instance that cannot be loaded
        real = backends.load_instance

        def load_instance(backend: backends.Backend, context: backends.Context) -> backends.RuntimeModel:
            if context.name == self.fails:
                raise InferError(Code.INTERNAL, "no memory left")
            self.loads.append(context.name)
            return real(backend, context)

        monkeypatch.setattr(resizing.backends, "load_instance", load_instance)
        self.model = self.load(self.config(2))

    def config(self, count: int, rest: str = BATCHING) -> ModelConfig:
        return config_of(self.root, None, rest + GROUP.format(count))

    def load(self, config: ModelConfig) -> LoadedModel:
        message = LoadInstances(config=config, version=1, generation=1, blocks=())
        model = self.table.load(message, [self.page.block(index + 1) for index in range(16)])
        self.table.publish(model, list)
        return model

    def names(self) -> list[str]:
        return sorted(instance.name for instance in self.model.instances)

    def close(self) -> None:
        self.table.unload("m", 1, list)
        self.loop.scheduler.close_retired()
        os.close(self.loop.hot_set._wake)
        os.close(self.watch)
        os.close(self.page.fd)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Table]:
    models.write_model(tmp_path, "m", models.add1())
    table = Table(tmp_path, monkeypatch)
    yield table
    table.close()


def test_more_and_fewer_instances_of_a_model_that_goes_on(table):
    kept = list(table.model.instances)
    runtime = kept[1].runtime
    assert table.load(table.config(4)) is table.model
    assert table.loads == ["m_0_2", "m_0_3"]
    assert table.names() == ["m_0_0", "m_0_1", "m_0_2", "m_0_3"]
    assert table.model.instances[:2] == kept
    assert len(table.model.free) == 4
    assert table.load(table.config(1)) is table.model
    table.loop.scheduler.close_retired()
    assert table.model.instances == table.model.free == kept[:1]
    assert runtime._session is None, "its memory is given back"
    assert table.load(table.config(2)) is table.model
    assert table.loads == ["m_0_2", "m_0_3", "m_0_1"]
    assert table.loop.scheduler.retired == []
    assert '"count": 2' in table.model.config.json


def test_an_instance_that_runs_goes_when_it_is_done(table):
    first, second = table.model.instances
    runtime = second.runtime
    running = table.model.free.pop()
    table.load(table.config(1))
    table.loop.scheduler.close_retired()
    assert table.names() == (["m_0_0"] if running is first else ["m_0_0", "m_0_1"])
    assert table.loop.scheduler.shrinking == ([] if running is first else [table.model])
    table.model.free_again(running)
    table.loop.scheduler.close_retired()
    assert table.model.instances == table.model.free == [first]
    assert table.loop.scheduler.shrinking == []
    assert runtime._session is None


def test_who_is_wanted_again_before_it_is_done_stays(table):
    table.model.free.clear()  # both run
    first, second = table.model.instances
    table.load(table.config(1))
    table.model.free_again(second)
    assert table.load(table.config(3)) is table.model
    assert table.loads == ["m_0_2"]
    table.model.free_again(first)
    table.loop.scheduler.close_retired()
    assert table.names() == ["m_0_0", "m_0_1", "m_0_2"]
    assert len(table.model.free) == 3
    assert second.runtime._session is not None


def test_an_instance_that_cannot_be_loaded_leaves_all_as_it_was(table):
    table.fails = "m_0_3"
    config = table.model.config
    with pytest.raises(InferError, match="no memory left"):
        table.load(table.config(4))
    table.loop.scheduler.close_retired()
    assert table.names() == ["m_0_0", "m_0_1"]
    assert len(table.model.free) == 2
    assert table.model.config is config


def test_how_the_instances_are_named_and_grouped_does_not_matter(table):
    groups = 'instance_group [ { name: "a" count: 2 kind: KIND_CPU }, { name: "b" count: 1 kind: KIND_CPU } ]\n'
    assert table.load(config_of(table.root, None, BATCHING + groups)) is table.model
    assert table.loads == ["b_0"]


@pytest.mark.parametrize(
    "rest",
    [
        "max_batch_size: 4\ndynamic_batching { }\n",
        BATCHING + 'parameters { key: "intra_op_thread_count" value { string_value: "1" } }\n',
        "max_batch_size: 8\ndynamic_batching { preserve_ordering: true }\n",
    ],
)
def test_any_other_change_is_a_load(table, rest):
    assert table.load(table.config(4, rest)) is not table.model
    assert table.loads == []


def test_another_file_is_a_load(table):
    models.write_model(table.root, "m", models.add1())
    assert table.load(table.config(4)) is not table.model


@pytest.mark.parametrize("name", ["1/weights", "1/more/weights", "backend.py"])
def test_what_lies_beside_the_file_counts_too(table, name):
    path = table.root / "m" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("from broker.worker.backends.onnxruntime import load\n")
    rest = BATCHING + 'default_model_filename: "model.onnx"\n'
    rest += "".join(f'{side} {{ name: "{name}" data_type: TYPE_FP32 dims: -1 }}\n' for side, name in TENSORS)
    table.model = table.load(table.config(4, rest))
    assert table.load(table.config(3, rest)) is table.model
    path.write_text("from broker.worker.backends.onnxruntime import load  # changed\n")
    assert table.load(table.config(4, rest)) is not table.model


def test_more_files_than_are_compared_are_a_load(table, monkeypatch):
    monkeypatch.setattr(resizing, "MAX_FILES", 1)
    table.model = table.load(table.config(4))
    assert table.load(table.config(3)) is not table.model


@pytest.mark.parametrize("rest", [BATCHING, "max_batch_size: 8\ndynamic_batching { preserve_ordering: true }\n"])
def test_what_has_not_changed_is_not_loaded_again(table, rest):
    """As in Triton."""
    table.model = table.load(table.config(2, rest))
    kept = list(table.model.instances)
    assert table.load(table.config(2, rest)) is table.model
    assert table.model.instances == kept
    assert len(table.model.free) == 2
