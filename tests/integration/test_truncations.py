"""A client that truncates what it registered, again and again."""

from __future__ import annotations

import os
import secrets
import signal

import posix_ipc
import pytest

from tests.fakes.broker import Broker, eventually, prepare_add1

pytestmark = pytest.mark.timeout(120)


def worker(broker: Broker) -> dict:
    (row,) = broker.status()["workers"]
    return row


def test_the_third_truncated_region_costs_the_session(broker):
    neighbour = broker.client()
    os.close(neighbour.register("r"))
    client = broker.client()
    for number in range(3):
        key = f"/tb-{secrets.token_hex(8)}"
        memory = posix_ipc.SharedMemory(key, posix_ipc.O_CREX, size=4096)
        try:
            name = f"r{number}"
            assert client.ask("RegisterSystem", name=name, key=key, byte_size=4096, offset=0)["type"] == "RegionInfo"
            assert prepare_add1(client, name)["type"] == "Prepared"
            os.ftruncate(memory.fd, 0)
            before = worker(broker)
            os.kill(before["pid"], signal.SIGBUS)  # what the next access of the worker would have come to
            eventually(lambda before=before: worker(broker)["restarts"] > before["restarts"], "it is replaced")
            if number < 2:
                eventually(lambda: client.ask("ListRegions")["regions"] == [], "it is retired")
        finally:
            os.close(memory.fd)
            posix_ipc.unlink_shared_memory(key)
    goodbye = client.receive()
    assert goodbye["type"] == "Goodbye"
    assert goodbye["reason"].startswith("3 regions of this session were truncated while a worker had them mapped")
    assert "the last one was 'r2'" in goodbye["reason"]
    assert client.receive() is None
    assert prepare_add1(neighbour, "r")["type"] == "Prepared"
