"""A process of a test's own that runs one function of an importable module: offenders, canaries, owners of memory.

The function is called with the keyword arguments of its first message; what it returns (JSON) is the result. While it
runs, `say` and `hear` exchange values with the test. With `valid`, a plain request of the same process must succeed
afterwards. Forked from a nursery (`tests.faults.nursery`).
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import socket
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

import clientlib
from shm.prctl import PR_SET_PDEATHSIG, prctl

_line: Connection | None = None


def say(value: Any) -> None:
    """Tell the test something; it gets it with `Child.heard`."""
    _send("say", value)


def hear(timeout_s: float = 300.0) -> Any:
    """What the test said with `Child.tell`; None when it has nothing to say within the time."""
    assert _line is not None
    return json.loads(_line.recv_bytes()) if _line.poll(timeout_s) else None


def refusal(function: Any, *arguments: Any, **options: Any) -> list[str]:
    """[code, message] of the InferError that the call raises, ["OK", ""] when it raises none."""
    try:
        function(*arguments, **options)
    except clientlib.InferError as error:
        return [error.code, error.message]
    return ["OK", ""]


def valid_request() -> None:
    """Connect, run a model on arrays and on a region, check the answers."""
    with clientlib.connect(timeout=40) as client:
        x = np.arange(8, dtype=np.float32).reshape(2, 4)
        assert np.array_equal(client.infer("add1", {"x": x}, timeout=40)["y"], x + 1)
        region = client.create_region("valid", 4096)
        source, target = region.array((2, 4), "FP32"), region.array((2, 4), "FP32", offset=64)
        source[:] = x
        inputs, outputs = {"x": region.tensor((2, 4), "FP32")}, {"y": region.tensor((2, 4), "FP32", offset=64)}
        client.prepare("add1", inputs=inputs, outputs=outputs).infer(timeout=40)
        assert np.array_equal(target, x + 1)


def _send(kind: str, value: Any) -> None:
    assert _line is not None
    _line.send_bytes(json.dumps({"kind": kind, "value": value}).encode())


def live(line: int, log: int) -> None:
    """The life of a child, from its fork to its end."""
    global _line
    parent = os.getppid()
    os.setsid()
    for fd in (1, 2):
        os.dup2(log, fd)
    os.close(log)
    _line = Connection(line)
    orders = json.loads(_line.recv_bytes())
    try:
        module, name = orders["function"].split(":")
        function = getattr(importlib.import_module(module), name)
        if orders["uid"] is not None:
            os.setgroups([])
            os.setgid(orders["uid"])
            os.setuid(orders["uid"])
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # after setuid, which clears it
        if os.getppid() != parent:
            return
        value = function(**orders["arguments"])
        if orders["valid"]:
            valid_request()
        _send("result", value)
    except BaseException:
        _send("crash", traceback.format_exc())


def nursery(control: socket.socket) -> None:
    """Fork a child for every pair of descriptors that comes, and answer with its pid; until hang-up."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them: the lab has pidfds
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1, 2)
        if not data:
            return
        pid = os.fork()
        if not pid:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                live(*fds)
            finally:
                sys.stdout.flush()
                os._exit(0)
        for fd in fds:
            os.close(fd)
        control.send(str(pid).encode())


if __name__ == "__main__":
    for ready in ("pytest", "tests.faults.lab"):
        importlib.import_module(ready)
    # One module, whoever imports it: offenders call `say` of `tests.faults.child`, not of `__main__`.
    importlib.import_module("tests.faults.child").nursery(socket.socket(fileno=int(sys.argv[1])))
