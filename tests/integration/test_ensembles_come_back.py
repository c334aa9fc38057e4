"""Ensembles whose members go and come: they follow, unless somebody has unloaded them. Real loader, real workers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.models import Models
from tests.fakes import models
from tests.fakes.processes import in_loop, subreaper
from tests.integration.test_models import refusal, serving
from tests.unit.test_ensemble_members import write_ensemble


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    with subreaper():
        yield


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    models.write_repository(tmp_path, {"a": models.add1(), "b": models.add1()})
    write_ensemble(tmp_path, "inner", "a", "b")
    write_ensemble(tmp_path, "outer", "inner", "b")
    return tmp_path


def ready(served: Models) -> set[str]:
    return {row.name for row in served.all() if row.state == "READY"}


@in_loop
async def test_an_ensemble_comes_back_with_the_member_that_took_it_away(repository: Path) -> None:
    async with serving(repository) as served:
        await served.load("outer")
        assert ready(served) == {"a", "b", "inner", "outer"}
        await served.unload("a")
        assert ready(served) == {"b"}
        reasons = {row.name: row.reason for row in served.all()}
        assert reasons["inner"] == "unloaded: ensemble 'inner' depends on 'a' which has no loaded version."
        assert reasons["outer"] == "unloaded: ensemble 'outer' depends on 'inner' which has no loaded version."
        await served.load("a")
        assert ready(served) == {"a", "b", "inner", "outer"}


@in_loop
async def test_an_ensemble_that_was_unloaded_stays_away(repository: Path) -> None:
    async with serving(repository) as served:
        await served.load("outer")
        await served.unload("outer")
        await served.unload("a")
        await served.load("a")
        assert ready(served) == {"a", "b", "inner"}
        await served.unload("a")
        await served.unload("inner")  # it does not serve, and is to stay away all the same
        await served.load("a")
        assert ready(served) == {"a", "b"}


@in_loop
async def test_an_ensemble_that_could_not_be_loaded_for_a_member_is_when_that_is_there(repository: Path) -> None:
    (repository / "a" / "1" / "model.onnx").write_bytes(b"not a model")
    async with serving(repository) as served:
        assert (
            "ensemble 'inner' depends on 'a' which has no loaded version."
            in (await refusal(served.load("inner"))).message
        )
        models.write_model(repository, "a", models.add1())
        await served.load("a")
        assert ready(served) == {"a", "b", "inner"}
        assert [row.reason for row in served.all()] == [""] * 3


@in_loop
async def test_an_ensemble_whose_member_a_worker_lost(repository: Path) -> None:
    async with serving(repository, "inner") as served:
        version = served.known["a"].versions[1]
        (worker,) = version.workers
        worker._give_up(("a", 1, version.generation), "a test")
        while served._unawaited._tasks:
            await next(iter(served._unawaited._tasks))
        assert ready(served) == {"b"}
        await served.load("a")
        assert ready(served) == {"a", "b", "inner"}


@in_loop
async def test_the_same_while_repositories_are_polled(repository: Path) -> None:
    async with serving(repository, control_mode="poll") as served:
        assert ready(served) == {"a", "b", "inner", "outer"}
        shutil.move(repository / "a", repository.parent / "elsewhere")
        while await served._poll.look():
            pass
        assert ready(served) == {"b"}
        shutil.move(repository.parent / "elsewhere", repository / "a")
        shutil.rmtree(repository / "outer")
        while await served._poll.look():
            pass
        assert ready(served) == {"a", "b", "inner"}
