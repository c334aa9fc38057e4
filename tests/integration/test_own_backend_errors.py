"""Exceptions of a model's own code: one line for the client, the traceback for the log. Real broker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import clientlib
from tests.fakes import models
from tests.fakes.broker import Broker, eventually

CONFIG = """
backend: "own"
input { name: "x" data_type: TYPE_FP32 dims: 1 }
output { name: "y" data_type: TYPE_FP32 dims: 1 }
"""
RUNS = """
def load(context):
    return Model()

class Model:
    def bind(self, inputs, outputs):
        return Run()

    def close(self):
        pass

class Run:
    def run(self):
        raise ValueError("not today")  # here
"""
LOADS = """
def load(context):
    raise KeyError("weights")  # here
"""
IMPORTS = """
import nowhere_to_be_found  # here
def load(context):
    pass
"""
STREAMS = """
def load(context):
    return Model()

class Model:
    def bind(self, inputs, outputs):
        pass

    def close(self):
        pass

    def execute(self, streams):
        raise ZeroDivisionError("no way")  # here
"""
CODE = {"runs": RUNS, "loads": LOADS, "imports": IMPORTS, "streams": STREAMS}

# Texts that neither a message nor UTF-8 can carry, none at all; one whose attributes cannot be set; odd InferErrors.
ODD = """
import dataclasses
from shm.errors import InferError

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("it has no text")

@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    text: str

class Wide(InferError):
    def __new__(cls, *, text):
        return super().__new__(cls)

    def __init__(self, *, text):
        super().__init__("NOT_FOUND", text)

ERRORS = [ValueError("a file named \\udc80"), ValueError("x" * 1_000_000), Mute(), Frozen("for good")]
ERRORS += [Wide(text="not here"), InferError("ODD", "what"), InferError("OK", "fine"), InferError("INTERNAL", None)]
at = 0
"""
ODD_RUNS = ODD + RUNS.replace('raise ValueError("not today")  # here', "global at; at += 1; raise ERRORS[at - 1]")
ODD_LOADS = (
    ODD
    + """
def load(context):
    raise ERRORS[context.version - 1]
"""
)

# What is no `Exception` would end the thread that it is raised in, and with it the worker.
EXITS = """
import asyncio, sys
import numpy as np

RAISED = {1: SystemExit(3), 2: KeyboardInterrupt("mine"), 3: asyncio.CancelledError(), 4: SystemExit()}

def load(context):
    return Model()

class Model:
    def bind(self, inputs, outputs):
        run = Run()
        run.x, run.y = (operand.memory.view(np.float32) for operand in (*inputs, *outputs))
        if run.x[0] == 9:
            sys.exit("from bind")
        return run

    def close(self):
        sys.exit("from close")

class Run:
    def run(self):
        if self.x[0] in RAISED:
            raise RAISED[self.x[0]]  # here
        self.y[:] = self.x
"""
EXITING_STREAMS = STREAMS.replace('raise ZeroDivisionError("no way")', 'raise SystemExit("no way")')


def test_tracebacks_of_own_code_are_in_the_log_and_nowhere_else(tmp_path: Path) -> None:
    root = tmp_path / "models"
    for name, code in CODE.items():
        text = CONFIG + ("model_transaction_policy { decoupled: true }\n" if name == "streams" else "")
        (models.write_model(root, name, config=text) / "backend.py").write_text(code)
    with Broker(root, tmp_path / "run", "--exit-on-error=false", "--strict-readiness=false") as broker:
        broker.ready()
        with clientlib.connect(f"ipc://{broker.directory}") as client:
            told = [found.reason for found in client.models().values() if found.state != "READY"]
            for _ in range(3):
                with pytest.raises(clientlib.InferError) as raised:
                    client.infer("runs", {"x": np.ones(1, np.float32)})
                told.append(raised.value.message)
            with (
                pytest.raises(clientlib.InferError) as raised,
                client.stream("streams", {"x": np.ones(1, np.float32)}) as responses,
            ):
                list(responses)
            told.append(raised.value.message)
        assert sorted(set(told)) == [
            "KeyError: 'weights'",
            "ValueError: not today",
            "ZeroDivisionError: no way",
            "imports/backend.py raised ModuleNotFoundError: No module named 'nowhere_to_be_found'",
        ]
        for name, code in CODE.items():
            line = 1 + next(at for at, text in enumerate(code.splitlines()) if text.endswith("# here"))
            where = f'File \\"{root / name}/backend.py\\", line {line}, in '
            eventually(lambda where=where: where in broker.log(), name)
            assert broker.log().count(where) == 1


def test_whatever_own_code_raises_is_an_answer(tmp_path: Path) -> None:
    root = tmp_path / "models"
    policy = "version_policy { all {} }\n"
    for name, code in {"runs": ODD_RUNS, "loads": ODD_LOADS}.items():
        directory = models.write_model(root, name, config=CONFIG + policy)
        (directory / "backend.py").write_text(code)
        for version in range(2, 9) if name == "loads" else ():
            (directory / str(version)).mkdir()
    with Broker(root, tmp_path / "run", "--exit-on-error=false", "--strict-readiness=false") as broker:
        broker.ready()
        with clientlib.connect(f"ipc://{broker.directory}") as client:
            told = []
            for _ in range(8):
                with pytest.raises(clientlib.InferError) as raised:
                    client.infer("runs", {"x": np.ones(1, np.float32)})
                told.append(raised.value.message)
        mute = "Mute: its text cannot be had, its __str__ failed"
        assert told[:4] == ["ValueError: a file named ?", told[1], mute, "Frozen: for good"]
        odd = ("[ODD] what", "[OK] fine", "[INTERNAL] None")
        assert told[4:] == ["not here", *(f"InferError: {text}" for text in odd)]
        assert told[1].startswith("ValueError: xxxx")
        for version, text in enumerate(told, 1):
            assert f"failed to load 'loads' version {version}: {text[:100]}" in broker.log()
        assert all(worker["restarts"] == 0 for worker in broker.status()["workers"]), broker.log()


def test_own_code_that_exits_ends_its_request_and_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "models"
    in_place = 'parameters { key: "zero_copy_inputs" value { string_value: "all" } }\n'
    (models.write_model(root, "exits", config=CONFIG + in_place) / "backend.py").write_text(EXITS)
    decoupled = CONFIG + "model_transaction_policy { decoupled: true }\n"
    (models.write_model(root, "streams", config=decoupled) / "backend.py").write_text(EXITING_STREAMS)
    with Broker(root, tmp_path / "run", "--model-control-mode=explicit", "--load-model=*") as broker:
        broker.ready()
        with clientlib.connect(f"ipc://{broker.directory}") as client:
            x, y = client.create_region("x", 4096), client.create_region("y", 4096)
            plan = client.prepare("exits", {"x": x.tensor((1,), "FP32")}, {"y": y.tensor((1,), "FP32")})
            number = x.array((1,), np.float32)

            def told(of: int) -> str:
                number[:] = of
                with pytest.raises(clientlib.InferError) as raised:
                    plan.infer(timeout=30)
                assert raised.value.code == "INTERNAL"
                return raised.value.message

            who, never = "model 'exits', instance 'exits_0'", "a model must not end its process (sys.exit, exit): "
            assert told(9).startswith(f"{who}: SystemExit: from bind; {never}")
            for _ in range(20):  # runs that have been measured run on the leader's own thread, right from the channel
                number[:] = 7
                assert plan.infer(timeout=30)["y"].tolist() == [7]
            texts = ["SystemExit: 3; ", "KeyboardInterrupt: mine", "CancelledError", f"SystemExit: {never}"]
            for of, text in enumerate(texts, 1):
                assert told(of).startswith(f"{who}: {text}")
            with (
                pytest.raises(
                    clientlib.InferError,
                    match=r"model 'streams', instance 'streams_0': SystemExit: no way; a model must not",
                ),
                client.stream("streams", {"x": np.ones(1, np.float32)}) as responses,
            ):
                list(responses)
            client.unload("exits")
            eventually(lambda: "close of its backend raised SystemExit: from close" in broker.log(), "it is closed")
            client.load("exits")
            number[:] = 7
            assert plan.infer(timeout=30)["y"].tolist() == [7]
        assert "model 'exits' raised SystemExit" in broker.log(), "with its traceback, once"
        assert all(worker["restarts"] == 0 for worker in broker.status()["workers"]), broker.log()


BROKEN = """
from types import SimpleNamespace
from broker.worker.control import Control

class Odd(Exception):
    @property
    def __traceback__(self):
        raise ValueError("nobody is to see it")

def serve():
    try:
        raise Odd
    except Odd:
        raise RuntimeError("while it was looked at")

Control._serve(SimpleNamespace(_loop=SimpleNamespace(serve=serve)))
"""


def test_a_worker_whose_loop_is_broken_ends_although_it_cannot_say_why() -> None:
    """It went on without that thread, and with what the thread had taken: requests waited for ever."""
    ended = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, timeout=60, check=False)
    assert ended.returncode == 70, ended.stderr
