"""A model is READY when every instance in every one of its workers has run its samples, and not if one fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import clientlib
from clientlib import Client
from shm.errors import InferError
from tests.fakes.broker import Broker

CONFIG = """backend: "told" max_batch_size: 0
input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }
instance_group [ { name: "one" count: 2 kind: KIND_CPU }, { name: "two" count: 1 kind: KIND_CPU } ]
parameters { key: "worker_group" value { string_value: "left,right" } }
model_warmup [
  { name: "first" inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 4 ] zero_data: true } } },
  { name: "second" count: 2 inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 4 ] random_data: true } } }
]
"""
BACKEND = """
import os

def load(context):
    return Model(os.path.join(context.directory, "..", ".."), context.group.name)

class Model:
    def __init__(self, root, group):
        self.root, self.group = root, group

    def bind(self, inputs, outputs):
        return Binding(self, inputs[0].memory.view("<f4"), outputs[0])

    def close(self):
        pass

class Binding:
    def __init__(self, model, x, y):
        self.model, self.x, self.y = model, x, y

    def run(self):
        line = f"{self.model.group} {os.getpid()} {id(self.model)} {'zeros' if not self.x.any() else 'random'}\\n"
        with open(os.path.join(self.model.root, "runs"), "a") as file:
            file.write(line)
        if os.path.exists(os.path.join(self.model.root, f"break-{self.model.group}")) and self.x.any():
            raise ValueError("this one is broken")
        self.result = self.x.reshape(4).copy()
        if self.y.memory is not None:
            self.y.memory.view("<f4")[:] = self.result

    def results(self):
        return [self.result] if self.y.memory is None else []
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    (root / "told" / "1").mkdir(parents=True)
    (root / "told" / "config.pbtxt").write_text(CONFIG)
    (root / "told" / "backend.py").write_text(BACKEND)
    return root


@pytest.fixture
def client(root: Path, tmp_path: Path) -> Iterator[Client]:
    with Broker(root, tmp_path / "run", "--model-control-mode=explicit") as broker:
        broker.ready()
        with clientlib.connect(f"ipc://{broker.directory}") as client:
            yield client


def runs(root: Path) -> list[list[str]]:
    """Of each run: instance group, process, instance, what it was given."""
    return [line.split() for line in (root / "runs").read_text().splitlines()]


def test_every_instance_of_every_worker(root: Path, client: Client) -> None:
    client.load("told")
    told = runs(root)
    assert Counter(group for group, *_ in told) == {"one": 6, "two": 3}
    assert len({process for _, process, *_ in told}) == 2
    by_instance: dict[tuple[str, str], list[str]] = {(process, instance): [] for _, process, instance, _ in told}
    for _, process, instance, given in told:
        by_instance[process, instance].append(given)
    assert list(by_instance.values()) == [["zeros", "random", "random"]] * 3
    assert client.statistics("told")[0]["execution_count"] == 0


@pytest.mark.parametrize("group", ["one", "two"])
def test_a_sample_that_fails_anywhere_is_named_and_nothing_serves(root: Path, client: Client, group: str) -> None:
    (root / f"break-{group}").touch()
    with pytest.raises(InferError, match=r"failed to run warmup sample 'second': .*this one is broken"):
        client.load("told")
    assert client.models()["told"].state == "UNAVAILABLE"
    with pytest.raises(InferError, match="warmup sample 'second'"):
        client.model("told")
    (root / f"break-{group}").unlink()
    client.load("told")
    assert client.models()["told"].state == "READY"
