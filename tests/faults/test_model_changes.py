"""Rows O-08 … O-11: models that are replaced, loaded and unloaded while they are asked; files that change meanwhile."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import clientlib
from tests.fakes import models
from tests.faults import child
from tests.faults.lab import SAME, Lab, eventually, scaled
from tests.faults.load_lab import LoadLab, mend, settled, without_paths

ROWS = 4
# What clients may be told of a model that others load and unload.
ABSENT = ("has no available versions", "is not at ready state", "is not loaded", "was reloaded", "is not found")


@pytest.fixture(scope="module")
def shared_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with LoadLab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


def add(number: float) -> onnx.ModelProto:
    """y = x + number, otherwise as `models.add1`."""
    return models.build(
        [helper.make_node("Add", ["x", "n"], ["y"])],
        [models.tensor("x", ["batch", "n"])],
        [models.tensor("y", ["batch", "n"])],
        {"n": np.full(1, number, np.float32)},
    )


def ask_until_told(model: str, threads: int = 3) -> dict[str, Any]:
    """Ask, by plans and by arrays, until told to stop. Counts what was added ("mixed": by two models), and errors."""
    added: Counter[str] = Counter()
    problems: list[str] = []
    stop = threading.Event()

    def ask(client: clientlib.Client, number: int) -> None:
        region = client.create_region(f"r{number}", 4096)
        x, y = region.array((ROWS, 4), "FP32"), region.array((ROWS, 4), "FP32", 1024)
        x[:] = number
        places = {"x": region.tensor((ROWS, 4), "FP32")}, {"y": region.tensor((ROWS, 4), "FP32", 1024)}
        plan = client.prepare(model, *places) if number else None
        while not stop.is_set():
            try:
                if plan is None:
                    got = client.infer(model, {"x": x}, timeout=50)["y"]
                else:
                    plan.infer(timeout=50)
                    got = y
            except clientlib.InferError as error:
                problems.append(f"{error.code} {error.message}")
            else:
                what = set((got - number).ravel().tolist())
                added[str(what.pop()) if len(what) == 1 else "mixed"] += 1

    with clientlib.connect() as client:
        running = [threading.Thread(target=ask, args=(client, number)) for number in range(threads)]
        for thread in running:
            thread.start()
        while (order := child.hear()) != "stop":
            if order:
                child.say({"added": dict(added), "problems": problems[:3]})
        stop.set()
        for thread in running:
            thread.join()
    return {"added": dict(added), "problems": sorted({without_paths(problem) for problem in problems})}


def only_load(model: str) -> list[str]:
    with clientlib.connect() as client:
        code, message = child.refusal(client.load, model)
        return [code, without_paths(message)]


# --- O-08 -------------------------------------------------------------------------------------------------------------


def test_o08_reloads_under_load(lab: Lab) -> None:
    """[O-08] back and forth, by file and by version; the bad one changes nothing. No request fails or gets both."""
    directory = mend(lab)
    asking = lab.start(ask_until_told, model="victim")

    def serves(number: float) -> None:
        def more() -> bool:
            asking.tell("report")
            found: int = asking.heard()["added"].get(str(number), 0)
            return found > seen

        seen = -1
        asking.tell("report")
        seen = asking.heard()["added"].get(str(number), 0)
        eventually(more, f"answers of the model that adds {number}")

    serves(1.0)
    for turn in range(scaled(1, 50)):
        for number in (2.0, 1.0):
            models.write_model(lab.repository, "victim", add(number))
            assert lab.offend(only_load, model="victim") == ["OK", ""]
            serves(number)
        models.write_model(lab.repository, "victim", add(2.0), version=2)
        assert lab.offend(only_load, model="victim") == ["OK", ""]
        serves(2.0)
        (directory / "2" / "model.onnx").write_bytes(b"no model" if turn % 2 else b"")
        assert lab.offend(only_load, model="victim")[0] == "INVALID_ARG"
        serves(2.0)
        shutil.rmtree(directory / "2")
        assert lab.offend(only_load, model="victim") == ["OK", ""]
        serves(1.0)
    asking.tell("stop")
    told = asking.result()
    assert told["problems"] == []
    assert set(told["added"]) == {"1.0", "2.0"}
    settled(lab)


# --- O-09 -------------------------------------------------------------------------------------------------------------


def load_and_unload_at_random(model: str, seed: int, turns: int) -> list[str]:
    """From 20 threads at once. Returns what the calls were answered."""
    told: list[str] = []

    def change(number: int) -> None:
        chance = random.Random(seed + number)
        with clientlib.connect() as client:
            for _ in range(turns):
                call = chance.choice((client.load, client.load, client.unload))
                told.append(" ".join(child.refusal(call, model)))

    threads = [threading.Thread(target=change, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(set(told))


def test_o09_loads_and_unloads_at_the_same_time(lab: Lab) -> None:
    """[O-09] all of them end, the model is there or not, and in the end it is what was asked for last."""
    mend(lab)
    asking = lab.start(ask_until_told, model="victim")
    told = lab.offend(
        load_and_unload_at_random, model="victim", seed=1, turns=scaled(3, 50), valid=False, timeout_s=600
    )
    # An unload ends a load that takes longer than it may; nobody waits for ever.
    assert set(told) <= {"OK ", "UNAVAILABLE failed to load 'victim': it was unloaded, or its files changed, meanwhile"}
    assert "OK " in told
    assert lab.offend(only_load, model="victim") == ["OK", ""]
    asking.tell("stop")
    outcome = asking.result()
    assert set(outcome["added"]) <= {"1.0"}
    for problem in outcome["problems"]:
        assert any(part in problem for part in ABSENT), problem
    settled(lab)


# --- O-10 -------------------------------------------------------------------------------------------------------------


def unload_while_it_runs(first: int) -> dict[str, Any]:
    """Four requests, the first of which takes a while (1 µs for each of `first`); "early" if it was over too soon."""
    with clientlib.connect() as client:
        counts = [first, 10, 10, 10]
        inputs = {"count": np.array([10], np.int64), "x": np.zeros(4, np.float32)}
        region = client.create_region("r", 1 << 16)
        count, x, y = region.array((4,), "INT64"), region.array((4,), "FP32", 4096), region.array((5, 4), "FP32", 8192)
        count[:], x[:] = counts, 0
        plan = client.prepare(
            "slow",
            {"count": region.tensor((1,), "INT64", stride=8), "x": region.tensor((4,), "FP32", 4096, stride=0)},
            {"y": region.tensor((4,), "FP32", 8192, stride=16)},
            slots=(4, 5),
        )
        pending = [plan.submit(input_slot=place, output_slot=place, timeout=90) for place in range(4)]
        eventually(
            lambda: client.statistics("slow")[0]["pending"] == 3 or pending[0].done(), "all are taken, one of them runs"
        )
        client.unload("slow")
        told: dict[str, Any] = {"state": client.models()["slow"].state}
        told["later"] = [
            child.refusal(plan.infer, output_slot=4, timeout=5),
            child.refusal(client.infer, "slow", inputs),
        ]
        told["earlier"] = [child.refusal(one.result) for one in pending]
        told["right"] = bool((y[:4] == np.array(counts)[:, None]).all())
        client.load("slow")
        told["again"] = child.refusal(plan.infer, timeout=50)
        return told


def test_o10_unload_while_requests_run(lab: Lab) -> None:
    """[O-10] what was accepted is finished, what comes later is told; a plan works again when the model is back."""
    for first in (600_000, 2_000_000, 8_000_000):  # a busy machine may be slow to unload
        told = lab.offend(unload_while_it_runs, first=first, timeout_s=90)
        if told["state"] == "UNLOADING":
            break
    assert told["earlier"] == [["OK", ""]] * 4
    assert told["right"]
    assert told["state"] == "UNLOADING"
    for code, message in told["later"]:
        assert code in ("NOT_FOUND", "UNAVAILABLE"), message
        assert any(part in message for part in ABSENT), message
    assert told["again"] == ["OK", ""]
    lab.settled()


# --- O-11 -------------------------------------------------------------------------------------------------------------


def test_o11_files_that_change_while_they_are_loaded(lab: Lab) -> None:
    """[O-11] each load is whole or refused; what serves is one of the models that were there, never between."""
    path = mend(lab) / "1" / "model.onnx"
    contents = [add(1.0).SerializeToString(), add(2.0).SerializeToString(), models.two_input().SerializeToString()]
    stop = threading.Event()

    def rewrite() -> None:
        number = 0
        while not stop.wait(0.0005):
            number += 1
            match number % 4:
                case 0:
                    with contextlib.suppress(FileNotFoundError):
                        path.unlink()
                case 1:
                    path.write_bytes(contents[number // 4 % 3])  # in place, so that half of it can be read
                case _:
                    path.with_name("new").write_bytes(contents[number % 3])
                    os.replace(path.with_name("new"), path)

    asking = lab.start(ask_until_told, model="victim", threads=1)
    changing = threading.Thread(target=rewrite)
    changing.start()
    try:
        for _ in range(scaled(5, 500)):
            code, message = lab.offend(only_load, model="victim")
            assert code in ("OK", "INTERNAL", "INVALID_ARG"), message
    finally:
        stop.set()
        changing.join()
    asking.tell("stop")
    told = asking.result()
    assert set(told["added"]) <= {"1.0", "2.0"}
    for problem in told["problems"]:  # of the model with other inputs, if it was loaded
        assert "'victim'" in problem, problem
    settled(lab)


def test_o11_a_file_that_was_replaced_before_its_worker_dies(lab: Lab) -> None:
    """[O-11] ✱ the replacement does not take another file for what was configured: it is configured anew."""
    path = mend(lab) / "1" / "model.onnx"
    path.with_name("new").write_bytes(models.two_input().SerializeToString())
    os.replace(path.with_name("new"), path)
    os.kill(lab.worker_pid(), signal.SIGKILL)

    def inputs() -> list[str]:
        with clientlib.connect(f"ipc://{lab.run_directory}") as client:
            try:
                return [tensor.name for tensor in client.model("victim").inputs]
            except clientlib.InferError:
                return []

    eventually(lambda: inputs() == ["a", "b"], "the model that is there now")
    assert "has changed since the configuration was read" in lab.broker.log()
    settled(lab, replaced=SAME)


def test_o11_a_file_that_is_gone_when_its_worker_dies(lab: Lab) -> None:
    """[O-11] ✱ it is UNAVAILABLE with the reason, and the others are back."""
    path = mend(lab) / "1" / "model.onnx"
    path.unlink()
    os.kill(lab.worker_pid(), signal.SIGKILL)

    def reason() -> str:
        with clientlib.connect(f"ipc://{lab.run_directory}") as client:
            code, message = child.refusal(client.model, "victim")
            return message if code == "NOT_FOUND" else ""

    assert "model.onnx" in eventually(reason, "it is known to be lost")
    assert lab.offend(only_load, model="add1") == ["OK", ""]
    settled(lab, replaced=SAME)
