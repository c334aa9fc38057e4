"""HTTP peers that take their time, and those who are many: closed, refused, or waited for."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import numpy as np
import pytest

from broker.gateway.http import limits as http_limits
from broker.gateway.http.limits import Patience
from broker.gateway.kserve import InferRequest, InferResponse, OutputTensor
from tests.fakes.broker import eventually
from tests.fakes.http_server import Peer, Running, running

INFER = "/v2/models/add1/infer"
RAW = "Inference-Header-Content-Length: 0"
IMPATIENT = Patience(first_byte=0.6, head=0.6, body=0.6, send=0.6, idle=0.6, discard=0.6)


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
        assert max(large_answers.call(buffered)) <= 2 * http_limits.SEND_SIZE
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


def test_a_pipeline_without_end_waits_in_the_kernel(impatient: Running) -> None:
    server = impatient
    eventually(lambda: server.connections() == 0, "those of earlier tests are gone")
    before = len(server.service.asked)
    gate = server.service.gate = server.call(asyncio.Event)
    try:
        with server.connect() as peer:
            peer.request("POST", INFER, bytes(16), RAW)
            for _ in range(2000):
                peer.request("GET", "/v2/health/live")
            eventually(lambda: len(server.service.asked) > before, "the first request runs")
            (queued,) = server.call(lambda: [len(each._queue) for each in server.server._connections])
            assert queued <= http_limits.PIPELINE
            server.call(gate.set)
            assert {peer.reply()[0] for _ in range(2001)} == {200}
    finally:
        server.service.gate = None
