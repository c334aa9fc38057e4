"""Clients that leave, die, fork or crowd: nothing of them stays, and nobody else notices."""

from __future__ import annotations

import os
import resource
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import clientlib
from clientlib.session import Call
from shm import messages
from shm.errors import InferError
from tests.fakes.broker import (
    Broker,
    HandClient,
    alive,
    eventually,
    pool,
    prepare_add1,
    steady,
    tensor,
)
from tests.fakes.processes import children

pytestmark = pytest.mark.timeout(180)


HOLDER = """
import os, socket, sys, time
sys.path.insert(0, {root!r})
from tests.fakes.broker import HandClient
client = HandClient({path!r})
client.ask("Hello", protocol=1)
for number in range(20):
    client.register(f"r{{number}}")
client.ask("OpenChannel", worker="cpu/default", slots=64)
if {fork}:
    if os.fork():
        print("holding", flush=True)
        time.sleep(60)
    time.sleep(60)
print("holding", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("fork", [False, True])
def test_a_killed_client_leaves_nothing_even_when_a_child_holds_its_socket(broker, fork):
    root = str(Path(__file__).parent.parent.parent)
    script = HOLDER.format(root=root, path=broker.path, fork=fork)
    before = steady(broker.descriptors)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"holding\n"
        forked = children(holder.pid)
        assert len(forked) == fork
        assert broker.descriptors() >= before + 20 + 4
        holder.kill()
        holder.wait()
        eventually(lambda: broker.descriptors() <= before, "the session's descriptors are closed")
        assert all(alive(pid) for pid in forked)
        for pid in forked:
            os.kill(pid, signal.SIGKILL)


def test_clients_that_come_and_go_leave_nothing(broker):
    before = steady(broker.descriptors)
    for turn in range(100):
        client = broker.connect()
        client.send("Hello", protocol=1)
        fd = pool(4096)
        client.send("RegisterPool", [fd], name="r", byte_size=4096)
        os.close(fd)
        inputs, outputs = [tensor("x", "r", (1, 4))], [tensor("y", "r", (1, 4), offset=64)]
        client.send("Prepare", model="add1", inputs=inputs, outputs=outputs)
        client.send("OpenChannel", worker="cpu/default", slots=4)
        for _ in range(turn % 5):
            client.receive()
        client.close()
    eventually(lambda: broker.descriptors() <= before)


def test_what_came_too_late_for_its_client_is_given_back(broker):
    with clientlib.connect(broker.directory) as client:
        for number in range(20):
            fd = pool(4096)
            late = Call(messages.RegisterPool(name=f"late{number}", byte_size=4096), (fd,))
            with pytest.raises(InferError, match="no answer to RegisterPool"):
                client.native.link.session.call(late, 0.0)
            os.close(fd)
        with pytest.raises(InferError, match="no answer to OpenChannel"):
            client.native.link.session.call(Call(messages.OpenChannel(worker="cpu/default", slots=4), expects=3), 0.0)

        def holds() -> list[tuple[int, int]]:
            client.models()  # whoever asks for something gives back what has come too late
            sessions = broker.status()["sessions"]
            return [(session["regions"], session["channels"]) for session in sessions if session["pid"] == os.getpid()]

        eventually(lambda: set(holds()) == {(0, 0)})


def test_a_worker_killed_between_register_and_prepare_is_not_noticed(broker):
    client = broker.client()
    os.close(client.register("r"))
    plan = prepare_add1(client)
    (worker,) = broker.status()["workers"]
    os.kill(worker["pid"], signal.SIGKILL)
    assert prepare_add1(client)["generation"] == plan["generation"]
    assert client.ask("OpenChannel", worker="cpu/default", slots=64)["type"] == "ChannelInfo"
    assert client.ask("Unregister")["type"] == "Done"

    def replaced() -> bool:
        (now,) = broker.status()["workers"]
        return now["pid"] not in (None, worker["pid"]) and now["restarts"] == worker["restarts"] + 1

    eventually(replaced, "its worker is replaced, once")


def test_idle_connections_up_to_the_limit_and_beyond(repository, tmp_path):
    def few_descriptors():
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

    with Broker(repository, tmp_path / "run", before=few_descriptors) as broker:
        first = broker.ready().client()
        crowd = [broker.connect() for _ in range(100)]
        told: dict[HandClient, str] = {}

        def refused() -> int:
            for client in crowd:
                if client not in told and select.select([client.socket], [], [], 0)[0]:
                    told[client] = (client.receive() or {}).get("reason", "")
            return sum("too many sessions" in reason for reason in told.values())

        eventually(lambda: refused() > 50, "most are refused")
        assert first.ask("ListRegions")["type"] == "Regions"
        for client in crowd:
            client.close()
        eventually(lambda: _welcome(broker), "it recovers")
        assert broker.log().count("a connection was refused") < 30


def _welcome(broker):
    client = HandClient(broker.path)
    try:
        reply = client.ask("Hello", protocol=1) if client else None
    except (AssertionError, OSError):
        return False
    finally:
        client.close()
    return reply["type"] == "Welcome"
