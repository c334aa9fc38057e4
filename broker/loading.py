"""Runs loader processes: the only ones that parse model files and config.pbtxt.

`broker.models` iterates over what they find. A loader may crash or hang on a model's files; that model fails with the
reason, and another loader goes on with the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import final

from msgspec.structs import replace

from broker.gpus import Gpus
from broker.load_watch import LoadWatch
from broker.repository.check import describe_exit
from broker.repository.config import LoadFailure, ModelConfig
from broker.repository.protocol import LoadRequest, LoadRun, Plan, encode_request
from broker.repository.requirements import check_requirements
from broker.worker_process import kill
from shm.errors import Code, InferError

PROGRESS_S = 120.0  # without a message from the loader
EXIT_S = 5.0  # between its last message and its end
MODULE = "broker.repository.loader"


async def results(
    request: LoadRequest,
    gpus: Gpus | None = None,
    watch: LoadWatch | None = None,
    *,
    module: str = MODULE,
    progress_s: float = PROGRESS_S,
) -> AsyncIterator[Plan | ModelConfig | LoadFailure]:
    """First the plan, then a result for every model it names, each as soon as it is known.

    `gpus`: what models may be placed on; None: whatever `request` says. `watch`: knows which model is being read.
    Raises InferError when there is no plan: the loader could not even list the models, or cannot run here.
    """
    check_requirements()
    watch = watch or LoadWatch(0)
    request = request if gpus is None else await gpus.known_to(request)
    first = True
    while True:
        loader, run, given = _Loader(request, module), LoadRun(), 0
        try:
            while data := await loader.read(progress_s):
                run.feed(data)
                watch.reading(loader, run.current, progress_s)
                for result in _known(run, first)[given:]:
                    given += 1
                    yield result
        except InferError as error:
            loader.kill(f"wrote what cannot be read ({error.message})")
        except BaseException:  # nobody wants the rest
            loader.kill("was stopped")
            raise
        finally:
            watch.reading(loader, None, progress_s)
            how = await loader.ended()
        rest = run.ended(how)
        for result in _known(run, first)[given:]:
            yield result
        if run.plan is None:
            raise InferError(Code.INTERNAL, f"the loader process {how} before it had listed the models")
        if not rest:
            return
        first = False
        request = replace(request, models=rest)


def _known(run: LoadRun, with_plan: bool) -> list[Plan | ModelConfig | LoadFailure]:
    return [*([run.plan] if with_plan and run.plan is not None else []), *run.results.values()]


@final
class _Loader:
    """One loader process."""

    __slots__ = ("_loop", "_output", "_pidfd", "_process", "_reason")

    def __init__(self, request: LoadRequest, module: str) -> None:
        self._reason = ""
        self._loop = asyncio.get_running_loop()
        self._output, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(theirs, True)
        # A memfd, not a pipe: a loader that does not read its request cannot make us wait.
        with open(os.memfd_create("tensorbroker-load-request"), "w+b") as question:
            question.write(encode_request(request))
            question.seek(0)
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", module], stdin=question, stdout=theirs, start_new_session=True
                )
            except OSError as error:
                os.close(self._output)
                raise InferError(
                    Code.UNAVAILABLE,
                    f"the loader process cannot be started: {error.strerror or error}; this host has no room for "
                    "another process now (ulimit -u, kernel.pid_max, memory): load the model again later",
                ) from error
            finally:
                os.close(theirs)
        self._pidfd = os.pidfd_open(self._process.pid)

    async def read(self, limit_s: float) -> bytes:
        """What it has written, b"" at the end; kills it when nothing comes for `limit_s`."""
        while True:
            try:
                return os.read(self._output, 1 << 16)
            except BlockingIOError:
                if not await self._readable(self._output, limit_s):
                    self.kill(f"made no progress for {limit_s:g} s")
                    return b""

    def kill(self, reason: str) -> None:
        """SIGKILL; `reason` is what its end will be put down to."""
        self._reason = reason
        kill(self._pidfd)

    async def ended(self) -> str:
        """Wait for its end and say how it was, as the end of a sentence about it. Closes everything."""
        try:
            if not await self._readable(self._pidfd, EXIT_S):
                self.kill("did not end")
                await self._readable(self._pidfd, EXIT_S)
        finally:
            kill(self._pidfd)  # only if we were cancelled is there anything to kill
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            os.close(self._output)
            code = self._process.poll()
            if code is None:  # it was killed just now, or the kernel holds it: nobody waits for that
                self._loop.add_reader(self._pidfd, self._reap)
            else:
                os.close(self._pidfd)
        return self._reason or describe_exit(code or 0)

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._process.poll()
        os.close(self._pidfd)

    async def _readable(self, fd: int, limit_s: float) -> bool:
        event = asyncio.Event()
        self._loop.add_reader(fd, event.set)
        try:
            async with asyncio.timeout(limit_s):
                await event.wait()
        except TimeoutError:
            return False
        finally:
            self._loop.remove_reader(fd)
        return True
