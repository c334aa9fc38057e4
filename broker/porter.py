"""The porter: a process that takes what clients hand over off their sockets, and brings the broker what cannot bite.

`close` of a file on a FUSE mount waits for that mount's own process (FLUSH), at each close and not at the last one
only, and nobody can kill who waits. So a descriptor that the broker has ever received can stop it, in its loop or, from
a thread, at its exit. Here they arrive instead: those of memory, dma-bufs and NVIDIA's devices go on to the broker, in
the place of any other goes one of /dev/null, and that one is closed by a thread that nobody waits for. When too many
such threads wait, the broker replaces the porter: `broker.porter_link`, which started it with one end of a socket pair.

    broker → porter   `ASK` and the client's socket                     TAKE: one datagram; DRAIN: all that is unread
    porter → broker   `TOLD`, what was in the datagram, descriptors     one for each TAKE; STUCK: of sessions, unasked
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import queue
import select
import signal
import socket
import struct
import sys
import threading
import time
from typing import Final, final

from shm.descriptor_kinds import is_harmless
from shm.errors import ProtocolError
from shm.messages import MAX_DATAGRAM
from shm.prctl import PR_SET_NAME, prctl, undumpable
from shm.sockets import brings_descriptors, close_all, receive, send

ASK: Final = struct.Struct("<Bq")  # what is asked, session
TOLD: Final = struct.Struct("<BqHH")  # what is told, session; descriptors that are not closed yet, of those the stuck
TAKE, DRAIN = 1, 2
TAKEN, ENDED, NOTHING, BROKEN, STUCK = 1, 2, 3, 4, 5  # BROKEN: with the reason in place of the data
THREADS = 8  # that may wait for a file's owner
CROWD = 256  # descriptors that wait for a thread: the next datagram waits, too
STUCK_S = 1.0  # a close that takes longer waits for somebody
LONGEST: Final = TOLD.size + MAX_DATAGRAM  # datagram to the broker
ANY = 253  # SCM_MAX_FD: with less room the kernel would close the rest here, in this thread


@final
class Droppers:
    """The threads that close. All methods are for one thread."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[int, int, int]] = queue.SimpleQueue()
        self._open: dict[int, tuple[int, float]] = {}  # number → session, since when a thread is at it
        self._numbers = itertools.count()
        self._threads = 0
        self._fewer = threading.Condition()
        self._stuck: set[int] = set()

    def drop(self, session: int, fds: list[int]) -> None:
        """Close `fds` elsewhere."""
        for fd in fds:
            number = next(self._numbers)
            with self._fewer:
                self._open[number] = (session, math.inf)
            self._waiting.put((number, fd, session))
        while self._threads < min(THREADS, len(self._open)):
            try:
                threading.Thread(target=self._close, daemon=True).start()
            except RuntimeError:  # one of those there are does it, or the end of this process
                break
            self._threads += 1

    def _close(self) -> None:
        while True:
            number, fd, session = self._waiting.get()
            with self._fewer:
                self._open[number] = (session, time.monotonic())
            close_all((fd,))
            with self._fewer:
                self._open.pop(number, None)
                self._fewer.notify()

    def wait(self) -> None:
        """Until there is no crowd any more, `STUCK_S` at most."""
        with self._fewer:
            self._fewer.wait_for(lambda: len(self._open) < CROWD, STUCK_S)

    def stuck(self) -> list[int]:
        """Sessions that have brought what has not been closed for `STUCK_S`, each descriptor once."""
        now = time.monotonic()
        with self._fewer:
            late = {number: session for number, (session, since) in self._open.items() if now - since >= STUCK_S}
        new = [session for number, session in late.items() if number not in self._stuck]
        self._stuck = set(late)
        return new

    def counts(self) -> tuple[int, int]:
        """Descriptors that are not closed, and how many of them are stuck."""
        return min(len(self._open), 0xFFFF), min(len(self._stuck), 0xFFFF)


@final
class Porter:
    """See above."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._droppers = Droppers()
        self._told = (0, 0)
        self._nothing = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)

    def run(self) -> None:
        """Until the broker lets go of the link."""
        arrived = select.poll()
        arrived.register(self._link, select.POLLIN)
        while True:
            busy = any(self._droppers.counts()) or any(self._told)
            if arrived.poll(STUCK_S * 1000 if busy else None):
                asked = receive(self._link)
                if asked is None:
                    return
                self._do(*asked)
            if busy:
                self._look()

    def _look(self) -> None:
        """Tell which sessions' descriptors are stuck, in one message: it may be the last one that is listened to."""
        sessions = sorted(set(self._droppers.stuck()))
        if sessions or self._droppers.counts() != self._told:
            self._tell(STUCK, 0, struct.pack(f"<{len(sessions)}q", *sessions))

    def _do(self, data: bytes, fds: list[int]) -> None:
        what, session = ASK.unpack(data)
        connection = socket.socket(fileno=fds[0])
        try:
            if what == TAKE:
                self._take(session, connection)
            else:
                self._drain(session, connection)
        finally:
            connection.close()  # with nothing in it that was not taken, or not for the last time

    def _take(self, session: int, connection: socket.socket) -> None:
        self._droppers.wait()
        try:
            taken = receive(connection, room=ANY, drop=lambda fds: self._droppers.drop(session, fds))
        except BlockingIOError:
            self._tell(NOTHING, session)
        except ProtocolError as error:
            self._tell(BROKEN, session, error.message.encode())
        except OSError:
            self._tell(ENDED, session)
        else:
            if taken is None:
                self._tell(ENDED, session)
            else:
                self._bring(session, *taken)

    def _bring(self, session: int, data: bytes, fds: list[int]) -> None:
        harmless = {fd for fd in fds if is_harmless(fd)}
        self._droppers.drop(session, [fd for fd in fds if fd not in harmless])
        try:
            self._tell(TAKEN, session, data, [fd if fd in harmless else self._nothing for fd in fds])
        finally:
            close_all(list(harmless))

    def _drain(self, session: int, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                with contextlib.suppress(ProtocolError):
                    taken = receive(connection, room=ANY, drop=lambda fds: self._droppers.drop(session, fds))
                    if taken is not None:
                        self._droppers.drop(session, taken[1])
                    elif not brings_descriptors(connection):  # one may come behind an empty datagram
                        return

    def _tell(self, what: int, session: int, data: bytes = b"", fds: list[int] | None = None) -> None:
        self._told = self._droppers.counts()
        send(self._link, TOLD.pack(what, session, *self._told) + data, fds or ())


def main() -> None:
    """`python -m broker.porter LINK`, a descriptor of SEQPACKET."""
    undumpable()  # descriptors of all clients come by here
    prctl(PR_SET_NAME, b"tb-porter")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the broker ends it
    link = socket.socket(fileno=int(sys.argv[1]))
    link.setblocking(True)
    try:
        Porter(link).run()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the broker is gone
    os._exit(0)  # no thread is waited for


if __name__ == "__main__":
    main()
