"""clientlib over TLS: `grpcs://` to the broker, `https://` to a proxy before it; certificates nobody vouches for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes import models
from tests.fakes.gateways import Gateway

pytestmark = [
    pytest.mark.skipif(not shutil.which("openssl"), reason="makes its certificate with openssl"),
    pytest.mark.timeout(120),
]
USE = """
import asyncio, sys, warnings, numpy, clientlib
x = numpy.full((1, 4), 2, numpy.float32)
url = sys.argv[1]
async def main():
    client = await clientlib.connect_async(url, timeout=30)
    assert (await client.infer("add1", {"x": x}))["y"].tolist() == [[3] * 4]
    await client.close()
try:
    client = clientlib.connect(url, timeout=30)
    assert client.infer("add1", {"x": x})["y"].tolist() == [[3] * 4]
    client.close()
    asyncio.run(main())
    print("served")
except clientlib.InferError as error:
    print(error.code, error.message)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Certificate and key of "localhost"."""
    directory = tmp_path_factory.mktemp("tls")
    certificate, key = directory / "certificate.pem", directory / "key.pem"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost"
    places = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*make.split(), *places], check=True, capture_output=True)
    return certificate, key


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory, files: tuple[Path, Path]) -> Iterator[Gateway]:
    repository = models.write_samples(tmp_path_factory.mktemp("repository"))
    tls = ("--grpc-use-ssl=true", f"--grpc-server-cert={files[0]}", f"--grpc-server-key={files[1]}")
    with Gateway(repository, tmp_path_factory.mktemp("run"), *tls) as broker:
        yield broker.ready()


def use(url: str, roots: Path | None) -> str:
    """What a client in a process of its own says, which trusts `roots`, or what the system does."""
    trusted = {"GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(roots), "SSL_CERT_FILE": str(roots)} if roots else {}
    done = subprocess.run(
        [sys.executable, "-c", USE, url],
        env={**os.environ, "GRPC_VERBOSITY": "NONE", **trusted},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@contextlib.contextmanager
def proxy(files: tuple[Path, Path], port: int) -> Iterator[int]:
    """What ends TLS in front of the broker's HTTP port: the port it listens on."""
    loop = asyncio.new_event_loop()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files)

    async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                target.write(data)
                await target.drain()
        target.close()

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_connection("127.0.0.1", port)
        try:
            await asyncio.gather(pump(reader, forth), pump(back, writer))
        finally:  # at the latest when the proxy ends: what is not closed then warns whoever collects it
            for each in (writer, forth):
                each.transport.abort()

    async def end(tasks: set[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(3):  # transports close in the next turns
            await asyncio.sleep(0)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = loop.run_until_complete(asyncio.start_server(accepted, sock=listening, ssl=context))
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            loop.call_soon_threadsafe(server.close)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(30)
            loop.run_until_complete(end(asyncio.all_tasks(loop)))
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()


def test_grpcs(broker: Gateway, files: tuple[Path, Path]) -> None:
    url = f"grpcs://localhost:{broker.ports['grpc']}"
    assert use(url, files[0]) == "served"
    assert use(url, None).startswith("UNAVAILABLE")
    assert use(url.replace("grpcs", "grpc"), files[0]).startswith("UNAVAILABLE")


def test_https(broker: Gateway, files: tuple[Path, Path]) -> None:
    with proxy(files, broker.ports["http"]) as port:
        assert use(f"https://localhost:{port}", files[0]) == "served"
        refusal = use(f"https://localhost:{port}", None)
        assert refusal.startswith("UNAVAILABLE")
        assert "certificate" in refusal.lower()
