"""Control mode poll in a real broker: changes of the repository, complete ones only; what is broken breaks nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

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
