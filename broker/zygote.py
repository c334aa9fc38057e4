"""The zygote: a process with numpy and the model runtimes imported, which forks workers in milliseconds.

`python -m broker.zygote FD`, started by the broker, which owns the other end of the SEQPACKET socket FD. It is the only
way a worker is started. It holds no channel, region, session or CUDA context and has one thread whenever it forks, so a
child is as good as a fresh process. Expendable: when it dies its workers die with it, and the broker starts another.

Broker → zygote:  Preload (first message) · Fork + the worker's end of its link
Zygote → broker:  Preloaded · Unfit (then it exits) · Forked + pidfd · ForkFailed · Exited
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import traceback
from typing import NoReturn, final

import msgspec

from shm.prctl import PR_SET_CHILD_SUBREAPER, PR_SET_NAME, PR_SET_PDEATHSIG, prctl, undumpable
from shm.sockets import close_all, receive, send


class ZygoteMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Anything that broker and zygote say to each other."""


class Preload(ZygoteMessage, frozen=True, kw_only=True, tag=True):
    """Import `modules` now (those that are not installed are skipped). Workers run `main(link)` of module `entry`."""

    modules: tuple[str, ...]
    entry: str


class Fork(ZygoteMessage, frozen=True, kw_only=True, tag=True):
    """Start a worker on the attached link. Answered by Forked or ForkFailed with the same id."""

    id: int


class Preloaded(ZygoteMessage, frozen=True, kw_only=True, tag=True):
    """The imports are done; workers can be forked."""


class Unfit(ZygoteMessage, frozen=True, kw_only=True, tag=True):
    """Importing `module` left more than one thread: a fork would copy their locks, held by nobody."""

    module: str


class Forked(ZygoteMessage, frozen=True, kw_only=True, tag=True):
    """The worker runs; its pidfd is attached."""

    id: int
    pid: int


class ForkFailed(ZygoteMessage, frozen=True, kw_only=True, tag=True):
    """No worker was started."""

    id: int
    reason: str


class Exited(ZygoteMessage, frozen=True, kw_only=True, tag=True):
    """The worker of that fork has ended and was reaped. `code` is its exit code, or minus the signal that killed it.

    Not named by its pid, which may be another's by now.
    """

    id: int
    code: int


FromZygote = Preloaded | Unfit | Forked | ForkFailed | Exited
_encoder = msgspec.msgpack.Encoder()
_to_zygote: msgspec.msgpack.Decoder[Preload | Fork] = msgspec.msgpack.Decoder(Preload | Fork)
_from_zygote: msgspec.msgpack.Decoder[FromZygote] = msgspec.msgpack.Decoder(FromZygote)


def encode(message: ZygoteMessage) -> bytes:
    """The datagram of any message."""
    return _encoder.encode(message)


def decode_from_zygote(data: bytes) -> FromZygote:
    """Raises msgspec.DecodeError."""
    return _from_zygote.decode(data)


def threads() -> int:
    """How many this process has, native ones included."""
    return len(os.listdir("/proc/self/task"))


@final
class _Zygote:
    """Serves one broker until it hangs up."""

    __slots__ = ("_entry", "_link", "_poll", "_wakeup", "_workers")

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._entry = ""
        self._workers: dict[int, int] = {}  # pid → the fork's id, until it is reaped
        self._wakeup, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write_end)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self._poll = select.poll()
        self._poll.register(link, select.POLLIN)
        self._poll.register(self._wakeup, select.POLLIN)

    def serve(self) -> None:
        """Returns when the broker has hung up, and nothing that comes from us is left."""
        try:
            self._serve()
        except (BrokenPipeError, ConnectionResetError):
            pass
        finally:
            _end_children()

    def _serve(self) -> None:
        while True:
            self._poll.poll()
            with contextlib.suppress(BlockingIOError):
                os.read(self._wakeup, 4096)
            self._reap()
            try:
                datagram = receive(self._link)
            except BlockingIOError:
                continue
            if datagram is None or not self._take(*datagram):
                return

    def _take(self, data: bytes, fds: list[int]) -> bool:
        match _to_zygote.decode(data):
            case Preload(modules=modules, entry=entry):
                self._entry = entry
                return self._preload(modules)
            case Fork(id=request):
                self._fork(request, fds[0])
        return True

    def _preload(self, modules: tuple[str, ...]) -> bool:
        for module in modules:
            try:
                importlib.import_module(module)
            except ImportError:
                continue  # not installed: a worker that needs it says so when it loads a model
            if threads() != 1:
                self._say(Unfit(module=module))
                return False
        gc.collect()
        gc.freeze()  # a collection in a worker would otherwise write to, and so copy, every page it shares with us
        # From here on the end of the link is enough, and workers' children must be ended then. Not if we are stopped.
        prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
        self._say(Preloaded())
        return True

    def _fork(self, request: int, link: int) -> None:
        try:
            if threads() != 1:
                raise OSError(f"the zygote has {threads()} threads, a fork needs exactly one")
            zygote = os.getpid()
            pid = os.fork()
        except OSError as error:
            os.close(link)
            self._say(ForkFailed(id=request, reason=str(error)))
            return
        if pid == 0:
            _become_worker(link, zygote, self._entry)
        os.close(link)
        self._workers[pid] = request
        pidfd = os.pidfd_open(pid)  # it cannot name another process: only we reap
        self._say(Forked(id=request, pid=pid), pidfd)
        os.close(pidfd)

    def _reap(self) -> None:
        """Workers, and what they left behind: we are the subreaper of their children when they have ended."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            pid = ended.si_pid
            if pid in self._workers:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)  # its helper processes; not yet reaped, so the id is still its own
            status = os.waitpid(pid, 0)[1]
            if (fork := self._workers.pop(pid, None)) is not None:
                self._say(Exited(id=fork, code=os.waitstatus_to_exitcode(status)))
            self._end_strays()

    def _end_strays(self) -> None:
        """Helper processes of a dead worker that had left its group. A living worker adopts its own, not we."""
        for pid in _children():
            if pid not in self._workers:
                _kill(pid)  # what it leaves behind comes to us, and its end brings us here again

    def _say(self, message: ZygoteMessage, *fds: int) -> None:
        send(self._link, encode(message), fds)


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as listed:
        return [int(pid) for pid in listed.read().split()]


def _kill(pid: int) -> bool:
    """False: it runs as another user by now (set-uid), and is left alone."""
    try:
        os.kill(pid, signal.SIGKILL)
    except PermissionError:
        return False
    return True


def _end_children() -> None:
    """Workers, and all that they started: whatever loses its parent becomes ours, so this comes to an end."""
    while True:
        killed = [pid for pid in _children() if _kill(pid)]
        if not killed:
            return
        for pid in killed:
            os.waitpid(pid, 0)


def _become_worker(link: int, zygote: int, entry: str) -> NoReturn:
    """Runs in the forked child."""
    code = 1
    try:
        os.setsid()  # its own process group, and no terminal: Ctrl-C reaches the broker alone
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        prctl(PR_SET_CHILD_SUBREAPER, 1)  # processes that models leave behind end with this one
        if os.getppid() != zygote:
            os._exit(1)  # it died before we asked to be told
        prctl(PR_SET_NAME, b"tb-worker")
        close_all([fd for fd in map(int, os.listdir("/proc/self/fd")) if fd > 2 and fd != link])
        importlib.import_module(entry).main(socket.socket(fileno=link))
        code = 0
    except SystemExit as exit_request:
        code = exit_request.code if isinstance(exit_request.code, int) else int(exit_request.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def main(link: socket.socket) -> None:
    """The zygote's life."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # only the broker ends it: workers must be able to drain first
    # While imports last, which may be for ever. A broker that died before this line shows as end of file.
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_NAME, b"tb-zygote")
    undumpable()  # inherited by workers
    link.setblocking(True)
    _Zygote(link).serve()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
