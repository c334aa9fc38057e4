"""Control mode poll in a real broker: changes of the repository, complete ones only; what is broken breaks nothing."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import clientlib
from clientlib import Client
from shm.errors import InferError
from tests.fakes import models
from tests.fakes.broker import Broker, eventually

X = np.ones((1, 4), np.float32)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return models.write_repository(tmp_path / "repository", {"m": models.add1(), "leaves": models.add1()})


@pytest.fixture
def client(repository: Path, tmp_path: Path) -> Iterator[Client]:
    (tmp_path / "more").mkdir()
    flags = ("--model-control-mode=poll", "--repository-poll-secs=1", f"--model-repository={tmp_path / 'more'}")
    with Broker(repository, tmp_path / "run", *flags) as broker:
        broker.ready()
        with clientlib.connect(f"ipc://{broker.directory}") as client:
            yield client


def state(client: Client, name: str) -> str:
    found = client.models().get(name)
    return f"{found.version} {found.state} {found.reason}".strip() if found else ""


def test_changes_are_followed_and_what_is_broken_serves_on(client: Client, repository: Path) -> None:
    with pytest.raises(InferError, match="explicit model load / unload is not allowed if polling is enabled"):
        client.load("m")
    # Broken, new and gone at once.
    (repository / "m" / "1" / "model.onnx").write_bytes(b"not a model")
    (repository / "sick").mkdir()
    models.write_model(repository, "new", models.add1())
    shutil.rmtree(repository / "leaves")
    eventually(lambda: state(client, "new") == "1 READY")
    eventually(lambda: state(client, "leaves") == "1 UNAVAILABLE unloaded")
    eventually(lambda: "UNAVAILABLE" in state(client, "sick"))
    assert np.array_equal(client.infer("m", {"x": X})["y"], X + 1), "the old one serves"
    eventually(lambda: state(client, "m").startswith("1 READY a later load failed: "), "and says so")
    # A version that is copied piece by piece is taken when it is complete.
    whole = models.matmul().SerializeToString()
    path = repository / "m" / "2" / "model.onnx"
    path.parent.mkdir()
    path.write_bytes(whole[: len(whole) // 2])
    path.write_bytes(whole)
    eventually(lambda: state(client, "m") == "2 READY")
    shutil.rmtree(repository / "m" / "2")
    models.write_model(repository, "m", models.add1())
    eventually(lambda: state(client, "m") == "1 READY", "the highest version that is ready")
    assert np.array_equal(client.infer("m", {"x": X})["y"], X + 1)
    models.write_model(repository, "sick", models.add1())
    eventually(lambda: state(client, "sick") == "1 READY")
    # A model that is in two repositories may be either, and is served when it is one again.
    shutil.copytree(repository / "m", repository.parent / "more" / "m")
    eventually(lambda: "UNAVAILABLE" in state(client, "m"), "is served no more")
    shutil.rmtree(repository / "m")
    eventually(lambda: state(client, "m") == "1 READY")


def test_what_is_moved_into_place_and_what_was_copied_by_half(client: Client, repository: Path) -> None:
    problems: list[BaseException] = []
    seen: set[float] = set()
    stop = threading.Event()

    def ask() -> None:
        try:
            while not stop.is_set():
                seen.add(float(client.infer("m", {"x": X})["y"][0, 0]))
        except BaseException as error:
            problems.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        # A whole model directory is exchanged by two renames; between them there is none.
        models.write_model(repository.parent / "staged", "m", add(10.0))
        (repository / "m").rename(repository.parent / "old")
        (repository.parent / "staged" / "m").rename(repository / "m")
        eventually(lambda: problems or 11.0 in seen, "the new one answers")
        # A copy that was broken off stays so over several looks: the version is not served, all others are.
        whole = add(20.0).SerializeToString()
        half = repository / "m" / "2" / "model.onnx"
        half.parent.mkdir()
        half.write_bytes(whole[: len(whole) // 2])
        models.write_model(repository, "other", models.add1())
        eventually(lambda: problems or state(client, "other") == "1 READY", "polling goes on")
        eventually(lambda: problems or state(client, "m").startswith("1 READY"))
        seen.clear()
        eventually(lambda: problems or 11.0 in seen)
        assert 21.0 not in seen
        half.write_bytes(whole)
        eventually(lambda: problems or 21.0 in seen, "it is taken when it is whole")
        # So is a file that is replaced by a rename.
        staged = repository.parent / "model.onnx"
        staged.write_bytes(add(30.0).SerializeToString())
        staged.rename(half)
        eventually(lambda: problems or 31.0 in seen)
    finally:
        stop.set()
        asking.join(30)
    assert not problems, problems[0]


def add(number: float) -> onnx.ModelProto:
    """y = x + number."""
    return models.build(
        [helper.make_node("Add", ["x", "c"], ["y"])],
        [models.tensor("x", ["batch", "n"])],
        [models.tensor("y", ["batch", "n"])],
        {"c": np.full(1, number, np.float32)},
    )
