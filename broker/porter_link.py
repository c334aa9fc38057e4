"""Runs porters, which receive what clients hand over in place of the broker (`broker.porter` says why), and asks them.

Used by `broker.sessions`. One session is served at a time, in the order they asked: it costs 0.1 ms, and a porter that
does not answer is the fault of that session alone. What cannot be closed ends the session that brought it, and is kept
until whoever serves its file answers or ends. A porter that keeps too much is replaced; when there are as many as may
be, no client can hand anything over: its request is answered so, and its descriptors are dropped without being received
(the kernel's own way, which asks nobody for a FLUSH).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, final

from broker.porter import ASK, BROKEN, CROWD, DRAIN, ENDED, LONGEST, NOTHING, STUCK, TAKE, TAKEN, THREADS, TOLD
from broker.worker_process import describe_exit, kill
from shm import sockets
from shm.errors import ProtocolError

log = logging.getLogger(__name__)

START_S = 30.0  # for its first answer
ANSWER_S = 5.0  # a porter that takes longer is stopped, or waits for somebody
MAX_HELD = 2 * CROWD  # descriptors that one porter may have waiting to be closed
MAX_PORTERS = 8  # that have not ended
END_S = 1.0  # for porters to end with the broker
PAUSE_S = 1.0  # after one that ended without having answered


@final
class Taken(NamedTuple):
    """A datagram, and descriptors that bite nobody: as `shm.sockets.receive` has them."""

    data: bytes
    fds: list[int]


@final
class NotTaken(NamedTuple):
    """Nothing can be said of the datagram, and the session cannot go on; `reason`, or "" when the client hung up."""

    reason: str


Outcome = Taken | NotTaken | ProtocolError | None  # None: there was no datagram
Done = Callable[[Outcome], None]


@final
class _Life:
    """One process. `held`, `stuck`: what it said last."""

    __slots__ = ("answered", "held", "link", "pidfd", "process", "stuck")

    def __init__(self, process: subprocess.Popen[bytes], pidfd: int, link: socket.socket) -> None:
        self.process, self.pidfd, self.link = process, pidfd, link
        self.held = self.stuck = 0
        self.answered = False


@final
class Porters:
    """The porter that serves, and those that still keep something. `on_stuck(session)`: a descriptor of its is stuck.

    `refused` counts datagrams whose descriptors nobody could take.
    """

    def __init__(self, on_stuck: Callable[[int], None], module: str = "broker.porter") -> None:
        self.refused = 0
        self._on_stuck = on_stuck
        self._module = module
        self._life: _Life | None = None
        self._lives: list[_Life] = []
        self._asked: deque[tuple[int, socket.socket, Done]] = deque()  # the first one is being served
        self._late: asyncio.TimerHandle | None = None
        self._not_before = 0.0
        self._none_left = asyncio.Event()
        self._none_left.set()

    @property
    def held(self) -> int:
        """Descriptors that have been received and not been closed yet."""
        return sum(life.held for life in self._lives)

    # --- what sessions ask -----------------------------------------------------------------------------------------

    def prepare(self) -> str:
        """Have a porter. Returns why there cannot be one."""
        if self._life is not None:
            return ""
        if len(self._lives) >= MAX_PORTERS:
            return (
                f"{self.held} descriptors that were passed to the broker cannot be closed, because whoever serves their"
                " files (a FUSE mount?) does not answer; no more can be passed until they can"
            )
        if asyncio.get_running_loop().time() < self._not_before:
            return "the process that takes descriptors has just ended; try again in a second"
        try:
            self._start()
        except OSError as error:
            return f"the process that takes descriptors cannot be started: {error.strerror}"
        return ""

    def take(self, session: int, connection: socket.socket, done: Done) -> str:
        """Take one datagram off `connection`, of which `done` hears later. Or returns why not."""
        if why := self.prepare():
            self.refused += 1
            return why
        self._asked.append((session, connection, done))
        if len(self._asked) == 1:
            self._ask()
        return ""

    def forget(self, session: int) -> None:
        """It has ended: what it asked for is not asked for any more; `done` hears of it, if that is under way."""
        first = [self._asked.popleft()] if self._asked else []
        self._asked = deque([*first, *(each for each in self._asked if each[0] != session)])

    def close(self, session: int, connection: socket.socket) -> None:
        """`close_politely`. Descriptors that lie in it unread are taken by the porter."""
        close_politely(connection, lambda: self._drain(session, connection))

    def _drain(self, session: int, connection: socket.socket) -> None:
        connection.shutdown(socket.SHUT_WR)  # the peer need not wait until the porter has closed it
        if not self.prepare() and self._life is not None:
            sockets.send(self._life.link, ASK.pack(DRAIN, session), [connection.fileno()])

    async def end(self) -> None:
        """The broker ends. What is stuck stays with the porters that keep it."""
        for life in list(self._lives):
            self._retire(life)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._none_left.wait(), END_S)

    # --- processes -------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", self._module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
            pidfd = os.pidfd_open(process.pid)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._life = life = _Life(process, pidfd, ours)
        self._lives.append(life)
        self._none_left.clear()
        loop = asyncio.get_running_loop()
        loop.add_reader(ours, self._readable, life)
        loop.add_reader(pidfd, self._exited, life)

    def _retire(self, life: _Life) -> None:
        """It ends as soon as it can: one whose descriptors are stuck does not."""
        if life is self._life:
            self._life = None
        if life.link.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(life.link)
            life.link.close()

    def _exited(self, life: _Life) -> None:
        asyncio.get_running_loop().remove_reader(life.pidfd)
        os.close(life.pidfd)
        self._lives.remove(life)
        if not self._lives:
            self._none_left.set()
        if life is self._life:
            self._readable(life)  # its last words
            self._lost(life)
        life.process.wait()  # its pidfd is readable: this does not block
        how = describe_exit(life.process.returncode).text
        log.log(logging.ERROR if life.process.returncode else logging.DEBUG, "porter: %s", how)

    def _lost(self, life: _Life) -> None:
        if life is not self._life:
            return
        self._retire(life)
        if not life.answered:
            self._not_before = asyncio.get_running_loop().time() + PAUSE_S
        if self._late is not None:
            self._late.cancel()
            self._late = None
            self._answer(NotTaken("the process that takes descriptors ended while it looked at those of this session"))

    # --- one at a time ---------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Serve the first that asks, if any does."""
        while self._asked:
            session, connection, _ = self._asked[0]
            why = self.prepare()
            if not why and self._life is not None:
                limit = ANSWER_S if self._life.answered else START_S
                try:
                    sockets.send(self._life.link, ASK.pack(TAKE, session), [connection.fileno()])
                    self._late = asyncio.get_running_loop().call_later(limit, self._too_late, self._life)
                    return
                except OSError as error:
                    why = f"the process that takes descriptors cannot be asked: {error.strerror}"
            self._asked.popleft()[2](NotTaken(why))

    def _too_late(self, life: _Life) -> None:
        log.error("a porter gave no answer in time; another one takes its place")
        kill(life.pidfd)
        self._lost(life)

    def _readable(self, life: _Life) -> None:
        while life.link.fileno() >= 0:
            try:
                told = sockets.receive(life.link, longest=LONGEST)
            except BlockingIOError:
                return
            except (OSError, ProtocolError) as error:
                log.error("what the porter says cannot be received: %s", error)
                told = None
            if told is None:
                self._lost(life)
                return
            self._hear(life, *told)

    def _hear(self, life: _Life, told: bytes, fds: list[int]) -> None:
        what, _, life.held, life.stuck = TOLD.unpack_from(told)
        life.answered = True
        if what != STUCK and self._late is not None:
            self._late.cancel()
            self._late = None
        if (life.held >= MAX_HELD or life.stuck >= THREADS) and self._late is None:
            log.error("a porter keeps %d descriptors that cannot be closed; another one takes its place", life.held)
            self._retire(life)
        data = told[TOLD.size :]
        if what == STUCK:
            for (session,) in struct.iter_unpack("<q", data):
                self._on_stuck(session)
        elif what == TAKEN:
            self._answer(Taken(data, fds))
        elif what == BROKEN:
            self._answer(ProtocolError(data.decode()))
        else:
            self._answer(NotTaken("") if what == ENDED else None)
            assert what in (ENDED, NOTHING), what

    def _answer(self, outcome: Outcome) -> None:
        done = self._asked.popleft()[2]
        self._ask()
        done(outcome)


def close_politely(connection: socket.socket, drain: Callable[[], None] | None = None) -> None:
    """Close so that the peer can still read what was sent: closing with unread input would reset it instead.

    `drain` takes what is unread from the first datagram on that brings descriptors: with the last reference to a socket
    the kernel closes those in it, in whose process that is. None: they are of our own processes.
    """
    try:
        connection.shutdown(socket.SHUT_RD)  # from here on the peer can send nothing more, so this ends
        while True:
            with contextlib.suppress(ProtocolError):
                if drain is not None and sockets.brings_descriptors(connection):
                    drain()
                    break
                if sockets.receive(connection, room=0) is None:
                    break
    except OSError:
        pass
    connection.close()
