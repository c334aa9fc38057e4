"""Connections of the HTTP transport, kept for the next request, and the threads of submitted requests.

Used by `clientlib.remote.http_transport` alone, which decides what is said and what is sent again.
"""

from __future__ import annotations

import contextlib
import http.client
import math
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import final

from clientlib.address import Address
from clientlib.remote.transport import cancelled, lost, unreachable

THREADS = 16  # requests of `submit` that are on the wire at once
KEPT = 16  # idle connections
CONNECT_S = 10.0
MAX_REASON = 300  # characters of an error's text
_NO_STATUS = "Bad status line"  # in aiohttp's text, which quotes what came


@final
class Connection:
    """A connection. `kept`: it has served a request before."""

    def __init__(self, address: Address, deadline: float) -> None:
        """Raises InferError when the server is not reached in time."""
        patience = min(_patience(deadline), CONNECT_S)
        if address.secure:
            self.http: http.client.HTTPConnection = http.client.HTTPSConnection(
                address.host, address.port, timeout=patience, context=ssl.create_default_context()
            )
        else:
            self.http = http.client.HTTPConnection(address.host, address.port, timeout=patience)
        self.kept = False
        try:
            self.http.connect()
        except TimeoutError:
            self.http.close()
            if time.monotonic() >= deadline:
                raise
            raise unreachable(address, f"no connection within {CONNECT_S:g} s") from None
        except OSError as error:
            self.http.close()
            raise unreachable(address, reason_of(error)) from None

    @property
    def sock(self) -> socket.socket:
        """The open socket."""
        sock = self.http.sock
        if sock is None:
            raise ConnectionResetError("it was closed")
        return sock

    def until(self, deadline: float) -> None:
        """No single wait from here on goes beyond the deadline. Raises TimeoutError when it has passed."""
        self.sock.settimeout(None if deadline == math.inf else _patience(deadline))

    def response(self, deadline: float) -> http.client.HTTPResponse:
        """Wait for the head of an answer."""
        self.until(deadline)
        return self.http.getresponse()

    def usable(self) -> bool:
        """Has the server left it alone since it was used? What comes unasked is its end."""
        try:
            sock = self.sock
            poller = select.poll()
            poller.register(sock, select.POLLIN)
            return not poller.poll(0)
        except OSError:
            return False


@final
class Connections:
    """Those that are idle, the one used last is taken first, and those in use."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._used: set[Connection] = set()
        self._closed = False

    def take(self, *, fresh: bool, deadline: float) -> Connection:
        """One to use; `fresh`: that has never been used."""
        while not fresh:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
                if connection is not None:
                    self._used.add(connection)
            if connection is None:
                break
            if connection.usable():
                return connection
            self.drop(connection)
        connection = Connection(self._address, deadline)
        with self._lock:
            if not self._closed:
                self._used.add(connection)
                return connection
        connection.http.close()
        raise lost(self._address, "the client was closed")

    def give_back(self, connection: Connection) -> None:
        """After an exchange that ended well."""
        connection.kept = True
        with self._lock:
            if connection in self._used and len(self._idle) < KEPT and not self._closed:
                self._used.remove(connection)
                self._idle.append(connection)

    def drop(self, connection: Connection) -> None:
        """Close it, unless it was given back."""
        with self._lock:
            if connection not in self._used:
                return
            self._used.remove(connection)
        connection.http.close()

    def close(self) -> None:
        """Close the idle ones, and shut down those in use, whose threads close them."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for connection in self._used:
                _shut_down(connection)
        for connection in idle:
            connection.http.close()

    def leave_to_parent(self) -> None:
        """In a forked child: close the copies of the sockets, without a word to the server."""
        for connection in (*self._idle, *self._used):
            sock = connection.http.sock
            if sock is not None:
                with contextlib.suppress(OSError):
                    socket.close(sock.detach())


@final
class Flight:
    """A request on its way, which may be cancelled by another thread."""

    def __init__(self) -> None:
        self.cancelled = False
        self._lock = threading.Lock()
        self._connection: Connection | None = None

    def board(self, connection: Connection) -> None:
        """It travels on `connection` from here on."""
        with self._lock:
            if self.cancelled:
                raise cancelled()
            self._connection = connection

    def leave(self) -> None:
        """The connection is somebody else's."""
        with self._lock:
            self._connection = None

    def until(self, deadline: float) -> None:
        """As `Connection.until`."""
        if self._connection is not None:
            self._connection.until(deadline)

    def cancel(self) -> None:
        """From any thread, at any time."""
        with self._lock:
            self.cancelled = True
            if self._connection is not None:
                _shut_down(self._connection)


@final
class Workers:
    """Up to `THREADS` threads, made as needed. They do not keep the process from ending."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._tasks: deque[Callable[[], None]] = deque()
        self._idle = self._threads = 0
        self._closed = False

    def run(self, task: Callable[[], None]) -> None:
        """On one of the threads, first come, first served."""
        with self._condition:
            self._tasks.append(task)
            if self._idle >= len(self._tasks):
                self._condition.notify()
            elif self._threads < THREADS:
                self._threads += 1
                threading.Thread(target=self._work, name="clientlib-http", daemon=True).start()

    def close(self) -> None:
        """Threads end when nothing is left to do."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def _work(self) -> None:
        while True:
            with self._condition:
                self._idle += 1
                while not self._tasks and not self._closed:
                    self._condition.wait()
                self._idle -= 1
                if not self._tasks:
                    self._threads -= 1
                    return
                task = self._tasks.popleft()
            task()


def reason_of(error: BaseException) -> str:
    """What to say of an error of the connection: without bytes that came, which may be anything."""
    text: str = getattr(error, "strerror", None) or str(error) or type(error).__name__
    no_status = isinstance(error, http.client.BadStatusLine) and not isinstance(error, ConnectionError)
    if no_status or _NO_STATUS in text:
        return "what answers there speaks no HTTP/1.1; is it a gRPC port? that is for grpc://"
    return "".join(each if each.isprintable() else " " for each in text[:MAX_REASON])


def _shut_down(connection: Connection) -> None:
    sock = connection.http.sock
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def _patience(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError
    return remaining
