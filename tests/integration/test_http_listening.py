"""The HTTP front end's listeners: addresses, who is behind them, and how they end."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from broker.gateway.http.server import HttpServer
from broker.gateway.options import GatewayOptions
from shm.errors import InferError
from tests.fakes.broker import eventually
from tests.fakes.http_server import Peer, Running, identify, running
from tests.fakes.kserve import FakeService

X = np.zeros((1, 4), np.float32)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as server:
        yield server


def test_the_unix_socket_is_its_owners(server: Running) -> None:
    path = Path(server.options.directory) / "http.sock"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert server.lines == [
        f"Started HTTPService at {server.url}",
        f"Started HTTPService at unix:{path}",
    ]


def test_a_port_that_is_taken(server: Running) -> None:
    async def start() -> None:
        options = GatewayOptions(directory="/nowhere", broker_uid=0, http_port=server.port)
        await HttpServer(FakeService(), options, identify).start()

    with pytest.raises(InferError) as caught:
        asyncio.run(start())
    assert (caught.value.code, caught.value.message) == ("UNAVAILABLE", f"Socket '{server.url}' already in use ")


def test_a_second_gateway_shares_the_port() -> None:
    with running(gateways=2) as first, running(gateways=2, index=1, http_port=first.port) as second:
        assert second.lines == [f"Started HTTPService at {first.url}"]
        for _ in range(64):
            with first.connect() as peer:
                assert peer.request("GET", "/v2/health/live").reply()[0] == 200
                if second.connections():
                    return
    pytest.fail("the kernel gave all 64 connections to one listener")


def test_callers_of_the_unix_socket_and_of_loopback_have_a_principal(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(peers=True, broker_uid=os.getuid()) as server:
        unix = socket.socket(socket.AF_UNIX)
        unix.connect(f"{server.options.directory}/http.sock")
        for peer, headers, known in (
            (Peer(unix), [], True),
            (server.connect(), [], True),
            (server.connect(), ["X-Forwarded-For: 10.0.0.1"], False),
        ):
            found: list[bool] = []
            monkeypatch.setattr(
                server.service, "check", lambda _, caller, found=found: found.append(caller.principal is not None)
            )
            with peer:
                assert peer.request("GET", "/v2", b"", *headers).reply()[0] == 200
            assert found == [known]


def test_stopping_lets_requests_end() -> None:
    with running() as server:
        gate = server.service.gate = server.call(asyncio.Event)
        with server.connect() as peer, server.connect() as idle:
            idle.request("GET", "/v2/health/live").reply()
            peer.request("POST", "/v2/models/add1/infer", X.tobytes(), "Inference-Header-Content-Length: 0")
            eventually(lambda: len(server.service.asked) == 1, "the request runs")
            stop = asyncio.run_coroutine_threadsafe(server.server.stop(30), server._loop)
            assert idle.closed()
            with pytest.raises(ConnectionError):
                socket.create_connection(("127.0.0.1", server.port), timeout=5)
            assert not stop.done()
            server.call(gate.set)
            assert peer.reply()[0] == 200
            assert peer.closed()
        stop.result(30)
        assert not (Path(server.options.directory) / "http.sock").exists()


def test_stopping_lets_bodies_arrive() -> None:
    with running() as server, server.connect() as peer:
        start = b"POST /v2/models/add1/infer HTTP/1.1\r\nHost: h\r\nInference-Header-Content-Length: 0\r\n"
        peer.send(start + b"Content-Length: 16\r\n\r\n" + bytes(8))
        eventually(
            lambda: server.call(lambda: {each._state for each in server.server._connections}) == {"body"}, "body"
        )
        stop = asyncio.run_coroutine_threadsafe(server.server.stop(30), server._loop)
        peer.send(bytes(8))
        assert peer.reply()[0] == 200
        assert peer.closed()
        peer.sock.close()
        stop.result(30)


def test_stopping_ends_what_does_not_end() -> None:
    with running() as server:
        server.service.gate = server.call(asyncio.Event)
        with server.connect() as peer:
            peer.request("POST", "/v2/models/add1/infer", X.tobytes(), "Inference-Header-Content-Length: 0")
            eventually(lambda: len(server.service.asked) == 1, "the request runs")
            server.call(lambda: server.server.stop(0.01))
            assert peer.closed()
        eventually(lambda: server.service.cancelled == 1, "its request is cancelled")


def test_the_http_library_is_the_gateways_alone() -> None:
    code = "import sys, broker.server; sys.exit('aiohttp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
