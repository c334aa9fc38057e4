"""W-13: nobody reads the log, or a model fills it. Lines are lost, and nothing else."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.broker import eventually
from tests.fakes.gateways import Gateway
from tests.faults import front_doors, repository

CLIENTS = 40


def pipe() -> tuple[int, int]:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    return reader, writer


def stream() -> tuple[int, int]:
    """What a service of systemd has."""
    reader, writer = socket.socketpair()
    writer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return reader.detach(), writer.detach()


def fill(writer: int) -> None:
    os.set_blocking(writer, False)
    for size in (4096, 1):
        try:
            while True:
                os.write(writer, b"\n" * size)
        except BlockingIOError:
            pass
    os.set_blocking(writer, True)


@pytest.fixture(params=[pipe, stream])
def deaf(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """Both ends of a stderr that is full."""
    reader, writer = request.param()
    fill(writer)
    yield reader, writer
    os.close(reader)
    os.close(writer)


def test_w13_nobody_reads_the_log(tmp_path: Path, deaf: tuple[int, int]) -> None:
    """[W-13] broker and gateways go on as if there were no log, and have one again as soon as it is read."""
    reader, writer = deaf
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    root = repository.write(tmp_path / "models")
    with Gateway(root, directory, "--log-verbose=1", before=lambda: os.dup2(writer, 2)) as broker:
        broker.ready()
        for _ in range(CLIENTS):  # each leaves lines
            broker.client().close()
            status, _ = broker.post("/v2/models/add1/infer", front_doors.infer_document())
            assert status == 200
        assert os.get_blocking(writer), "others write to the same stderr: how is not ours to change"
        os.set_blocking(reader, False)
        told = b""

        def read() -> bool:
            nonlocal told
            broker.client().close()
            try:
                told += os.read(reader, 1 << 16)
            except BlockingIOError:
                return False
            return b"lines of the log were dropped" in told and b"hung up" in told

        eventually(read, "a log again, which says what it lacks")
        family = broker.descendants()
    assert broker.process.returncode == 0
    assert family
