"""Sessions of the broker's own workers: the way from an ensemble's worker to members in other workers.

`broker.workers` says that a worker process wants one, and it gets its end of a socket pair over its link. From there on
it is a session like a client's, but for what its role lets it ask (`shm.messages.PrepareStep`); it ends with the
process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from typing import Protocol, final

from broker.records import WORKER
from broker.worker.messages import OpenSession
from broker.worker_process import ProcessDied, WorkerProcess
from shm.sockets import close_all

_log = logging.getLogger(__name__)


class Sessions(Protocol):
    """Who makes sessions (`broker.listener.Sessions`)."""

    def adopt(self, connection: socket.socket, pid: int, pidfd: int, role: str) -> object:
        """A session over the broker's end of a socket pair. Takes over `connection` and `pidfd`."""


@final
class StepSessions:
    """At most one per life of a worker process."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._given: set[WorkerProcess] = set()

    def open(self, process: WorkerProcess) -> None:
        """Give `process` a session, unless it has one. Without a descriptor for it, it has to ask again."""
        self._given = {each for each in self._given if not each.died.is_set()}
        if process in self._given or process.died.is_set():
            return
        try:
            self._open(process)
        except OSError as error:
            _log.error("worker process %d gets no session for steps of ensembles: %s", process.pid, error.strerror)

    def _open(self, process: WorkerProcess) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        pidfds: list[int] = []
        try:
            pidfds.append(os.dup(process.pidfd))
            self._sessions.adopt(ours, process.pid, pidfds[0], WORKER)
            self._given.add(process)
        except BaseException:
            close_all(pidfds)
            ours.close()
            theirs.close()
            raise
        with theirs, contextlib.suppress(ProcessDied):
            process.post(OpenSession(), (theirs.fileno(),))
