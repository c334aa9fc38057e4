"""The door: who may connect, how many at once, and the set of sessions that are open.

Made by `broker.server`. It decides by what the kernel says of a peer and by counting; it never reads a message.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import final

from broker.records import CLIENT, GATEWAY, Peer
from broker.sessions import HELLO_TIMEOUT_S, Service, Session, close_politely
from shm import sockets
from shm.messages import Goodbye, encode

log = logging.getLogger(__name__)

BURST = 16  # connections per turn of the loop
PAUSE_S = 0.2  # without a free descriptor, accept would fail again at once, for ever
FDS_PER_SESSION = 8  # socket, pidfd, and room for a channel (4) and regions; more are taken while there are any
MAX_SESSIONS = 4096


@final
class Sessions:
    """The open sessions, and the listener that adds to them."""

    def __init__(self, service: Service, *, limit: int | None = None) -> None:
        self._service = service
        self.limit = session_limit() if limit is None else limit
        self.accepted = 0
        self.refused = 0
        self.protocol_errors = 0  # of sessions that have ended
        self._open: dict[int, Session] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count(1)
        self._listener: socket.socket | None = None
        self._complain = RateLimited()
        self._allowed = {os.getuid(), 0} - _overflow_uid()

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._open.values()))

    def __len__(self) -> int:
        return len(self._open)

    def get(self, session: int | None) -> Session | None:
        """The open session of that number."""
        return self._open.get(session or 0)

    def listen(self, listener: socket.socket) -> None:
        """Accept connections on `listener` from now on; takes it over."""
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._accept)

    def stop_listening(self) -> None:
        """Refuse new connections: the socket is closed."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def adopt(self, connection: socket.socket, pid: int, pidfd: int, role: str = GATEWAY) -> Session:
        """A session over the broker's end of a socket pair, whose other end the child `pid` was given.

        The child is known by the `pid` and `pidfd` that its parent has, since such a socket names its maker. Takes over
        `connection` and `pidfd`. Not subject to the limit on sessions; how long the child may take to say Hello is its
        parent's business.
        """
        connection.setblocking(False)
        return self._open_session(connection, pidfd, Peer(next(self._numbers), pid, os.getuid(), role))

    async def end_all(self, reason: str) -> None:
        """Hang up every session and return when all they held has been given back."""
        for session in self:
            session.hang_up(reason, orderly=True)
        if self._ending:
            await asyncio.wait(self._ending)

    # --- accepting -------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        for _ in range(BURST):
            if self._listener is None:
                return
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._pause(error)
                    return
                continue  # this one connection was aborted
            connection.setblocking(False)
            self._admit(connection)

    def _admit(self, connection: socket.socket) -> None:
        pid, uid, _ = sockets.peer_credentials(connection)
        if uid not in self._allowed:
            self._refuse(connection, f"this broker serves uid {os.getuid()}, not uid {uid}")
        elif len(self._open) + len(self._ending) >= self.limit:
            more = "a larger `ulimit -n` for the broker raises it"
            self._refuse(connection, f"too many sessions: the limit is {self.limit}; {more}")
        else:
            try:
                pidfd = sockets.peer_pidfd(connection)
            except OSError as error:
                self._refuse(connection, f"the process that connected cannot be watched: {error.strerror}")
                return
            self._open_session(connection, pidfd, Peer(next(self._numbers), pid, uid))

    def _open_session(self, connection: socket.socket, pidfd: int, peer: Peer) -> Session:
        hello_s = HELLO_TIMEOUT_S if peer.role == CLIENT else None
        session = Session(connection, pidfd, peer, self._service, on_end=self._forget, hello_s=hello_s)
        self.accepted += 1
        self._open[peer.session] = session
        return session

    def _forget(self, session: Session) -> None:
        del self._open[session.peer.session]
        self.protocol_errors += session.protocol_errors
        if session.fault and session.peer.role == CLIENT:
            self._complain("session %d (pid %d) was hung up: %s", session.peer.session, session.peer.pid, session.fault)
        self._ending.add(session.closed)
        session.closed.add_done_callback(self._ending.discard)

    def _refuse(self, connection: socket.socket, reason: str) -> None:
        self.refused += 1
        self._complain("a connection was refused: %s", reason)
        try:
            sockets.send(connection, encode(Goodbye(reason=reason)))
        except OSError:
            pass
        close_politely(connection)

    def _pause(self, error: OSError) -> None:
        assert self._listener is not None
        self._complain("no connections are accepted for %.1f s: %s", PAUSE_S, error.strerror)
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener)
        loop.call_later(PAUSE_S, self._resume)

    def _resume(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)


@final
class RateLimited:
    """Logs at most one warning a second; the next one says how many were left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = float("-inf")
        self._suppressed = 0

    def __call__(self, text: str, *arguments: object) -> None:
        """Log, or count."""
        now = self._clock()
        if now - self._last < 1.0:
            self._suppressed += 1
            return
        if self._suppressed:
            text, arguments = text + " (and %d like it)", (*arguments, self._suppressed)
        log.warning(text, *arguments)
        self._last, self._suppressed = now, 0


def session_limit() -> int:
    """Sessions that the descriptors of this process allow, with half of a small limit or 256 kept for the rest."""
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(1, min(MAX_SESSIONS, (descriptors - min(256, descriptors // 2)) // FDS_PER_SESSION))


def _overflow_uid() -> set[int]:
    # What the kernel shows for every uid outside this user namespace: it could be anybody's.
    return {int(Path("/proc/sys/kernel/overflowuid").read_text())}
