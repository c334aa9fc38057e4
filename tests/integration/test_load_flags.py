"""`--model-load-thread-count` and `--model-load-retry-count` in real brokers: models whose loads leave traces."""

from __future__ import annotations

from pathlib import Path

import pytest

import clientlib
from tests.fakes import models
from tests.fakes.broker import Broker, command

MANY = 6  # more than load at a time by default
CONFIG = """
max_batch_size: 0
input {{ name: "x" data_type: TYPE_FP32 dims: 1 }}
output {{ name: "y" data_type: TYPE_FP32 dims: 1 }}
parameters {{ key: "worker_group" value {{ string_value: "default" }} }}
parameters {{ key: "traces" value {{ string_value: "{}" }} }}
"""
# A load waits until so many are there at once, or for a while; `most` says how many there were at most.
COUNTED = """
import os, time

class Model:
    def bind(self, inputs, outputs):
        raise NotImplementedError
    def close(self):
        pass

def load(context):
    traces = context.config.parameters["traces"]
    mine = os.path.join(traces, context.config.name)
    open(mine, "w").close()
    end = time.monotonic() + %(patience)s
    while len(os.listdir(traces)) < %(wanted)d and time.monotonic() < end:
        time.sleep(0.005)
    with open(traces + ".most", "a") as file:
        file.write("%%d\\n" %% len(os.listdir(traces)))
    if len(os.listdir(traces)) < %(wanted)d:
        os.unlink(mine)
    return Model()
"""
FAILS = """
import os

class Model:
    def bind(self, inputs, outputs):
        raise NotImplementedError
    def close(self):
        pass

def load(context):
    with open(context.config.parameters["traces"], "a") as file:
        file.write("tried\\n")
    with open(context.config.parameters["traces"]) as file:
        if len(file.read().split()) < 3:
            raise ValueError("not yet")
    return Model()
"""


def write(root: Path, name: str, code: str, traces: Path) -> None:
    directory = models.write_model(root, name, config=CONFIG.format(traces))
    (directory / "1").mkdir(exist_ok=True)
    (directory / "backend.py").write_text(code)


@pytest.mark.parametrize(("flag", "wanted", "patience", "most"), [(MANY, MANY, 30, MANY), (1, 2, 0.05, 1)])
def test_how_many_load_at_a_time(tmp_path: Path, flag: int, wanted: int, patience: float, most: int) -> None:
    (tmp_path / "traces").mkdir()
    for number in range(MANY):
        code = COUNTED % {"wanted": wanted, "patience": patience}
        write(tmp_path / "repository", f"m{number}", code, tmp_path / "traces")
    with Broker(tmp_path / "repository", tmp_path / "run", f"--model-load-thread-count={flag}") as broker:
        broker.ready()
    assert max(map(int, (tmp_path / "traces.most").read_text().split())) == most


def test_a_load_that_fails_is_tried_again(tmp_path: Path) -> None:
    write(tmp_path / "repository", "m", FAILS, tmp_path / "traces")
    flags = ("--model-load-retry-count=2", "--model-control-mode=explicit")
    with Broker(tmp_path / "repository", tmp_path / "run", *flags) as broker:
        broker.ready()
        with clientlib.connect(f"ipc://{broker.directory}") as client:
            client.load("m")
            assert client.models()["m"].state == "READY"
        assert (tmp_path / "traces").read_text().split() == ["tried"] * 3
        assert broker.log().count("loading 'm' version 1 failed, once more: ValueError: not yet") == 2


def test_without_retries_it_is_tried_once(tmp_path: Path) -> None:
    write(tmp_path / "repository", "m", FAILS, tmp_path / "traces")
    failed = command(
        "serve",
        "--model-repository",
        str(tmp_path / "repository"),
        "--directory",
        str(tmp_path / "run"),
        "--gateways=0",
    )
    assert failed.returncode == 1
    assert "failed to load 'm' version 1: ValueError: not yet" in failed.stderr
    assert (tmp_path / "traces").read_text().split() == ["tried"]
