"""What a hostile or slow HTTP peer can do: be refused, be closed, and be of no consequence to others."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from collections.abc import Iterator

import numpy as np
import pytest

from broker.gateway import http_connection
from broker.gateway.http_connection import Patience
from broker.gateway.kserve import InferRequest, InferResponse, OutputTensor
from tests.fakes.broker import eventually
from tests.fakes.http_server import Peer, Running, running

LIMIT = 1 << 20
INFER = "/v2/models/add1/infer"
RAW = "Inference-Header-Content-Length: 0"
JSON_SIZE = "bytes exceeds the maximum allowed input size of 1048576 bytes. Use --http-max-input-size to increase"
IMPATIENT = Patience(first_byte=0.6, head=0.6, body=0.6, send=0.6, idle=0.6, discard=0.6)


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    with running(http_max_input_size=LIMIT) as server:
        yield server


@pytest.fixture
def server(shared: Running) -> Iterator[Running]:
    """Afterwards: no connection, no memory of bodies, and it serves."""
    yield shared
    eventually(lambda: shared.connections() == 0, "connections are gone")
    assert shared.call(lambda: shared.server._body_bytes) == 0
    with shared.connect() as peer:
        assert peer.request("GET", "/v2/health/live").reply()[0] == 200


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def chunked(peer: Peer, path: str = INFER, *headers: str) -> Peer:
    lines = [f"POST {path} HTTP/1.1", "Host: h", "Transfer-Encoding: chunked", *headers, "", ""]
    return peer.send("\r\n".join(lines).encode())


# --- size -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [LIMIT + 1, 10 << 30])
@pytest.mark.parametrize(
    ("headers", "text"),
    [
        ((), f"request JSON size of {{}} {JSON_SIZE}"),
        (
            (RAW,),
            "Raw input has a byte_size ({} bytes) that exceeds the maximum allowed value of 1048576 bytes. Use --",
        ),
        (("Expect: 100-continue",), f"request JSON size of {{}} {JSON_SIZE}"),
    ],
)
def test_a_length_beyond_the_limit_is_refused_before_the_body(
    server: Running, length: int, headers: tuple[str, ...], text: str
) -> None:
    with server.connect() as peer:
        lines = [f"POST {INFER} HTTP/1.1", "Host: h", f"Content-Length: {length}", *headers, "", ""]
        status, message = peer.send("\r\n".join(lines).encode()).error()
        assert status == 400
        assert text.format(length) in message
        assert peer.closed()


def test_a_client_that_sends_all_of_it_first_gets_the_answer(server: Running) -> None:
    with server.connect() as peer:
        peer.request("POST", INFER, bytes(8 * LIMIT))
        assert peer.error()[0] == 400


def test_the_limit_itself_is_allowed(server: Running) -> None:
    document = json.dumps({"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]})
    with server.connect() as peer:
        assert peer.request("POST", INFER, document.encode().ljust(LIMIT)).reply()[0] == 200
        assert (
            "request JSON size of 1048577" in peer.request("POST", INFER, document.encode().ljust(LIMIT + 1)).error()[1]
        )


def test_chunks_are_counted_while_they_come(server: Running) -> None:
    with server.connect() as peer:
        chunked(peer)
        for _ in range(17):
            peer.send(chunk(bytes(64 << 10)))
        status, message = peer.error()
        assert status == 400
        assert JSON_SIZE in message
        assert peer.closed()


def test_a_body_in_chunks_is_a_body(server: Running) -> None:
    x = np.ones((1, 4), np.float32)
    with server.connect() as peer:
        chunked(peer, INFER, RAW).send(b"".join(chunk(bytes([byte])) for byte in x.tobytes()) + b"0\r\n\r\n")
        status, headers, body = peer.reply()
        assert status == 200
        assert body[int(headers["inference-header-content-length"]) :] == (x + 1).tobytes()
        chunked(peer, "/v2/repository/index").send(b"0\r\n\r\n")
        assert peer.reply()[0] == 200


@pytest.mark.parametrize("over", [False, True])
def test_one_byte_chunks(server: Running, over: bool) -> None:
    with server.connect() as peer:
        chunked(peer, INFER, RAW)
        flood = chunk(b"A") * (65536 + over)
        peer.send(flood + b"0\r\n\r\n")
        status, message = peer.error() if over else (peer.reply()[0], "")
        if over:
            expected = (
                "Chunked request body exceeds maximum of 65536 non-empty chunks. Send fewer or larger HTTP chunks."
            )
            assert (status, message) == (400, expected)
            assert peer.closed()
        else:
            assert status == 200  # the stand-in takes any size


def test_a_flood_of_chunks_is_not_even_parsed(server: Running) -> None:
    with server.connect() as peer:
        chunked(peer, INFER, RAW)
        flood = chunk(b"A") * 100_000
        for _ in range(10):
            try:
                peer.send(flood)
            except ConnectionError:
                break
        assert "65536" in peer.error()[1]


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_bombs(server: Running, coding: str) -> None:
    bomb = gzip.compress(bytes(64 << 20))
    with server.connect() as peer:
        status, message = peer.request("POST", INFER, bomb, f"Content-Encoding: {coding}").error()
    assert status == 400
    assert message.startswith("Decompressed data size exceeds the maximum allowed value of 1048576 bytes.")


def test_all_bodies_together_have_a_limit(server: Running) -> None:
    peers = [server.connect() for _ in range(20)]
    try:
        for peer in peers:
            peer.send(f"POST {INFER} HTTP/1.1\r\nHost: h\r\nContent-Length: {LIMIT}\r\n\r\n".encode())
            peer.send(b"{")
        eventually(lambda: server.call(lambda: server.server._body_bytes) == 16 * LIMIT, "the limit is reached")
        refused = [each.error() for each in peers[-4:]]
        assert refused == [(503, "too many large requests at a time: try again later")] * 4
    finally:
        for peer in peers:
            peer.sock.close()


def test_deep_json_is_quick(server: Running) -> None:
    with server.connect() as peer:
        body = b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":' + b"[" * 100_000 + b"1"
        assert peer.request("POST", INFER, body).error() == (
            400,
            "JSON nesting depth exceeds maximum allowed limit (100)",
        )


# --- malformed --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x01\x02\x03" * 1024,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"GET /v2 HTTP/9.9\r\nHost: h\r\n\r\n",
        b"GET /v2 HTTP/1.1\nHost: h\n\n",
        b"GET /v2 HTTP/1.1\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nHost: h\r\nHost: i\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nHost: h\r\nx y: 1\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nHost: h\r\nx: a\0b\r\n\r\n",
        b"POST /v2 HTTP/1.1\r\nHost: h\r\nContent-Length: -1\r\n\r\n",
        b"POST /v2 HTTP/1.1\r\nHost: h\r\nContent-Length: abc\r\n\r\n",
        b"POST /v2 HTTP/1.1\r\nHost: h\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"POST /v2 HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /v2 HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /v2 HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"POST /v2 HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: h\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nHost: h\r\nx: " + b"a" * 70_000 + b"\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nHost: h\r\n" + b"x: 1\r\n" * 200 + b"\r\n",
    ],
)
def test_malformed_requests(server: Running, data: bytes) -> None:
    with server.connect() as peer:
        status, message = peer.send(data).error()
        assert status == 400
        assert message.startswith("malformed HTTP request: ")
        assert "Traceback" not in message
        assert peer.closed()


def test_a_malformed_chunk_after_the_head(server: Running) -> None:
    with server.connect() as peer:
        chunked(peer)
        eventually(
            lambda: server.call(lambda: {each._state for each in server.server._connections}) == {"body"}, "body"
        )
        assert peer.send(b"zz\r\n").error()[1].startswith("malformed request body: ")
        assert peer.closed()


@pytest.mark.parametrize(
    "start",
    [
        b"GET /v2 HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nrest",
        b"CONNECT h:1 HTTP/1.1\r\nHost: h\r\n\r\nrest",
    ],
)
def test_other_protocols_are_not_spoken(server: Running, start: bytes) -> None:
    with server.connect() as peer:
        status, headers, _ = peer.send(start).reply()
        assert status in (200, 404)
        assert headers["connection"] == "close"
        assert peer.closed()


def test_wrong_paths_and_methods(server: Running) -> None:
    with server.connect() as peer:
        for method in ("GET", "PUT", "DELETE", "OPTIONS", "PATCH"):
            assert peer.request(method, INFER, b"{}").error() == (405, "Method Not Allowed")
        for path in ("/", "/v1", "//v2", "/v2/", "/v2/models/a%00b/x", "/v2/models/%2e%2e/%2e%2e/x", "/v2?x=/../"):
            expected = 200 if path.startswith("/v2?") else 404
            assert peer.request("GET", path).reply()[0] == expected
        status, message = peer.request("GET", "/v2/models/%00%0d%0a").error()
        assert (status, message) == (400, "Request for unknown model: '%00%0d%0a' is not found")


# --- slow -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def impatient() -> Iterator[Running]:
    with running(patience=IMPATIENT) as server:
        yield server


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"POST /v2/models/add1/inf",
        b"POST /v2/models/add1/infer HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\n{",
        b"POST /v2/models/add1/infer HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
    ],
    ids=["connect", "head", "body", "chunks"],
)
def test_those_who_dribble_are_closed(impatient: Running, start: bytes) -> None:
    with impatient.connect() as peer:
        peer.send(start)
        peer.sock.settimeout(0.1)
        for _ in range(100):
            try:
                if start:
                    peer.send(b"1\r\n{\r\n" if b"chunked" in start else b"a")
                if peer.sock.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        else:
            pytest.fail("still open")
    eventually(lambda: impatient.connections() == 0, "the connection is gone")


def test_those_who_idle_are_closed_later(impatient: Running) -> None:
    with impatient.connect() as peer:
        assert peer.request("GET", "/v2/health/live").reply()[0] == 200
        assert peer.closed()


def test_a_body_that_makes_progress_may_take_long(impatient: Running) -> None:
    body = np.zeros(64 << 10, np.float32).tobytes()
    with impatient.connect() as peer:
        peer.send(f"POST {INFER} HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n{RAW}\r\n\r\n".encode())
        peer.sock.settimeout(0.3)
        for start in range(0, len(body), 32 << 10):
            peer.send(body[start : start + (32 << 10)])
            with pytest.raises(TimeoutError):
                peer.sock.recv(1)
            if start > 4 * 32 << 10:
                peer.sock.settimeout(30)
                peer.send(body[start + (32 << 10) :])
                break
        assert peer.reply()[0] == 200


LARGE = 12 << 20  # more than the kernel buffers


@pytest.fixture
def large_answers(impatient: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    async def infer(request: InferRequest, _: object) -> InferResponse:
        impatient.service.asked.append(request)
        return InferResponse("add1", "1", "", [OutputTensor("y", "UINT8", (LARGE,), bytes(LARGE))])

    monkeypatch.setattr(impatient.service, "infer", infer)
    return impatient


def narrow(server: Running) -> Peer:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
    sock.connect(("127.0.0.1", server.port))
    sock.settimeout(30)
    return Peer(sock)


def test_those_who_never_read_are_cut(large_answers: Running) -> None:
    with narrow(large_answers) as peer:
        peer.request("POST", INFER, bytes(16), RAW)

        def buffered() -> list[int]:
            return [each.transport.get_write_buffer_size() for each in large_answers.server._connections]

        eventually(lambda: any(large_answers.call(buffered)), "the answer waits for the peer")
        assert max(large_answers.call(buffered)) <= 2 * http_connection.SEND_SIZE
        eventually(lambda: large_answers.connections() == 0, "the connection is cut")


def test_those_who_read_slowly_get_everything(large_answers: Running) -> None:
    with narrow(large_answers) as peer:
        peer.request("POST", INFER, bytes(16), RAW)
        pause = socket.socketpair()
        try:
            pause[0].settimeout(0.3)
            for _ in range(6):  # two seconds, three times the patience
                with pytest.raises(TimeoutError):
                    pause[0].recv(1)
                peer._buffer += peer.sock.recv(64 << 10)
        finally:
            pause[0].close()
            pause[1].close()
        peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        assert len(peer.reply()[2]) > LARGE


# --- many -------------------------------------------------------------------------------------------------------------


def test_more_connections_than_allowed_are_told_so() -> None:
    with running(max_connections=8) as server:
        peers = [server.connect() for _ in range(8)]
        try:
            for peer in peers:
                assert peer.request("GET", "/v2/health/live").reply()[0] == 200
            with server.connect() as late:
                assert late.error() == (503, "too many connections: this server takes 8 at a time")
                assert late.closed()
            assert peers[0].request("GET", "/v2/health/live").reply()[0] == 200
        finally:
            for peer in peers:
                peer.sock.close()
        eventually(lambda: server.connections() == 0, "connections are gone")
        with server.connect() as peer:
            assert peer.request("GET", "/v2/health/live").reply()[0] == 200


def test_idle_connections_do_not_keep_others_out() -> None:
    with running(max_connections=8, patience=IMPATIENT) as server:
        peers = [server.connect() for _ in range(8)]
        try:
            eventually(lambda: server.connections() == 8, "all are accepted")
            eventually(lambda: server.connections() == 0, "those that say nothing are closed")
            with server.connect() as peer:
                assert peer.request("GET", "/v2/health/live").reply()[0] == 200
        finally:
            for peer in peers:
                peer.sock.close()


def test_a_pipeline_without_end_waits_in_the_kernel(server: Running) -> None:
    gate = server.service.gate = server.call(asyncio.Event)
    try:
        with server.connect() as peer:
            peer.request("POST", INFER, bytes(16), RAW)
            for _ in range(2000):
                peer.request("GET", "/v2/health/live")
            eventually(lambda: len(server.service.asked) > 0, "the first request runs")
            (queued,) = server.call(lambda: [len(each._queue) for each in server.server._connections])
            assert queued <= http_connection.PIPELINE
            server.call(gate.set)
            assert {peer.reply()[0] for _ in range(2001)} == {200}
    finally:
        server.service.gate = None
