"""A broker for one benchmark, processes beside it, and on which cores everything runs."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.models import Model, write_repository
from broker.commands import ask_status
from shm.prctl import PR_SET_PDEATHSIG, prctl

START_S = 60.0
STOP_S = 30.0


def die_with_parent() -> None:
    """A benchmark that is killed leaves nothing behind."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Broker:
    """`tensorbroker serve` on a repository of `models`, in a directory of its own. A context manager.

    `gateway`: with one, on free ports (`ports`: "http", "grpc"). `flags`: more of them.
    """

    def __init__(self, models: Iterable[Model], *, gateway: bool = False, flags: Sequence[str] = ()) -> None:
        self.ports = {name: free_port() for name in ("http", "grpc")} if gateway else {}
        ports = [f"--{name}-port={port}" for name, port in self.ports.items()]
        front = [*ports, "--allow-metrics=false"] if gateway else ["--gateways=0"]
        self._scratch = tempfile.TemporaryDirectory(prefix="tensorbroker-bench-")
        root = Path(self._scratch.name)
        repository = write_repository(root / "models", models)
        self.directory = root / "run"
        self.directory.mkdir(mode=0o700)
        self._log_path = root / "log"
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "broker", "serve"),
                    *("--model-repository", str(repository), "--directory", str(self.directory), *front, *flags),
                ],
                stdout=subprocess.PIPE,
                stderr=log,
                preexec_fn=die_with_parent,
            )

    def __enter__(self) -> Broker:
        stdout = self._process.stdout
        assert stdout is not None
        readable, _, _ = select.select([stdout], [], [], START_S)
        if not readable or b"is ready" not in stdout.readline():
            log = self._log_path.read_text()
            self.__exit__()
            raise SystemExit(f"the broker did not start:\n{log}")
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.terminate()
        try:
            failed = self._process.wait(STOP_S) != 0
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            failed = True
        assert self._process.stdout is not None
        self._process.stdout.close()
        if failed:
            print(self._log_path.read_text(), file=sys.stderr)
        self._scratch.cleanup()

    @property
    def url(self) -> str:
        return f"ipc://{self.directory}"

    def worker(self, group: str = "") -> int:
        """Pid of the process that runs the models of a group."""
        workers = ask_status(str(self.directory))["workers"]
        (worker,) = [worker for worker in workers if worker["key"] == f"cpu/{group or 'default'}"]
        return int(worker["pid"])

    def pids(self) -> list[int]:
        """The broker and everything it started."""
        found, todo = [], [self._process.pid]
        while todo:
            pid = todo.pop()
            found.append(pid)
            for task in Path(f"/proc/{pid}/task").iterdir():
                todo += map(int, (task / "children").read_text().split())
        return found


def free_port() -> int:
    """A TCP port that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time that the threads of these processes have used. Finer than the clock ticks of /proc/PID/stat."""
    tasks = (task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir())
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


# --- placement ----------------------------------------------------------------------------------------------------

CORES = tuple(sorted(os.sched_getaffinity(0)))


@dataclass(frozen=True, slots=True)
class Placement:
    """On which cores the client and the other side run; None: wherever the scheduler likes."""

    name: str
    client: int | None = None
    other: int | None = None


UNPINNED = Placement("unpinned")
SPLIT = Placement("split cores", CORES[0], CORES[-1])
SAME = Placement("same core", CORES[0], CORES[0])


@contextlib.contextmanager
def placed(placement: Placement, other: int) -> Iterator[None]:
    """Pins this process and the process `other`, every thread of both."""
    try:
        _pin(os.getpid(), placement.client)
        _pin(other, placement.other)
        yield
    finally:
        _pin(os.getpid(), None)
        _pin(other, None)


def _pin(pid: int, core: int | None) -> None:
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), CORES if core is None else {core})


# --- processes beside ---------------------------------------------------------------------------------------------


class Companion:
    """`python -m bench.MODULE …`, which speaks lines and ends when its standard input does. A context manager.

    `root`: another directory with this project, whose modules it runs on; `module` is a file then.
    """

    def __init__(self, module: str, *arguments: str, root: Path | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m" if root is None else "-P", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
            env=None if root is None else {**os.environ, "PYTHONPATH": str(root)},
        )
        self._name = module
        self.pid = self._process.pid

    def __enter__(self) -> Companion:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self._process.communicate(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self, limit_s: float = START_S) -> str:
        """Its next line."""
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], limit_s)
        line = self._process.stdout.readline() if readable else ""
        if not line:
            raise RuntimeError(f"{self._name} says nothing (exit code {self._process.poll()})")
        return line.rstrip("\n")


@contextlib.contextmanager
def idle_clients(broker: Broker, count: int) -> Iterator[None]:
    """`count` clients that have made one request each and stay connected."""
    if not count:
        yield
        return
    with Companion("bench.idle", broker.url, str(count)) as companion:
        companion.hear()
        yield
