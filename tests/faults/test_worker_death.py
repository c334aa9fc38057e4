"""W: a worker dies or hangs, in any way, at any moment."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import posix_ipc
import pytest

import clientlib
from tests.faults import child, raw, unruly
from tests.faults.lab import OTHER, SAME, Lab, eventually, scaled
from tests.faults.measure import alive

MIB = 1 << 20
TWICE = "UNAVAILABLE the worker died while it ran this request, alone and for the second time"
NOT_AGAIN = "it is not run again (with the model parameter retry 'false' it would have ended at the first death)"
REFUSED = "UNAVAILABLE requests of this client for model 'unruly' are refused"
TAGS = itertools.count(1000)  # one for every request whose runs are counted


@pytest.fixture(scope="module")
def shared_lab(tmp_path_factory):
    with Lab(tmp_path_factory.mktemp("lab"), models=unruly.write) as lab:
        yield lab


def worker(lab: Lab) -> dict[str, Any]:
    return next(worker for worker in lab.status()["workers"] if worker["key"] == SAME)


def kill_worker(lab: Lab, again: bool = False, key: str = SAME) -> None:
    """SIGKILL; returns when it has been replaced. `again`: kill the replacement, too, before it is ready."""
    for _ in range(1 + again):
        victim = eventually(lambda: lab.worker_pid(key), "a worker")
        with contextlib.suppress(ProcessLookupError):  # the status names a dead one for a moment
            os.kill(victim, signal.SIGKILL)
        eventually(lambda victim=victim: lab.worker_pid(key) not in (0, victim), "a new worker")
    eventually(lambda: lab._is_ready(key), "a worker that is ready")


def last_death(lab: Lab) -> str:
    return worker(lab)["last_death"]


def failures(lab: Lab, model: str) -> int:
    entry = next(each for each in lab.statistics() if each["name"] == model)
    return int(entry["inference_stats"]["fail"]["count"])


def ask(model: str, act: str, tag: int, seconds: float = 0.0) -> list[Any]:
    """[code, message, right answer?] of one request."""
    with clientlib.connect() as client:
        return answer(client, model, act, tag, seconds)


def answer(client: clientlib.Client, model: str, act: str, tag: int, seconds: float = 0.0) -> list[Any]:
    asked = unruly.inputs(act, tag, seconds)
    try:
        y = client.infer(model, asked, timeout=60)["y"]
    except clientlib.InferError as error:
        return [error.code, error.message, False]
    return ["OK", "", bool(np.array_equal(y, asked["x"] + 1))]


# --- W-01 … W-04: killed in every phase ------------------------------------------------------------------------------


def infer_before_and_after() -> list[Any]:
    with clientlib.connect() as client:
        region = client.create_region("r", 4096)
        x, y = region.array((2, 4), "FP32"), region.array((2, 4), "FP32", 64)
        places = {"x": region.tensor((2, 4), "FP32")}, {"y": region.tensor((2, 4), "FP32", 64)}
        plan = client.prepare("add1", *places)
        right = []
        for turn in range(2):
            x[:] = turn
            plan.infer(timeout=60)
            right.append(bool((y == turn + 1).all()))
            child.say("once")
            child.hear()
        return right


def test_w01_killed_while_nothing_runs(lab):
    offender = lab.start(infer_before_and_after)
    offender.heard()
    kill_worker(lab)
    offender.tell("again")
    offender.heard()
    offender.tell("end")
    assert offender.result() == [True, True]
    assert last_death(lab) == "killed by SIGKILL"
    lab.settled(replaced=SAME)


def register_and_infer_for_ever() -> dict[str, int]:
    """How often each answer came. Control calls may not fail at all: what dies is asked again when it is back."""
    told: Counter[str] = Counter()
    with clientlib.connect() as client:
        for turn in itertools.count():
            region = client.create_region(f"r{turn}", 4096)
            places = {"x": region.tensor((2, 4), "FP32")}, {"y": region.tensor((2, 4), "FP32", 64)}
            plan = client.prepare("add1", *places)
            region.array((2, 4), "FP32")[:] = turn
            code, message = child.refusal(plan.infer, timeout=60)
            told[f"{code} {message}"] += 1
            assert code != "OK" or (region.array((2, 4), "FP32", 64) == turn + 1).all()
            client.unregister(region.name)
            if child.hear(0) == "end":
                return told


def write_much_for_ever() -> dict[str, int]:
    """An output whose shape only the run tells: copied into place afterwards."""
    count = 1 << 18
    told: Counter[str] = Counter()
    with clientlib.connect() as client:
        region = client.create_region("r", count * 12)
        x, y = region.array((count,), "FP32"), region.array((1, count), "INT64", count * 4)
        x[:] = 1
        places = {"x": region.tensor((count,), "FP32")}, {"y": region.tensor((1, count), "INT64", count * 4)}
        plan = client.prepare("nonzero", *places)
        while True:
            y[:] = -1
            code, message = child.refusal(plan.infer, timeout=60)
            told[f"{code} {message}"] += 1
            assert code != "OK" or np.array_equal(y[0], np.arange(count)), "a partial output passed for a result"
            if child.hear(0) == "end":
                return told


def sentence(told: str) -> str:  # without of what and how the worker died, and for how long it is held against one
    return TWICE if told.startswith(TWICE) else told.partition(" for another")[0]


@pytest.mark.parametrize("life", [register_and_infer_for_ever, write_much_for_ever], ids=["w02_map", "w04_output"])
def test_killed_at_any_moment(lab, life):
    offender = lab.start(life)
    for turn in range(scaled(8, 200)):
        kill_worker(lab, again=turn % 3 == 2)
        offender.ended(random.uniform(0, 0.03))
    offender.tell("end")
    told = offender.result()
    assert told["OK "] > 0
    refused = {REFUSED.replace("unruly", model) for model in ("add1", "nonzero")}
    assert set(map(sentence, told)) <= {"OK ", TWICE} | refused, "kills may meet the same request twice, two of them"
    lab.settled(replaced=SAME)


def wait_with_a_queue(model: str, tag: int) -> list[list[Any]]:
    """One that runs, and four that wait for the only instance."""
    with clientlib.connect() as client:
        region = client.create_region("r", 4096)
        act, x = region.array((5, 1), "INT64"), region.array((5, 4), "FP32", 1024)
        y = region.array((5, 4), "FP32", 2048)
        plan = client.prepare(
            model,
            {"act": region.tensor((1,), "INT64"), "x": region.tensor((4,), "FP32", 1024)},
            {"y": region.tensor((4,), "FP32", 2048)},
            slots=5,
        )
        for place in range(5):
            asked = unruly.inputs("add" if place else "nap_once", tag + place, 30)
            act[place], x[place] = asked["act"], asked["x"]
        pending = [plan.submit(input_slot=place, output_slot=place) for place in range(5)]
        answers = [child.refusal(one.result, timeout=60) for one in pending]
        return [[*told, bool(np.array_equal(y[i], x[i] + 1))] for i, told in enumerate(answers)]


@pytest.mark.parametrize("model", ["unruly", "unrepeatable"])
def test_w03_killed_while_running(lab, model):
    tag = next(TAGS)
    for _ in range(4):
        next(TAGS)
    offender = lab.start(wait_with_a_queue, model=model, tag=tag)
    eventually(lambda: unruly.runs(lab.repository, model, tag) == 1, "the request runs")
    kill_worker(lab)
    first, *queued = offender.result()
    assert queued == [["OK", "", True]] * 4, "what had not started is served by the replacement"
    if model == "unruly":
        assert first == ["OK", "", True]
    else:
        assert first[0] == "UNAVAILABLE"
        assert "its model does not allow it to run twice" in first[1]
    runs = [unruly.runs(lab.repository, model, tag + place) for place in range(5)]
    assert runs == [2 if model == "unruly" else 1, 1, 1, 1, 1]
    lab.settled(replaced=SAME)


# --- W-05 … W-09: the model's own doing ------------------------------------------------------------------------------


def truncate_below_the_output(tag: int) -> list[Any]:
    """The model writes its output when it may go on: by then the memory is not there any more."""
    with clientlib.connect() as client, raw.named_memory(2 * MIB) as key:
        fd = posix_ipc.SharedMemory(key).fd
        region = client.register_system_shm("r", key, 2 * MIB)
        asked = unruly.inputs("wait", tag)
        region.array((1,), "INT64")[:], region.array((4,), "FP32", 64)[:] = asked["act"], asked["x"]
        inputs = {"act": region.tensor((1,), "INT64"), "x": region.tensor((4,), "FP32", 64)}
        plan = client.prepare("unruly", inputs, {"y": region.tensor((4,), "FP32", MIB)})
        pending = plan.submit(timeout=60)
        child.hear()
        os.ftruncate(fd, MIB)
        child.say("cut")
        told = [child.refusal(pending.result), child.refusal(plan.infer, timeout=20)]
        told.append(child.refusal(client.prepare, "add1", {"x": region.tensor((2, 4), "FP32")}))
        os.ftruncate(fd, 2 * MIB)
        told.append(child.refusal(client.register_system_shm, "again", key, 2 * MIB))
        os.close(fd)
        return [told, [row.name for row in client.regions()]]


def test_w05_region_that_killed_its_worker_is_retired(lab):
    tag = next(TAGS)
    unruly.hold(lab.repository, "unruly")
    offender = lab.start(truncate_below_the_output, tag=tag)
    eventually(lambda: unruly.runs(lab.repository, "unruly", tag) == 1, "the request runs")
    offender.tell("cut")
    assert offender.heard() == "cut"
    unruly.let_go(lab.repository, "unruly")
    (first, second, prepared, again), names = offender.result()
    assert first[0] == "UNAVAILABLE"
    assert first[1].startswith("the worker died while it ran this request, and its plan is gone")
    assert second[0] == "NOT_FOUND"
    assert prepared == ["NOT_FOUND", "Unable to find shared memory region: 'r'"]
    assert again == ["OK", ""], "the same memory at its full size"
    assert "r" not in names
    assert "again" in names
    assert last_death(lab) == "killed by SIGBUS"
    assert unruly.runs(lab.repository, "unruly", tag) == 1, "one death is enough to know why"
    lab.settled(replaced=SAME)


@pytest.mark.parametrize(
    ("act", "death"),
    [
        *(("segfault", "killed by SIGSEGV"), ("overflow", "killed by SIGSEGV"), ("kill", "killed by SIGKILL")),
        *(("abort", "killed by SIGABRT"), ("terminate", "killed by SIGABRT"), ("exit", "exit code 0")),
    ],
)
def test_w06_w07_w09_model_ends_its_process(lab, act, death):
    tag, failed = next(TAGS), failures(lab, "unruly")
    offender = lab.start(ask, model="unruly", act=act, tag=tag)
    while not offender.ended(0.01):
        assert_truthful(lab)
    code, message, _ = offender.result()
    known = (death, "ended, nobody knows how")  # if it is not heard soon
    assert f"{code} {message}" in [f"{TWICE}: model 'unruly' version 1, {how}; {NOT_AGAIN}" for how in known]
    assert unruly.runs(lab.repository, "unruly", tag) == 2
    assert last_death(lab) == death
    eventually(lambda: failures(lab, "unruly") > failed, "it is counted")
    assert failures(lab, "unruly") == failed + 1, "counted once, by the broker"
    lab.settled(replaced=SAME)


def assert_truthful(lab: Lab) -> None:
    """S5 at any moment: what is called ready is alive, or its death is being noticed."""
    seen = worker(lab)
    if seen["state"] == "ready" and not alive(seen["pid"]):
        eventually(lambda: lab.worker_pid() != seen["pid"], "the death is noticed")


@pytest.mark.parametrize(
    ("act", "code", "text"),
    [
        *(("refuse", "INTERNAL", "ValueError: not this one"), ("allocate", "INTERNAL", "Error"), ("thread", "OK", "")),
        *(("sys_exit", "INTERNAL", "SystemExit"), ("cancel", "INTERNAL", "CancelledError")),
    ],
)
def test_w07_w09_model_fails_without_dying(lab, act, code, text):
    told = lab.offend(ask, model="unruly", act=act, tag=next(TAGS))
    assert told[0] == code
    assert text in told[1]
    lab.settled()


@pytest.mark.parametrize("act", ["nap", "hold", "spin"])
def test_w08_hang(lab, act):
    tag, failed = next(TAGS), failures(lab, "hanger")
    code, message, _ = lab.offend(ask, model="hanger", act=act, tag=tag, seconds=60.0)
    assert message.startswith("model 'hanger' version 1 hung: it had run a batch of 1 for ")
    assert "the limit is 0.5 s (model parameter hang_timeout_s); " in message
    assert f"{code} {message.rsplit('; ')[-1]}" == f"{TWICE}: {NOT_AGAIN}"
    assert "hung: model 'hanger' version 1" in last_death(lab)
    eventually(lambda: failures(lab, "hanger") > failed, "it is counted")
    assert failures(lab, "hanger") == failed + 1, "counted once, by the broker"
    lab.settled(replaced=SAME)


def test_w08_stopped_while_running(lab):
    for _ in range(10):
        tag, victim = next(TAGS), lab.worker_pid()
        offender = lab.start(ask, model="hanger", act="nap_once", tag=tag, seconds=unruly.HANG_S / 2)
        eventually(lambda tag=tag: unruly.runs(lab.repository, "hanger", tag) >= 1, "the request runs")
        os.kill(victim, signal.SIGSTOP)
        offender.ended(3 * unruly.HANG_S)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGCONT)  # it was over before: stopped while nothing ran
        assert offender.result() == ["OK", "", True]
        if unruly.runs(lab.repository, "hanger", tag) == 2:
            break
    assert "hung: model 'hanger' version 1" in last_death(lab)
    assert unruly.runs(lab.repository, "hanger", tag) == 2
    lab.settled(replaced=SAME)


# --- W-11: poison ----------------------------------------------------------------------------------------------------


def poison_three_times(tags: list[int]) -> list[list[Any]]:
    with clientlib.connect() as client:
        told = [answer(client, "unruly", "segfault", tag) for tag in tags]
        told.append(answer(client, "hanger", "add", 0))
        child.say(told)
        child.hear()
        return told


def test_w11_poison_runs_twice_and_its_sender_is_refused(lab):
    tags = [next(TAGS) for _ in range(3)]
    offender = lab.start(poison_three_times, tags=tags)
    first, second, third, other = offender.heard()
    assert [sentence(f"{code} {message}") for code, message, _ in (first, second)] == [TWICE, TWICE]
    assert sentence(f"{third[0]} {third[1]}") == REFUSED
    assert [unruly.runs(lab.repository, "unruly", tag) for tag in tags] == [2, 2, 0]
    assert other == ["OK", "", True], "another model of the same session"
    assert lab.offend(ask, model="unruly", act="add", tag=0) == ["OK", "", True], "another session, the same model"
    offender.tell("end")
    lab.tell_tales(offender.result())
    lab.settled(replaced=SAME)


def test_w11_who_ran_beside_poison_is_answered(lab):
    innocent_tag, poison_tag = next(TAGS), next(TAGS)
    innocent = lab.start(ask, model="unruly_pair", act="nap_once", tag=innocent_tag, seconds=30.0)
    eventually(lambda: unruly.runs(lab.repository, "unruly_pair", innocent_tag) == 1, "the innocent runs")
    poison = lab.start(ask, model="unruly_pair", act="segfault", tag=poison_tag)
    assert poison.result()[0] == "UNAVAILABLE"
    assert innocent.result() == ["OK", "", True]
    assert unruly.runs(lab.repository, "unruly_pair", poison_tag) == 2
    assert unruly.runs(lab.repository, "unruly_pair", innocent_tag) == 2
    lab.settled(replaced=SAME)


def test_w11_others_prepare_and_run_while_poison_kills(lab):
    """The death of a replacement that has just acknowledged everything is still a death."""
    others = [lab.start(register_and_infer_for_ever) for _ in range(2)]
    for _ in range(scaled(6, 100)):
        told = lab.start(ask, model="unruly", act="exit", tag=0, valid=False).result()
        assert sentence(f"{told[0]} {told[1]}") == TWICE
    for other in others:
        other.tell("end")
    for other in others:
        told = other.result()
        assert told["OK "] > 0
        again = sum(count for text, count in told.items() if sentence(text) == TWICE)
        assert set(map(sentence, told)) <= {"OK ", TWICE, *((REFUSED,) if again > 1 else ())}
    lab.settled(replaced=SAME)


# --- W-14: what a model has started -----------------------------------------------------------------------------------


MARK = os.getpid() % 1_000_000  # nobody else's helpers
HELPERS = 5  # processes: four that sleep, and a shell that waits for one of these


def helpers() -> set[int]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if f"{1_000_000 + MARK}" in path.read_text():
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found


def test_w14_helpers_of_a_model_end_with_its_worker(lab):
    """Wherever they went; another worker's death is none of theirs."""
    before = helpers()
    assert lab.offend(ask, model="unruly", act="helpers", tag=next(TAGS), seconds=MARK) == ["OK", "", True]
    started = eventually(lambda: new if len(new := helpers() - before) >= HELPERS else None, "helpers")
    assert len({os.getsid(pid) for pid in started}) > 2, "some have left the worker's session"
    kill_worker(lab, key=OTHER)
    assert helpers() - before == started
    lab.settled(replaced=OTHER)
    kill_worker(lab)
    eventually(lambda: not helpers() - before, "all have ended")
    lab.settled(replaced=SAME)
