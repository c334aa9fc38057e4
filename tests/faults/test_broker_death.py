"""K: the broker ends, is killed, comes back, or is started twice."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import clientlib
from tests.fakes.broker import command
from tests.faults import child, raw
from tests.faults.lab import LIMIT_S, Lab, eventually
from tests.faults.measure import NO_MORE_THAN, alive

SHAPE = (4, 64)
PLACES = 8


class Caller(threading.Thread):
    """One thread with a plan of its own, several requests in flight, every answer checked."""

    def __init__(self, client: clientlib.Client, number: int, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        size = PLACES * 4096
        self.region = client.create_region(f"caller {number}", 2 * size)
        self.places = self.region.array((2, PLACES, 1024), "FP32")
        inputs = {"x": self.region.tensor(SHAPE, "FP32", stride=4096)}
        outputs = {"y": self.region.tensor(SHAPE, "FP32", offset=size, stride=4096)}
        self.plan = client.prepare("add1", inputs, outputs, slots=PLACES)
        self.client, self.stop = client, stop
        self.ok = self.wrong = 0
        self.errors: list[tuple[float, str, str]] = []  # when the request had been published, code, message

    def run(self) -> None:
        turn = 0
        while not self.stop.is_set():
            turn += 1
            self.places[0], self.places[1] = turn, -1
            try:
                sent = [(self.plan.submit(input_slot=p, output_slot=p), time.monotonic()) for p in range(PLACES)]
            except clientlib.InferError as error:
                self.errors.append((time.monotonic(), error.code, error.message))
                continue
            for place, (pending, published) in enumerate(sent):
                try:
                    pending.result(timeout=LIMIT_S)
                except clientlib.InferError as error:
                    self.errors.append((published, error.code, error.message))
                else:
                    self.ok += 1
                    self.wrong += not (self.places[1, place, :256] == turn + 1).all()

    def report(self) -> dict[str, Any]:
        return {"ok": self.ok, "wrong": self.wrong, "errors": self.errors, "array": float(self.places[0, 0, 0])}


def call(threads: int, until_first_error: bool) -> list[dict[str, Any]]:
    """Callers until told to end, or until each has met an error."""
    if not until_first_error:  # a slow start of the next broker must not cost more than what was cut off
        clientlib.client.RECONNECT_S = 60.0
    client = clientlib.connect()
    stops = [threading.Event() for _ in range(threads)]
    callers = [Caller(client, number, stop) for number, stop in enumerate(stops)]
    for caller in callers:
        caller.start()
    while not all(caller.ok > 20 for caller in callers):
        time.sleep(0.001)
    child.say("under load")
    while not (child.hear(0.01) == "end" or (until_first_error and all(caller.errors for caller in callers))):
        for caller in callers:
            if until_first_error and caller.errors:
                caller.stop.set()
    for caller in callers:
        caller.stop.set()
        caller.join(LIMIT_S)
        assert not caller.is_alive()
    client.close()
    return [caller.report() for caller in callers]


def ended(lab: Lab, family: list[int]) -> None:
    """Nothing of the broker is left: processes, names in /dev/shm."""
    eventually(lambda: not any(alive(pid) for pid in family), "its processes have ended", NO_MORE_THAN)
    if lab.private:
        assert os.listdir(lab.shm) == []


def test_k01_sigterm_under_load(fresh_lab):
    lab = fresh_lab
    family = lab.broker.descendants()
    callers = lab.start(call, valid=False, threads=3, until_first_error=True)
    callers.heard()
    told = time.monotonic()
    lab.broker.process.send_signal(signal.SIGTERM)
    reports = callers.result()
    assert lab.broker.process.wait(LIMIT_S) == 0
    for report in reports:
        assert report["wrong"] == 0
        for published, code, message in report["errors"]:
            assert published >= told, f"accepted, and failed: {message}"
            assert code == "UNAVAILABLE", message
    assert os.listdir(lab.run_directory) == []
    ended(lab, family)
    lab.tell_tales(reports)


def test_k02_k04_sigkill_under_load_and_back(fresh_lab):
    lab = fresh_lab
    family = lab.broker.descendants()
    callers = lab.start(call, threads=3, until_first_error=False)
    callers.heard()
    lab.broker.process.kill()
    lab.broker.process.wait()
    ended(lab, family)
    assert sorted(os.listdir(lab.run_directory)) == ["broker.lock", "broker.sock"], "K-06: what it could not remove"
    (lab.run_directory / "broker.lock").write_text(f"{os.getpid()}\n")  # a pid that lives
    lab.broker.__exit__()
    lab._hand.close()
    lab.start_broker()
    for side, errors, texts in lab._await_answers().values():
        assert side["wrong"] == 0
        assert errors in ({}, {"UNAVAILABLE": 1}), texts
    callers.tell("end")
    for report in callers.result():
        assert report["wrong"] == 0
        assert report["ok"] > 20
        assert report["array"] > 1
        # Of each caller's eight requests in flight, those that were cut off; then nothing but answers.
        assert {code for _, code, _ in report["errors"]} <= {"UNAVAILABLE"}
        assert len(report["errors"]) <= PLACES
    lab.remember()
    lab.settled()


def work_on(token: str = "") -> list[Any]:
    """A plan on a pool region, of its own or shared by `token`, that is asked whenever told to, and never made anew."""
    client = clientlib.connect()
    region = client.open_region(token, name="kept") if token else client.create_region("kept", 8192)
    place = 1 if token else 0  # each has its own half
    x, y = (region.array(SHAPE, "FP32", offset=4096 * place + at) for at in (0, 1024))
    tensor = {name: region.tensor(SHAPE, "FP32", offset=4096 * place + at) for name, at in (("x", 0), ("y", 1024))}
    plan = client.prepare("add1", {"x": tensor["x"]}, {"y": tensor["y"]})
    child.say("" if token else region.share())
    told = []
    while child.hear() == "ask":
        x[:] += 1
        said = [child.refusal(plan.infer, timeout=LIMIT_S) for _ in range(2)]
        told = [said, bool((y == x + 1).all()), [each.name for each in client.regions()], region.identity]
        child.say([*told, region.array((2, 1024), "FP32")[:, 0].tolist()])
    return told


def test_k05_pool_regions_survive_the_broker(fresh_lab):
    """Without a store of descriptors: their clients hold them, and the next broker gets them from these."""
    lab = fresh_lab
    owner = lab.start(work_on, valid=False)
    other = lab.start(work_on, valid=False, token=owner.heard())
    other.heard()

    def ask(who: Any) -> list[Any]:
        who.tell("ask")
        heard = who.heard()
        assert isinstance(heard, list)
        return heard

    before = {who: ask(who) for who in (owner, other)}
    assert [said for said, *_ in before.values()] == [[["OK", ""]] * 2] * 2
    for turn in (2, 3):
        lab.broker.process.kill()
        lab.broker.process.wait()
        lab.broker.__exit__()
        lab._hand.close()
        lab.start_broker()
        after = {who: ask(who) for who in (owner, other)}
        for who, (said, right, names, identity, _) in after.items():
            assert said[1] == ["OK", ""], said
            assert said[0][0] in ("OK", "UNAVAILABLE"), said
            assert right
            assert (names, identity) == (["kept"], before[who][3]), "it is not the memory that it was"
        assert after[owner][3] == after[other][3]
        assert after[other][4] == [turn, turn], "what both have written, before and since"
    for who in (owner, other):
        who.tell("end")
        assert who.result()[1]


def test_k06_second_instance_is_refused(lab):
    socket = lab.run_directory / "broker.sock"
    before = socket.stat().st_ino
    arguments = ("serve", "--model-repository", str(lab.repository), "--directory", str(lab.run_directory))
    for cleaned_away in (False, True):
        if cleaned_away:
            (lab.run_directory / "broker.lock").unlink()  # as systemd-tmpfiles does in /tmp
        answer = command(*arguments)
        assert answer.returncode == 1
        assert f"already running (pid {lab.broker.pid})" in answer.stderr
        assert "Traceback" not in answer.stderr
        assert socket.stat().st_ino == before
    lab.offend(child_connects)
    lab.settled()


def child_connects() -> str:
    client = raw.session()
    client.close()
    return "welcome"
