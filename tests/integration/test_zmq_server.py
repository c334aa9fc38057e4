"""The ZeroMQ front end over real sockets, on a service without a broker."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from broker.gateway import zmq_port
from broker.gateway.zmq_clients import LIMITS, watch
from shm.errors import Code, InferError
from tests.fakes.kserve import FakeService
from tests.fakes.zmq_gateway import HandZmqClient, ZmqGateway

DATA = np.arange(4, dtype=np.float32)
INLINE = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": DATA.tobytes()}
IN_REGION = {"name": "x", "datatype": "FP32", "shape": [1, 4], "region": "r", "byte_size": 16}

# Says hello, registers a region, prints a line, and stays.
VICTIM = """
import sys, msgpack, zmq
socket = zmq.Context().socket(zmq.DEALER)
socket.connect("ipc://" + sys.argv[1] + "/zmq.sock")
def ask(**message):
    socket.send(msgpack.packb(message))
    return msgpack.unpackb(socket.recv())
token = ask(type="hello", id=1, protocol=1, heartbeat_ms=60000)["token"]
ask(type="register", id=2, name="r", key="/r", byte_size=16)
print(token, flush=True)
socket.send(msgpack.packb(dict(type="infer", id=3, model="add1", inputs=[
    dict(name="x", datatype="FP32", shape=[1, 4], region="r", byte_size=16)])))
sys.stdin.read()
"""


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[ZmqGateway]:
    """Afterwards: its thread has ended and no descriptor is left."""
    before = len(os.listdir("/proc/self/fd"))
    with ZmqGateway(tmp_path) as gateway:
        yield gateway
    assert len(os.listdir("/proc/self/fd")) <= before
    assert not (tmp_path / "zmq.sock").exists()


@pytest.fixture
def client(gateway: ZmqGateway) -> Iterator[HandZmqClient]:
    with HandZmqClient(gateway.directory) as client:
        client.hello()
        yield client


def hold(gateway: ZmqGateway) -> asyncio.Event:
    """Inferences wait until this is set (on the gateway's loop)."""

    def set_gate() -> asyncio.Event:
        gateway.service.gate = asyncio.Event()
        return gateway.service.gate

    gate: asyncio.Event = gateway.call(set_gate)
    return gate


def test_the_socket_is_for_this_user_alone(gateway: ZmqGateway) -> None:
    assert gateway.lines == [f"Started ZMQService at ipc://{gateway.directory}/zmq.sock"]
    assert stat.S_IMODE((gateway.directory / "zmq.sock").stat().st_mode) == 0o600


@pytest.mark.parametrize("options", [{"index": 1}, {"zmq": False}])
def test_only_gateway_0_listens_and_only_if_asked(tmp_path: Path, options: dict[str, Any]) -> None:
    with ZmqGateway(tmp_path, **options) as gateway:
        assert gateway.lines == []
        assert os.listdir(tmp_path) == []


def test_every_verb(gateway: ZmqGateway, client: HandZmqClient) -> None:
    server = client.ask("server")
    assert (server["name"], server["live"], server["ready"]) == ("triton", True, True)
    assert [entry["name"] for entry in client.ask("models")["models"]] == ["add1", "never"]
    assert [entry["name"] for entry in client.ask("models", ready=True)["models"]] == ["add1"]
    assert client.ask("metadata", model="add1")["metadata"]["inputs"][0]["shape"] == [-1, 4]
    assert client.ask("config", model="add1")["config"]["max_batch_size"] == 8
    assert client.ask("statistics")["model_stats"][0]["inference_count"] == 4
    assert client.ask("heartbeat")["type"] == "done"
    assert client.ask("load", model="add1", config="{}", files={"1/model.onnx": b"x"})["type"] == "done"
    assert client.ask("unload", model="add1", unload_dependents=True)["type"] == "done"
    assert gateway.service.loads == [
        ("add1", {"config": "{}", "file:1/model.onnx": b"x"}),
        ("add1", {"unload_dependents": True}),
    ]
    assert client.ask("metadata", model="nix") == {
        "type": "error",
        "id": 11,
        "code": "INVALID_ARG",
        "message": "Request for unknown model: 'nix' is not found",
    }


def test_regions_of_a_session(gateway: ZmqGateway, client: HandZmqClient) -> None:
    assert client.ask("register", name="r", key="/key", byte_size=32, offset=8)["type"] == "done"
    assert client.ask("register", name="r", key="/key", byte_size=32)["code"] == "ALREADY_EXISTS"
    assert client.ask("register_cuda", name="c", handle=bytes(64), device=0, byte_size=4)["code"] == "INVALID_ARG"
    region = client.ask("regions", name="r")["regions"][0]
    assert region == {"name": "r", "kind": "system", "key": "/key", "offset": 8, "byte_size": 32}
    assert client.ask("regions", name="nix")["code"] == "NOT_FOUND"
    assert client.ask("unregister")["type"] == "done"
    assert client.ask("regions")["regions"] == []


def test_inference_inline_in_a_region_and_prepared(gateway: ZmqGateway, client: HandZmqClient) -> None:
    reply = client.ask("infer", model="add1", inputs=[INLINE])
    assert reply["outputs"][0]["shape"] == [1, 4]
    np.testing.assert_array_equal(np.frombuffer(reply["outputs"][0]["data"], np.float32), DATA + 1)
    reply = client.ask("infer", model="add1", inputs=[IN_REGION], outputs=[{"name": "y", "region": "r"}])
    assert reply["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [1, 4]}]
    number = client.ask("prepare", model="add1", inputs=[{**IN_REGION, "stride": 16}], input_slots=3)["number"]
    assert client.ask("run", number=number, input_slot=2, timeout_us=9)["type"] == "result"
    asked = gateway.service.asked[-1]
    assert (asked.inputs[0].offset, asked.timeout_us) == (32, 9)
    principal = gateway.service.callers[-1].principal
    assert principal is not None
    assert (principal.uid, principal.scope[:4]) == (os.getuid(), "zmq:")
    assert client.ask("run", number=number, input_slot=3)["code"] == "INVALID_ARG"
    assert client.ask("release", number=number)["type"] == "done"
    assert client.ask("run", number=number)["code"] == "NOT_FOUND"
    assert client.ask("prepare", model="nix", inputs=[])["code"] == "INVALID_ARG"


def test_who_said_no_hello_is_told_so(gateway: ZmqGateway) -> None:
    with HandZmqClient(gateway.directory) as client:
        for _ in range(5):
            reply = client.ask("models")
            assert (reply["type"], reply["code"], reply["hello"]) == ("error", "UNAVAILABLE", True)
            assert "say hello first" in reply["message"]
        client.hello()
        assert client.ask("models")["type"] == "index"
        assert client.ask("hello", protocol=1)["code"] == "INVALID_ARG"
        assert client.ask("goodbye")["type"] == "done"
        assert client.ask("models")["hello"] is True
        assert client.ask("hello", protocol=7)["code"] == "UNSUPPORTED"


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
        other.socket.send(bytes((1 << 20) + 1))
        gateway.eventually(lambda: len(gateway.server._port._connections) == 1, "it was disconnected")
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
    for _ in range(8):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(str(gateway.directory / "zmq.sock"))
        idle.append(sock)
    gateway.eventually(lambda: port._hidden, "it does not accept any more")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as late, pytest.raises(FileNotFoundError):
        late.connect(str(gateway.directory / "zmq.sock"))
    assert client.ask("heartbeat")["type"] == "done"
    for sock in idle:
        sock.close()
    gateway.eventually(lambda: not port._hidden, "it accepts again")
    with HandZmqClient(gateway.directory) as other:
        other.hello()


def test_cancel_ends_a_request_with_its_own_reply(gateway: ZmqGateway, client: HandZmqClient) -> None:
    hold(gateway)
    running = client.send("infer", model="add1", inputs=[INLINE])
    gateway.eventually(lambda: gateway.service.asked, "it runs")
    replies = {client.send("cancel", target=running): "done", running: "error"}
    for _ in range(2):
        reply = client.receive()
        assert reply["type"] == replies.pop(reply["id"])
        assert reply.get("code", "CANCELLED") == "CANCELLED"
    assert client.ask("cancel", target=12345)["type"] == "done"
    # One that had no time to begin.
    client.socket.send(msgpack.packb({"type": "infer", "id": 50, "model": "add1", "inputs": [INLINE]}))
    client.socket.send(msgpack.packb({"type": "cancel", "id": 51, "target": 50}))
    assert {(reply := client.receive())["id"]: reply.get("code") for _ in range(2)} == {50: "CANCELLED", 51: None}


def test_requests_in_flight_are_bounded(gateway: ZmqGateway, client: HandZmqClient) -> None:
    gate = hold(gateway)
    for _ in range(LIMITS.requests):
        client.send("infer", model="add1", inputs=[INLINE])
    reply = client.ask("infer", model="add1", inputs=[INLINE])
    assert (reply["code"], "1024 requests" in reply["message"]) == ("UNAVAILABLE", True)
    gateway.call(gate.set)
    assert sorted(client.receive()["id"] for _ in range(LIMITS.requests)) == list(range(2, LIMITS.requests + 2))


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
    assert gateway.call(lambda: gateway.server._clients.known) == {}
    with HandZmqClient(gateway.directory) as heir:
        assert heir.hello(token=token)["resumed"] is False


def test_missed_heartbeats_end_a_session(gateway: ZmqGateway, client: HandZmqClient) -> None:
    with HandZmqClient(gateway.directory) as silent:
        silent.hello(heartbeat_ms=100)
        silent.ask("register", name="r", key="/r", byte_size=16)
        gateway.eventually(lambda: not gateway.service.held, "its regions are gone")
        assert silent.ask("heartbeat")["hello"] is True
    assert client.ask("heartbeat")["type"] == "done"


def test_a_session_outlives_its_gateway(tmp_path: Path) -> None:
    service = FakeService()
    with HandZmqClient(tmp_path) as client:
        with ZmqGateway(tmp_path, service):
            token = client.hello()["token"]
            client.ask("register", name="r", key="/r", byte_size=16)
        with ZmqGateway(tmp_path, service):
            while client.ask("heartbeat").get("hello") is not True:
                pass
            reply = client.hello(token=token)
            assert (reply["token"], reply["resumed"]) == (token, True)
            assert [region["name"] for region in client.ask("regions")["regions"]] == ["r"]


def test_a_client_that_dies_while_there_is_no_gateway(tmp_path: Path) -> None:
    service = FakeService()
    with ZmqGateway(tmp_path, service) as gateway:
        hold(gateway)
        command = [sys.executable, "-c", VICTIM, str(tmp_path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as victim:
            assert victim.stdout is not None
            victim.stdout.readline()
            with HandZmqClient(tmp_path) as survivor:
                token = survivor.hello()["token"]
                gateway.stop()
                assert stat.S_IMODE((tmp_path / "zmq.sessions").stat().st_mode) == 0o600
                victim.kill()
                victim.wait()
                with ZmqGateway(tmp_path, service) as second:
                    second.eventually(lambda: not service.held, "the dead client's regions are gone")
                    assert [client.token for client in second.call(second.server._clients.sessions)] == [token]
                    while survivor.ask("heartbeat").get("hello") is not True:
                        pass
                    assert survivor.hello(token=token)["resumed"] is True
                    survivor.ask("goodbye")
    assert not (tmp_path / "zmq.sessions").exists()


@pytest.mark.parametrize("content", [b"", b"{", b'[{"token": "x"}]', b"\xff"])
def test_a_list_of_sessions_that_cannot_be_read(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "zmq.sessions").write_bytes(content)
    with ZmqGateway(tmp_path), HandZmqClient(tmp_path) as client:
        client.hello()
        client.ask("goodbye")


def test_stopping_lets_requests_end_and_refuses_new_ones(tmp_path: Path) -> None:
    with ZmqGateway(tmp_path) as gateway, HandZmqClient(tmp_path) as client:
        client.hello()
        gate = hold(gateway)
        running = client.send("infer", model="add1", inputs=[INLINE])
        gateway.eventually(lambda: gateway.service.asked, "it runs")
        gateway.call(lambda: setattr(gateway.service, "exiting", True))
        stopping = threading.Thread(target=gateway.stop, args=(20.0,))
        stopping.start()
        reply = client.ask("infer", model="add1", inputs=[INLINE])
        assert (reply["code"], reply["message"]) == ("UNAVAILABLE", "Server exiting")
        assert client.ask("heartbeat")["type"] == "done"
        gateway.call(gate.set)
        reply = client.receive()
        assert (reply["type"], reply["id"]) == ("result", running)
        stopping.join()


def test_an_error_of_ours_is_an_answer_too(
    gateway: ZmqGateway, client: HandZmqClient, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.service.fails = InferError(Code.INTERNAL, "as the service says")
    assert client.ask("config", model="add1")["message"] == "as the service says"

    async def broken(model: str, version: str) -> Any:
        raise RuntimeError("/a/secret/path")

    gateway.service.config = broken  # type: ignore[method-assign]
    reply = client.ask("config", model="add1")
    assert (reply["code"], "secret" in reply["message"]) == ("INTERNAL", False)
    assert "/a/secret/path" in caplog.text


def test_a_socket_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "zmq.sock").mkdir()
    with pytest.raises(OSError, match=r"zmq\.sock|directory"), ZmqGateway(tmp_path):
        pass


def test_the_run_directory_may_lie_deep(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    with ZmqGateway(deep):
        fd = os.open(deep, os.O_PATH)
        try:
            with HandZmqClient(Path(f"/proc/self/fd/{fd}")) as client:
                client.hello()
        finally:
            os.close(fd)


def test_a_process_that_must_not_be_dumped_is_watched_all_the_same() -> None:
    code = "import ctypes, sys; ctypes.CDLL(None).prctl(4, 0); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.close(watch(process.pid, os.getuid()))


def test_limits_that_the_hello_tells_are_those_of_the_socket() -> None:
    assert LIMITS.message_bytes == zmq_port.MAX_MESSAGE == 1 << 20
