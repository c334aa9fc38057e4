"""Models from a real repository through the real loader into real workers with ONNX Runtime."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from broker.models import Models
from broker.repository.protocol import LoadRequest
from broker.statistics_blocks import StatisticsBlocks
from broker.workers import Workers
from shm.errors import InferError
from shm.statistics import StatisticsPage
from tests.fakes.models import add1, matmul, write_model
from tests.fakes.processes import in_loop, subreaper, until


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    with subreaper():
        yield


@contextlib.asynccontextmanager
async def serving(
    root: Path, *startup: str, control_mode: str = "explicit", repositories: Sequence[Path] = ()
) -> AsyncIterator[Models]:
    page = StatisticsPage.create()
    workers = Workers(StatisticsBlocks(page))
    request = LoadRequest(repositories=tuple(map(str, repositories or (root,))))
    models = Models(workers, request, control_mode=control_mode, startup_models=startup)
    progress: list[tuple[int, int]] = []
    try:
        await models.start(lambda done, total: progress.append((done, total)))
        assert progress == sorted(progress)
        assert progress[-1][0] == progress[-1][1]
        yield models
    finally:
        await models.stop()
        await workers.stop(10.0)
        os.close(page.fd)


async def refusal(awaitable) -> InferError:
    with pytest.raises(InferError) as raised:
        await awaitable
    return raised.value


def lookup_error(models: Models, model: str, version: str = "") -> tuple[str, str]:
    with pytest.raises(InferError) as raised:
        models.metadata(model, version)
    return raised.value.code, raised.value.message


@in_loop
async def test_what_is_loaded_at_start_is_described(tmp_path: Path) -> None:
    write_model(tmp_path, "add1", add1())
    write_model(tmp_path, "broken", b"not a model")
    write_model(tmp_path, "tpu", add1(), config='backend: "tpu"')
    async with serving(tmp_path, control_mode="none") as models:
        add = models.metadata("add1")
        assert (add.name, add.version, add.versions, add.state) == ("add1", "1", ("1",), "READY")
        assert add.workers == ("cpu/default",)
        assert (add.inputs[0].shape, add.inputs[0].symbols) == ((-1, -1), ("*batch", "n"))
        assert add.outputs[0].symbols == ("*batch", "n")
        assert models.workers_for("add1", "1")[0].key == "cpu/default"
        assert models.config("add1")[1] == 1
        states = {row.name: row.state for row in models.all()}
        assert states == {"add1": "READY", "broken": "UNAVAILABLE", "tpu": "UNAVAILABLE"}
        assert "| add1   | 1       | READY" in models.table()
        assert "| broken | 1       | UNAVAILABLE: " in models.table()
        code, text = lookup_error(models, "broken")
        assert code == "NOT_FOUND"
        assert text.startswith("Request for unknown model: 'broken' has no available versions: ")
        text = (await refusal(models.load("add1"))).message
        assert text.startswith("explicit model load / unload is not allowed if polling is enabled: ")


@in_loop
async def test_lookups_fail_with_tritons_texts(tmp_path: Path) -> None:
    write_model(tmp_path, "m", add1(), version=2)
    async with serving(tmp_path, "m") as models:
        assert lookup_error(models, "x") == ("INVALID_ARG", "Request for unknown model: 'x' is not found")
        assert lookup_error(models, "m", "1") == (
            "NOT_FOUND",
            "Request for unknown model: 'm' version 1 is not found",
        )
        code, text = lookup_error(models, "m", "one")
        assert code == "INVALID_ARG"
        assert text.startswith("failed to get model version from specified version string 'one' (details: stol)")
        await models.unload("m")
        assert lookup_error(models, "m")[1].startswith("Request for unknown model: 'm' has no available versions")
        assert lookup_error(models, "m", "2") == (
            "UNAVAILABLE",
            "Request for unknown model: 'm' version 2 is not at ready state: unloaded",
        )
        with pytest.raises(InferError, match="requested model 'x' is not available"):
            models.statistics("x")
        with pytest.raises(InferError, match="requested model version is not available for model 'm'"):
            models.statistics("m", "7")


@in_loop
async def test_a_model_that_moves_to_another_worker_is_watched_there(tmp_path: Path) -> None:
    group = 'parameters { key: "worker_group" value { string_value: "%s" } }\n'
    limit = 'parameters { key: "hang_timeout_s" value { string_value: "%s" } }\n'
    write_model(tmp_path, "m", add1(), config=group % "first" + limit % "1")
    async with serving(tmp_path) as models:
        await models.load("m")
        first = models.workers_for("m", "1")[0]
        write_model(tmp_path, "m", add1(), config=group % "second" + limit % "60")
        await models.load("m")
        second = models.workers_for("m", "1")[0]
        assert (first.key, second.key) == ("cpu/first", "cpu/second")
        assert set(first.instances).isdisjoint(second.instances)
        assert list(second.instances.values()) == [60.0]
        await models.unload("m")
        models._workers.give_back(("m", 1))
        assert not first.instances
        assert not second.instances


@in_loop
async def test_load_reload_and_unload(tmp_path: Path) -> None:
    write_model(tmp_path, "m", add1())
    async with serving(tmp_path) as models:
        assert models.all() == []
        text = (await refusal(models.load("absent"))).message
        assert text == ("failed to load 'absent', failed to poll from model repository: there is no directory absent")
        text = (await refusal(models.load("..a"))).message
        assert text.startswith("failed to load '..a', failed to poll from model repository: invalid model name '..a'")
        text = (await refusal(models.load("../a"))).message
        assert text == "invalid model name '../a', model name must not contain path traversal characters"
        assert models.all() == []
        await models.load("m")
        assert models.metadata("m").outputs[0].shape == (-1, -1)
        write_model(tmp_path, "m", matmul(), version=2)
        await models.load("m")
        assert models.metadata("m").version == "2"
        assert models.metadata("m").outputs[0].shape == (-1, 4)
        assert [(row.version, row.state, row.reason) for row in models.all()] == [
            ("1", "UNAVAILABLE", "unloaded"),
            ("2", "READY", ""),
        ]
        assert [stats["version"] for stats in models.statistics("m")] == ["2"]
        await models.unload("m")
        await models.unload("never heard of")
        assert {row.state for row in models.all()} == {"UNAVAILABLE"}
        await models.load("m")
        assert models.metadata("m").state == "READY"


@in_loop
async def test_a_bad_reload_leaves_the_good_one(tmp_path: Path) -> None:
    write_model(tmp_path, "m", add1())
    async with serving(tmp_path, "m") as models:
        (tmp_path / "m" / "1" / "model.onnx").write_bytes(b"not a model")
        error = await refusal(models.load("m"))
        assert error.message.startswith("load failed for model 'm': version 1 is at UNAVAILABLE state: ")
        assert models.metadata("m").state == "READY"


@in_loop
async def test_what_cannot_be_configured_and_what_cannot_be_loaded(tmp_path: Path) -> None:
    root = tmp_path / "models"
    write_model(root, "text", add1(), config="max_batch_size: -1")
    write_model(root, "file", b"not a model")
    write_model(root, "none", config='backend: "onnxruntime"', version=3)
    write_model(root, "tpu", add1(), config='backend: "tpu"')
    write_model(root, "twice", add1())
    write_model(tmp_path / "more", "twice", add1())
    async with serving(root, repositories=(root, tmp_path / "more")) as models:
        for name, begins in {
            "text": "failed to load 'text', failed to poll from model repository: 'max_batch_size' must be",
            "file": "load failed for model 'file': version 1 is at UNAVAILABLE state: ",
            "none": "load failed for model 'none': version 3 is at UNAVAILABLE state: unable to find ",
            "tpu": "load failed for model 'tpu': version 1 is at UNAVAILABLE state: Invalid argument: unable to find ",
            "twice": "failed to load 'twice', failed to poll from model repository: failed to poll model 'twice'",
        }.items():
            for _ in range(2):
                error = await refusal(models.load(name))
                assert error.message.startswith(begins)
                assert str(tmp_path) not in error.message
                assert error.code == ("INVALID_ARG" if begins.startswith("load failed") else "INTERNAL")
        index = {entry.name: (entry.version, entry.state, entry.reason[:20]) for entry in await models.index()}
        assert index == {
            "file": ("1", "UNAVAILABLE", "file/1/model.onnx: i"),
            "none": ("3", "UNAVAILABLE", "unable to find 'none"),
            "text": ("", "UNAVAILABLE", "'max_batch_size' mus"),
            "tpu": ("1", "UNAVAILABLE", "Invalid argument: un"),
            "twice": ("", "UNAVAILABLE", "model appears in two"),
        }
        write_model(root, "file", add1())
        await models.load("file")
        assert models.metadata("file").state == "READY"
        await models.unload("tpu")
        assert "tpu" not in models.known


@in_loop
async def test_a_model_the_worker_cannot_load_says_why(tmp_path: Path) -> None:
    tensors = 'input {name: "x" data_type: TYPE_FP32 dims: -1} output {name: "y" data_type: TYPE_FP32 dims: -1}'
    directory = write_model(tmp_path, "m", add1(), config=f"max_batch_size: 4 {tensors}")
    async with serving(tmp_path) as models:
        await models.load("m")
        (directory / "backend.py").write_text("def load(context):\n    raise ValueError('not today')\n")
        error = await refusal(models.load("m"))
        assert error.code == "INVALID_ARG"
        assert error.message.startswith("load failed for model 'm': version 1 is at UNAVAILABLE state: ")
        assert "not today" in error.message
        assert error.message.endswith(";\n")
        assert models.metadata("m").state == "READY", "what was loaded serves on"


@in_loop
async def test_a_worker_that_is_replaced_shows_and_serves_again(tmp_path: Path) -> None:
    write_model(tmp_path, "m", add1())
    async with serving(tmp_path, "*") as models:
        worker = models.workers_for("m")[0]
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        await until(lambda: models.all()[0].state == "LOADING")
        assert models.all()[0].reason.startswith("worker 'cpu/default' is ")
        assert models.metadata("m").name == "m"
        await until(lambda: models.all()[0].state == "READY")
        assert worker.restarts == 1
