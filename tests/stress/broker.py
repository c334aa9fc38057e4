"""A broker for a stress run, started as a user would start it, and what /proc tells of it and its workers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import clientlib
from broker.commands import NoAnswer, ask_status
from shm.prctl import PR_SET_PDEATHSIG, prctl


def die_with_parent() -> None:
    """In a child, before anything else: it must not outlive the run."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def kill(pid: int) -> bool:
    """SIGKILL; False when it is gone already."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


@final
class Broker:
    """One `tensorbroker serve`; its log is `run/log`."""

    def __init__(self, models: Path, run: Path, *flags: str) -> None:
        self.directory = str(run)
        self.log = run.with_name(run.name + ".log")
        gateways = () if any(flag.startswith("--gateways") for flag in flags) else ("--gateways=0",)
        repository = ("--model-repository", str(models), "--directory", str(run), *gateways)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "broker", "serve", *repository, *flags],
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
                # Workers are not dumpable, which hides /proc/PID from whoever is not root.
                env={**os.environ, "TENSORBROKER_DEBUG": "1"},
            )
        self.pid = self.process.pid

    def connect(self, limit_s: float = 60, **options: Any) -> clientlib.Client:
        """A client, as soon as the broker is ready."""
        end = time.monotonic() + limit_s
        while True:
            try:
                return clientlib.connect(f"ipc://{self.directory}", **options)
            except clientlib.InferError:
                if self.process.poll() is not None or time.monotonic() > end:
                    raise AssertionError(f"the broker is not ready:\n{self.log_tail()}") from None
                time.sleep(0.05)

    @property
    def zygote(self) -> int | None:
        return next((pid for pid in children(self.pid) if "broker.zygote" in command(pid)), None)

    def worker(self, *, other_than: int = 0) -> int | None:
        """The worker's pid; None while there is none."""
        zygote = self.zygote
        return next((pid for pid in children(zygote) if pid != other_than), None) if zygote else None

    def status(self) -> dict[str, Any]:
        for _ in range(3):
            with contextlib.suppress(NoAnswer):
                return ask_status(self.directory)
        return ask_status(self.directory)

    def log_tail(self, size: int = 4000) -> str:
        return self.log.read_text(errors="replace")[-size:]

    def stop(self) -> int | None:
        """SIGTERM; the exit code, None when it had to be killed."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return None


@contextlib.contextmanager
def running(models: Path, run: Path, *flags: str) -> Iterator[Broker]:
    broker = Broker(models, run, *flags)
    try:
        yield broker
    finally:
        if broker.process.poll() is None:
            broker.stop()
