"""The ZeroMQ front end and clients that break rules, die, or do not read."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgpack
import pytest
import zmq

from tests.fakes.zmq_gateway import INLINE, VICTIM, HandZmqClient, ZmqGateway, client, gateway, hold  # noqa: F401


def test_garbage_is_answered_three_times_and_then_ignored(gateway: ZmqGateway, client: HandZmqClient) -> None:
    for _ in range(2):
        client.socket.send(b"\xc1")
        assert client.receive()["id"] == 0
    assert client.ask("heartbeat")["type"] == "done"  # a good one starts the count anew
    client.ask("register", name="r", key="/r", byte_size=16)
    for garbage in (b"", b"\x80\x04]\x94.", os.urandom(4096)):
        client.socket.send(garbage)
        assert client.receive() | {"message": ""} == {"type": "error", "id": 0, "code": "INVALID_ARG", "message": ""}
    gateway.eventually(lambda: not gateway.service.held, "its regions are gone")
    client.send("heartbeat")
    assert client.silent()
    assert gateway.call(lambda: gateway.server.refused) == 5


def test_wrong_fields_are_answered_by_the_requests_id_as_often_as_they_come(client: HandZmqClient) -> None:
    for _ in range(10):
        reply = client.ask("register", name="r", key="/r", byte_size=-1)
        assert reply["code"] == "INVALID_ARG"
        assert "$.byte_size" in reply["message"]


def test_more_than_one_frame_is_no_message(gateway: ZmqGateway, client: HandZmqClient) -> None:
    client.socket.send_multipart([b"", msgpack.packb({"type": "heartbeat", "id": 1})])  # as REQ sockets do
    reply = client.receive()
    assert (reply["id"], "one frame" in reply["message"]) == (0, True)


def test_an_identity_of_ones_own_is_refused(gateway: ZmqGateway) -> None:
    with HandZmqClient(gateway.directory, ROUTING_ID=b"victim") as client:
        reply = client.ask("hello", protocol=1)
        assert (reply["code"], "ZMQ_ROUTING_ID" in reply["message"]) == ("INVALID_ARG", True)
        assert client.ask("models")["hello"] is True


def test_a_copied_identity_gets_nobody_elses_replies(gateway: ZmqGateway, client: HandZmqClient) -> None:
    routing = gateway.call(lambda: next(iter(gateway.server._clients.known)))
    with HandZmqClient(gateway.directory, ROUTING_ID=routing) as thief:
        thief.send("hello", protocol=1)
        assert thief.silent()
        assert client.ask("heartbeat")["type"] == "done"
        assert thief.silent()


def test_a_message_that_is_too_large_costs_the_connection_not_the_session(
    gateway: ZmqGateway, client: HandZmqClient
) -> None:
    with HandZmqClient(gateway.directory) as other:
        token = other.hello()["token"]
        other.ask("register", name="r", key="/r", byte_size=16)
        lost = other.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)  # which it may be for a moment only
        other.socket.send(bytes((1 << 20) + 1))
        assert lost.poll(20_000), "it was disconnected"
        other.socket.disable_monitor()
        lost.close()
        assert client.ask("heartbeat")["type"] == "done"
        gateway.eventually(lambda: len(gateway.server._port._connections) == 2, "libzmq connected again")
        reply = other.hello(token=token)
        assert (reply["token"], reply["resumed"]) == (token, True)
        assert list(gateway.call(lambda: dict(gateway.service.held))) == ["r"]


def test_hostile_bytes_on_the_socket(gateway: ZmqGateway, client: HandZmqClient) -> None:
    greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL" + bytes(16) + b"\0" + bytes(31)
    ready = b"\x04\x26\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
    claims_8_gib = b"\x02" + (8 << 30).to_bytes(8, "big")
    pickle_bomb = b"\x80\x04\x95\x1d\0\0\0\0\0\0\0\x8c\x05posix\x94\x8c\x06system\x94\x93\x94."
    for attack in (
        b"",
        os.urandom(4096),
        pickle_bomb,
        greeting,
        greeting + ready + claims_8_gib,
        b"GET / HTTP/1.1\r\n\r\n",
    ):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(str(gateway.directory / "zmq.sock"))
            sock.sendall(attack)
            assert client.ask("heartbeat")["type"] == "done"
    gateway.eventually(lambda: len(gateway.server._port._connections) == 1, "only the client is connected")


def test_no_more_connections_than_descriptors_allow(
    gateway: ZmqGateway, client: HandZmqClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = gateway.server._port
    assert port is not None
    gateway.call(lambda: setattr(port, "_limit", 8))
    idle = []
    for _ in range(8):  # with the client one more than it takes: the last may come too late to connect
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        idle.append(sock)
        with contextlib.suppress(FileNotFoundError) if len(idle) == 8 else contextlib.nullcontext():
            sock.connect(str(gateway.directory / "zmq.sock"))
    gateway.eventually(lambda: port._hidden, "it does not accept any more")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as late, pytest.raises(FileNotFoundError):
        late.connect(str(gateway.directory / "zmq.sock"))
    assert client.ask("heartbeat")["type"] == "done"
    for sock in idle:
        sock.close()
    gateway.eventually(lambda: not port._hidden, "it accepts again")
    with HandZmqClient(gateway.directory) as other:
        other.hello()


def test_a_client_that_never_reads_is_dropped(gateway: ZmqGateway, client: HandZmqClient) -> None:
    with HandZmqClient(gateway.directory, RCVHWM=1, SNDHWM=0) as greedy:
        greedy.hello()
        greedy.ask("register", name="r", key="/r", byte_size=16)
        many = {**INLINE, "shape": [50_000, 4], "data": bytes(800_000)}
        for _ in range(400):
            greedy.send("infer", model="add1", inputs=[many])
            assert client.ask("heartbeat")["type"] == "done"
            if gateway.call(lambda: gateway.server.dropped):
                break
        gateway.eventually(lambda: gateway.server.dropped == 1, "it was dropped")
        gateway.eventually(lambda: not gateway.service.held, "its regions are gone")
    assert client.ask("heartbeat")["type"] == "done"


def test_a_client_that_is_killed(gateway: ZmqGateway) -> None:
    hold(gateway)
    command = [sys.executable, "-c", VICTIM, str(gateway.directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as victim:
        assert victim.stdout is not None
        token = victim.stdout.readline().decode().strip()
        gateway.eventually(lambda: gateway.service.asked, "its request runs")
        with HandZmqClient(gateway.directory) as thief:
            reply = thief.ask("hello", protocol=1, token=token)
            assert (reply["code"], "another process's" in reply["message"]) == ("ALREADY_EXISTS", True)
        victim.send_signal(signal.SIGKILL)
    gateway.eventually(lambda: not gateway.service.held, "its regions are gone")
    gateway.eventually(lambda: gateway.service.cancelled == 1, "its request was cancelled")
    gateway.eventually(lambda: gateway.server._clients.known == {}, "it is known no more")
    with HandZmqClient(gateway.directory) as heir:
        assert heir.hello(token=token)["resumed"] is False


def test_missed_heartbeats_end_a_session(gateway: ZmqGateway, client: HandZmqClient) -> None:
    with HandZmqClient(gateway.directory) as silent:
        silent.hello(heartbeat_ms=100)
        silent.ask("register", name="r", key="/r", byte_size=16)
        gateway.eventually(lambda: not gateway.service.held, "its regions are gone")
        assert silent.ask("heartbeat")["hello"] is True
    assert client.ask("heartbeat")["type"] == "done"


@pytest.mark.parametrize("content", [b"", b"{", b'[{"token": "x"}]', b"\xff"])
def test_a_list_of_sessions_that_cannot_be_read(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "zmq.sessions").write_bytes(content)
    with ZmqGateway(tmp_path), HandZmqClient(tmp_path) as client:
        client.hello()
        client.ask("goodbye")
