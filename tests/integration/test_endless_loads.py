"""Loads that never return: an unload ends them, others go on, the broker stops in time. And ends of models that never
return. Real loader and workers.
"""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import clientlib
from broker import desired_state, loads, polling
from shm.errors import InferError
from tests.fakes import models
from tests.fakes.broker import Broker, command, eventually
from tests.fakes.processes import in_loop, subreaper, until
from tests.integration.test_models import refusal, serving

CONFIG = """
backend: "own"
input { name: "x" data_type: TYPE_FP32 dims: -1 }
output { name: "y" data_type: TYPE_FP32 dims: -1 }
parameters { key: "worker_group" value { string_value: "default" } }
"""
BACKEND = """
import os, time

def load(context):
    root = os.path.abspath(context.directory + "/../../..")
    with open(f"{root}/began", "a") as file:
        file.write(f"{os.getpid()}\\n")
    while os.path.exists(f"{root}/endless"):
        time.sleep(0.01)
    return Model(root)

class Model:
    def __init__(self, root):
        self.root = root

    def bind(self, inputs, outputs):
        return Run(inputs[0], outputs[0])

    def close(self):
        while os.path.exists(f"{self.root}/unclosed"):
            time.sleep(0.01)

class Run:
    def __init__(self, x, y):
        self.x, self.y = x, y

    def run(self):
        self.y.memory[:] = self.x.memory

    def results(self):
        return []
"""


@pytest.fixture(autouse=True)
def _no_process_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(loads, "PATIENCE_S", 0.2)
    with subreaper():
        yield


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    models.write_model(root, "add1", models.add1())
    (models.write_model(root, "slow", config=CONFIG) / "backend.py").write_text(BACKEND)
    (tmp_path / "endless").touch()
    return root


def change(repository: Path, number: int) -> None:
    """At once: who polls never sees half of it."""
    parameter = f'parameters {{ key: "number" value {{ string_value: "{number}" }} }}\n'
    written = repository.parent / "config.pbtxt"
    written.write_text(CONFIG + parameter)
    written.rename(repository / "slow" / "config.pbtxt")


def began(repository: Path) -> int:
    path = repository / "../began"
    return len(path.read_text().splitlines()) if path.exists() else 0


@in_loop
async def test_an_unload_ends_the_load_and_what_it_made_serves_nobody(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desired_state, "END_LOAD_S", 60)  # it ends before, on any machine
    async with serving(repository, "add1") as served:
        loading = asyncio.create_task(served.load("slow"))
        await until(lambda: began(repository))
        await served.unload("slow")
        assert (await refusal(loading)).message == (
            "failed to load 'slow': it was unloaded, or its files changed, meanwhile"
        )
        states = {row.name: (row.state, row.reason) for row in served.all()}
        assert states == {"add1": ("READY", ""), "slow": ("UNAVAILABLE", "unloaded")}
        worker = served.workers_for("add1")[0]
        pid = worker.pid
        (repository / "../endless").unlink()
        await until(lambda: not worker._state._ending)
        await served.load("slow")
        assert worker.pid == pid, "a load that ended by itself costs nobody anything"
        assert began(repository) == 2


@in_loop
async def test_a_load_that_goes_on_after_its_unload_ends_with_its_process(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desired_state, "END_LOAD_S", 0.2)
    async with serving(repository, "add1") as served:
        loading = asyncio.create_task(served.load("slow"))
        await until(lambda: began(repository))
        worker = served.workers_for("add1")[0]
        pid = worker.pid
        await served.unload("slow")
        await refusal(loading)
        await until(lambda: worker.state == "ready" and worker.pid not in (None, pid))
        assert worker.last_death == (
            "model 'slow' version 1 was unloaded while it was loading, and the load did not end within 0.2 s"
        )
        assert [row.name for row in served.all() if row.state == "READY"] == ["add1"]


@in_loop
async def test_a_reload_that_was_ended_leaves_what_serves(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "SETTLE_S", 0.01)
    monkeypatch.setattr(desired_state, "END_LOAD_S", 60)
    (repository / "../endless").unlink()
    async with serving(repository, control_mode="poll") as served:
        generation = served.known["slow"].versions[1].generation
        (repository / "../endless").touch()
        polled = asyncio.create_task(served.keep_polling(0.01))
        change(repository, 1)
        await until(lambda: began(repository) == 2)
        change(repository, 2)  # what is loaded has gone
        await until(lambda: began(repository) == 3)
        assert served.known["slow"].versions[1].generation == generation
        (repository / "../endless").unlink()
        await until(lambda: served.known["slow"].versions[1].generation > generation)
        polled.cancel()
        await asyncio.wait((polled,))
        worker = served.workers_for("slow")[0]
        await until(lambda: not worker._state._ending)
        assert worker.restarts == 0


@in_loop
async def test_an_end_that_takes_long_is_waited_for_and_keeps_nobody_else_waiting(repository: Path) -> None:
    (repository / "../endless").unlink()
    (repository / "../unclosed").touch()
    async with serving(repository, "slow") as served:
        worker = served.workers_for("slow")[0]
        unloading = asyncio.create_task(served.unload("slow"))
        await until(lambda: served.known["slow"].versions[1].state == "UNLOADING")
        await served.load("add1")
        assert served.workers_for("add1") == (worker,)
        assert not unloading.done()
        (repository / "../unclosed").unlink()
        await unloading
        assert served.known["slow"].versions[1].state == "UNAVAILABLE"
        assert worker.restarts == 0


@pytest.mark.parametrize("replaced", [False, True])
@in_loop
async def test_an_end_that_never_comes_ends_with_its_process_and_is_named(repository: Path, replaced: bool) -> None:
    (repository / "../endless").unlink()
    (repository / "../unclosed").touch()
    async with serving(repository, "add1", "slow") as served:
        worker = served.workers_for("slow")[0]
        worker._owner.close_s = 0.3
        text = (
            "'close' of an instance of model 'slow' version 1 that serves nobody any more did not end within 0.3 s "
            "(a tenth of --model-load-timeout-secs, at least 5 s)"
        )
        if replaced:
            change(repository, 1)
            await served.load("slow")  # nobody waits for the end of what it replaces
        else:
            refused = (await refusal(served.unload("slow"))).message
            assert refused == f"'slow' is unloaded, but {text}: its worker is being replaced"
        await until(lambda: worker.restarts == 1 and worker.state == "ready")
        assert worker.last_death == text
        assert {row.name for row in served.all() if row.state == "READY"} == {"add1", *(["slow"] if replaced else [])}


def test_a_lease_that_waits_for_an_endless_load_keeps_no_other_call_waiting(repository: Path, tmp_path: Path) -> None:
    with Broker(repository, tmp_path / "run", "--model-control-mode=explicit") as broker:
        broker.ready()
        with clientlib.connect(f"ipc://{broker.directory}", timeout=20) as client:
            with pytest.raises(InferError, match="no answer to KeepLoaded"), client.keep_loaded("slow", timeout=0.5):
                pass
            eventually(lambda: (slow := client.models().get("slow")) and slow.state == "LOADING")
            (repository / "../endless").unlink()
            eventually(lambda: client.models()["slow"].state == "READY")
            client.unload("slow")  # its lease has ended with the block


class RestlessBroker(Broker):
    module = "tests.fakes.restless_broker"


NAMED = (
    r"model 'slow' version 1 has been loading in worker 'cpu/default' for \d+ s; it is given up after 500 s "
    r"\(--model-load-timeout-secs\)"
)


@pytest.mark.parametrize("start", [True, False], ids=["at start", "asked for"])
def test_a_broker_with_an_endless_load_names_it_and_stops_in_time(
    repository: Path, tmp_path: Path, start: bool
) -> None:
    flags = ["--model-control-mode=explicit", "--load-model=add1", "--exit-timeout-secs=100"]
    flags.append("--model-load-timeout-secs=500")
    with RestlessBroker(repository, tmp_path / "run", *flags, *(["--load-model=slow"] if start else [])) as broker:
        if not start:
            broker.ready()
            with clientlib.connect(f"ipc://{broker.directory}", timeout=20) as client:
                with pytest.raises(InferError, match="no answer to LoadModel"):
                    client.load("slow", timeout=0.5)
                # Other calls of the session are answered.
                eventually(lambda: "slow" in client.models() and client.models()["slow"].state == "LOADING")
                x = np.ones((1, 4), np.float32)
                assert np.array_equal(client.infer("add1", {"x": x})["y"], x + 1)

            def reason() -> str:
                return {model["name"]: model["reason"] for model in broker.status()["models"]}["slow"]

            eventually(lambda: re.fullmatch(NAMED, reason()), "the status names it")
        eventually(lambda: began(repository))
        if start:
            status = "status", "--directory", str(broker.directory)
            eventually(lambda: re.fullmatch(rf"starting: . of 2 models; {NAMED}\n", command(*status).stderr))
        eventually(lambda: re.search(NAMED, broker.log()), "the log is told")
        broker.process.send_signal(signal.SIGTERM)
        assert broker.process.wait(60) == 0, "well before the exit time-out"
