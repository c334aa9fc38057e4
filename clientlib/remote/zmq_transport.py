"""The ZeroMQ transport for threads: whoever asks sends, and a thread that waits alone reads its answer itself.

A thread of the transport sends heartbeats, and reads where several wait or nobody does: between two threads an answer
takes 50 µs longer. `zmq_async` is the transport for event loops.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, final

from clientlib.address import Address
from clientlib.pending import expired
from clientlib.remote import transport, zmq_codec
from clientlib.remote.transport import InferAnswer, InferRequest, Word, lost, unreachable
from clientlib.remote.zmq_line import HEARTBEAT_S, RECONNECT_S, RETRY_S, Ended, Line, call_back, repeat
from shm import zmq_messages as words
from shm.errors import InferError, fresh

CROWD_S = 1.0  # how long it stays so that several threads wait
LOOK_S = 0.02  # how late an answer may come that nobody waits for, while somebody waits alone now and then
_in_parent: list[object] = []  # in a forked child: what is never to be collected, as its threads are not there
Reply = words.GatewayMessage | InferError


def connect(address: Address) -> ZmqTransport:
    """For threads. Connects when it is first used."""
    return ZmqTransport(address)


@final
class _Call:
    """A reply that a thread waits for."""

    __slots__ = ("here", "reply")

    def __init__(self) -> None:
        self.reply: Reply | None = None
        self.here = threading.Event()

    def ended(self, reply: Reply) -> None:
        self.reply = reply
        self.here.set()


@final
class ZmqTransport:
    """A gateway over ZeroMQ, for threads."""

    wire = "ZeroMQ"
    shares_memory = True

    def __init__(self, address: Address) -> None:
        self._address = address
        self._line = Line(address)
        self._lock = threading.Lock()  # of the line
        self._greeting = threading.Lock()
        self._closed = False
        self._alone = threading.Lock()  # held by the one thread that waits and reads
        self._waited = self._crowded = -math.inf  # when a thread last read for itself, and had to share
        self._nudge = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # another thread has read for that one
        self._reads = select.poll()
        for fd in (self._line.fd, self._nudge):
            self._reads.register(fd, select.POLLIN)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread: threading.Thread | None = None

    # --- what is asked ---------------------------------------------------------------------------------------------

    def call(self, word: Word, deadline: float) -> Any:
        """As `Transport.call`."""
        reply = self._ask(partial(zmq_codec.word_message, word), deadline)
        answer = zmq_codec.answer(reply, word)
        with self._lock:
            self._line.remember(word)
        return answer

    def infer(self, request: InferRequest, deadline: float) -> InferAnswer:
        """As `Transport.infer`."""
        end = zmq_codec.infer_answer(self._ask(partial(zmq_codec.infer_message, request), deadline))
        if isinstance(end, InferError):
            raise fresh(end)
        return end

    def submit(self, request: InferRequest, deadline: float, ended: transport.Ended) -> Callable[[], None]:
        """As `Transport.submit`."""
        self._session(deadline)

        def end(reply: Reply) -> None:
            ended(reply if isinstance(reply, InferError) else zmq_codec.infer_answer(reply))

        number = self._send(partial(zmq_codec.infer_message, request), end)

        def cancel() -> None:
            with self._lock:
                if not self._closed and number in self._line.asked:
                    self._line.tell(words.Cancel(id=self._line.number(), target=number))

        return cancel

    def wait(self, event: threading.Event, timeout: float | None) -> bool:
        """As `Transport.wait`."""
        if time.monotonic() - self._crowded > CROWD_S:
            if self._alone.acquire(blocking=False):
                try:
                    return self._read_until(event, timeout)
                finally:
                    self._waited = time.monotonic()
                    self._alone.release()
            self._crowded = time.monotonic()
            self._stir()
        return event.wait(timeout)

    def _read_until(self, event: threading.Event, timeout: float | None) -> bool:
        until = math.inf if timeout is None else time.monotonic() + timeout
        while not event.is_set():
            remaining = until - time.monotonic()
            if remaining <= 0:
                return False
            self._reads.poll(min(remaining, HEARTBEAT_S) * 1e3)
            with self._lock:
                if self._closed:
                    break
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._nudge)
                ended = self._line.receive()
            call_back(ended)
        return event.wait(max(until - time.monotonic(), 0.0) if until < math.inf else None)

    def _tell(self, ended: list[tuple[Ended, Reply]]) -> None:
        """Pass on what was read, to a thread that sleeps on the socket, too."""
        call_back(ended)
        if ended and self._alone.locked():
            with self._lock:
                if not self._closed:
                    os.eventfd_write(self._nudge, 1)

    def _stir(self) -> None:
        """Have the thread look how it is to wait now."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._wake, 1)

    # --- life ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """As `Transport.close`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            call_backs = []
            if self._thread is None:
                call_backs = self._line.close()
                self._close_bells()
            else:
                os.eventfd_write(self._wake, 1)  # the thread closes, as nobody may while it polls
        call_back(call_backs)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def leave_to_parent(self) -> None:
        """As `Transport.leave_to_parent`."""
        _in_parent.append(self)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _ask(self, make: Callable[[int], words.Request], deadline: float) -> words.GatewayMessage:
        for last in (False, True):
            self._session(deadline)
            reply = self._wait(make, deadline)
            if isinstance(reply, InferError):
                raise fresh(reply)
            if last or not repeat(reply):
                return reply
        raise AssertionError

    def _wait(self, make: Callable[[int], words.Request], deadline: float) -> Reply:
        call = _Call()
        number = self._send(make, call.ended)
        self.wait(call.here, min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX))
        reply = call.reply
        if reply is None:
            with self._lock:
                if not self._closed:
                    self._line.tell(words.Cancel(id=self._line.number(), target=number))
            raise expired()
        return reply

    def _send(self, make: Callable[[int], words.Request], ended: Callable[[Reply], None]) -> int:
        with self._lock:
            if self._closed:
                raise lost(self._address, "the client was closed")
            number = self._line.number()
            self._line.ask(make(number), ended)
            done = self._line.receive()  # sending may have used up the event that the thread waits for
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="clientlib ZeroMQ", daemon=True)
                self._thread.start()
        self._tell(done)
        return number

    def _session(self, deadline: float) -> None:
        """Returns when there is a session. Raises InferError."""
        if self._line.welcomed:
            return
        if not self._greeting.acquire(timeout=max(min(deadline - time.monotonic(), threading.TIMEOUT_MAX), 0.0)):
            raise expired()
        try:
            while not self._line.welcomed:
                self._connect(min(deadline, time.monotonic() + RECONNECT_S))
                reply = self._wait(self._line.hello, deadline)
                if isinstance(reply, InferError):
                    raise fresh(reply)
                with self._lock:
                    greeted = self._line.greeted(reply)
                    again = greeted and bool(self._line.regions)
                if again:
                    self._restore(deadline)
        finally:
            self._greeting.release()

    def _restore(self, deadline: float) -> None:
        listed = self._wait(lambda number: words.Regions(id=number), deadline)
        if not isinstance(listed, InferError):
            with self._lock:
                missing = self._line.missing(listed)
            for word in missing:  # one whose object is gone will be missed by the first request that names it
                self._wait(partial(zmq_codec.word_message, word), deadline)

    def _connect(self, until: float) -> None:
        while True:
            with self._lock:
                if self._closed:
                    raise lost(self._address, "the client was closed")
                self._line.probe()
                lost_ones = self._line.receive()
                there = self._line.connected()
            self._tell(lost_ones)
            if there:
                return
            if time.monotonic() >= until:
                raise unreachable(self._address, "the gateway is not there")
            select.select([self._line.fd], [], [], RETRY_S)

    def _left_to_others(self) -> bool:
        """Does a thread that waits alone read its answers, now or just before?"""
        now = time.monotonic()
        return now - self._crowded > CROWD_S and (self._alone.locked() or now - self._waited < CROWD_S)

    def _serve(self) -> None:
        """The thread: answers, heartbeats, and at last the end of the socket."""
        all_of_it, woken = select.poll(), select.poll()
        all_of_it.register(self._line.fd, select.POLLIN)
        for poll in (all_of_it, woken):
            poll.register(self._wake, select.POLLIN)
        beat = time.monotonic() + HEARTBEAT_S
        while not self._closed:
            remaining = max(beat - time.monotonic(), 0.0)
            if self._left_to_others():
                woken.poll(min(remaining, LOOK_S) * 1e3)
            else:
                all_of_it.poll(remaining * 1e3)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            with self._lock:
                ended = self._line.receive()
                if time.monotonic() >= beat:
                    beat = time.monotonic() + HEARTBEAT_S
                    if self._line.welcomed:
                        self._line.tell(words.Heartbeat(id=self._line.number()))
                        ended += self._line.receive()
            self._tell(ended)
        with self._lock, contextlib.suppress(OSError):
            ended = self._line.close()
            self._close_bells()
        call_back(ended)

    def _close_bells(self) -> None:
        os.close(self._wake)
        os.close(self._nudge)
