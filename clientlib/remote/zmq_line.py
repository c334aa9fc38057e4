"""What both ZeroMQ transports are made of: the socket, and the session as far as it needs no waiting.

A connection begins with hello. The gateway's word "hello" in an error, or the socket without a peer, means that the
connection is another one by now: whatever was asked on the old one is lost, and the session is resumed by its token.
Not for more than one thread at a time.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any, Final, final

import zmq

from clientlib.address import Address
from clientlib.remote import transport, zmq_codec
from clientlib.remote.transport import Word, lost, unreachable
from shm import zmq_messages as wire
from shm.errors import InferError
from shm.sockets import MAX_PATH
from shm.sockets import address as short

HEARTBEAT_S: Final = 2.0  # a third of what the gateway waits
RECONNECT_S: Final = 10.0  # how long a gateway that went away is waited for
RETRY_S: Final = 0.02
SOCKET: Final = "zmq.sock"
QUEUE: Final = 4096  # messages; the clients' slots are fewer
LINGER_MS: Final = 200  # for the goodbye

Ended = Callable[[wire.GatewayMessage | InferError], None]


@final
class Line:
    """One connection that libzmq makes anew by itself, and what was asked on it. `fd` is edge-triggered."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.path = os.path.join(address.path, SOCKET)
        self.welcomed = False
        self.asked: dict[int, Ended] = {}
        self.regions: dict[str, transport.RegisterSystem] = {}  # what the session has, if the gateway remembers it
        self._directory = -1
        self._token: str | None = None
        self._number = 0
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.IMMEDIATE, 1),  # messages wait in no queue for a gateway that is not there
            (zmq.LINGER, LINGER_MS),
            (zmq.SNDHWM, QUEUE),
            (zmq.RCVHWM, QUEUE),
            (zmq.RECONNECT_IVL, 20),
            (zmq.RECONNECT_IVL_MAX, 200),
        ):
            self._socket.setsockopt(option, value)
        self.fd = int(self._socket.getsockopt(zmq.FD))
        self._dialled = False

    def probe(self) -> None:
        """Begin to connect. Raises InferError when nobody listens there (who does once is waited for later)."""
        if self._dialled:
            return
        try:
            with (
                socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe,
                short(self.path) as at,
            ):
                probe.settimeout(1.0)
                probe.connect(at)
        except OSError as error:
            raise unreachable(self.address, f"{self.path}: {error.strerror or error}") from None
        place = self.path
        if len(os.fsencode(place)) > MAX_PATH:
            self._directory = os.open(self.address.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            place = f"/proc/self/fd/{self._directory}/{SOCKET}"
        self._socket.connect(f"ipc://{place}")
        self._dialled = True

    def connected(self) -> bool:
        """Is there a connection? Look after `receive`."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT)

    def number(self) -> int:
        """A new request id."""
        self._number += 1
        return self._number

    def ask(self, message: wire.Request, ended: Ended) -> None:
        """Send a request; `ended` will be called once. Raises InferError, and it will not."""
        data = zmq_codec.encode(message)
        self.asked[message.id] = ended
        if not self._send(data):
            del self.asked[message.id]
            raise unreachable(self.address, "the gateway is not there, or does not read")

    def tell(self, message: wire.Request) -> None:
        """Send a request whose answer does not matter."""
        self._send(zmq_codec.encode(message))

    def _send(self, data: bytes) -> bool:
        try:
            self._socket.send(data, zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[tuple[Ended, wire.GatewayMessage | InferError]]:
        """The requests that have ended, and how: to be called without the lock."""
        ended: list[tuple[Ended, wire.GatewayMessage | InferError]] = []
        while (events := int(self._socket.getsockopt(zmq.EVENTS))) & zmq.POLLIN:
            reply = zmq_codec.decode(self._socket.recv(zmq.DONTWAIT))
            if reply is None:
                continue
            known = self.asked.pop(reply.id, None)
            if isinstance(reply, wire.Error) and reply.hello:
                ended += self.lose("the gateway was restarted")
            if known is not None:
                ended.append((known, reply))
        if not events & zmq.POLLOUT and self._dialled:
            ended += self.lose("the gateway went away")
        return ended

    def lose(self, reason: str) -> list[tuple[Ended, wire.GatewayMessage | InferError]]:
        """This connection has no session, or not any more: nothing that was asked will be answered."""
        self.welcomed = False
        error = lost(self.address, reason)
        asked, self.asked = self.asked, {}
        return [(ended, error) for ended in asked.values()]

    # --- the session ------------------------------------------------------------------------------------------------

    def hello(self, number: int) -> wire.Hello:
        """The first message of a connection."""
        return wire.Hello(
            id=number,
            protocol=wire.PROTOCOL,
            pid=os.getpid(),
            heartbeat_ms=int(HEARTBEAT_S * 1e3),
            token=self._token,
            library="clientlib",
            headers=dict(self.address.headers),
        )

    def greeted(self, reply: wire.GatewayMessage) -> bool:
        """Is the session there? False: say hello again. Raises InferError when the gateway refuses."""
        if isinstance(reply, wire.Welcome):
            self._token = reply.token
            self.welcomed = True
            return True
        if isinstance(reply, wire.Error) and reply.code == "ALREADY_EXISTS" and self._token is not None:
            self._token = None  # somebody else's by now
            return False
        raise zmq_codec.error_of(reply)

    def missing(self, reply: wire.GatewayMessage) -> list[Word]:
        """What must be registered again, by the answer to `regions`."""
        there = {region.name for region in reply.regions} if isinstance(reply, wire.RegionsAre) else set()
        return [word for name, word in self.regions.items() if name not in there]

    def remember(self, word: Word) -> None:
        """A word was answered without an error."""
        if isinstance(word, transport.RegisterSystem):
            self.regions[word.name] = word
        elif isinstance(word, transport.Unregister):
            self.regions.pop(word.name, None)

    def close(self) -> list[tuple[Ended, wire.GatewayMessage | InferError]]:
        """Say goodbye and close."""
        if self.welcomed:
            self.tell(wire.Goodbye(id=self.number()))
        ended = self.lose("the client was closed")
        self._socket.close()
        self._context.term()
        if self._directory >= 0:
            os.close(self._directory)
            self._directory = -1
        return ended


def call_back(ended: list[tuple[Ended, Any]]) -> None:
    """End requests. Without any lock, since whoever is called back may ask again."""
    for each, reply in ended:
        each(reply)


def repeat(reply: wire.GatewayMessage | InferError) -> bool:
    """Was the request certainly not run, because the connection had no session?"""
    return isinstance(reply, wire.Error) and reply.hello
