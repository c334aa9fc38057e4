"""The HTTP transports against a server that misbehaves on purpose: what is sent again, and what answers are refused."""

from __future__ import annotations

import asyncio
import json
import queue
import time

import numpy as np
import pytest

from clientlib.address import wire_of
from clientlib.remote import http_async, http_transport, transport
from clientlib.remote.http_connections import THREADS
from clientlib.remote.transport import InferRequest, InputTensor
from shm.errors import InferError
from tests.fakes.broker import eventually
from tests.fakes.raw_http import RawHttp, hang, hang_up, raw, reply

HEAD = {"outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}}]}
PACKED = np.array([[1, 2]], np.float32).tobytes()


def answer(head=HEAD, data=PACKED, length=None, **options):
    text = json.dumps(head).encode()
    header = f"Inference-Header-Content-Length: {len(text) if length is None else length}\r\n"
    return reply(text + data, head=header, **options)


def request():
    return InferRequest("m", "", [InputTensor("x", "FP32", (1, 2), memoryview(PACKED))])


class OnLoop:
    """The asynchronous transport, blocking."""

    def __init__(self, address):
        self.runner = asyncio.Runner()

        async def make():
            return http_async.connect_async(address)

        self.inner = self.runner.run(make())

    def call(self, word, deadline):
        return self.runner.run(self.inner.call(word, deadline))

    def infer(self, request, deadline):
        return self.runner.run(self.inner.infer(request, deadline))

    def pause(self):
        self.runner.run(asyncio.sleep(0.01))

    def close(self):
        with self.runner:
            self.runner.run(self.inner.close())


@pytest.fixture(params=["threads", "loop"])
def serve(request):
    """`serve(*steps)` is a server and a transport to it."""
    made = []

    def serve(*steps):
        server = RawHttp(steps)
        address = wire_of(server.url)
        wire = http_transport.connect(address) if request.param == "threads" else OnLoop(address)
        made.append((server, wire))
        return server, wire

    yield serve
    for server, wire in made:
        wire.close()
        server.__exit__()


def soon():
    return time.monotonic() + 30


def test_connections_are_kept(serve):
    server, wire = serve(answer(), answer(), reply(b"{}"))
    for _ in range(2):
        (output,) = wire.infer(request(), soon()).outputs
        assert (output.name, output.datatype, output.shape) == ("y", "FP32", (1, 2))
        assert bytes(output.data) == PACKED
    assert wire.call(transport.Live(), soon()) is True
    assert len(server._sockets) == 1


def test_what_an_inference_says(serve):
    server, wire = serve(answer())
    asked = request()
    asked.version, asked.timeout_us, asked.priority, asked.model = "3", 5, 7, "a/b ü"
    asked.sequence_id, asked.sequence_start = 2**64 - 1, True
    wire.infer(asked, soon())
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /v2/models/a%2Fb%20%C3%BC/versions/3/infer HTTP/1.1"
    (length,) = [int(line.split(": ")[1]) for line in lines if line.startswith("Inference-Header-Content-Length")]
    assert body[length:] == PACKED
    assert json.loads(body[:length]) == {
        "inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}],
        "parameters": {
            "binary_data_output": True,
            "timeout": 5,
            "priority": 7,
            "sequence_id": 2**64 - 1,
            "sequence_start": True,
            "sequence_end": False,
        },
    }


def test_a_connection_closed_while_idle_is_not_used(serve):
    server, wire = serve(answer(keep=False), answer())
    wire.infer(request(), soon())
    assert server.closed.wait(30)
    if isinstance(wire, OnLoop):
        wire.pause()  # the loop has to see it
    assert wire.infer(request(), soon()).outputs
    assert len(server.requests) == 2


def test_an_inference_that_was_sent_is_not_sent_again(serve):
    server, wire = serve(answer(), hang_up, answer())
    wire.infer(request(), soon())
    with pytest.raises(InferError, match="the request may have run or not") as caught:
        wire.infer(request(), soon())
    assert caught.value.code == "UNAVAILABLE"
    assert len(server.requests) == 2


def test_a_read_is_sent_again_once(serve):
    server, wire = serve(reply(), hang_up, reply(), reply(), hang_up, hang_up)
    for _ in range(3):
        assert wire.call(transport.Live(), soon()) is True
    assert len(server.requests) == 4
    with pytest.raises(InferError, match="ended before the answer came"):
        wire.call(transport.Live(), soon())
    assert len(server.requests) == 6


def test_a_load_is_not(serve):
    server, wire = serve(reply(), hang_up)
    wire.call(transport.Live(), soon())
    with pytest.raises(InferError, match="ended before the answer came"):
        wire.call(transport.Load("m"), soon())
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (answer(length="x"), "Inference-Header-Content-Length of x"),
        (answer(length=9999), "Inference-Header-Content-Length of 9999"),
        (answer(data=b"\0" * 4), "has .* bytes, its outputs end at byte"),
        (answer(data=b"\0" * 12), "has .* bytes, its outputs end at byte"),
        (answer({"outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}), "no binary data"),
        (answer({"outputs": [{"parameters": {"binary_data_size": 8}}]}), "cannot be read"),
        (answer({"outputs": 3}), "cannot be read"),
        (answer({"outputs": ["y"]}), "cannot be read"),
        (reply(b"no JSON"), "no JSON"),
        (reply(b"[]"), "list where an object belongs"),
        (raw(b"not HTTP\r\n\r\n"), "ended before the answer came [(]what answers there speaks no HTTP/1.1"),
        (raw(b"\0\0\x18\4\0\0\0\0\0\0\4\0@"), "is it a gRPC port[?] that is for grpc://"),
        (raw(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\nInference-Header-Content-Length: 2\r\n\r\n{}"), "."),
        (raw(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n"), "."),
    ],
)
def test_answers_that_cannot_be(serve, step, text):
    _, wire = serve(step, answer())
    with pytest.raises(InferError, match=text) as caught:
        wire.infer(request(), soon())
    assert caught.value.code in ("INTERNAL", "UNAVAILABLE")
    assert wire.infer(request(), soon()).outputs, "on another connection"


@pytest.mark.parametrize(
    ("status", "body", "code", "text"),
    [
        ("400 Bad Request", b'{"error":"[request id: <id_unknown>] no"}', "INVALID_ARG", "no"),
        ("404 Not Found", b'{"error":"Not Found"}', "NOT_FOUND", "Not Found"),
        ("403 Forbidden", b'{"error":"This API is restricted"}', "UNAVAILABLE", "This API is restricted"),
        ("405 Method Not Allowed", b"", "UNSUPPORTED", "the server answered with HTTP status 405"),
        ("501 Not Implemented", b"<html>", "UNSUPPORTED", "<html>"),
        ("503 Service Unavailable", b'{"error":"Server exiting"}', "UNAVAILABLE", "Server exiting"),
        ("418 Teapot", b"[]", "INVALID_ARG", "[]"),
        ("302 Found", b"", "UNKNOWN", "the server answered with HTTP status 302"),
        ("599 Odd", b"\xff", "UNKNOWN", "�"),
    ],
)
def test_errors(serve, status, body, code, text):
    server, wire = serve(reply(body, status=status), answer())
    with pytest.raises(InferError) as caught:
        wire.infer(request(), soon())
    assert (caught.value.code, caught.value.message) == (code, text)
    wire.infer(request(), soon())
    assert len(server._sockets) == 1, "the connection is as good as before"


def test_a_server_that_says_nothing(serve):
    server, wire = serve(hang, hang)
    with pytest.raises(InferError, match="Request timeout expired") as caught:
        wire.infer(request(), time.monotonic() + 0.2)
    assert caught.value.code == "UNAVAILABLE"
    with pytest.raises(InferError, match=f"no answer to Live from {server.url}"):
        wire.call(transport.Live(), time.monotonic() + 0.2)
    with pytest.raises(InferError, match="Request timeout expired"):
        wire.infer(request(), time.monotonic() - 1)
    eventually(lambda: len(server.requests) >= 2, "it has read both")
    assert len(server.requests) == 2


def test_an_answer_that_stops_in_the_middle(serve):
    def stop(sock, request):
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 200\r\nInference-Header-Content-Length: 10\r\n\r\n{")
        return hang(sock, request)

    _, wire = serve(stop)
    with pytest.raises(InferError, match="Request timeout expired"):
        wire.infer(request(), time.monotonic() + 0.1)


def test_nobody_there(serve):
    server, wire = serve()
    server.__exit__()
    with pytest.raises(InferError, match=f"cannot reach {server.url}: ") as caught:
        wire.infer(request(), soon())
    assert caught.value.code == "UNAVAILABLE"


class Early(RawHttp):
    """Answers before it has read everything."""

    def _read(self, sock):
        return sock.recv(100)


def test_a_body_that_the_server_does_not_want():
    with Early([reply(b'{"error":"too large"}', status="400 Bad Request", keep=False)]) as server:
        wire = http_transport.connect(wire_of(server.url))
        big = request()
        big.inputs[0].data = memoryview(bytes(32 << 20))
        with pytest.raises(InferError) as caught:
            wire.infer(big, soon())
        # By the kernel's choice the answer may be lost with the connection.
        text = caught.value.message
        assert text == "too large" or "ended before the answer came" in text or "cannot reach" in text
        wire.close()


class TestSubmit:
    def submitted(self, server, count):
        """A transport, and `count` requests: what cancels them, and where their ends come."""
        wire, ends = http_transport.connect(wire_of(server.url)), queue.SimpleQueue()
        return wire, [wire.submit(request(), soon(), ends.put) for _ in range(count)], ends

    def test_many(self):
        with RawHttp([answer()] * 40) as server:
            wire, _, ends = self.submitted(server, 40)
            assert [type(ends.get(timeout=30)).__name__ for _ in range(40)] == ["InferAnswer"] * 40
            wire.close()

    def test_cancel(self):
        with RawHttp([hang] * (THREADS + 1)) as server:
            wire, cancels, ends = self.submitted(server, THREADS + 1)  # the last one waits in line
            for _ in range(THREADS):
                server.arrived.get(timeout=30)
            for cancel in reversed(cancels):
                cancel()
                cancel()
            assert [ends.get(timeout=30).code for _ in cancels] == ["CANCELLED"] * (THREADS + 1)
            assert len(server.requests) == THREADS
            wire.close()

    def test_close_ends_what_runs(self):
        with RawHttp([hang] * 2) as server:
            wire, _, ends = self.submitted(server, 2)
            for _ in range(2):
                server.arrived.get(timeout=30)
            wire.close()
            assert [ends.get(timeout=30).code for _ in range(2)] == ["UNAVAILABLE"] * 2
