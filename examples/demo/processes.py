"""The processes that the demo starts: the broker and the cameras. Each can be stopped, within a bound, at any time.

Every child is in a process group of its own, so Ctrl-C reaches the demo alone and the demo stops them in order.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import clientlib

START_SECONDS = 60.0
STOP_SECONDS = 15.0


class DemoError(Exception):
    """The demo cannot go on; the message is for the user."""


def log_tail(path: Path, lines: int = 20) -> str:
    """The last lines of a log, indented."""
    text = path.read_text(errors="replace") if path.exists() else ""
    return "\n".join(f"    {line}" for line in text.splitlines()[-lines:]) or "    (nothing was logged)"


class Broker:
    """`tensorbroker serve` on a model repository, reachable at `address` once `connect` has returned."""

    def __init__(
        self, repository: Path, directory: Path, log: Path, gateway: Sequence[str] = ("--gateways=0",)
    ) -> None:
        """`gateway`: flags of the network front ends; without them there are none."""
        self.address = f"ipc://{directory}"
        self._log = log
        program = Path(sys.executable).with_name("tensorbroker")
        if not program.exists():
            raise DemoError(f"there is no {program}: install the project into this environment (`make demo` does)")
        flags = ["serve", "--model-repository", str(repository), "--directory", str(directory), *gateway]
        self.command = " ".join([program.name, *flags])
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [str(program), *flags],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    def connect(self) -> clientlib.Client:
        """A client of the broker, as soon as that serves all models. Raises `DemoError` with the log's end."""
        deadline = time.monotonic() + START_SECONDS
        reason = ""
        while time.monotonic() < deadline:
            try:
                return clientlib.connect(self.address)
            except clientlib.InferError as error:
                reason = str(error)
            self.check(0.1)
        raise DemoError(f"no broker after {START_SECONDS:.0f} s ({reason}); its log:\n{log_tail(self._log)}")

    def check(self, patience: float = 0.0) -> None:
        """Raises `DemoError` if the broker is gone, or goes within `patience` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(patience)
            raise DemoError(f"the broker ended with status {status}; the end of its log:\n{log_tail(self._log)}")

    def stop(self) -> int:
        """Stops it as an init system would; its exit status (negative: it had to be killed)."""
        if self._process.poll() is None:
            self._process.terminate()
        return _reap(self._process, STOP_SECONDS)


class CameraProcess:
    """A camera and the lines it has not finished writing."""

    def __init__(self, name: str, address: str, clip: Path, start: int, scratch: Path) -> None:
        self.name = name
        self._log = scratch / f"{name}.log"
        self._rest = b""
        command = [sys.executable, "-m", "examples.demo.camera", address, str(clip)]
        command += ["--start", str(start), "--picture", str(scratch / f"{name}.png")]
        # Camera and worker share few cores; a second BLAS thread in each camera would only be in the way.
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=environment,
                process_group=0,
            )

    def fileno(self) -> int:
        """The descriptor to wait on for lines."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def lines(self) -> list[bytes] | None:
        """The lines that have come; None at the end. Blocks unless `fileno` is readable."""
        data = os.read(self.fileno(), 1 << 16)
        if not data:
            return None
        *complete, self._rest = (self._rest + data).split(b"\n")
        return complete

    def finish(self) -> None:
        """Asks it to answer what is in flight, report for the last time and end."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def check(self) -> None:
        """Raises `DemoError` if it ended badly. To be called once its lines have ended."""
        status = _reap(self._process, STOP_SECONDS)
        if status:
            raise DemoError(f"camera {self.name} ended with status {status}; its log:\n{log_tail(self._log)}")

    def stop(self) -> None:
        """Ends it, whatever it is doing."""
        assert self._process.stdout is not None
        self.finish()
        self._process.stdout.close()  # a camera that still writes must not wait for us
        _reap(self._process, 3.0)


def _reap(process: subprocess.Popen[bytes], seconds: float) -> int:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait(seconds)
