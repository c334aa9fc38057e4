"""The broker's end of the zygote: starts it, asks it for workers, learns from it how they ended.

`broker.workers` is the only user. What the forked processes are for is not known here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, final

from broker import zygote
from broker.worker_process import describe_exit, kill
from shm.sockets import close_all, receive, send

START_S = 60.0  # for the imports, which a cold disk makes slow, and the fork
ANSWER_S = 10.0  # for an exit to be reported
LINGER_S = 1.0  # between hanging up and the zygote's end
PRELOAD = ("numpy", "onnxruntime")

_log = logging.getLogger(__name__)


class StartFailed(Exception):
    """No worker process could be started; the text says why."""


@final
@dataclass(slots=True)
class _Life:
    """One zygote process, or the start of one."""

    process: subprocess.Popen[bytes]
    pidfd: int
    link: socket.socket
    preloaded: asyncio.Future[None]
    ended: asyncio.Future[None]


@final
@dataclass(frozen=True, slots=True)
class _Report:
    """How a worker ended, once the zygote has told; None: it cannot any more."""

    fork: int
    code: asyncio.Future[int | None]


@final
class Zygote:
    """The broker's end of the zygote. Started by the first `fork`, started again by the next one after its death."""

    __slots__ = ("_entry", "_forks", "_last_id", "_life", "_modules", "_reports")

    def __init__(self, entry: str) -> None:
        self._entry = entry
        self._modules: tuple[str, ...] = (*PRELOAD, entry)
        self._life: _Life | None = None
        self._last_id = 0
        self._forks: dict[int, asyncio.Future[tuple[int, int]]] = {}
        # By the pidfd that `fork` gave, which is one process's until it is closed; a pid may be another's by then.
        self._reports: dict[int, _Report] = {}

    @property
    def pid(self) -> int | None:
        """Of the zygote process, while there is one."""
        return self._life.process.pid if self._life is not None else None

    async def fork(self) -> tuple[socket.socket, int, int]:
        """Start a worker: (the broker's end of its link, pid, pidfd), all the caller's. Raises StartFailed."""
        life = self._life or self._start()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._last_id += 1
        number = self._last_id
        answer = self._forks[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(START_S):
                await asyncio.shield(life.preloaded)
                send(life.link, zygote.encode(zygote.Fork(id=number)), (theirs.fileno(),))
                pid, pidfd = await answer
        except BaseException as error:
            ours.close()
            if isinstance(error, OSError):  # includes the TimeoutError
                if self._life is life:
                    kill(life.pidfd)  # it does not answer: the next start needs another one
                raise StartFailed(f"the zygote does not answer ({error or 'timeout'})") from None
            raise
        finally:
            theirs.close()
            self._forks.pop(number, None)
        return ours, pid, pidfd

    async def exit_code(self, pid: int, pidfd: int) -> int | None:
        """Exit code, or minus the signal, of a worker whose pidfd is readable; None if nobody can tell.

        The zygote reaps and reports; when it is dead its workers have become the broker's own children.
        """
        report = self._reports.get(pidfd)
        if report is not None:
            await asyncio.wait([report.code], timeout=ANSWER_S)
            del self._reports[pidfd]
            if report.code.done() and (code := report.code.result()) is not None:
                return code
        return _reap(pid, pidfd)

    async def stop(self) -> None:
        """End it by hanging up; kill it if that does not help."""
        life = self._life
        if life is None:
            return
        life.link.shutdown(socket.SHUT_RDWR)
        await asyncio.wait([life.ended], timeout=LINGER_S)
        if not life.ended.done():
            kill(life.pidfd)
            await asyncio.wait([life.ended])

    def _start(self) -> _Life:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        # Both would start threads at import, and a zygote with threads must not fork.
        environment |= {"OPENBLAS_NUM_THREADS": "1", "ORT_DISABLE_TELEMETRY": "1"}
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "broker.zygote", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise StartFailed(f"the zygote cannot be started: {error}") from error
        finally:
            theirs.close()
        life = _Life(process, os.pidfd_open(process.pid), ours, loop.create_future(), loop.create_future())
        self._life = life
        loop.add_reader(life.link, self._readable, life)
        loop.add_reader(life.pidfd, self._exited, life)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is dead already: its pidfd will tell
            send(ours, zygote.encode(zygote.Preload(modules=self._modules, entry=self._entry)))
        return life

    def _readable(self, life: _Life) -> None:
        while True:
            try:
                datagram = receive(life.link)
            except BlockingIOError:
                return
            if datagram is None:
                asyncio.get_running_loop().remove_reader(life.link)
                return
            self._take(life, zygote.decode_from_zygote(datagram[0]), datagram[1])

    def _take(self, life: _Life, message: zygote.FromZygote, fds: list[int]) -> None:
        match message:
            case zygote.Preloaded():
                life.preloaded.set_result(None)
            case zygote.Unfit(module=module):
                _log.warning("importing %s starts threads: workers import it themselves, and start slower", module)
                self._modules = tuple(name for name in self._modules if name != module)
            case zygote.Forked(id=number, pid=pid):
                answer = self._forks.get(number)
                if answer is None or answer.done():
                    kill(fds[0])  # nobody waits for it any more
                    close_all(fds)
                    return
                self._reports[fds[0]] = _Report(number, asyncio.get_running_loop().create_future())
                answer.set_result((pid, fds[0]))
            case zygote.ForkFailed(id=number, reason=reason):
                answer = self._forks.get(number)
                if answer is not None and not answer.done():
                    answer.set_exception(StartFailed(f"fork: {reason}"))
            case zygote.Exited(id=number, code=code):
                for report in self._reports.values():
                    if report.fork == number and not report.code.done():
                        report.code.set_result(code)

    def _exited(self, life: _Life) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(life.pidfd)
        self._readable(life)
        loop.remove_reader(life.link)
        life.link.close()
        life.process.wait()  # its pidfd is readable: this does not block
        os.close(life.pidfd)
        self._life = None
        how = describe_exit(life.process.returncode).text
        _log.log(logging.DEBUG if life.process.returncode == 0 else logging.ERROR, "zygote: %s", how)
        life.ended.set_result(None)
        for report in self._reports.values():
            if not report.code.done():
                report.code.set_result(None)
        waiters: list[asyncio.Future[Any]] = [life.preloaded, *self._forks.values()]
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(StartFailed(f"the zygote ended: {how}"))
                waiter.exception()


def _reap(pid: int, pidfd: int) -> int | None:
    """Reap an adopted worker, and end the helper processes it left in its process group."""
    try:
        ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # a zombie of ours: so far the number is still its own
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
