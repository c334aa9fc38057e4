"""What a hostile or slow HTTP peer can do: be refused, be closed, and be of no consequence to others."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import select
from collections.abc import Iterator
from types import FrameType

import numpy as np
import pytest

from tests.fakes.broker import eventually
from tests.fakes.http_server import Peer, Running, running

LIMIT = 1 << 20
INFER = "/v2/models/add1/infer"
RAW = "Inference-Header-Content-Length: 0"
JSON_SIZE = "bytes exceeds the maximum allowed input size of 1048576 bytes. Use --http-max-input-size to increase"


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    with running(http_max_input_size=LIMIT) as server:
        yield server


@pytest.fixture
def server(shared: Running) -> Iterator[Running]:
    """Afterwards: no connection, no memory of bodies, and it serves."""
    yield shared
    eventually(lambda: shared.connections() == 0, "connections are gone")
    eventually(lambda: shared.call(lambda: shared.server._body_bytes) == 0, "so are the bodies")
    with shared.connect() as peer:
        assert peer.request("GET", "/v2/health/live").reply()[0] == 200


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def chunked(peer: Peer, path: str = INFER, *headers: str) -> Peer:
    lines = [f"POST {path} HTTP/1.1", "Host: h", "Transfer-Encoding: chunked", *headers, "", ""]
    return peer.send("\r\n".join(lines).encode())


def answered(peers: list[Peer]) -> list[Peer]:
    """Who has something to read."""
    return [peer for peer in peers if select.select([peer.sock], [], [], 0)[0]]


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


def test_what_came_of_a_malformed_body_is_let_go(server: Running) -> None:
    """The stream of the body keeps the error, and by its frames all that was read so far."""
    gc.collect()
    gc.disable()
    try:
        with server.connect() as peer:
            chunked(peer, INFER, RAW).send(chunk(bytes(LIMIT // 2)))
            eventually(lambda: server.call(lambda: server.server._body_bytes) == LIMIT // 2, "it has been read")
            assert peer.send(b"no number\r\n").error()[1].startswith("malformed request body")

        def kept() -> list[FrameType]:
            frames = [each for each in gc.get_objects() if isinstance(each, FrameType)]
            return [frame for frame in frames if len(frame.f_locals.get("body") or "") >= LIMIT // 2]

        eventually(lambda: not kept(), "no frame has it")
    finally:
        gc.enable()


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


def test_what_was_compressed_counts_as_what_it_is(server: Running) -> None:
    tensor = np.zeros((1, LIMIT // 4 - 256), np.float32)
    fields = {"name": "x", "datatype": "FP32", "shape": tensor.shape, "parameters": {"binary_data_size": tensor.nbytes}}
    header = json.dumps({"inputs": [fields]}).encode()
    body = gzip.compress(header + tensor.tobytes())
    headers = ("Content-Encoding: gzip", f"Inference-Header-Content-Length: {len(header)}")

    def hold() -> asyncio.Event:
        server.service.gate = asyncio.Event()
        return server.service.gate

    gate, before = server.call(hold), len(server.service.asked)
    peers = [server.connect() for _ in range(17)]
    try:
        for peer in peers[:-1]:
            peer.request("POST", INFER, body, *headers)
        eventually(lambda: len(server.service.asked) == before + 16, "they run")
        assert server.call(lambda: server.server._body_bytes) > 15 * LIMIT
        assert peers[-1].request("POST", INFER, body, *headers).error()[0] == 503
        server.call(gate.set)
        assert {peer.reply()[0] for peer in peers[:-1]} == {200}
    finally:
        server.service.gate = None
        for peer in peers:
            peer.sock.close()


def test_all_bodies_together_have_a_limit(server: Running) -> None:
    peers = [server.connect() for _ in range(20)]
    try:
        for peer in peers:
            peer.send(f"POST {INFER} HTTP/1.1\r\nHost: h\r\nContent-Length: {LIMIT}\r\n\r\n".encode())
            peer.send(b"{")
        eventually(lambda: server.call(lambda: server.server._body_bytes) == 16 * LIMIT, "the limit is reached")
        eventually(lambda: len(answered(peers)) == 4, "four are refused, whichever came last")
        refused = [each.error() for each in answered(peers)]
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
            status, headers, body = peer.request(method, INFER, b"{}").reply()
            assert (status, headers["allow"], body) == (405, "POST", b'{"error":"Method Not Allowed"}')
        assert peer.request("DELETE", "/v2/logging").reply()[1]["allow"] == "GET, POST"
        status, headers, body = peer.request("POST", "/v2/models/m/versions/abc/infer", b"{}").reply()
        assert (status, body) == (404, b'{"error":"Not Found"}')
        assert "'abc'" in headers["tensorbroker-detail"]
        for path in ("/", "/v1", "//v2", "/v2/", "/v2/models/a%00b/x", "/v2/models/%2e%2e/%2e%2e/x", "/v2?x=/../"):
            expected = 200 if path.startswith("/v2?") else 404
            assert peer.request("GET", path).reply()[0] == expected
        assert peer.request("GET", "/v2/models/%00%0d%0a").reply()[0] == 404
        status, message = peer.request("GET", "/v2/models/%250d%250a").error()
        assert (status, message) == (400, "Request for unknown model: '%0d%0a' is not found")
