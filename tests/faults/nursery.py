"""Processes that run functions for a test, and their certain end.

A nursery is one process that has imported everything; each child is a fork of it, so that a row costs milliseconds.
Used by `tests.faults.lab`; the other side is `tests.faults.child`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from socket import AF_UNIX, SOCK_SEQPACKET, SOCK_STREAM, send_fds, socketpair
from typing import Any

from shm.prctl import PR_SET_PDEATHSIG, prctl

LIMIT_S = 60.0  # of anything that takes milliseconds: a machine may be slow, a failure may take its time


def eventually(condition: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
    """The first true value of `condition`; fails after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"never came true: {what}"
        select.select([], [], [], 0.01)
    return value


class Child:
    """A process that runs `function` (of an importable module) and dies with its nursery. See `tests.faults.child`."""

    def __init__(self, name: str, pid: int, line: Connection, log: Path) -> None:
        self.name, self.pid, self.log = name, pid, log
        self._pidfd = os.pidfd_open(pid)
        self._line = line

    def tell(self, value: Any) -> None:
        """What `hear` returns there."""
        self._line.send_bytes(json.dumps(value).encode())

    def heard(self, timeout_s: float = LIMIT_S) -> Any:
        """What it said next."""
        return self._message("say", timeout_s)

    def result(self, timeout_s: float = LIMIT_S) -> Any:
        """What its function returned; the process has ended."""
        value = self._message("result", timeout_s)
        assert self.ended(timeout_s), f"{self.name} does not end"
        return value

    def ended(self, timeout_s: float = LIMIT_S) -> bool:
        """Whether the process ends within that time."""
        return bool(select.select([self._pidfd], [], [], timeout_s)[0])

    def signal(self, number: int) -> None:
        """To it and what it started, if it has not ended."""
        if not self.ended(0):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)
            with contextlib.suppress(ProcessLookupError):  # so young that it leads no group yet
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """SIGKILL; returns when it has ended, its process group with it."""
        self.signal(signal.SIGKILL)
        assert self.ended(), f"{self.name} survived SIGKILL"

    def close(self) -> None:
        """End it, and everything about it."""
        self.kill()
        self._line.close()
        os.close(self._pidfd)

    def _message(self, kind: str, timeout_s: float) -> Any:
        if not self._line.poll(timeout_s):
            raise AssertionError(f"{self.name} said nothing within {timeout_s} s:\n{self.log.read_text()}")
        try:
            message = json.loads(self._line.recv_bytes())
        except (EOFError, ConnectionResetError):
            raise AssertionError(f"{self.name} ended without a word:\n{self.log.read_text()}") from None
        assert message["kind"] == kind, f"{self.name}: {message['value']}\n{self.log.read_text()}"
        return message["value"]


class Nursery:
    """Starts children. `before` runs in the nursery's process before anything else."""

    def __init__(self, directory: Path, environment: Mapping[str, str], before: Callable[[], None]) -> None:
        self.directory = directory
        self._numbers = itertools.count()
        self._control, its = socketpair(AF_UNIX, SOCK_SEQPACKET)
        self._control.settimeout(LIMIT_S)

        def in_child() -> None:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            before()

        with its:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "tests.faults.child", str(its.fileno())],
                    env=environment,
                    pass_fds=[its.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    preexec_fn=in_child,
                )
            except BaseException:
                self._control.close()
                raise

    def start(self, function: Callable[..., Any], arguments: dict[str, Any], *, uid: int | None, valid: bool) -> Child:
        """A child that runs `function(**arguments)`."""
        name = f"{function.__module__}:{function.__qualname__}"
        log_path = self.directory / f"child{next(self._numbers)}-{function.__name__}.log"
        mine, its = socketpair(AF_UNIX, SOCK_STREAM)
        with its, log_path.open("wb") as log:
            send_fds(self._control, [b"1"], [its.fileno(), log.fileno()])
            pid = int(self._control.recv(16))
        child = Child(name, pid, Connection(mine.detach()), log_path)
        child.tell({"function": name, "arguments": arguments, "uid": uid, "valid": valid})
        return child

    def close(self) -> None:
        """End it; its children are the caller's to end."""
        self._control.close()
        self._process.wait(LIMIT_S)
