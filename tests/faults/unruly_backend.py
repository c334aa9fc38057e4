"""A backend that does what its input says: answer, sleep, or end its process in one of many ways.

Copied into model directories as `backend.py`. `act`: INT64 [1], an index of ACTS. x, y: FP32 [4]; y = x + 1, x[1] are
the seconds for acts that take time. Each run leaves x[0] as a line of the file `runs` in the version's directory.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time

import numpy as np

_directory = ""  # of the version


def _add(seconds: float) -> None:
    pass


def _wait(seconds: float) -> None:
    """Until the test makes the file `go` in the version's directory."""
    end = time.monotonic() + 60
    while not os.path.exists(os.path.join(_directory, "go")) and time.monotonic() < end:
        time.sleep(0.005)


def _segfault(seconds: float) -> None:
    ctypes.string_at(0)


def _abort(seconds: float) -> None:
    os.abort()


def _terminate(seconds: float) -> None:
    ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev()


def _overflow(seconds: float) -> None:
    sys.setrecursionlimit(1 << 30)

    @ctypes.CFUNCTYPE(None)
    def deeper() -> None:
        deeper()

    deeper()


def _kill(seconds: float) -> None:
    os.kill(os.getpid(), signal.SIGKILL)  # what the OOM killer does


def _exit(seconds: float) -> None:
    os._exit(0)


def _sys_exit(seconds: float) -> None:
    sys.exit(0)


def _cancel(seconds: float) -> None:
    raise asyncio.CancelledError


def _refuse(seconds: float) -> None:
    raise ValueError("not this one")


def _allocate(seconds: float) -> None:
    np.empty(1 << 50, np.uint8)


def _thread(seconds: float) -> None:
    def fail() -> None:
        raise ValueError("in a thread of the model's own")

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()


def _hold(seconds: float) -> None:
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))  # with the GIL


def _spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def _helpers(seconds: float) -> None:
    """Processes beside this one: in its group, in a session of its own, and one whose parent is gone."""
    command = ["sleep", f"{1_000_000 + int(seconds)}"]
    subprocess.Popen(command)
    subprocess.Popen(command, start_new_session=True)
    subprocess.run(
        ["sh", "-c", f"setsid {' '.join(command)} & setsid sh -c '{' '.join(command)} & wait' & "], check=True
    )


def _runs(tag: int) -> int:
    with open(os.path.join(_directory, "runs")) as file:
        return file.read().split().count(str(tag))


ACTS = {
    "add": _add,
    "nap": time.sleep,
    "nap_once": time.sleep,  # in the first run with a tag; `add` in others
    "hold": _hold,
    "spin": _spin,
    "segfault": _segfault,
    "abort": _abort,
    "terminate": _terminate,
    "overflow": _overflow,
    "kill": _kill,
    "exit": _exit,
    "sys_exit": _sys_exit,
    "cancel": _cancel,
    "refuse": _refuse,
    "allocate": _allocate,
    "thread": _thread,
    "helpers": _helpers,
    "wait": _wait,
}


class _Binding:
    def __init__(self, runs, inputs, outputs):
        by_name = {operand.name: operand.memory for operand in (*inputs, *outputs)}
        self.runs = runs
        self.act = by_name["act"].view(np.int64)
        self.x, self.y = by_name["x"].view(np.float32), by_name["y"].view(np.float32)

    def run(self):
        x = self.x.copy()
        os.write(self.runs, b"%d\n" % x[0])
        if self.act[0] != list(ACTS).index("nap_once") or _runs(int(x[0])) == 1:
            list(ACTS.values())[self.act[0]](float(x[1]))
        self.y[:] = x + 1

    def results(self):
        return []


class _Model:
    def __init__(self, directory):
        self.runs = os.open(os.path.join(directory, "runs"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)

    def bind(self, inputs, outputs):
        return _Binding(self.runs, inputs, outputs)

    def close(self):
        os.close(self.runs)


def load(context):
    global _directory
    _directory = context.directory
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return _Model(context.directory)
