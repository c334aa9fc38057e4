"""A region that was unregistered while a request uses it goes with the request, however that ends, and not before."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from tests.fakes.broker import eventually
from tests.fakes.gateways import Gateway
from tests.fakes.lone_worker import BEAST, WAIT, Gate
from tests.faults import raw
from tests.faults.visitor import Door, outcome
from tests.integration.test_principals import CONFIG

SIZE = 4096


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    gate = Gate(tmp_path_factory.mktemp("repository") / "gate")
    (gate.directory / "config.pbtxt").write_text(CONFIG.format(gate.directory))
    yield gate
    gate.close()


@pytest.fixture(scope="module")
def gateway(gate: Gate, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with Gateway(gate.directory.parent, tmp_path_factory.mktemp("run")) as running:
        yield running.ready()


def names(door: Door) -> list[str]:
    listed = door.client.get_system_shared_memory_status()
    return [each["name"] for each in listed] if isinstance(listed, list) else list(listed.regions)


def ask(
    gateway: Gateway, kind: str, how: str, told: list[list[str]], patience_s: float
) -> threading.Thread | socket.socket:
    """Send a request that uses the region "mine". `patience_s`: its deadline, if it has one."""
    if how == "hang up":
        body = (
            b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,4],"parameters":{"shared_memory_region":"mine",'
            b'"shared_memory_byte_size":16}}],"outputs":[{"name":"y","parameters":{"shared_memory_region":"mine",'
            b'"shared_memory_byte_size":16,"shared_memory_offset":16}}]}'
        )
        head = f"POST /v2/models/gate/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        connection = socket.create_connection(("127.0.0.1", gateway.ports["http"]))
        connection.sendall(head + body)
        return connection
    door = Door(kind, gateway.ports["http"], gateway.ports["grpc"])
    given, wanted = door.tensors((1, 4), "mine", 0, 16, 16)
    limit = {"client_timeout": patience_s} if how == "deadline" else {}

    def infer() -> None:
        told.append(outcome(door.client.infer, "gate", [given], outputs=[wanted], **limit))
        door.close()

    thread = threading.Thread(target=infer)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("http", "success"),
        ("grpc", "success"),
        ("http", "error"),
        ("grpc", "error"),
        ("http", "hang up"),
        ("grpc", "deadline"),
    ],
)
def test_it_is_gone_when_its_request_has_ended(gateway: Gateway, gate: Gate, kind: str, how: str) -> None:
    told: list[list[str]] = []
    with raw.named_memory(SIZE) as key:
        memory = os.open(f"/dev/shm{key}", os.O_RDWR)
        os.pwrite(memory, np.full(4, BEAST if how == "error" else WAIT, np.float32).tobytes(), 0)
        door = Door(kind, gateway.ports["http"], gateway.ports["grpc"])
        door.client.register_system_shared_memory("mine", key, SIZE)
        asked, patience_s = ask(gateway, kind, how, told, 1.0), 1.0
        while eventually(lambda: told or not gate.nobody_entered()) and gate.nobody_entered():
            patience_s *= 4  # on a busy machine the first may have come too late
            told.clear()
            asked = ask(gateway, kind, how, told, patience_s)
        gate.entered()
        door.client.unregister_system_shared_memory("mine")
        assert names(door) == ["mine"]
        assert "Unable to find shared memory region: 'mine'" in outcome(door.infer, "mine", 0, 16, model="gate")[1]
        if isinstance(asked, socket.socket):
            asked.close()
        elif how == "deadline":
            asked.join()
            assert told[0][0] == "DEADLINE_EXCEEDED"
        assert names(door) == ["mine"], "the model still runs"
        gate.let()
        eventually(lambda: names(door) == [], "nobody uses it any more")
        if isinstance(asked, threading.Thread):
            asked.join()
            assert (told[0][0] == "OK") == (how == "success")
        if how != "error":
            assert os.pread(memory, 16, 16) == np.full(4, WAIT + 1, np.float32).tobytes(), "it lands where it was asked"
        door.client.register_system_shared_memory("mine", key, SIZE)
        door.client.unregister_system_shared_memory("mine")
        door.close()
        os.close(memory)
