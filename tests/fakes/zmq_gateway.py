"""The ZeroMQ front end in a thread, on a service without a broker; and a client whose messages are made by hand.

The client shares nothing with the code under test: `pyzmq` and `msgpack` only, as docs/wire-protocol.md says.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq

from broker.gateway.options import GatewayOptions
from broker.gateway.peers import Peers
from broker.gateway.zmq.server import ZmqServer
from tests.fakes.broker import eventually
from tests.fakes.kserve import FakeService

LIMIT_S = 20.0
DATA = np.arange(4, dtype=np.float32)
INLINE = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": DATA.tobytes()}


class ZmqGateway:
    """A context manager. `call` runs a function on the gateway's event loop."""

    def __init__(self, directory: Path, service: FakeService | None = None, **options: Any) -> None:
        self.directory = directory
        self.service = service or FakeService()
        self.lines: list[str] = []
        self._options = GatewayOptions(directory=str(directory), broker_uid=os.getuid(), **options)
        self._started = threading.Event()
        self._problem: BaseException | None = None
        self._grace_s = 0.0
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="zmq gateway")

    async def _main(self) -> None:
        self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        peers = Peers(os.getuid())
        self.server = ZmqServer(self.service, self._options, peers.zmq_caller)
        try:
            self.lines = await self.server.start()
        except BaseException as error:
            self._problem = error
            return
        finally:
            self._started.set()
        await self._stop.wait()
        await self.server.stop(self._grace_s)
        peers.close()

    def __enter__(self) -> ZmqGateway:
        self._thread.start()
        assert self._started.wait(LIMIT_S)
        if self._problem is not None:
            raise self._problem
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, grace_s: float = 0.0) -> None:
        if self._thread.is_alive():
            self._grace_s = grace_s
            self.loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(LIMIT_S)
            assert not self._thread.is_alive()

    def call(self, function: Callable[[], Any]) -> Any:
        async def on_loop() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(on_loop(), self.loop).result(LIMIT_S)

    def eventually(self, condition: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + LIMIT_S
        while not (value := self.call(condition)):
            assert time.monotonic() < deadline, f"never came true: {what}"
        return value


class HandZmqClient:
    """A context manager. `options` are set on the socket before it connects."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self._context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        self.socket.connect(f"ipc://{directory}/zmq.sock")
        self._id = 0

    def __enter__(self) -> HandZmqClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()
        self._context.term()

    def send(self, kind: str, **fields: Any) -> int:
        self._id += 1
        self.socket.send(msgpack.packb({"type": kind, "id": self._id, **fields}))
        return self._id

    def receive(self, timeout_s: float = LIMIT_S) -> dict[str, Any]:
        assert self.socket.poll(int(timeout_s * 1e3)), "no reply came"
        reply: dict[str, Any] = msgpack.unpackb(self.socket.recv())
        return reply

    def silent(self, timeout_s: float = 0.1) -> bool:
        return not self.socket.poll(int(timeout_s * 1e3))

    def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        request = self.send(kind, **fields)
        reply = self.receive()
        assert reply["id"] == fields.get("id", request)
        return reply

    def told_to_say_hello(self) -> None:
        """Ask until a gateway answers that does not know us, as a new one does.

        Again and again: libzmq loses a message that it was about to send when the connection ended.
        """
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            number = self.send("heartbeat")
            while self.socket.poll(1000):
                reply = self.receive()
                if reply.get("hello") is True:
                    while reply["id"] != number:  # those that were sent before it, late
                        reply = self.receive()
                    return
                if reply["id"] == number:
                    break
        raise AssertionError("no new gateway answers")

    def hello(self, **fields: Any) -> dict[str, Any]:
        reply = self.ask("hello", protocol=1, **fields)
        assert reply["type"] == "welcome", reply
        return reply


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
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= before, "no descriptor is left")  # others of this process
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
