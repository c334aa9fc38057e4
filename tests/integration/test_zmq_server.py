"""The ZeroMQ front end over real sockets, on a service without a broker."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from broker.gateway.zmq import port
from broker.gateway.zmq.clients import LIMITS, watch
from shm.errors import Code, InferError
from tests.fakes.kserve import FakeService
from tests.fakes.zmq_gateway import DATA, INLINE, VICTIM, HandZmqClient, ZmqGateway, client, gateway, hold  # noqa: F401

IN_REGION = {"name": "x", "datatype": "FP32", "shape": [1, 4], "region": "r", "byte_size": 16}


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


def test_a_session_outlives_its_gateway(tmp_path: Path) -> None:
    service = FakeService()
    with HandZmqClient(tmp_path) as client:
        with ZmqGateway(tmp_path, service):
            token = client.hello()["token"]
            client.ask("register", name="r", key="/r", byte_size=16)
        with ZmqGateway(tmp_path, service):
            client.told_to_say_hello()
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
                    second.eventually(
                        lambda: [client.token for client in second.server._clients.sessions()] == [token],
                        "only the other one's session is left",
                    )
                    survivor.told_to_say_hello()
                    assert survivor.hello(token=token)["resumed"] is True
                    survivor.ask("goodbye")
    assert not (tmp_path / "zmq.sessions").exists()


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
    assert LIMITS.message_bytes == port.MAX_MESSAGE == 1 << 20
