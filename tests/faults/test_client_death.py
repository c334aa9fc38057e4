"""C, T-06 and sessions across fork: clients that die, let go of their memory, or leave a child behind."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import clientlib
from tests.fakes.broker import HandClient, tensor
from tests.faults import child, raw, unruly
from tests.faults.lab import Lab, eventually, scaled
from tests.faults.measure import alive
from tests.faults.nursery import Child

TAGS = itertools.count(1000)


@pytest.fixture(scope="module")
def shared_lab(tmp_path_factory):
    with Lab(tmp_path_factory.mktemp("lab"), models=unruly.write) as lab:
        yield lab


def ran(lab: Lab, tag: int) -> int:
    return unruly.runs(lab.repository, "unruly", tag)


def cancelled(lab: Lab) -> int:
    """Requests of the model "unruly"."""
    return next(int(row["cancelled"]) for row in lab.status()["models"] if row["name"] == "unruly")


def has_session(lab: Lab, client: Child) -> bool:
    return any(session["pid"] == client.pid for session in lab.status()["sessions"])


# --- C-01 ------------------------------------------------------------------------------------------------------------


def connect() -> HandClient:
    return raw.stranger()


def send_half_a_message() -> HandClient:
    client = raw.session()
    client.send_raw(b"\x83\xa4type\xacRegisterPool\xa2id")
    return client


def leave_replies_unread() -> HandClient:
    client = raw.session()
    for _ in range(20):
        client.send("GetModels")
    return client


def register() -> HandClient:
    client = raw.session()
    for number in range(8):
        raw.Region(client, f"r{number}", 1 << 20)
    return client


def prepare() -> HandClient:
    client = register()
    for _ in range(8):
        assert raw.plan(client, region="r0")["type"] == "Prepared"
    return client


def open_channels() -> HandClient:
    client = prepare()
    client.kept = [raw.Channel(client) for _ in range(4)]
    return client


def register_while_registering() -> HandClient:
    """Control calls on their way when the end comes."""
    client = register()
    for number in range(10):
        client.send("Prepare", model="add1", inputs=[tensor("x", "r0", (2, 4))], outputs=[])
        client.send("Unregister", name=f"r{number % 8}")
        client.send("OpenChannel", worker="cpu/default", slots=64)
    return client


def live_until(step: str) -> None:
    kept = globals()[step]()
    child.say("there")
    child.hear(60)
    kept.close()


STEPS: tuple[Callable[[], HandClient], ...] = (
    connect,
    send_half_a_message,
    leave_replies_unread,
    register,
    prepare,
    open_channels,
    register_while_registering,
)


@pytest.mark.parametrize("step", [step.__name__ for step in STEPS])
def test_c01_killed_after(lab, step):
    for _ in range(3):
        client = lab.start(live_until, step=step)
        client.heard()
        client.kill()
    lab.settled()


# --- C-02, C-03 ------------------------------------------------------------------------------------------------------


def submit(tags: list[int], act: str, seconds: float) -> list[list[Any]]:
    """All at once, to a model with one instance."""
    with clientlib.connect() as client:
        count = len(tags)
        region = client.create_region("r", 8192)
        acts, x, y = region.array((count, 1), "INT64"), region.array((count, 4), "FP32", 2048), None
        inputs = {"act": region.tensor((1,), "INT64"), "x": region.tensor((4,), "FP32", 2048)}
        plan = client.prepare("unruly", inputs, {"y": region.tensor((4,), "FP32", 4096)}, slots=count)
        for place, tag in enumerate(tags):
            asked = unruly.inputs(act, tag, seconds)
            acts[place], x[place] = asked["act"], asked["x"]
        pending = [plan.submit(input_slot=place, output_slot=place) for place in range(count)]
        child.say("submitted")
        y = region.array((count, 4), "FP32", 4096)
        told = [child.refusal(one.result, timeout=30) for one in pending]
        return [[*answer, bool(np.array_equal(y[i], x[i] + 1))] for i, answer in enumerate(told)]


def test_c02_queued_requests_of_a_dead_client_never_run(lab):
    first, *tags = [next(TAGS) for _ in range(20)]
    other = lab.start(submit, tags=[first], act="wait", seconds=0.0)
    eventually(lambda: ran(lab, first), "the only instance is taken")
    before = cancelled(lab)
    client = lab.start(submit, tags=tags, act="add", seconds=0.0)
    client.heard()
    client.kill()
    eventually(lambda: not has_session(lab, client), "its session has ended")
    eventually(lambda: cancelled(lab) - before >= len(tags), "what it had queued has ended")
    unruly.let_go(lab.repository, "unruly")
    other.heard()
    assert other.result() == [["OK", "", True]]
    lab.settled()
    assert [ran(lab, tag) for tag in tags] == [0] * len(tags)


def test_c03_running_request_of_a_dead_client_ends_and_is_forgotten(lab):
    tag = next(TAGS)
    client = lab.start(submit, tags=[tag], act="nap", seconds=0.3)
    eventually(lambda: ran(lab, tag), "it runs")
    client.kill()
    lab.settled()
    assert ran(lab, tag) == 1


def infer_for_ever() -> None:
    """Every way of asking, with several requests in flight."""
    with clientlib.connect() as client:
        region = client.create_region("r", 1 << 20)
        inputs, outputs = {"x": region.tensor((2, 8), "FP32")}, {"y": region.tensor((2, 8), "FP32", 4096)}
        plan = client.prepare("add1", inputs, outputs, slots=16)
        child.say("there")
        while True:
            pending = [plan.submit(input_slot=place, output_slot=place) for place in range(16)]
            client.infer("nonzero", {"x": np.ones(1000, np.float32)}, timeout=20)
            for one in pending:
                one.result(timeout=20)


def test_c03_killed_at_any_moment(lab):
    chance = random.Random(7)
    for _ in range(scaled(12, 2000)):
        client = lab.start(infer_for_ever)
        client.heard()
        client.ended(chance.uniform(0, 0.03))
        client.kill()
    lab.settled()


# --- T-06 ------------------------------------------------------------------------------------------------------------


def let_go(how: str, tag: int) -> list[str]:
    """Of the memory that a running request works on."""
    client = raw.session()
    region = raw.Region(client, "r", 8192)
    asked = unruly.inputs("nap", tag, 0.3)
    region.memory[:8], region.memory[64:80] = asked["act"].tobytes(), asked["x"].tobytes()
    plan = client.ask(
        "Prepare",
        model="unruly",
        inputs=[tensor("act", "r", (1,), "INT64"), tensor("x", "r", (4,), offset=64)],
        outputs=[tensor("y", "r", (4,), offset=4096)],
    )
    channel = raw.Channel(client)
    ending = channel.submit(plan["index"], plan["generation"])
    child.say("submitted")
    child.hear()
    if how == "unmap":
        region.memory.close()
    elif how == "unregister":
        assert client.ask("Unregister", name="r")["type"] == "Done"
    else:
        client.send("Release", index=plan["index"], generation=plan["generation"])
    told = channel.wait(ending)
    channel.close()
    client.close()
    return told


@pytest.mark.parametrize("how", ["unmap", "unregister", "release"])
def test_t06_client_lets_go_while_it_runs(lab, how):
    tag = next(TAGS)
    client = lab.start(let_go, how=how, tag=tag)
    eventually(lambda: ran(lab, tag), "it runs")
    client.heard()
    client.tell("let go")
    assert client.result() == ["0", ""]
    lab.settled()


# --- fork ------------------------------------------------------------------------------------------------------------


def leave_a_child_behind() -> None:
    """The child holds every descriptor of its parent's session, and tries to go on with its client."""
    held = register()
    client = clientlib.connect()
    region = client.create_region("r", 4096)
    inputs, outputs = {"x": region.tensor((2, 4), "FP32")}, {"y": region.tensor((2, 4), "FP32", 64)}
    plan = client.prepare("add1", inputs, outputs)
    plan.infer()
    pending = plan.submit()
    x = {"x": np.ones((2, 4), np.float32)}
    if os.fork():
        child.say("forked")
        child.hear()
        os._exit(0)
    calls: dict[str, Callable[[], Any]] = {
        "infer": lambda: client.infer("add1", x),
        "plan.infer": plan.infer,
        "plan.submit": plan.submit,
        "pending.result": pending.result,
        "models": client.models,
        "prepare": lambda: client.prepare("add1", inputs, outputs),
        "create_region": lambda: client.create_region("more", 4096),
        "unregister": lambda: client.unregister("r"),
        "array": lambda: region.array((2, 4), "FP32"),
        "share": region.share,
    }
    child.say([os.getpid(), {name: _name_of_error(call) for name, call in calls.items()}])
    client.close()
    child.valid_request()
    child.say("connected again")
    signal.alarm(60)  # nobody else ends it when the test is killed
    signal.pause()
    held.close()


def _name_of_error(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "none"


def test_child_cannot_keep_the_session_of_its_dead_parent(lab):
    parent = lab.start(leave_a_child_behind, valid=False)
    messages = [parent.heard() for _ in range(3)]
    pid, errors = next(message for message in messages if isinstance(message, list))
    try:
        assert "connected again" in messages
        assert {name: error for name, error in errors.items() if error != "ForkedError"} == {}
        assert has_session(lab, parent)
        os.kill(parent.pid, signal.SIGKILL)
        assert parent.ended()
        assert alive(pid), "the child holds the parent's socket"
        lab.settled()
        assert alive(pid)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
