"""This worker's own session with the broker, for steps of ensembles whose members are in other workers.

Made by `broker.worker.control`, one per process; ensembles (`broker.worker.ensembles.remote.elsewhere`) call it from
any thread. One thread of its own sends what is asked, reads the replies and looks at the channels
(`ensembles.remote.channel`). It starts with the first such ensemble; a worker without one has neither thread nor
session.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, final

from msgspec.structs import replace

from broker.worker.ensembles.remote.channel import Lane
from broker.worker.ensembles.remote.homes import StepHomes
from shm import messages, sockets
from shm.admission import Verdict
from shm.client_channel import ClientChannel
from shm.errors import Code, InferError, ProtocolError
from shm.messages import ChannelInfo, Failure, Goodbye, Message, Reply
from shm.sockets import close_all

LIBRARY = "broker.worker"
SLOTS = 256  # steps at a time in one other worker; more wait here
STREAMS = 1024  # of decoupled members; none waits: who has a slot keeps it while steps behind, which may want one, run
WINDOW = 32  # calls that the broker has not answered; a session may have 256 waiting
ASK_S = 1.0  # between two times that a session is asked for
CONNECT_S = 30.0  # then what waits for one has failed
_now = time.monotonic_ns

# Called on the session's thread with the reply or why there is none; the descriptors are the callee's.
Then = Callable[[Reply | InferError, list[int]], None]


class _Call(NamedTuple):
    message: Message
    fds: Sequence[int]
    then: Then
    since: int


def ignore(reply: Reply | InferError, fds: list[int]) -> None:
    """Nobody waits for it."""
    close_all(fds)


@final
class StepSession:
    """`ask` has the broker make a session, which comes by `connected`."""

    def __init__(self, ask: Callable[[], None]) -> None:
        self.homes = StepHomes()
        self._ask = ask
        self._asked = 0
        self._lock = threading.Lock()  # of the next four, and of starting
        self._calls: deque[_Call] = deque()
        self._postponed: deque[Callable[[], None]] = deque()
        self.lanes: dict[tuple[str, bool], Lane] = {}
        self._thread: threading.Thread | None = None
        self._arrived: socket.socket | None = None
        self._socket: socket.socket | None = None
        self._unanswered: dict[int, Then] = {}
        self._last_id = 0
        self._reason = ""
        self._closed: Verdict | None = None
        self._watched: dict[int, Lane] = {}  # by the descriptor of its pipe
        self._poll = select.poll()
        self._bell = -1

    # --- from any thread ----------------------------------------------------------------------------------------

    def need(self) -> None:
        """There is an ensemble that will ask for something."""
        with self._lock:
            if self._thread is None:
                if self._bell < 0:
                    self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                    self._poll.register(self._bell, select.POLLIN)
                thread = threading.Thread(target=self._serve, name="steps elsewhere", daemon=True)
                thread.start()
                self._thread = thread
                os.eventfd_write(self._bell, 1)

    def connected(self, sock: socket.socket) -> None:
        """The session that was asked for; takes `sock` over."""
        with self._lock:
            self._arrived = sock
        self.stir()

    def call(self, message: Message, then: Then = ignore, fds: Sequence[int] = ()) -> None:
        """Send a request, in the order of the calls; `fds` are closed then. Returns at once."""
        with self._lock:
            self._calls.append(_Call(message, fds, then, _now()))
        self.stir()

    def postpone(self, then: Callable[[], None]) -> None:
        """Have the thread do what would take the leader of the worker's loop too long."""
        with self._lock:
            self._postponed.append(then)
        self.stir()

    def lane(self, worker: str, streams: bool = False) -> Lane:
        """The way to another worker; `streams`: for steps that have any number of responses."""
        with self._lock:
            lane = self.lanes.get((worker, streams))
            if lane is None:
                slots = STREAMS if streams else SLOTS
                lane = self.lanes[worker, streams] = Lane(worker, self.stir, self._open, slots, waits=not streams)
                if self._closed is not None:
                    lane.close(self._closed)
            return lane

    def watch(self) -> Sequence[Lane]:
        """The lanes with steps under way, which ask not to be rung until `Lane.unwatch`: the caller looks at them."""
        return [lane for lane in list(self.lanes.values()) if lane.watch()]

    def stir(self) -> None:
        """Have the thread look at everything."""
        if self._bell >= 0:
            os.eventfd_write(self._bell, 1)

    def close(self, verdict: Verdict) -> None:
        """No step is under way: end the session. What comes all the same ends with `verdict`."""
        with self._lock:
            self._closed = verdict
            lanes = list(self.lanes.values())
        for lane in lanes:
            lane.close(verdict)
        self.stir()

    # --- the thread ---------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while self._closed is None:
                self._turn()
            if self._socket is not None:
                self._socket.close()  # channels, plans and regions go with it
        except BaseException:
            # Requests would wait for ever: the worker's replacement redoes them from the ledger.
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(70)

    def _turn(self) -> None:
        lanes = list(self.lanes.values())
        wait = [lane.rest() for lane in lanes]  # each, since a lane that was not asked to ring would not
        timeout = 50 if self._calls or any(wait) else None
        if self._socket is None:
            timeout = int(1000 * ASK_S)
        for fd, _ in self._poll.poll(timeout):
            if fd == self._bell:
                os.eventfd_read(fd)
            elif fd in self._watched:
                self._watched[fd].rung()
        self._connect()
        self._send()
        self._receive()
        while self._postponed:
            self._postponed.popleft()()
        now = _now()
        for lane in lanes:
            lane.look(now)

    def _connect(self) -> None:
        if self._socket is not None:
            return
        with self._lock:
            self._socket, self._arrived = self._arrived, None
        if self._socket is not None:
            self._poll.register(self._socket, select.POLLIN)
            hello = messages.Hello(protocol=messages.PROTOCOL, library=LIBRARY)
            with self._lock:
                self._calls.appendleft(_Call(hello, (), ignore, _now()))
            return
        now = _now()
        if now - self._asked > ASK_S * 1e9:
            self._asked = now
            self._ask()
        late: list[_Call] = []
        with self._lock:
            while self._calls and now - self._calls[0].since > CONNECT_S * 1e9:
                late.append(self._calls.popleft())
        for call in late:
            close_all(call.fds)
            call.then(InferError(Code.UNAVAILABLE, "the broker has given no session for steps in other workers"), [])

    def _send(self) -> None:
        sock = self._socket
        while sock is not None and len(self._unanswered) < WINDOW:
            with self._lock:
                if not self._calls:
                    break
                call = self._calls[0]
            self._last_id += 1
            data = messages.encode(replace(call.message, id=self._last_id))
            if len(data) > messages.MAX_DATAGRAM:
                what = f"{type(call.message).__name__} has {len(data)} bytes, a message may have"
                call.then(InferError(Code.INVALID_ARG, f"{what} {messages.MAX_DATAGRAM}: use fewer tensors"), [])
            else:
                try:
                    sockets.send(sock, data, call.fds)
                except BlockingIOError:
                    self._poll.modify(sock, select.POLLIN | select.POLLOUT)
                    return
                self._unanswered[self._last_id] = call.then
            with self._lock:
                self._calls.popleft()
            close_all(call.fds)
        if sock is not None:
            self._poll.modify(sock, select.POLLIN)

    def _receive(self) -> None:
        while self._socket is not None:
            try:
                datagram = sockets.receive(self._socket)
            except BlockingIOError:
                return
            except sockets.DescriptorsLost as lost:
                self._settle(messages.decode_reply(lost.data), None)
                continue
            if datagram is None and self._closed is not None:
                return
            if datagram is None:
                raise ProtocolError(
                    f"the session for steps in other workers has ended{self._reason and ': '}{self._reason}"
                )
            self._settle(messages.decode_reply(datagram[0]), datagram[1])
            self._send()

    def _settle(self, reply: Reply, fds: list[int] | None) -> None:
        """`fds` None: there was no descriptor left for them."""
        if isinstance(reply, Goodbye):
            self._reason = reply.reason
        then = self._unanswered.pop(reply.id, ignore)
        if isinstance(reply, Failure):
            then(InferError(reply.code, reply.message), fds or [])
        elif fds is None:
            then(InferError(Code.UNAVAILABLE, "the worker has no descriptor left for this: raise RLIMIT_NOFILE"), [])
        else:
            then(reply, fds)

    # --- channels -----------------------------------------------------------------------------------------------

    def _open(self, lane: Lane) -> None:
        def opened(reply: Reply | InferError, fds: list[int]) -> None:
            if not isinstance(reply, ChannelInfo):
                close_all(fds)
                lane.failed(reply if isinstance(reply, InferError) else InferError(Code.INTERNAL, "no channel"))
                return
            memory, bell, pipe = fds
            channel = ClientChannel(memory, bell, pipe, reply.slots, 0.0)
            self._watched[pipe] = lane
            self._poll.register(pipe, select.POLLIN)
            lane.opened(channel)

        self.call(messages.OpenChannel(worker=lane.worker, slots=lane.slots), opened)
