"""A session for threads: any number of threads call, one of those that wait reads for all.

Made by `clientlib.client`. There is no reader thread: a client that asks for nothing costs nothing.
"""

from __future__ import annotations

import contextlib
import functools
import select
import socket
import threading
import time
from typing import TypeVar, final

from clientlib.session import Answer, Call, Procedure, Session
from shm import sockets
from shm.errors import InferError, ProtocolError, fresh

T = TypeVar("T")
CALLS = 128  # unanswered ones at a time, given up or not: the broker hangs up on a session that has 256
LONGEST_POLL_MS = 3_600_000  # poll() takes 24 days at most; whoever waits looks again after it


@final
class _Reply:
    __slots__ = ("answer", "done", "error")

    def __init__(self) -> None:
        self.done = False
        self.answer: Answer | None = None
        self.error: InferError | None = None

    def answered(self, answer: Answer) -> None:
        self.answer = answer
        self.done = True

    def failed(self, error: InferError) -> None:
        self.error = error
        self.done = True

    def take(self) -> Answer:
        if self.error is not None:
            raise fresh(self.error)
        assert self.answer is not None
        return self.answer


@final
class SyncSession:
    """Owns `sock`, a connected, non-blocking SEQPACKET socket."""

    __slots__ = ("_changed", "_poller", "_reading", "_session", "_sock")

    def __init__(self, sock: socket.socket, path: str) -> None:
        self._sock = sock
        self._session = Session(path)
        self._changed = threading.Condition()
        self._reading = False
        self._poller = select.poll()
        self._poller.register(sock, select.POLLIN)

    @property
    def lost(self) -> bool:
        """Has the connection ended, as far as anybody has looked?"""
        return self._session.lost is not None

    def drive(self, procedure: Procedure[T], deadline: float) -> T:
        """Run `procedure` to its end; every one of its calls must be answered by `deadline` (time.monotonic)."""
        try:
            call = next(procedure)
            while True:
                try:
                    answer = self.call(call, deadline)
                except BaseException as error:
                    call = procedure.throw(error)
                else:
                    call = procedure.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result

    def call(self, call: Call, deadline: float) -> Answer:
        """Send `call` and wait for its reply. Raises InferError; ConnectionLost when the session has ended."""
        began = time.monotonic()
        reply = _Reply()
        sent = False
        with self._changed:
            self._catch_up()
            while self._session.outstanding >= CALLS and not self.lost:
                self._look(call, began, deadline)
            number, data = self._session.request(call, reply)
            try:
                self._send(data, call, deadline)
                sent = True
                while not reply.done:
                    self._look(call, began, deadline)
            finally:
                self._session.forget(number, sent=sent)
        return reply.take()

    def close(self) -> None:
        """End the session; whoever waits is told that it was closed."""
        with self._changed:
            self._session.end("was left: the client was closed")
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads
            if not self._reading:
                self._sock.close()
            self._changed.notify_all()

    def leave_to_parent(self) -> None:
        """In a forked child: close the copy of the socket without a word to the broker, taking no lock."""
        self._sock.close()

    def _send(self, data: bytes, call: Call, deadline: float) -> None:
        while True:
            try:
                return sockets.send(self._sock, data, call.fds)
            except BlockingIOError:
                # The broker is behind with reading.
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise self._session.late(call, 0) from None
                writable = select.poll()
                writable.register(self._sock, select.POLLOUT)
                self._changed.release()  # nobody else can send either, but others' deadlines may be earlier
                try:
                    writable.poll(min(remaining * 1000, LONGEST_POLL_MS))
                finally:
                    self._changed.acquire()
            except OSError:
                self._session.end()
                assert self._session.lost is not None
                raise fresh(self._session.lost) from None

    def _catch_up(self) -> None:
        """Read the replies that came since everybody stopped waiting: what they gave is given back first."""
        while self._session.unanswered and not self._reading and not self.lost and self._poller.poll(0):
            self._read(0)

    def _look(self, call: Call, began: float, deadline: float) -> None:
        """Return when something has come, for whomever. Raises InferError at the deadline of `call`."""
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise self._session.late(call, deadline - began)
        if self._reading:
            self._changed.wait(remaining)
        else:
            self._read(remaining)

    def _read(self, timeout_s: float) -> None:
        """Wait for one datagram without the lock, then hand it on."""
        self._reading = True
        self._changed.release()
        received: tuple[bytes, list[int]] | None = (b"", [])
        problem = "went away"
        try:
            if self._poller.poll(min(timeout_s * 1000, LONGEST_POLL_MS)):
                received = sockets.receive(self._sock)
        except BlockingIOError:
            pass
        except (OSError, ProtocolError) as error:
            received, problem = None, f"was left: {error}"
        finally:
            self._changed.acquire()
            self._reading = False
            self._changed.notify_all()
        try:
            if received is None:
                self._session.end(problem)
                self._sock.close()
            elif received[0]:
                self._session.receive(*received)
                with contextlib.suppress(OSError):
                    self._session.give_back(functools.partial(sockets.send, self._sock))
        except ProtocolError as error:
            self._session.end(f"was left: {error.message}")
            self._sock.close()
