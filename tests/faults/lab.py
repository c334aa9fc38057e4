"""Where rows are run: a real broker with two workers, an honest client beside the attacker, and what must hold after.

    with Lab(directory) as lab:
        result = lab.offend(function, …)      # in a process of its own; its next valid request must succeed (S7)
        lab.settled()                         # S1 … S6

S1 same broker · S2 same workers · S3 every answer to the canary right · S4 nothing kept · S5 status tells the truth ·
S6 no reply gives anything away · S7 the offender's next valid request succeeds. Everything ends with the lab.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shm.prctl import PR_SET_CHILD_SUBREAPER, prctl
from tests.fakes.broker import Broker, HandClient
from tests.fakes.processes import children
from tests.faults import canary, measure, repository
from tests.faults.measure import NO_MORE_THAN, Holdings, alive, holdings
from tests.faults.nursery import LIMIT_S, Child, Nursery, eventually
from tests.faults.repository import OTHER, SAME

ROOT = Path(__file__).parents[2]
FULL = os.environ.get("TENSORBROKER_FAULTS_FULL") == "1"  # the numbers of turns that take minutes
SHM_BYTES = 64 << 20  # of the lab's own /dev/shm: what containers have unless told otherwise
ALLOCATOR_MAPS = 24
CLONE_FS, CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x200, 0x20000, 0x4000, 1 << 18
GIVEAWAYS = re.compile(r"Traceback|site-packages|File \"|\.py\b|0x[0-9a-f]{6,}|\bat 0x")
_libc = ctypes.CDLL(None, use_errno=True)


def scaled(quick: int, full: int) -> int:
    """How many turns: `full` with TENSORBROKER_FAULTS_FULL=1."""
    return full if FULL else quick


class Lab:
    """A broker, its canary and what offenders need. `flags` go to `tensorbroker serve`."""

    def __init__(self, directory: Path, *flags: str, models: Callable[[Path], Path] = repository.write) -> None:
        self.directory = directory
        self.run_directory = directory / "run"
        self.run_directory.mkdir(mode=0o700)
        self.repository = models(directory / "repository")
        self.flags = flags
        self.children: list[Child] = []
        self.private = os.geteuid() == 0  # a /dev/shm of the lab's own, so that every byte in it is ours
        self.checked = True
        self._namespace = -1
        self._strays: set[int] = set(children())
        self._before = os.environ.get("TENSORBROKER_DEBUG")

    # --- life ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Lab:
        prctl(PR_SET_CHILD_SUBREAPER, 1)  # what offenders leave behind comes to us
        if os.geteuid():
            os.environ["TENSORBROKER_DEBUG"] = "1"  # else only root may look at /proc/PID/fd
        try:
            self.start_broker()
            self._start_nursery()
            self.start_canary()
            self.remember()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end_children()
        with contextlib.suppress(AttributeError):
            self._hand.close()
        with contextlib.suppress(AttributeError):
            self.broker.__exit__()
        with contextlib.suppress(AttributeError):
            self._nursery.close()
        for pid in set(children()) - self._strays:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        prctl(PR_SET_CHILD_SUBREAPER, 0)
        if self._namespace >= 0:
            os.close(self._namespace)
            os.close(self.shm)
        if self._before is None:
            os.environ.pop("TENSORBROKER_DEBUG", None)

    def start_broker(self) -> None:
        """A broker on the lab's run directory, after `kill_broker` or the end of the last one."""
        self.broker = Broker(self.repository, self.run_directory, *self.flags, before=self._in_broker)
        self.broker.ready()
        if self._namespace < 0:
            self._namespace = os.open(f"/proc/{self.broker.pid}/ns/mnt", os.O_RDONLY)
            self.shm = os.open(f"/proc/{self.broker.pid}/root/dev/shm", os.O_RDONLY | os.O_DIRECTORY)
        self._hand = HandClient(self.broker.path)
        assert self._hand.ask("Hello", protocol=1, library="lab")["type"] == "Welcome"

    def start_canary(self) -> None:
        self._canary = self.start(canary.run, valid=False, models={SAME: "add1", OTHER: "other"})
        self._seen: dict[str, dict[str, Any]] = {worker: {"ok": 0, "errors": {}} for worker in (SAME, OTHER)}
        self._await_answers()

    def _start_nursery(self) -> None:
        environment = {**os.environ, "TENSORBROKER_DIR": str(self.run_directory), "PYTHONPATH": str(ROOT)}
        self._nursery = Nursery(self.directory, environment, self.enter_namespace)

    def _in_broker(self) -> None:
        os.setsid()
        if self._namespace >= 0:
            self.enter_namespace()
        elif self.private:
            _call(_libc.unshare(CLONE_NEWNS), "unshare")
            _call(_libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "mount private")
            _call(_libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"mode=1777,size=%d" % SHM_BYTES), "mount tmpfs")

    def enter_namespace(self) -> None:
        """Called in children, before they become something else: see the lab's /dev/shm."""
        if self.private:
            # Libraries with fork handlers (gRPC's is one) start threads in a forked child, and only who shares its
            # root and working directory with no other thread may enter a mount namespace.
            _call(_libc.unshare(CLONE_FS), "unshare")
            _call(_libc.setns(self._namespace, CLONE_NEWNS), "setns")

    def end_children(self) -> None:
        """Kill every offender and the canary."""
        while self.children:
            self.children.pop().close()

    def end_offenders(self) -> None:
        """Kill what a row started, unlink what it made in the lab's /dev/shm."""
        while len(self.children) > 1:
            self.children.pop().close()
        if self.private:
            for name in os.listdir(self.shm):
                with contextlib.suppress(IsADirectoryError):
                    os.unlink(name, dir_fd=self.shm)

    # --- rows ------------------------------------------------------------------------------------------------------

    def start(
        self, function: Callable[..., Any], *, uid: int | None = None, valid: bool = True, **arguments: Any
    ) -> Child:
        """Run `function(**arguments)` in a process of its own. `valid`: then do a valid request there, too (S7)."""
        child = self._nursery.start(function, arguments, uid=uid, valid=valid)
        self.children.append(child)
        return child

    def offend(
        self,
        function: Callable[..., Any],
        *,
        timeout_s: float = LIMIT_S,
        uid: int | None = None,
        valid: bool = True,
        **arguments: Any,
    ) -> Any:
        """Run `function` to its end. Returns its result, in which nothing may be given away (S6)."""
        child = self.start(function, uid=uid, valid=valid, **arguments)
        result = child.result(timeout_s)
        self.tell_tales(result)
        return result

    def tell_tales(self, replies: Any) -> None:
        """S6: no traceback, no path of ours, no address, nothing of the canary's in what a client was told."""
        text = json.dumps(replies)
        found = GIVEAWAYS.findall(text)
        found += [secret for secret in (str(self.repository), str(ROOT), canary.REGION) if secret in text]
        assert not found, f"S6: replies give away {found}: {text[:2000]}"

    def status(self) -> dict[str, Any]:
        """What `tensorbroker status --json` prints, through a session that the lab keeps."""
        status: dict[str, Any] = self._hand.ask("GetStatus")["status"]
        return status

    def statistics(self) -> list[dict[str, Any]]:
        """Triton's statistics of every model, through that session."""
        found: list[dict[str, Any]] = self._hand.ask("GetStatistics")["model_stats"]
        return found

    def worker_pid(self, key: str = SAME) -> int:
        """0 while it has none."""
        return self._worker_pids()[key]

    # --- invariants ------------------------------------------------------------------------------------------------

    def remember(self) -> None:
        """Take the state of this moment as what rows must come back to."""
        self._warm_up()
        self._broker_pid = self.broker.pid
        self._workers = self._worker_pids()
        self._held = self._steady_holdings()
        self._bytes = self._shm_bytes()
        self._regions = self._region_rows()
        self.checked = True

    def settled(self, *, replaced: str = "", holders: int = 0) -> None:
        """S1 … S5 hold. `replaced`: a worker that the row may have cost (rows marked ✱).

        `holders`: sessions of the row that are still open, whose own regions are not counted.
        """
        self.end_offenders() if not holders else None
        self.checked = True
        assert self.broker.process.poll() is None, f"S1: the broker died\n{self.broker.log()[-4000:]}"
        assert self.broker.pid == self._broker_pid, "S1: another broker"
        if replaced:
            eventually(lambda: self._is_ready(replaced), f"S2: {replaced} is back")
        now = self._worker_pids()
        changed = {key for key, pid in self._workers.items() if now.get(key) != pid}
        assert changed <= {replaced}, f"S2: replaced {changed}: {self.status()['workers']}"
        self._check_canary(replaced)
        self._check_given_back(changed, holders)
        self._check_truth(holders)
        self._workers = now

    def _is_ready(self, key: str) -> bool:
        """Alive, too: just after a death the status still calls the dead one ready."""
        workers = [worker for worker in self.status()["workers"] if worker["key"] == key]
        return any(worker["state"] == "ready" and alive(worker["pid"]) for worker in workers)

    def _check_canary(self, replaced: str) -> None:
        for worker, (answers, errors, texts) in self._await_answers().items():
            assert answers["wrong"] == 0, f"S3: {worker} gave the canary wrong answers: {answers}"
            allowed = {"UNAVAILABLE"} if worker == replaced else set()
            assert set(errors) <= allowed, f"S3: the canary's requests to {worker} failed: {errors} {texts}"

    def _await_answers(self) -> dict[str, tuple[dict[str, Any], dict[str, int], list[str]]]:
        """What is new since the last time, when both workers have answered again."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            self._canary.tell("report")
            report = self._canary.heard()
            if all(report[worker]["ok"] > seen["ok"] for worker, seen in self._seen.items()):
                break
            assert time.monotonic() < deadline, f"S3: the canary gets no answers: {report}\n{self.broker.log()[-4000:]}"
        news = {}
        for worker, side in report.items():
            known = self._seen[worker]["errors"]
            errors = {code: n - known.get(code, 0) for code, n in side["errors"].items() if n > known.get(code, 0)}
            news[worker] = (side, errors, side["texts"])
        self._seen = report
        return news

    def _check_given_back(self, changed: set[str], holders: int) -> None:
        if holders:
            return
        if changed:  # a replacement has holdings of its own; it may keep no more than its predecessor's kind
            self._held = {process: held for process, held in self._held.items() if process not in changed}
        deadline = time.monotonic() + NO_MORE_THAN
        while kept := self._kept():
            assert time.monotonic() < deadline, f"S4: kept {kept}"
            select.select([], [], [], 0.02)
        if changed:
            self._held = {**self._holdings(), **self._held}

    def _kept(self) -> list[str]:
        kept = measure.excess(self._holdings(), self._held, ALLOCATOR_MAPS)
        if (now := self._shm_bytes()) > self._bytes:
            kept.append(f"/dev/shm: {self._bytes} → {now} bytes, {os.listdir(self.shm)}")
        if (rows := self._region_rows()) != self._regions:
            kept.append(f"regions: {rows}")
        return kept

    def _check_truth(self, holders: int) -> None:
        status = self.status()
        assert status["broker"]["pid"] == self.broker.pid, "S5"
        for worker in status["workers"]:
            assert worker["state"] == "ready", f"S5: {worker}"
            assert alive(worker["pid"]), f"S5: {worker} is dead"
            assert worker["lost_wakeups"] == 0, f"S5: {worker}"
        for model in status["models"]:
            unloaded = model["state"] == "UNAVAILABLE" and model["reason"] == "unloaded"
            assert model["state"] == "READY" or unloaded, f"S5: {model}"
        if not holders:
            ours = sorted((os.getpid(), self._canary.pid))
            eventually(lambda: sorted(visitors(self.status())) == ours, f"S5: no sessions but {ours}", NO_MORE_THAN)

    # --- measuring -------------------------------------------------------------------------------------------------

    def _worker_pids(self) -> dict[str, int]:
        return {worker["key"]: worker["pid"] or 0 for worker in self.status()["workers"]}

    def _holdings(self) -> dict[str, Holdings]:
        named = {"broker": self.broker.pid, **self._worker_pids()}
        return {name: holdings(pid) for name, pid in named.items() if pid and alive(pid)}

    def _steady_holdings(self) -> dict[str, Holdings]:
        """As `_holdings`, once they no longer go down: what the warm-up cost has been given back."""
        lowest, looks = self._holdings(), 0
        while looks < 10:
            select.select([], [], [], 0.02)
            now = self._holdings()
            looks = looks + 1 if now == lowest else 0
            lowest = now
        return lowest

    def _shm_bytes(self) -> int:
        """Bytes in use in the lab's own /dev/shm; 0 where it is everybody's."""
        if not self.private:
            return 0
        usage = os.fstatvfs(self.shm)
        return (usage.f_blocks - usage.f_bfree) * usage.f_frsize

    def _region_rows(self) -> list[tuple[int, str, int]]:
        return sorted((row["session"], row["name"], row["byte_size"]) for row in self.status()["regions"])

    def _warm_up(self) -> None:
        """Start every thread that a broker starts at need, so that later ones are leaks."""
        for _ in range(2):
            self.offend(warm_up)
        self.end_offenders()
        eventually(lambda: len(visitors(self.status())) == 2, "the sessions of the warm-up ended")


def visitors(status: dict[str, Any]) -> list[int]:
    """Pids of the sessions that are not the broker's own gateways'."""
    gateways = {row["pid"] for row in status["gateways"]}
    return [session["pid"] for session in status["sessions"] if session["pid"] not in gateways]


def warm_up() -> None:
    """Two sessions, each with a system region big enough that both are reserved at once."""
    import posix_ipc  # only offenders need it

    size = 8 << 20
    path = os.path.join(os.environ["TENSORBROKER_DIR"], "broker.sock")
    sessions = [HandClient(path) for _ in range(4)]
    for number, session in enumerate(sessions):
        memory = posix_ipc.SharedMemory(f"/warm-up-{number}", posix_ipc.O_CREX, size=size)
        os.close(memory.fd)
        assert session.ask("Hello", protocol=1)["type"] == "Welcome"
    for number, session in enumerate(sessions):
        session.send("RegisterSystem", name="r", key=f"/warm-up-{number}", byte_size=size)
    for number, session in enumerate(sessions):
        reply = session.receive()
        assert reply is not None
        assert reply["type"] == "RegionInfo", reply
        session.close()
        posix_ipc.unlink_shared_memory(f"/warm-up-{number}")


def _call(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), what)
