"""Rows F-04 and C-09, in a pid namespace of their own: hardly a pid is left, or one is somebody else's by now.

`python -m tests.faults.few_pids ROW DIRECTORY`, as root of a new pid namespace with a /proc of its own, whose
`kernel.pid_max` is its own as well (Linux 6.14). Started by `tests.faults.test_few_pids`; what fails is told on stderr.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

import clientlib
from broker.gateway.zmq.journal import FILE as JOURNAL
from tests.fakes.processes import children, name_of
from tests.faults import child, front_doors, raw
from tests.faults.front_doors import FrontDoors
from tests.faults.lab import SAME, Lab, eventually

PID_MAX, LAST_PID = Path("/proc/sys/kernel/pid_max"), Path("/proc/sys/kernel/ns_last_pid")
FEW = 400
X = np.arange(8, dtype=np.float32).reshape(2, 4)
LIMIT_S = 60.0


class Crowd:
    """Processes that take every pid that is left."""

    def __init__(self) -> None:
        self._before = PID_MAX.read_text()
        self._pids: list[int] = []
        PID_MAX.write_text(str(FEW))

    def fill(self, but: int = 0) -> None:
        """`but` processes or threads can be started from here on."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._pids.append(os.posix_spawn("/bin/sleep", ["sleep", "1000"], {}))
        for _ in range(but):
            self._end(self._pids.pop())

    def leave(self) -> None:
        PID_MAX.write_text(self._before)
        while self._pids:
            self._end(self._pids.pop())

    def _end(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


# --- F-04 ------------------------------------------------------------------------------------------------------------


def ask(http: int) -> None:
    """Whenever told to: requests of a new client, a region, a load, and the same over HTTP."""
    child.say("here")
    while child.hear() == "ask":
        with clientlib.connect(timeout=40) as client, raw.named_memory(8 << 20) as key:
            told: dict[str, Any] = {
                "served": child.refusal(client.infer, "other", {"x": X}, timeout=40),
                "region": child.refusal(client.register_system_shm, "r", key, 8 << 20),
                "http": front_doors.ask_http(http, "POST", "/v2/models/other/infer", front_doors.infer_document())[0],
                "load": front_doors.ask_http(http, "POST", "/v2/repository/models/matmul/load"),
            }
        child.say(told)


def f04(directory: Path) -> None:
    """What serves goes on; loads are refused; processes that die meanwhile come back, with everything, afterwards."""
    with FrontDoors(directory, "--model-control-mode=explicit", "--load-model=*") as lab:
        client = lab.start(ask, valid=False, http=lab.http)
        client.heard()
        zygote = next(pid for pid in children(lab.broker.pid) if name_of(pid) == "tb-zygote")
        gateway = lab.status()["gateways"][0]["pid"]
        crowd = Crowd()
        crowd.fill()
        serves_on(client, (503, "the loader process cannot be started: Resource temporarily unavailable; this host"))
        crowd.fill(but=1)
        serves_on(client, (500, "loader process"))
        comes_back_with_all(lab, crowd, zygote)
        os.kill(lab.broker.pid, signal.SIGSTOP)  # or it would be faster than the crowd
        for pid in (gateway, zygote):
            os.kill(pid, signal.SIGKILL)
        crowd.fill()
        os.kill(lab.broker.pid, signal.SIGCONT)
        eventually(lambda: lab.status()["gateways"][0]["restarts"] > 1, "starts of a gateway were tried in vain")
        crowd.leave()
        eventually(lambda: lab.status()["gateways"][0]["state"] == "serving", "the gateway is back")
        eventually(lambda: all(worker["state"] == "ready" for worker in lab.status()["workers"]), "workers are back")
        client.tell("ask")
        told = client.heard()
        assert told == {"served": ["OK", ""], "region": ["OK", ""], "http": 200, "load": [200, ""]}, told
        client.tell("end")
        client.result()
        all_serve(lab)
        crowd = Crowd()
        crowd.fill()
        lab.broker.process.terminate()
        assert lab.broker.process.wait(LIMIT_S) == 0, lab.broker.log()
        crowd.leave()
        assert "start new thread" not in lab.broker.log().rpartition("Signal (15)")[2], lab.broker.log()


def serves_on(client: child.Any, refused: tuple[int, str]) -> None:
    """`refused`: the status of a load, and a part of what is said of it."""
    client.tell("ask")
    told = client.heard()
    code, text = told.pop("load")
    assert code == refused[0], told
    assert refused[1] in text, text
    assert told == {"served": ["OK", ""], "region": ["OK", ""], "http": 200}, told


def comes_back_with_all(lab: Lab, crowd: Crowd, zygote: int) -> None:
    """A worker dies while there are pids for its replacement, and none for the threads that load its models."""
    victim = lab.worker_pid()
    os.kill(zygote, signal.SIGSTOP)
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: not Path(f"/proc/{victim}/task/{victim}/children").exists() or is_zombie(victim), "it died")
    crowd.fill(but=3)
    os.kill(zygote, signal.SIGCONT)
    eventually(lambda: "cannot take up its work: there is no thread" in lab.broker.log(), "a replacement in vain")
    crowd.leave()
    eventually(lambda: lab.worker_pid(), "a worker again")
    all_serve(lab)
    crowd.__init__()  # type: ignore[misc]


def is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def all_serve(lab: Lab) -> None:
    eventually(lambda: all(model["state"] == "READY" for model in lab.status()["models"]), "every model serves")


# --- C-09 ------------------------------------------------------------------------------------------------------------


def take(pid: int) -> int:
    """Start a process that means nobody any harm under a number that has just become free. Returns it."""

    def taken() -> bool:
        LAST_PID.write_text(str(pid - 1))
        innocent = os.posix_spawn("/bin/sleep", ["sleep", "1000"], {}, setsid=True)
        if innocent != pid:  # another process was started in between
            os.kill(innocent, signal.SIGKILL)
            os.waitpid(innocent, 0)
        return innocent == pid

    eventually(taken, f"pid {pid} is free")
    return pid


def end(innocent: int) -> None:
    """It lives, and nobody has touched it, until now."""
    assert os.waitpid(innocent, os.WNOHANG) == (0, 0), f"process {innocent} was killed in place of a dead one"
    os.kill(innocent, signal.SIGKILL)
    os.waitpid(innocent, 0)


def leave_a_child() -> None:
    """A session with a region, whose socket a child inherits and keeps."""
    client = raw.session()
    raw.Region(client, "mine", 1 << 20)
    child.say(os.getpid())
    if os.fork() == 0:
        os.setsid()  # no number is free while a session or a group has it
    signal.pause()


def look_for_it() -> list[Any]:
    client = raw.session()
    found = [os.getpid(), [region["name"] for region in client.ask("ListRegions")["regions"]]]
    return [*found, raw.outcome(raw.plan(client, region="mine"))]


def stay() -> None:
    client = clientlib.connect(f"zmq+ipc://{os.environ['TENSORBROKER_DIR']}", timeout=40)
    region = client.create_region("mine", 1 << 20)
    child.say(region.key)
    signal.pause()


def c09(directory: Path) -> None:
    """Sessions, the gateway's ZeroMQ sessions and workers end with their processes, whoever has their numbers now."""
    with FrontDoors(directory) as lab:
        session_of_a_dead_process(lab)
        zmq_session_of_a_dead_process(lab)
        worker_whose_number_is_taken(lab)
        lab.remember()  # clients that had to wait for a stopped broker have more regions than before
        lab.settled(replaced=SAME)


def session_of_a_dead_process(lab: Lab) -> None:
    old = lab.start(leave_a_child, valid=False)
    pid = old.heard()
    os.kill(lab.broker.pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    assert old.ended()
    innocent = take(pid)
    os.kill(lab.broker.pid, signal.SIGCONT)
    eventually(lambda: pid not in [row["pid"] for row in lab.status()["sessions"]], "its session has ended")
    assert not [row for row in lab.status()["regions"] if row["name"] == "mine"]
    end(innocent)
    LAST_PID.write_text(str(pid - 1))
    number, regions, told = lab.offend(look_for_it)
    assert regions == [], f"{number} after {pid}: {regions}"
    assert told == ["NOT_FOUND", "Unable to find shared memory region: 'mine'"], told


def zmq_session_of_a_dead_process(lab: Lab) -> None:
    """Also where the gateway is another one by then, which finds the session in a file."""
    journal = lab.run_directory / JOURNAL
    gateway = lab.status()["gateways"][0]["pid"]
    for replaced in (False, True):
        old = lab.start(stay, valid=False)
        old.heard()
        eventually(journal.exists, "the gateway has a session")
        frozen = lab.broker.pid if replaced else gateway
        os.kill(frozen, signal.SIGSTOP)
        if replaced:
            os.kill(gateway, signal.SIGKILL)
        old.kill()
        innocent = take(old.pid)
        os.kill(frozen, signal.SIGCONT)
        eventually(lambda: not journal.exists(), "the session has ended")
        end(innocent)


def worker_whose_number_is_taken(lab: Lab) -> None:
    victim = lab.worker_pid()
    os.kill(lab.broker.pid, signal.SIGSTOP)
    os.kill(victim, signal.SIGKILL)
    innocent = take(victim)  # as soon as the zygote has reaped it
    os.kill(lab.broker.pid, signal.SIGCONT)
    eventually(lambda: lab.worker_pid() not in (0, victim), "a new worker")
    worker = next(worker for worker in lab.status()["workers"] if worker["key"] == SAME)
    assert worker["last_death"] == "killed by SIGKILL", worker
    end(innocent)


if __name__ == "__main__":
    from tests.faults import few_pids  # as children know it

    {"f04": few_pids.f04, "c09": few_pids.c09}[sys.argv[1]](Path(sys.argv[2]))
