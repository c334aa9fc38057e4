"""Rows F-02, F-03, L-05, L-06, L-08, M-06, M-07: floods of connections, silent and deaf ones, cancels, bombs."""

from __future__ import annotations

import contextlib
import gzip
import json
import resource
import select
import selectors
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc as grpc_wire
import msgpack
import numpy as np
import pytest
import zmq
from tritonclient.grpc import service_pb2, service_pb2_grpc

from broker.gateway.zmq.port import MIN_DESCRIPTORS
from tests.faults import child
from tests.faults.lab import scaled
from tests.faults.measure import resident_bytes
from tests.faults.visited import VisitedLab
from tests.faults.visitor import Door

MIB = 1 << 20
LARGE = 4 * MIB  # of an answer: more than the kernel keeps for its reader
DESCRIPTORS = 256
LIMIT_S = 50.0


class FewDescriptors(VisitedLab):
    """RLIMIT_NOFILE of 256 for the broker and all that it starts."""

    def _in_broker(self) -> None:
        super()._in_broker()
        resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FewDescriptors]:
    flags = ("--http-max-input-size=8388608", "--grpc-max-input-size=8388608")
    with FewDescriptors(tmp_path_factory.mktemp("few"), *flags) as lab:
        yield lab


def _connect(where: int | str, kind: int = socket.SOCK_STREAM) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX if isinstance(where, str) else socket.AF_INET, kind)
    connection.settimeout(0.2)
    try:
        connection.connect(where if isinstance(where, str) else ("127.0.0.1", where))
    except OSError:
        connection.close()
        return None
    return connection


def _closed(connections: list[socket.socket], limit_s: float = LIMIT_S) -> int:
    """How many the server closed within that time."""
    deadline = time.monotonic() + limit_s
    closed = 0
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ)
        while closed < len(connections) and (wait := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(wait):
                with contextlib.suppress(OSError):
                    if key.fileobj.recv(4096):  # type: ignore[union-attr]
                        continue
                selector.unregister(key.fileobj)
                closed += 1
    return closed


# --- F-02, F-03: connections that say nothing ----------------------------------------------------------------------


def _flood(where: int | str, count: int, seqpacket: bool, closes: bool) -> dict[str, int]:
    kind = socket.SOCK_SEQPACKET if seqpacket else socket.SOCK_STREAM
    connections: list[socket.socket] = []
    refused = 0
    while len(connections) < count and refused < 10:
        connection = _connect(where, kind)
        connections += [connection] if connection else []
        refused += connection is None
    child.say("flooded")
    return {"connected": len(connections), "closed": _closed(connections, LIMIT_S if closes else 0.5)}


@pytest.mark.parametrize("listener", ["http", "http.sock", "grpc", "grpc.sock", "broker.sock"])
def test_f02_f03_connections_that_say_nothing(few: FewDescriptors, listener: str) -> None:
    """[F-02] [F-03] more than there are descriptors: those who are connected are served, and all comes back."""
    where = {"http": few.http, "grpc": few.grpc}.get(listener, str(few.run_directory / listener))
    lines = few.broker.log().count("\n")
    closes = listener in ("http", "grpc")
    flood = few.start(_flood, valid=False, where=where, count=300, seqpacket=listener == "broker.sock", closes=closes)
    assert flood.heard() == "flooded"
    found = flood.result(100)
    if closes:
        assert found["closed"] == found["connected"] > 0, found
    flood.close()
    few.children.remove(flood)
    few.settled()
    assert few.broker.log().count("\n") - lines < 60, few.broker.log()[-3000:]
    few.offend(_serve_all, http=few.http, grpc=few.grpc)
    few.settled()


class EnoughDescriptors(VisitedLab):
    """As few as ZeroMQ is served with."""

    def _in_broker(self) -> None:
        super()._in_broker()
        resource.setrlimit(resource.RLIMIT_NOFILE, (MIN_DESCRIPTORS, MIN_DESCRIPTORS))


def test_f02_zeromq(few: FewDescriptors, tmp_path: Path) -> None:
    """[F-02] libzmq ends its process when descriptors run out: they must be many, or it is off."""
    assert not (few.run_directory / "zmq.sock").exists()
    assert "ZeroMQ is off" in few.broker.log()
    with EnoughDescriptors(tmp_path) as lab:
        where = str(lab.run_directory / "zmq.sock")
        flood = lab.start(_flood, where=where, count=2 * MIN_DESCRIPTORS, seqpacket=False, closes=False)
        assert flood.heard() == "flooded"
        assert flood.result()["connected"] < MIN_DESCRIPTORS // 2
        lab.settled()


def _serve_all(http: int, grpc: int) -> None:
    x = np.ones((1, 4), np.float32)
    for kind in ("http", "grpc"):
        door = Door(kind, http, grpc)
        assert np.array_equal(door.inline(x), x + 1)
        door.close()


# --- M-06, M-07: bodies that are too large --------------------------------------------------------------------------


def _http(port: int, headers: str, body: bytes) -> list[str]:
    connection = _connect(port)
    assert connection is not None
    with connection, contextlib.suppress(OSError):
        connection.settimeout(LIMIT_S)
        head = f"POST /v2/models/add1/infer HTTP/1.1\r\nHost: x\r\n{headers}\r\n\r\n"
        connection.sendall(head.encode() + body)
        answer = connection.recv(65536).decode()
        return [answer.split()[1], answer.partition("\r\n\r\n")[2]]
    return ["closed", ""]


def _bombs(http: int, grpc: int, size: int) -> dict[str, Any]:
    """Lengths that are not sent, bodies that are, and such as become so."""
    bomb = gzip.compress(bytes(size))
    found: dict[str, Any] = {
        "announced": _http(http, f"Content-Length: {10 << 30}", b""),
        "bomb": _http(http, f"Content-Encoding: gzip\r\nContent-Length: {len(bomb)}", bomb),
    }
    options = [("grpc.max_send_message_length", -1)]
    with grpc_wire.insecure_channel(f"127.0.0.1:{grpc}", options=options) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for name, compression in (("plain", None), ("gzip", grpc_wire.Compression.Gzip)):
            error = call.future(bytes(size), compression=compression, timeout=LIMIT_S).exception()
            found[name] = [error.code().name, error.details()]
    return found


def test_m06_m07_bodies_and_bombs(few: FewDescriptors) -> None:
    """[M-06] [M-07] refused, and the gateway's memory is what it was."""
    pid = few.gateway_pids()[0]
    before = resident_bytes(pid)
    for _ in range(3):
        found = few.offend(_bombs, http=few.http, grpc=few.grpc, size=64 * MIB)
        assert found["announced"][0] == "400", found
        assert found["bomb"][0] in ("400", "413"), found
        assert found["plain"][0] == found["gzip"][0] == "RESOURCE_EXHAUSTED", found
        assert resident_bytes(pid) < before + 80 * MIB
    few.settled()


# --- L-05, L-06: those who never read, those who hardly write ---------------------------------------------------------


def _never_read(http: int, grpc: int, directory: str, count: int) -> dict[str, Any]:
    """Large answers that nobody takes, over all three wires; heads and bodies that come byte by byte."""
    x = np.ones((1, LARGE // 4), np.float32)
    document = {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": x.shape, "parameters": {"binary_data_size": LARGE}}],
        "parameters": {"binary_data_output": True},
    }
    text = json.dumps(document).encode()
    head = f"POST /v2/models/add1/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text) + LARGE}\r\n"
    request = f"{head}Inference-Header-Content-Length: {len(text)}\r\n\r\n".encode() + text + x.tobytes()
    deaf = []
    for _ in range(count):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(LIMIT_S)
        connection.connect(("127.0.0.1", http))
        connection.sendall(request)
        deaf.append(connection)
    dribblers = [connection for _ in range(count) if (connection := _connect(http))]
    context = zmq.Context()
    sockets = []
    for _ in range(2):
        client = context.socket(zmq.DEALER)
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.RCVHWM, 1)
        client.connect(f"ipc://{directory}/zmq.sock")
        client.send(msgpack.packb({"type": "hello", "id": 0, "protocol": 1}))
        for number in range(1, 200):
            with contextlib.suppress(zmq.Again):
                client.send(msgpack.packb({"type": "metadata", "id": number, "model": "add1"}), zmq.NOBLOCK)
        sockets.append(client)
    with grpc_wire.insecure_channel(f"127.0.0.1:{grpc}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        message = service_pb2.ModelInferRequest(model_name="add1", raw_input_contents=[x.tobytes()])
        message.inputs.add(name="x", datatype="FP32", shape=[1, LARGE // 4])
        stream = stub.ModelStreamInfer(iter([message] * 16))
        closed = 0
        open_ = set(dribblers)
        deadline = time.monotonic() + LIMIT_S
        turn = 0
        while open_ and time.monotonic() < deadline:
            turn += 1
            for connection in list(open_):
                try:
                    connection.send(head.encode()[turn - 1 : turn])
                    if select.select([connection], [], [], 0)[0] and not connection.recv(4096):
                        raise ConnectionResetError
                except OSError:
                    open_.discard(connection)
                    closed += 1
            child.hear(0.3)
        stream.cancel()
    for client in sockets:
        client.close()
    context.term()
    return {"dribblers": [closed, len(dribblers)], "deaf": _drained(deaf)}


def _drained(connections: list[socket.socket]) -> int:
    """How many end before the whole answer."""
    cut = 0
    for connection in connections:
        taken = 0
        with contextlib.suppress(OSError):
            while more := connection.recv(1 << 16):
                taken += len(more)
                if taken > LARGE:
                    break
        cut += taken < LARGE
    return cut


def test_l05_l06_those_who_never_read_and_hardly_write(few: FewDescriptors) -> None:
    """[L-05] [L-06] cut off, all of them, while others are served and memory stays bounded."""
    pid = few.gateway_pids()[0]
    before = resident_bytes(pid)
    arguments = {"http": few.http, "grpc": few.grpc, "directory": str(few.run_directory)}
    offender = few.start(_never_read, count=10, **arguments)
    most = 0
    while not offender.ended(0.1):
        most = max(most, resident_bytes(pid))
    found = offender.result()
    assert found["dribblers"][0] == found["dribblers"][1] > 0, found
    assert found["deaf"] == 10, found
    assert most < before + 320 * MIB, (before, most)  # 26 requests, each with its answer
    few.settled()


# --- L-08: cancels -------------------------------------------------------------------------------------------------


def _cancel_storm(http: int, grpc: int, turns: int) -> dict[str, int]:
    """Half of the requests are given up at some moment; the others must be right."""
    found = {"right": 0, "wrong": 0, "cancelled": 0}
    x = np.ones((1, 4), np.float32)
    body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 1, 1, 1]}]}).encode()
    request = f"POST /v2/models/add1/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    message = service_pb2.ModelInferRequest(model_name="add1", raw_input_contents=[x.tobytes()])
    message.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    with grpc_wire.insecure_channel(f"127.0.0.1:{grpc}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for turn in range(turns):
            calls = [stub.ModelInfer.future(message, timeout=LIMIT_S) for _ in range(4)]
            connections = [connection for _ in range(2) if (connection := _connect(http))]
            for connection in connections:
                connection.sendall(request[: -1 if turn % 3 == 2 else None])
            child.hear(0.0005 * (turn % 5))
            for connection in connections:
                connection.close()
            for call in calls[::2]:
                found["cancelled"] += call.cancel()
            for call in calls[1::2]:
                y = np.frombuffer(call.result().raw_output_contents[0], np.float32)
                found["right" if np.array_equal(y, x[0] + 1) else "wrong"] += 1
    return found


def test_l08_cancel_storms(few: FewDescriptors) -> None:
    """[L-08] half of all requests are cancelled at any moment: the others are answered, and nothing is left."""
    turns = scaled(100, 5000)
    found = few.offend(_cancel_storm, http=few.http, grpc=few.grpc, turns=turns)
    assert found["wrong"] == 0, found
    assert found["right"] == 2 * turns, found
    assert found["cancelled"] > 0, found
    few.settled()
