"""Processes that use CUDA in a test: each runs a function of a test module and answers calls.

    child = Child(cuda_env, "tests.integration.test_x:Worker")     # a class; made in the process, once
    child.call("method", 1, fd=7)                                   # its method there; InferError comes back as one

They are started by spawn, as CUDA wants it, and end with their line or their parent.
"""

from __future__ import annotations

import importlib
import os
import select
import socket
import subprocess
import sys
import traceback
from types import TracebackType
from typing import Any

import msgspec

from shm.errors import InferError
from shm.prctl import PR_SET_PDEATHSIG, prctl
from tests.fakes.cuda import ROOT, CudaEnv

LIMIT_S = 60.0


class Child:
    """One such process. `fds` of the last answer are the caller's."""

    def __init__(self, env: CudaEnv, target: str, *arguments: str) -> None:
        self.line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.line.settimeout(LIMIT_S)
        command = [sys.executable, "-m", "tests.fakes.cuda_children", str(theirs.fileno()), target, *arguments]
        self.process = subprocess.Popen(command, env=env.environ, cwd=ROOT, pass_fds=[theirs.fileno()])
        theirs.close()
        self.fds: list[int] = []

    @property
    def pid(self) -> int:
        return self.process.pid

    def call(self, method: str, *arguments: Any, fd: int = -1) -> Any:
        self.ask(method, *arguments, fd=fd)
        return self.answer()

    def ask(self, method: str, *arguments: Any, fd: int = -1) -> None:
        """`call` without waiting for what `answer` gives."""
        socket.send_fds(self.line, [msgspec.msgpack.encode((method, arguments))], [fd] if fd >= 0 else [])

    def answered(self) -> bool:
        return bool(select.select([self.line], [], [], 0.02)[0])

    def answer(self) -> Any:
        data, self.fds, _, _ = socket.recv_fds(self.line, 1 << 16, 4)
        assert data, f"the child has ended: {self.process.wait(LIMIT_S)}"
        kind, value = msgspec.msgpack.decode(data)
        if kind == "refused":
            raise InferError(*value)
        assert kind == "answer", value
        return value

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.line.close()
        try:
            self.process.wait(LIMIT_S)
        finally:
            self.kill()


def _serve(line: socket.socket, target: Any) -> None:
    while True:
        data, fds, _, _ = socket.recv_fds(line, 1 << 16, 4)
        if not data:
            return
        method, arguments = msgspec.msgpack.decode(data)
        out: list[int] = []
        try:
            found = getattr(target, method)(*arguments, **({"fd": fds[0]} if fds else {}))
            value, out = found if isinstance(found, tuple) else (found, [])
            answer = ("answer", msgspec.to_builtins(value, builtin_types=(bytes,)))
        except InferError as error:
            answer = ("refused", (error.code, error.message))
        except BaseException:
            answer = ("broken", traceback.format_exc())
        for fd in fds:
            os.close(fd)
        socket.send_fds(line, [msgspec.msgpack.encode(answer)], out)


if __name__ == "__main__":
    prctl(PR_SET_PDEATHSIG, 9)
    module, _, name = sys.argv[2].partition(":")
    _serve(socket.socket(fileno=int(sys.argv[1])), getattr(importlib.import_module(module), name)(*sys.argv[3:]))
