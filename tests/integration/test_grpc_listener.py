"""The gRPC front end as a listener: addresses, start and stop, TLS, compression, grpc's own options."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import shutil
import socket
import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio

from broker.gateway.grpc.limits import Budget, server_options
from broker.gateway.options import GatewayOptions
from shm.errors import InferError
from tests.fakes.broker import eventually
from tests.fakes.grpc_front import Front, front
from tests.fakes.kserve import FakeService
from tests.fakes.processes import in_loop
from tests.integration.test_grpc import error_of, tensor
from tests.integration.test_grpc_hostile import INFER, request, status_of


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with front(tmp_path_factory.mktemp("run")) as server:
        yield server


def test_addresses(server: Front) -> None:
    assert server.lines == [
        f"Started GRPCInferenceService at 127.0.0.1:{server.port}",
        f"Started GRPCInferenceService at {server.unix}",
    ]
    assert stat.S_IMODE(Path(server.unix.removeprefix("unix:")).stat().st_mode) == 0o600
    server.peers.clear()
    for url in (server.url, server.unix):
        with triton.InferenceServerClient(url) as client:
            assert client.is_server_live()
    assert sorted(re.sub(r"\d+$", "*", peer) for peer in server.peers) == ["ipv4:127.0.0.1:*", "unix:"]


@pytest.mark.parametrize(("level", "compressed"), [("none", False), ("low", True), ("high", True)])
def test_compressed_responses(tmp_path: Path, level: str, compressed: bool) -> None:
    sent = 0

    async def counting(server: Front) -> None:
        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal sent
            with contextlib.closing(writer):
                while data := await reader.read(1 << 16):
                    sent += len(data)
                    writer.write(data)

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", server.port)
            await asyncio.gather(_copy(reader, up_writer), relay(up_reader, writer), return_exceptions=True)

        async with await asyncio.start_server(accept, "127.0.0.1", 0) as listener:
            port = listener.sockets[0].getsockname()[1]
            async with triton_aio.InferenceServerClient(f"127.0.0.1:{port}") as client:
                given = tensor(np.zeros((10_000, 4), np.float32), triton_aio)
                result = await client.infer("add1", [given], compression_algorithm="gzip")
                assert (result.as_numpy("y") == 1).all()

    with front(tmp_path, grpc_compression=level) as server:
        in_loop(counting)(server)
    assert (sent < 20_000) == compressed
    assert sent > 160_000 or compressed


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.closing(writer):
        while data := await reader.read(1 << 16):
            writer.write(data)


def test_stopping_lets_requests_finish(tmp_path: Path) -> None:
    with front(tmp_path) as server, triton.InferenceServerClient(server.url) as client:
        server.hold()
        ended: list[Any] = []
        done = threading.Event()

        def callback(result: Any, error: Any) -> None:
            ended.append((result, error))
            done.set()

        client.async_infer("add1", [tensor()], callback)
        server.wait(lambda: len(server.service.asked) == 1)

        async def stop() -> None:
            stopping = asyncio.create_task(server.server.stop(30))
            await asyncio.sleep(0)
            assert server.service.gate is not None
            server.service.gate.set()
            await stopping

        server.call(stop())
        assert done.wait(30)
        assert ended[0][1] is None
        assert not Path(server.unix.removeprefix("unix:")).exists()
        assert error_of(client.is_server_live)[0] == "UNAVAILABLE"


def test_a_port_in_use(tmp_path: Path, server: Front, capfd: pytest.CaptureFixture[str]) -> None:
    second = Front(tmp_path, FakeService(), grpc_port=server.port)
    try:
        with pytest.raises(InferError) as caught:
            second.start()
    finally:
        second.stop()
    assert (caught.value.code, caught.value.message) == (
        "UNAVAILABLE",
        f"Socket '127.0.0.1:{server.port}' already in use ",
    )


def test_gateways_share_a_port(tmp_path: Path) -> None:
    with front(tmp_path, gateways=2) as first, front(tmp_path, gateways=2, index=1, grpc_port=first.port) as second:
        assert len(first.lines) == 2
        assert second.lines == [f"Started GRPCInferenceService at 127.0.0.1:{first.port}"]
    with front(tmp_path, grpc_port=0) as off:
        assert off.lines == []


def test_paths_of_the_unix_socket(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    odd = tmp_path / "a%20 b"
    odd.mkdir()
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as stale:
        stale.bind(str(odd / "grpc.sock"))  # as a gateway that was killed leaves it
    with front(odd) as server, triton.InferenceServerClient(f"unix:{quote(str(odd))}/grpc.sock") as client:
        assert server.lines[1] == f"Started GRPCInferenceService at unix:{odd}/grpc.sock"
        assert client.is_server_live()
    (odd / "grpc.sock").write_text("mine")
    refused = Front(odd, FakeService())
    try:
        with pytest.raises(InferError, match="cannot listen at 'unix:"):
            refused.start()
    finally:
        refused.stop()
    assert (odd / "grpc.sock").read_text() == "mine"
    eventually(lambda: is_free(refused.port), "the port that it had is free")  # grpc closes it in a thread of its own


def is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def test_requests_are_not_logged(server: Front, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), triton.InferenceServerClient(server.url) as client:
        assert client.is_server_live()
        client.infer("add1", [tensor()])
    assert not [each for each in caplog.records if each.name.startswith(("grpc", "broker"))]


@pytest.mark.skipif(not shutil.which("openssl"), reason="makes its certificate with openssl")
def test_tls(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost"
    files_out = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*make.split(), *files_out], check=True, capture_output=True)
    files = (str(certificate), str(key), str(certificate))
    pem, secret = certificate.read_bytes(), key.read_bytes()
    with front(tmp_path, grpc_ssl=files) as server:
        target = f"localhost:{server.port}"
        with grpc.secure_channel(target, grpc.ssl_channel_credentials(pem, secret, pem)) as client:
            assert client.unary_unary(INFER)(request(), timeout=30)
        for credentials in (grpc.ssl_channel_credentials(pem), None):  # without the client's certificate; in clear
            client = grpc.secure_channel(target, credentials) if credentials else grpc.insecure_channel(target)
            with client:
                assert status_of(client.unary_unary(INFER), request())[0] == "UNAVAILABLE"


def test_options_of_the_flags() -> None:
    options = GatewayOptions(
        directory="", broker_uid=0, grpc_compression="medium", grpc_channel_options=(("grpc.keepalive_time_ms", 7000),)
    )
    given = dict(server_options(options, Budget(2**40)))
    assert given["grpc.keepalive_time_ms"] == 7000
    assert given["grpc.default_compression_level"] == 2
    assert given["grpc.so_reuseport"] == 0
    assert given["grpc.max_send_message_length"] == 2**31 - 1
    assert given["grpc.max_receive_message_length"] == 256 << 20
    small = dict(server_options(GatewayOptions(directory="", broker_uid=0, gateways=2), Budget(1000)))
    assert small["grpc.max_receive_message_length"] == 333
    assert small["grpc.so_reuseport"] == 1
