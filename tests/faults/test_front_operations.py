"""Rows K-03, F-05, R-20, B-14 and H-11 with unmodified tritonclient: what operators and their hosts do to it.

A broker that was killed and is back, a disk that is full, shared memory that is off, one /dev/shm that is another's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fakes.broker import alive, eventually
from tests.fakes.gateways import Gateway
from tests.fakes.zmq_gateway import HandZmqClient
from tests.faults import raw, repository
from tests.faults.front_doors import DISABLED
from tests.faults.visitor import Door, outcome

KINDS = ("http", "grpc")
MISTAKEN = "The region named 'mine' is registered as system shared memory, not CUDA shared memory"
SIZE = 4096
X = np.arange(4, dtype=np.float32)
NOT_FOUND = {"http": "404", "grpc": "NOT_FOUND"}
UNSUPPORTED = {"http": "501", "grpc": "UNIMPLEMENTED"}


@contextmanager
def serving(tmp_path: Path, *flags: str, name: str = "run", **named: Any) -> Iterator[Gateway]:
    root = tmp_path / "models"
    if not root.exists():
        repository.write(root)
    run = tmp_path / name
    run.mkdir(exist_ok=True)
    with Gateway(root, run, *flags, **named) as gateway:
        gateway.ready()
        yield gateway


@contextmanager
def doors(gateway: Gateway) -> Iterator[dict[str, Door]]:
    opened = {kind: Door(kind, gateway.ports["http"], gateway.ports["grpc"]) for kind in KINDS}
    try:
        yield opened
    finally:
        for door in opened.values():
            door.close()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with serving(tmp_path_factory.mktemp("operations")) as running:
        yield running


def back(door: Door) -> list[str]:
    """What an inference comes to; [] while the client has not noticed that its broker is back."""
    told = outcome(door.infer, "mine", 0, 16)
    return [] if told[0] in ("LOST", "UNAVAILABLE") else told


def test_k03_a_broker_that_was_killed_and_is_back(tmp_path: Path) -> None:
    """The clients stay as they are: told that the region is not there, in Triton's words, they register it again."""
    with raw.named_memory(SIZE) as key, serving(tmp_path) as first:
        memory = os.open(f"/dev/shm{key}", os.O_RDWR)
        os.pwrite(memory, X.tobytes(), 0)
        with doors(first) as clients:
            clients["http"].client.register_system_shared_memory("mine", key, SIZE)
            for door in clients.values():
                door.infer("mine", 0, 16)
            family = first.descendants()
            first.process.kill()
            first.process.wait()
            eventually(lambda: not any(map(alive, family)), "its gateway and workers have ended with it")
            for door in clients.values():
                assert outcome(door.infer, "mine", 0, 16)[0] != "OK"
            with serving(tmp_path, ports=first.ports):
                for kind, door in clients.items():
                    text = "Unable to find shared memory region: 'mine'"
                    told = eventually(partial(back, door), "it is connected again")
                    assert told == [NOT_FOUND[kind], text], kind
                    assert door.client.is_server_ready()
                clients["grpc"].client.register_system_shared_memory("mine", key, SIZE)
                for door in clients.values():
                    os.pwrite(memory, bytes(16), 16)
                    door.infer("mine", 0, 16)
                    assert os.pread(memory, 16, 16) == (X + 1).tobytes()
        os.close(memory)


def test_f05_a_disk_that_is_full(tmp_path: Path) -> None:
    with serving(tmp_path, "--log-file=/dev/full", "--log-verbose=1") as full, doors(full) as clients:
        for _ in range(20):
            for door in clients.values():
                assert (door.inline(X.reshape(1, 4)) == X + 1).all()
        assert full.get("/v2/health/ready")[0] == 200
        assert len(full.log().splitlines()) < 5, "what cannot be logged is dropped, not told on stderr line by line"


def test_r20_client_shared_memory_is_off(tmp_path: Path) -> None:
    with (
        raw.named_memory(SIZE) as key,
        serving(tmp_path, "--allow-client-shm=false") as off,
        doors(off) as clients,
        HandZmqClient(off.directory) as zmq,
    ):
        for kind, door in clients.items():
            told = outcome(door.client.register_system_shared_memory, "mine", key, SIZE)
            assert told == [UNSUPPORTED[kind], DISABLED]
            assert outcome(door.infer, "mine", 0, 16)[0] == NOT_FOUND[kind]
            assert (door.inline(X.reshape(1, 4)) == X + 1).all()
        zmq.hello()
        assert zmq.ask("register", name="mine", key=key, byte_size=SIZE)["message"] == DISABLED


@pytest.mark.parametrize("kind", KINDS)
def test_b14_a_system_region_is_no_cuda_region(gateway: Gateway, kind: str) -> None:
    with raw.named_memory(SIZE) as key, doors(gateway) as clients:
        client = clients[kind].client
        client.register_system_shared_memory("mine", key, SIZE)
        try:
            told = outcome(client.get_cuda_shared_memory_status, "mine")
            assert told == [NOT_FOUND[kind], MISTAKEN]
            client.unregister_cuda_shared_memory("mine")  # as in Triton: that is none, which is no error
            client.unregister_cuda_shared_memory()  # all there are
            clients[kind].infer("mine", 0, 16)
        finally:
            client.unregister_system_shared_memory("mine")
        assert outcome(client.get_system_shared_memory_status, "mine")[0] == NOT_FOUND[kind]


ELSEWHERE = """
import sys
import clientlib, numpy, posix_ipc
directory, http, key = sys.argv[1], sys.argv[2], sys.argv[3]
memory = posix_ipc.SharedMemory(key, posix_ipc.O_CREX, size=4096)
with clientlib.connect(f"ipc://{directory}") as client:
    try:
        client.register_system_shm("mine", key=key, byte_size=4096)
    except clientlib.InferError as error:
        print(error.message)
    x = numpy.arange(4, dtype=numpy.float32).reshape(1, 4)
    print(client.infer("add1", {"x": x})["y"].tolist())
import tritonclient.http as triton
try:
    triton.InferenceServerClient(f"127.0.0.1:{http}").register_system_shared_memory("mine", key, 4096)
except triton.InferenceServerException as error:
    print(error.message())
"""


def test_h11_another_dev_shm(gateway: Gateway) -> None:
    """A container without a shared ipc namespace: told so in words, and what needs no names works all the same."""
    alone = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces of one's own here")
    key = f"/elsewhere-{os.getpid()}"
    arguments = (str(gateway.directory), str(gateway.ports["http"]), key)
    ran = subprocess.run(
        [*alone, sys.executable, "-c", ELSEWHERE, *arguments], capture_output=True, text=True, timeout=60, check=True
    )
    native, result, triton = ran.stdout.splitlines()
    assert native.startswith(f"Unable to open shared memory region: '{key}': ENOENT")
    assert "its /dev/shm is" in native
    assert "create_region works without" in native
    assert result == "[[1.0, 2.0, 3.0, 4.0]]"
    assert triton == native
