"""Rows K-08 and W-15: the broker, or everything, or one worker of two, stands still; every worker dies at once."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clientlib
from tests.fakes import models
from tests.faults import child, unruly
from tests.faults.lab import OTHER, SAME, Lab, eventually

STILL_S = 3 * unruly.HANG_S
BOTH = """max_batch_size: 4
instance_group [ { count: 1 kind: KIND_CPU }, { count: 1 kind: KIND_CPU } ]
parameters { key: "worker_group" value { string_value: "default,other" } }
"""


def write(root: Path) -> Path:
    """The lab's models, and "both", which both workers serve."""
    unruly.write(root)
    models.write_model(root, "both", models.add1(), config=BOTH)
    return root


@pytest.fixture(scope="module")
def shared_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("lab"), models=write) as lab:
        yield lab


def stand_still(*pids: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it has ended since it was found
            os.kill(pid, signal.SIGSTOP)
    select.select([], [], [], STILL_S)  # longer than anything may hang: that is what is tried
    for pid in reversed(pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def go_on_without_a_broker() -> list[Any]:
    """Requests of a plan that is there; then a call that needs the broker, in time for which it comes back."""
    with clientlib.connect() as client:
        region = client.create_region("r", 4096)
        x, y = region.array((2, 4), "FP32"), region.array((2, 4), "FP32", 64)
        places = {"x": region.tensor((2, 4), "FP32")}, {"y": region.tensor((2, 4), "FP32", 64)}
        plan = client.prepare("add1", *places)
        plan.infer(timeout=40)
        child.say("ready")
        child.hear()
        right = 0
        for turn in range(100):
            x[:] = turn
            plan.infer(timeout=40)
            right += bool((y == turn + 1).all())
        told = child.refusal(clientlib.connect, timeout=0.2)
        child.say([right, *told])
        return child.refusal(client.prepare, "matmul", *places)


def test_k08_the_broker_stands_still(lab: Lab) -> None:
    """[K-08] what is prepared is served without it; afterwards it takes its own silence for nobody else's."""
    client = lab.start(go_on_without_a_broker, valid=False)
    client.heard()
    os.kill(lab.broker.pid, signal.SIGSTOP)
    try:
        client.tell("go on")
        right, code, text = client.heard()
        assert right == 100
        assert code == "UNAVAILABLE", text
        select.select([], [], [], STILL_S)
    finally:
        os.kill(lab.broker.pid, signal.SIGCONT)
    code, text = client.result()
    assert code in ("OK", "INVALID_ARG"), text
    lab.remember()  # who had to wait has made more regions
    lab.settled()


def nap(tag: int) -> list[Any]:
    with clientlib.connect() as client:
        asked = unruly.inputs("nap_once", tag, unruly.HANG_S / 2)
        y = client.infer("hanger", asked, timeout=60)["y"]
        return [bool(np.array_equal(y, asked["x"] + 1))]


def test_k08_everything_stands_still_while_a_model_runs(lab: Lab) -> None:
    """A machine that is frozen and goes on: no model has hung, no worker been silent."""
    for tag in range(100, 105):  # a busy machine may keep a worker from running for as long as nothing may hang
        client = lab.start(nap, tag=tag)
        eventually(lambda tag=tag: unruly.runs(lab.repository, "hanger", tag) >= 1, "the request runs")
        stand_still(lab.broker.pid, *lab.broker.descendants())
        assert client.result() == [True]
        if unruly.runs(lab.repository, "hanger", tag) == 1:
            break
        lab.remember()
        lab.settled(replaced=SAME)
    else:
        pytest.fail("it was run again, each time")
    lab.remember()
    lab.settled()


def ask_both() -> list[list[Any]]:
    """Requests that run while their workers die, and requests afterwards."""
    told = []
    with clientlib.connect() as client:
        asked = unruly.inputs("nap", 8, 30)
        child.say("asks")
        told.append(child.refusal(client.infer, "unrepeatable", asked, timeout=60))
        for model in ("add1", "other"):
            told.append(child.refusal(client.infer, model, {"x": np.ones((2, 4), np.float32)}, timeout=60))
    return told


def test_w15_every_worker_dies_at_once(lab: Lab) -> None:
    client = lab.start(ask_both)
    client.heard()
    eventually(lambda: unruly.runs(lab.repository, "unrepeatable", 8) == 1, "the request runs")
    dead = [lab.worker_pid(key) for key in (SAME, OTHER)]
    for pid in dead:
        os.kill(pid, signal.SIGKILL)
    running, *later = client.result()
    assert running[0] == "UNAVAILABLE", running
    assert "died" in running[1]
    assert later == [["OK", ""], ["OK", ""]]
    eventually(lambda: all(map(lab._is_ready, (SAME, OTHER))), "both are back")
    states = {worker["key"]: worker for worker in lab.status()["workers"]}
    assert all(states[key]["pid"] not in (*dead, None) for key in (SAME, OTHER)), states
    lab.remember()
    report = lab._await_answers()
    assert all(set(errors) <= {"UNAVAILABLE"} and not side["wrong"] for side, errors, _ in report.values()), report
    lab.settled()


def use_both() -> list[list[str]]:
    """A new thread of a client, and a new client, while one of the workers is stopped."""
    x = np.ones((2, 4), np.float32)
    with clientlib.connect() as known, ThreadPoolExecutor(1) as thread:
        known.infer("both", {"x": x}, timeout=40)
        child.say("ready")
        child.hear()
        told = [thread.submit(child.refusal, known.infer, "both", {"x": x}, timeout=40).result()]
        with clientlib.connect(timeout=40) as client:
            region = client.create_region("r", 4096)
            places = {"x": region.tensor((2, 4), "FP32")}, {"y": region.tensor((2, 4), "FP32", 64)}
            plan = client.prepare("both", *places)
            told += [child.refusal(plan.infer, timeout=40) for _ in range(3)]
            told.append(child.refusal(client.unregister, "r"))
            told += [child.refusal(client.infer, "both", {"x": x}, timeout=40) for _ in range(3)]
        child.say("new ones go elsewhere")
        child.hear()
        told += [child.refusal(known.infer, "both", {"x": x}, timeout=40) for _ in range(8)]
    child.say("done")
    child.hear()
    return told


@pytest.mark.parametrize("victim", [SAME, OTHER])
def test_w08_one_worker_of_two_is_stopped(lab: Lab, victim: str) -> None:
    """Whoever is new goes to the other one at once, and everybody else soon: before the broker gives this one up."""
    client = lab.start(use_both, valid=False)
    client.heard()
    pid = lab.worker_pid(victim)
    os.kill(pid, signal.SIGSTOP)
    try:
        client.tell("go on")
        assert client.heard() == "new ones go elsewhere"
        eventually(lambda: f"(pid {pid}) has not responded for 1 s" in lab.broker.log(), "that is seen")
        client.tell("go on")
        assert client.heard() == "done"
        (seen,) = (row for row in lab.status()["workers"] if row["key"] == victim)
        # What it ran when it was stopped may have hung for too long meanwhile, on a slow machine.
        replaced = seen["pid"] != pid and not seen["last_death"].startswith("hung: ")
        assert not replaced, f"it was waited for until the broker had replaced it: {seen}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    client.tell("end")
    assert client.result() == 16 * [["OK", ""]]
    lab.settled(replaced=victim)
