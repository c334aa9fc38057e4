"""HTTP peers that take their time, and those who are many: closed, refused, or waited for."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import numpy as np
import pytest

from broker.gateway.http import limits
from broker.gateway.kserve import InferRequest, InferResponse, OutputTensor
from tests.fakes.broker import eventually
from tests.fakes.http_server import Running, running

INFER = "/v2/models/add1/infer"
RAW = "Inference-Header-Content-Length: 0"
SOON, LATE = 25.0, 70.0  # seconds: within everybody's patience, and beyond


@pytest.fixture
def server() -> Iterator[Running]:
    with running() as server:
        yield server


@pytest.mark.parametrize(
    ("start", "state"),
    [
        (b"", "new"),
        (b"POST /v2/models/add1/inf", "head"),
        (b"POST /v2/models/add1/infer HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\n{", "body"),
        (
            b"POST /v2/models/add1/infer HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
            "body",
        ),
    ],
    ids=["connect", "head", "body", "chunks"],
)
def test_those_who_dribble_are_closed(server: Running, start: bytes, state: str) -> None:
    with server.connect() as peer:
        peer.send(start)
        eventually(lambda: server.states() == {state}, state)
        for turn in range(3):
            server.advance(SOON)
            assert server.connections() == (turn < 2)
            if start and turn < 2:
                peer.send(b"1\r\n{\r\n" if b"chunked" in start else b"a")
        assert peer.closed()


def test_those_who_idle_are_closed_later(server: Running) -> None:
    with server.connect() as peer:
        assert peer.request("GET", "/v2/health/live").reply()[0] == 200
        eventually(lambda: server.states() == {"idle"}, "idle")
        server.advance(SOON)
        assert peer.request("GET", "/v2/health/live").reply()[0] == 200
        eventually(lambda: server.states() == {"idle"}, "idle")
        # As long as the peer's kernel has not acknowledged the reply it may be on its way.
        eventually(lambda: server.advance(LATE) or server.connections() == 0, "the connection is gone")
        assert peer.closed()


def test_a_body_that_makes_progress_may_take_long(server: Running) -> None:
    body = np.zeros(64 << 10, np.float32).tobytes()
    with server.connect() as peer:
        peer.send(f"POST {INFER} HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n{RAW}\r\n\r\n".encode())

        def came() -> list[int]:
            return [each._current.total_bytes for each in server.server._connections if each._current is not None]

        for end in range(32 << 10, len(body), 32 << 10):
            peer.send(body[end - (32 << 10) : end])
            eventually(lambda: server.call(came) == [end], "it has come")  # noqa: B023
            server.advance(SOON)
            assert server.states() == {"body"}
        peer.send(body[end:])
        assert peer.reply()[0] == 200


LARGE = 12 << 20  # more than the kernel buffers
NARROW = 16 << 10


@pytest.fixture
def large_answers(server: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    async def infer(request: InferRequest, _: object) -> InferResponse:
        return InferResponse("add1", "1", "", [OutputTensor("y", "UINT8", (LARGE,), bytes(LARGE))])

    monkeypatch.setattr(server.service, "infer", infer)
    return server


def test_those_who_never_read_are_cut(large_answers: Running) -> None:
    with large_answers.connect(NARROW) as peer:
        peer.request("POST", INFER, bytes(16), RAW)

        def buffered() -> list[int]:
            return [each.transport.get_write_buffer_size() for each in large_answers.server._connections]

        eventually(lambda: any(large_answers.call(buffered)), "the answer waits for the peer")
        assert max(large_answers.call(buffered)) <= 2 * limits.SEND_SIZE
        # As long as the peer's kernel takes something there is more time.
        eventually(lambda: large_answers.advance(LATE) or large_answers.connections() == 0, "the connection is cut")


def test_those_who_read_slowly_get_everything(large_answers: Running) -> None:
    def taken() -> int:
        (count,) = large_answers.call(lambda: [each._taken() for each in large_answers.server._connections])
        return count

    with large_answers.connect(NARROW) as peer:
        peer.request("POST", INFER, bytes(16), RAW)
        for _ in range(8):
            eventually(lambda: large_answers.states() == {"sending"}, "the answer waits for the peer")
            before = taken()
            peer._buffer += peer.sock.recv(64 << 10)
            eventually(lambda: taken() > before, "the peer's kernel takes more")  # noqa: B023
            large_answers.advance(SOON)
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
    with running(max_connections=8) as server:
        peers = [server.connect() for _ in range(8)]
        try:
            eventually(lambda: server.connections() == 8, "all are accepted")
            server.advance(LATE)
            eventually(lambda: server.connections() == 0, "those that say nothing are closed")
            with server.connect() as peer:
                assert peer.request("GET", "/v2/health/live").reply()[0] == 200
        finally:
            for peer in peers:
                peer.sock.close()


def test_a_pipeline_without_end_waits_in_the_kernel(server: Running) -> None:
    gate = server.service.gate = server.call(asyncio.Event)
    with server.connect() as peer:
        peer.request("POST", INFER, bytes(16), RAW)
        for _ in range(2000):
            peer.request("GET", "/v2/health/live")
        eventually(lambda: len(server.service.asked) == 1, "the first request runs")
        (queued,) = server.call(lambda: [len(each._queue) for each in server.server._connections])
        assert queued <= limits.PIPELINE
        server.call(gate.set)
        assert {peer.reply()[0] for _ in range(2001)} == {200}
