"""The ZeroMQ transport for threads: requests are sent by whoever asks, answers come on one thread of the transport.

That thread also sends heartbeats. `zmq_async` is the transport for event loops.
"""

from __future__ import annotations

import contextlib
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
from clientlib.remote.zmq_line import HEARTBEAT_S, RECONNECT_S, RETRY_S, Line, call_back, repeat
from shm import zmq_messages as words
from shm.errors import InferError

_in_parent: list[object] = []  # in a forked child: what is never to be collected, as its threads are not there
Reply = words.GatewayMessage | InferError


def connect(address: Address) -> ZmqTransport:
    """For threads. Connects when it is first used."""
    return ZmqTransport(address)


@final
class _Call:
    """A reply that a thread waits for."""

    __slots__ = ("_here", "reply")

    def __init__(self) -> None:
        self.reply: Reply | None = None
        self._here = threading.Lock()
        self._here.acquire()

    def ended(self, reply: Reply) -> None:
        self.reply = reply
        self._here.release()

    def wait(self, deadline: float) -> Reply | None:
        """None at the deadline."""
        remaining = max(deadline - time.monotonic(), 0.0)
        self._here.acquire(timeout=min(remaining, threading.TIMEOUT_MAX))
        return self.reply


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
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread: threading.Thread | None = None

    # --- what is asked ---------------------------------------------------------------------------------------------

    def call(self, word: Word, deadline: float) -> Any:
        """As `Transport.call`."""
        reply = self._ask(partial(zmq_codec.word_message, word), deadline)
        answer = zmq_codec.answer(reply)
        with self._lock:
            self._line.remember(word)
        return answer

    def infer(self, request: InferRequest, deadline: float) -> InferAnswer:
        """As `Transport.infer`."""
        end = zmq_codec.infer_answer(self._ask(partial(zmq_codec.infer_message, request), deadline))
        if isinstance(end, InferError):
            raise end
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
                os.close(self._wake)
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
                raise reply
            if last or not repeat(reply):
                return reply
        raise AssertionError

    def _wait(self, make: Callable[[int], words.Request], deadline: float) -> Reply:
        call = _Call()
        number = self._send(make, call.ended)
        reply = call.wait(deadline)
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
        call_back(done)
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
                    raise reply
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
            call_back(lost_ones)
            if there:
                return
            if time.monotonic() >= until:
                raise unreachable(self._address, "the gateway is not there")
            select.select([self._line.fd], [], [], RETRY_S)

    def _serve(self) -> None:
        """The thread: answers, heartbeats, and at last the end of the socket."""
        poll = select.poll()
        poll.register(self._line.fd, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        beat = time.monotonic() + HEARTBEAT_S
        while not self._closed:
            poll.poll(max(beat - time.monotonic(), 0.0) * 1e3)
            with self._lock:
                ended = self._line.receive()
                if time.monotonic() >= beat:
                    beat = time.monotonic() + HEARTBEAT_S
                    if self._line.welcomed:
                        self._line.tell(words.Heartbeat(id=self._line.number()))
                        ended += self._line.receive()
            call_back(ended)
        with self._lock, contextlib.suppress(OSError):
            ended = self._line.close()
            os.close(self._wake)
        call_back(ended)
