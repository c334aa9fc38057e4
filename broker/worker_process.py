"""One life of a worker process as the broker holds it: its link, its pidfd, its end.

Made by `broker.logical_worker`; `describe_exit` and `kill` serve the keepers of other processes, too
(`broker.gateways`, `broker.zygote_link`, `broker.loading`). What is known here is descriptors, messages and ends of
processes; what a worker must load or map, and what follows from its death, is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, final

import msgspec

from broker.worker.messages import (
    CLOSED_DESCRIPTORS,
    Acknowledged,
    ChannelBroken,
    LinkMessage,
    Logged,
    Offence,
    Ping,
    Ready,
    Refused,
    RegionIdle,
    ToBroker,
    WantSession,
    decode_to_broker,
    encode,
)
from broker.worker_tasks import task
from shm.errors import Code, InferError, ProtocolError
from shm.messages import MAX_DATAGRAM
from shm.sockets import close_all, receive, send

Notice = ChannelBroken | RegionIdle | WantSession | Offence
CLOSED = "its descriptors were closed, not by itself: a model may have closed some that are not its own"
LINGER_S = 1.0  # between the end of a link and the end of its process
TOLD_S = 0.05  # for the zygote to say how a process ended: what its requests are told is due within 0.1 s
OUTBOX = 65536  # messages that wait for a worker to read its link

_log = logging.getLogger(__name__)


class ProcessDied(Exception):
    """The worker process ended before it answered."""


class Lacking(InferError):
    """The process refused for want of descriptors or threads: another one, later, may be able to."""


class Exit(NamedTuple):
    """How a process ended: `signal` is 0 unless one killed it. `told`: what clients hear of a worker's end."""

    text: str
    signal: int
    told: str = ""
    asks_who: bool = False  # is it of interest which model ran last?


def describe_exit(code: int | None) -> Exit:
    """`code`: exit code, or minus the signal; None when somebody else reaped the process."""
    if code is None:
        return Exit("ended, nobody knows how", 0)
    if code >= 0:
        return Exit(f"exit code {code}", 0)
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return Exit(f"killed by {name}", -code)


def kill(pidfd: int) -> None:
    """SIGKILL, to that process and no other."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


@final
class WorkerProcess:
    """One life. `on_exit` runs as soon as the pidfd is readable and the link is drained, before anything else."""

    __slots__ = (
        "_answers",
        "_last_id",
        "_link",
        "_loop",
        "_on_exit",
        "_on_notice",
        "_outbox",
        "_ping",
        "_pinged_s",
        "_reading",
        "_writing",
        "died",
        "kill_reason",
        "kill_told",
        "life",
        "pid",
        "pidfd",
        "ready",
        "shunned",
        "suspected",
    )

    def __init__(
        self,
        link: socket.socket,
        pid: int,
        pidfd: int,
        life: int,
        *,
        on_exit: Callable[[WorkerProcess], None],
        on_notice: Callable[[Notice], None],
    ) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self.life = life
        self.kill_reason = self.kill_told = ""
        self.suspected = self.shunned = False  # see `broker.silence`
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.died = asyncio.Event()
        self._link = link
        self._on_exit = on_exit
        self._on_notice = on_notice
        self._answers: dict[int, asyncio.Future[str]] = {}
        self._last_id = 0
        self._ping: asyncio.Future[str] | None = None
        self._pinged_s = 0.0  # when, by the loop's clock
        self._outbox: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._reading = True
        self._writing = False
        self._loop.add_reader(link, self._readable)
        self._loop.add_reader(pidfd, self._exited)

    async def request(self, message: LinkMessage, descriptors: tuple[int, ...] = ()) -> str:
        """Send, and return when it is acknowledged: the acknowledgement's detail.

        Raises InferError with the worker's reason when it refuses, ProcessDied when it ends first.
        """
        answer: asyncio.Future[str] = self._loop.create_future()
        number = self.post(message, descriptors)
        self._answers[number] = answer
        try:
            return await answer
        finally:
            self._answers.pop(number, None)

    def post(self, message: LinkMessage, descriptors: tuple[int, ...] = ()) -> int:
        """Send without waiting; the answer to the returned id is ignored unless somebody waits for it."""
        if self.died.is_set():
            raise ProcessDied
        self._last_id += 1
        data = encode(msgspec.structs.replace(message, id=self._last_id))
        if len(data) > MAX_DATAGRAM:
            what = f"to {task(message)} takes a message of {len(data)} bytes to the worker"
            raise InferError(Code.INVALID_ARG, f"{what}, at most {MAX_DATAGRAM} are possible: use fewer tensors")
        if self._outbox:
            self._queue(data, descriptors)
            return self._last_id
        try:
            send(self._link, data, descriptors)
        except BlockingIOError:
            self._queue(data, descriptors)
        except (BrokenPipeError, ConnectionResetError):
            pass  # its end of the link is closed: the pidfd follows, or the linger timer
        return self._last_id

    def ping(self) -> None:
        """Ask for a sign of life. Only while `answered`."""
        answer: asyncio.Future[str] = self._loop.create_future()
        self._answers[self.post(Ping())] = self._ping = answer
        self._pinged_s = self._loop.time()

    @property
    def owes_s(self) -> float:
        """For how long it has owed a sign of life; 0 if it owes none."""
        return 0.0 if self.answered else self._loop.time() - self._pinged_s

    async def answers(self, limit_s: float) -> bool:
        """Does it give a sign of life within `limit_s` of being asked for one? Nobody waits for it twice: of one that
        was asked earlier and still owes the answer, that is known at once.
        """
        if self.died.is_set():
            return False
        if self._ping is None or self._ping.done():
            self.ping()
        ping = self._ping  # there may be the next one before this one's answer is seen here
        assert ping is not None
        await asyncio.wait((ping,), timeout=max(0.0, limit_s - self.owes_s))
        return ping.done() and not self.died.is_set()

    @property
    def answered(self) -> bool:
        """Has the last ping been answered, or was there none?"""
        return self._ping is None or self._ping.done()

    def kill(self, reason: str, told: str = "") -> None:
        """SIGKILL; `reason` is what its death will be put down to, `told` what clients hear of it whom it costs."""
        if not self.kill_reason:
            self.kill_reason, self.kill_told = reason, told
        kill(self.pidfd)

    @property
    def by_itself(self) -> bool:
        """Was it not killed from here, or for what it ran?"""
        return bool(self.kill_told) or not self.kill_reason

    def exit(self, code: int | None) -> Exit:
        """How it ended, given what `Zygote.exit_code` said of it. Why it was killed may not be for clients."""
        ended = describe_exit(code)
        if is_closed := code == CLOSED_DESCRIPTORS:
            ended = ended._replace(text=f"{ended.text}: {CLOSED}")
        return Exit(self.kill_reason or ended.text, ended.signal, self.kill_told or ended.text, is_closed)

    async def ended(
        self, exit_code: Coroutine[Any, Any, int | None], bury: Callable[[WorkerProcess, str, int], None]
    ) -> Exit:
        """How it ended, given what `Zygote.exit_code` will say. Only after `died`.

        `bury` is called once, with that as clients are told of it, and with when it was seen (ns). It does not wait
        for long for a zygote that does not answer: then nobody knows how.
        """
        now_ns = time.monotonic_ns()
        code = asyncio.ensure_future(self._code(exit_code))
        await asyncio.wait((code,), timeout=TOLD_S)
        try:
            bury(self, self.exit(code.result() if code.done() else None).told, now_ns)
        except Exception:  # whoever was told of it may fail; the worker is replaced all the same
            _log.exception("worker (pid %d): its requests were not dealt with", self.pid)
        return self.exit(await code)

    async def _code(self, exit_code: Coroutine[Any, Any, int | None]) -> int | None:
        try:
            return await exit_code
        except Exception:  # its requests must have their endings all the same
            _log.exception("worker (pid %d): how it ended cannot be found out", self.pid)
            return None

    def close(self) -> None:
        """Close the descriptors. Only after `died`."""
        os.close(self.pidfd)

    def _queue(self, data: bytes, descriptors: tuple[int, ...]) -> None:
        if len(self._outbox) >= OUTBOX:
            self.kill(f"did not read its link: {OUTBOX} messages were waiting")
            return
        # Duplicates: the caller may close its own, and their numbers be used again, before these are sent.
        self._outbox.append((data, tuple(os.dup(fd) for fd in descriptors)))
        if not self._writing:
            self._writing = True
            self._loop.add_writer(self._link, self._writable)

    def _writable(self) -> None:
        while self._outbox:
            data, descriptors = self._outbox[0]
            try:
                send(self._link, data, descriptors)
            except BlockingIOError:
                return
            except OSError as error:
                self.kill(f"its link cannot be written: {error}")
            self._outbox.popleft()
            close_all(descriptors)
        self._writing = False
        self._loop.remove_writer(self._link)

    def _readable(self) -> bool:
        """Take what is there, up to a limit that leaves the loop time for others. True: there may be more."""
        for _ in range(256):
            try:
                datagram = receive(self._link)
                if datagram is None:
                    self._link_ended()
                    return False
                close_all(datagram[1])
                self._take(decode_to_broker(datagram[0]))
            except BlockingIOError:
                return False
            except (ProtocolError, msgspec.DecodeError) as error:
                self.kill(f"sent something that is not in the protocol: {error}")
        return True

    def _link_ended(self) -> None:
        self._reading = False
        self._loop.remove_reader(self._link)
        self._loop.call_later(LINGER_S, self._expel)

    def _expel(self) -> None:
        if not self.died.is_set():
            self.kill("closed its link to the broker")

    def _take(self, message: ToBroker) -> None:
        match message:
            case Ready():
                if not self.ready.done():
                    self.ready.set_result(None)
            case ChannelBroken() | RegionIdle() | WantSession() | Offence():
                self._on_notice(message)
            case Logged():
                _log.log(message.level, "%s", message.text)
            case Acknowledged() | Refused():
                answer = self._answers.pop(message.id, None)
                if answer is None or answer.done():
                    return
                if isinstance(message, Acknowledged):
                    answer.set_result(message.detail)
                else:
                    kind = Lacking if message.lacking else InferError
                    answer.set_exception(kind(message.code, message.message))

    def _exited(self) -> None:
        self._loop.remove_reader(self.pidfd)
        while self._reading and self._readable():
            pass  # what it managed to say still counts; nobody writes any more, so this ends
        self._loop.remove_reader(self._link)
        self._loop.remove_writer(self._link)
        while self._outbox:
            close_all(self._outbox.popleft()[1])
        self._link.close()
        try:
            self._on_exit(self)
        finally:
            self.died.set()
            waiting: list[asyncio.Future[Any]] = [self.ready, *self._answers.values()]
            for answer in waiting:
                if not answer.done():
                    answer.set_exception(ProcessDied())
                    answer.exception()  # nobody may be waiting; that is no error
