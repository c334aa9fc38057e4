"""The HTTP transport for threads: the standard library's client on a few kept connections.

A request that a thread waits for runs on that thread. Submitted ones run on up to `THREADS` threads of the transport;
further ones wait in line, at most as many as the client has slots. Cancelling shuts the request's connection down, by
which the server knows.

What is sent again, and what is not: a server may close a kept connection at any moment, so a request on one can fail
without having been seen. A connection that was closed while it lay idle is noticed before it is used. If sending fails
on a kept connection all the same, the server cannot have the whole request, and it goes out once more, on a new
connection. Once all of it was sent, only what may happen twice (reads) is repeated; an inference may have run, its
caller is told so and decides.

`https://` trusts the system's roots (SSL_CERT_FILE, SSL_CERT_DIR).
"""

from __future__ import annotations

import http.client
import ssl
import threading
from collections.abc import Callable, Sequence
from typing import Any, final

from clientlib.address import Address
from clientlib.pending import expired
from clientlib.remote import http_codec
from clientlib.remote.http_codec import HEADER_LENGTH, HttpCall
from clientlib.remote.http_connections import Connection, Connections, Flight, Workers, reason_of
from clientlib.remote.transport import Ended, InferAnswer, InferRequest, Word, cancelled, late, lost, unreachable
from shm.errors import Code, InferError, fresh

MAX_JOINED = 1 << 16  # bytes of a body that goes out in one piece with its head
_BROKEN = (ConnectionError, http.client.HTTPException, ssl.SSLError)


def connect(address: Address) -> HttpTransport:
    """For threads. Connects when it is first used."""
    return HttpTransport(address)


@final
class HttpTransport:
    """A server over HTTP, for threads."""

    wire = "HTTP"
    shares_memory = False

    def __init__(self, address: Address) -> None:
        self._address = address
        self._connections = Connections(address)
        self._workers = Workers()

    def call(self, word: Word, deadline: float) -> Any:
        """As `Transport.call`."""
        call = http_codec.encode(self._address, word)
        try:
            return self._exchange(call, deadline, Flight(), lambda response: call.read(response.read()))
        except TimeoutError:
            raise late(self._address, word) from None

    def infer(self, request: InferRequest, deadline: float) -> InferAnswer:
        """As `Transport.infer`."""
        return self._infer(http_codec.encode_infer(self._address, request), deadline, Flight())

    def submit(self, request: InferRequest, deadline: float, ended: Ended) -> Callable[[], None]:
        """As `Transport.submit`."""
        call = http_codec.encode_infer(self._address, request)
        call = call._replace(parts=[bytes(part) for part in call.parts])  # now: it may wait in line
        flight = Flight()

        def run() -> None:
            end: InferAnswer | InferError
            try:
                end = self._infer(call, deadline, flight)
            except InferError as error:
                end = fresh(error)
            except Exception as error:  # whoever waits must hear of it
                end = InferError(Code.INTERNAL, f"the server's answer cannot be read: {error!r}")
            ended(end)

        self._workers.run(run)
        return flight.cancel

    def wait(self, event: threading.Event, timeout: float | None) -> bool:
        """As `Transport.wait`: answers come on threads of their own."""
        return event.wait(timeout)

    def close(self) -> None:
        """As `Transport.close`."""
        self._connections.close()
        self._workers.close()

    def leave_to_parent(self) -> None:
        """As `Transport.leave_to_parent`."""
        self._connections.leave_to_parent()

    # --- inside ----------------------------------------------------------------------------------------------------

    def _infer(self, call: HttpCall, deadline: float, flight: Flight) -> InferAnswer:
        try:
            answer = self._exchange(call, deadline, flight, lambda response: _answer(response, flight, deadline))
        except TimeoutError:
            raise expired() from None
        assert isinstance(answer, InferAnswer)
        return answer

    def _exchange(
        self, call: HttpCall, deadline: float, flight: Flight, read: Callable[[http.client.HTTPResponse], Any]
    ) -> Any:
        """Send `call` and read its answer. Raises TimeoutError at the deadline, InferError for every other failure."""
        for again in (False, True):
            connection = self._connections.take(fresh=again, deadline=deadline)
            kept = connection.kept
            try:
                flight.board(connection)
                sent = _send(connection, call, self._address.headers, deadline)
                try:
                    response = connection.response(deadline)
                except _BROKEN as error:
                    if kept and not again and (call.repeatable or not sent) and not flight.cancelled:
                        continue
                    raise (lost if sent else unreachable)(self._address, reason_of(error)) from None
                status = response.status
                answer = read(response) if status == 200 else http_codec.error_of(status, response.read(), call.word)
                if sent and not response.will_close:
                    flight.leave()
                    self._connections.give_back(connection)
                if isinstance(answer, InferError):
                    raise fresh(answer)
                return answer
            except (InferError, OSError, http.client.HTTPException) as error:
                if flight.cancelled:
                    raise cancelled() from None
                if isinstance(error, InferError | TimeoutError):
                    raise
                raise lost(self._address, reason_of(error)) from None
            finally:
                flight.leave()
                self._connections.drop(connection)
        raise AssertionError("the second attempt returns or raises")


def _send(connection: Connection, call: HttpCall, headers: Sequence[tuple[str, str]], deadline: float) -> bool:
    """Send a request. False: not all of it went out, but there may be an answer that says why."""
    try:
        connection.until(deadline)
        wire = connection.http
        wire.putrequest(call.method, call.path, skip_accept_encoding=True)
        for name, value in (*call.headers.items(), *headers):
            wire.putheader(name, value)
        length = sum(len(part) for part in call.parts)
        if call.parts:
            wire.putheader("Content-Length", str(length))
        if length <= MAX_JOINED:
            wire.endheaders(b"".join(call.parts))
        else:
            wire.endheaders(bytes(call.parts[0]))
            for part in call.parts[1:]:
                connection.until(deadline)
                wire.send(part)
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def _answer(response: http.client.HTTPResponse, flight: Flight, deadline: float) -> InferAnswer:
    """Read an inference's answer, every output into memory of its own."""
    length = response.length
    if length is None:  # chunked, by a proxy
        return http_codec.decode_infer(response.headers.get(HEADER_LENGTH), response.read())
    position = http_codec.header_length(response.headers.get(HEADER_LENGTH), length)
    described, parameters = http_codec.decode_head(response.read(position))
    outputs = []
    for tensor, size in described:
        position += size
        if position > length:
            break
        data = bytearray(size)
        view = memoryview(data)
        while view:
            flight.until(deadline)
            if not (count := response.readinto(view)):
                raise ConnectionResetError("it ended in the middle")
            view = view[count:]
        tensor.data = data
        outputs.append(tensor)
    http_codec.check_end(position, length)
    return InferAnswer(outputs, parameters=parameters)
