"""The ROUTER socket in the run directory, and who is behind its connections. Knows nothing of messages.

Used by `zmq.server`. The listening socket is made here and given to libzmq (ZMQ_USE_FD), so that its mode, backlog and
file are ours. libzmq aborts the process when accept() finds no descriptor left: long before that the file is hidden, so
that nobody else connects. (Unbinding would end the connections that there are.) With few descriptors that is too late,
and there is no such socket: `enough_descriptors`.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import logging
import os
import resource
import socket
from collections.abc import Container
from typing import Final, final

import zmq
from zmq.utils.monitor import parse_monitor_message

from shm import sockets
from shm.zmq_messages import MAX_MESSAGE

log = logging.getLogger(__name__)

SOCKET: Final = "zmq.sock"
HIDDEN: Final = ".hidden"
BACKLOG: Final = 128
HANDSHAKE_MS: Final = 2000
QUEUE: Final = 16  # messages per connection that libzmq holds, in each direction: replies can be large
MAX_CONNECTIONS: Final = 1024
# libzmq's thread accepts connections, the event loop counts them a moment later: 300 that came at once ended a gateway
# with 256 descriptors. The difference to MAX_CONNECTIONS must last while the loop does something else.
MIN_DESCRIPTORS: Final = 4 * MAX_CONNECTIONS
LINGER_MS: Final = 200
_EVENTS: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED


def enough_descriptors() -> bool:
    """Is the limit of open files such that no flood of connections can make libzmq end this process?"""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft >= MIN_DESCRIPTORS or soft == resource.RLIM_INFINITY


class Sent(enum.Enum):
    """What became of a message: queued by libzmq, no room in the peer's queue, no such peer."""

    YES = 1
    FULL = 2
    GONE = 3


@final
class Port:
    """Bound when made; raises OSError when the socket cannot be made. Methods are for the event loop's thread.

    `fd` is edge-triggered, also by sending: whenever something was received or sent, look at `readable` again.
    """

    def __init__(self, directory: str, uid: int) -> None:
        self.path = os.path.join(directory, SOCKET)
        self._listener = _listen(self.path)
        self._inode = os.lstat(self.path).st_ino
        self._context = zmq.Context()
        self._context.setsockopt(zmq.MAX_SOCKETS, 16)
        self._router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._monitor: zmq.Socket[bytes] | None = None
        self._connections: set[int] = set()
        self._limit = min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._hidden = ""  # where the socket file is while nobody may connect
        try:
            self._configure(uid)
            self._bind()
        except BaseException:
            self.close()
            raise
        self.fd = int(self._router.getsockopt(zmq.FD))

    def _configure(self, uid: int) -> None:
        router = self._router
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),  # an unknown peer is an error, not a message lost in silence
            (zmq.ROUTER_HANDOVER, 0),  # nobody takes another's identity over
            (zmq.MAXMSGSIZE, MAX_MESSAGE),
            (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
            (zmq.SNDHWM, QUEUE),
            (zmq.RCVHWM, QUEUE),
            (zmq.LINGER, LINGER_MS),
            (zmq.BACKLOG, BACKLOG),
            (zmq.SNDTIMEO, 0),
        ):
            router.setsockopt(option, value)
        with contextlib.suppress(AttributeError, zmq.ZMQError):  # not on every platform; the socket is 0600 anyway
            router.setsockopt(zmq.IPC_FILTER_UID, uid)
        self._monitor = router.get_monitor_socket(_EVENTS)
        self._monitor.setsockopt(zmq.LINGER, 0)

    # --- connections ------------------------------------------------------------------------------------------------

    @property
    def monitor_fd(self) -> int:
        """Readable when connections came or went: call `count`. Edge-triggered."""
        assert self._monitor is not None
        return int(self._monitor.getsockopt(zmq.FD))

    def count(self) -> int:
        """Look at what came and went; pause or resume accepting. Returns how many are connected."""
        assert self._monitor is not None
        while int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.DONTWAIT))
            change = self._connections.add if event["event"] == zmq.EVENT_ACCEPTED else self._connections.discard
            change(event["value"])
        if len(self._connections) >= self._limit and not self._hidden:
            log.warning("ZeroMQ: %d connections, no more are accepted until some end", len(self._connections))
            self.pause()
        elif len(self._connections) < self._limit * 3 // 4 and self._hidden:
            self.resume()
        return len(self._connections)

    def pause(self) -> None:
        """Let nobody else connect. At most a backlog of connections is still accepted."""
        if not self._hidden:
            hidden = self.path + HIDDEN
            with contextlib.suppress(FileNotFoundError):
                os.rename(self.path, hidden)
            self._hidden = hidden

    def resume(self) -> None:
        """Let others connect again."""
        if self._hidden:
            with contextlib.suppress(FileNotFoundError):
                os.rename(self._hidden, self.path)
            self._hidden = ""

    def _bind(self) -> None:
        fd = os.dup(self._listener.fileno())  # libzmq closes the one that it is given
        try:
            self._router.setsockopt(zmq.USE_FD, fd)
            self._router.bind("ipc://given")
        except zmq.ZMQError as error:
            os.close(fd)
            raise OSError(error.errno, f"cannot listen: {error.strerror}", self.path) from None

    # --- messages ---------------------------------------------------------------------------------------------------

    def readable(self) -> bool:
        """Is there a message? Until this says no, `fd` may stay silent about it."""
        return bool(int(self._router.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def receive(self, known: Container[bytes]) -> tuple[bytes, bytes | None, str | None]:
        """(routing id, the message, peer address): the next one. Call only when `readable`.

        The message is None unless it has exactly one frame. The peer address is told for routing ids that are not
        `known`: "" where libzmq does not know it, None for a peer that chose its routing id itself.
        """
        router = self._router
        routing: bytes = router.recv(zmq.DONTWAIT)
        peer: str | None = ""
        data: bytes | None = None
        if routing in known:
            data = router.recv(zmq.DONTWAIT)
        elif router.getsockopt(zmq.RCVMORE):
            frame = router.recv(zmq.DONTWAIT, copy=False)
            peer = _peer(frame)
            data = frame.bytes
        while router.getsockopt(zmq.RCVMORE):
            router.recv(zmq.DONTWAIT)
            data = None
        return routing, data, peer

    def send(self, routing: bytes, data: bytes) -> Sent:
        """Hand one message to libzmq. Never waits."""
        try:
            self._router.send(routing, zmq.SNDMORE | zmq.DONTWAIT)
            self._router.send(data, zmq.DONTWAIT)
        except zmq.Again:
            return Sent.FULL
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            return Sent.GONE
        return Sent.YES

    def close(self) -> None:
        """Close everything; what libzmq holds is sent for at most LINGER_MS more. May be called again."""
        if self._listener.fileno() >= 0:
            with contextlib.suppress(OSError):
                path = self._hidden or self.path
                if os.lstat(path).st_ino == self._inode:
                    os.unlink(path)
            self._listener.close()
        if not self._context.closed:
            if self._monitor is not None:
                self._router.disable_monitor()
                self._monitor.close()
                self._monitor = None
            self._router.close()
            self._context.term()


def _listen(path: str) -> socket.socket:
    """A listening socket (0600) at `path`; what a gateway that died left there is replaced."""
    for left in (path, path + HIDDEN):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(left)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    previous = os.umask(0o177)
    try:
        with sockets.address(path) as address:
            listener.bind(address)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    finally:
        os.umask(previous)
    return listener


def _peer(frame: zmq.Frame) -> str | None:
    try:
        if frame.get("Identity"):
            return None
    except zmq.ZMQError:
        return None  # no handshake of this decade: whatever that is, it can choose its routing id
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return ""
