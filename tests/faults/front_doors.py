"""What offenders say to HTTP, gRPC and ZeroMQ: plain requests, and what came back in one form for all three.

Requests run in children of a lab with a gateway. Of tritonclient only the protobuf messages: it would tidy up.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  of names of hosts: a child that has given up its uid cannot import it any more
import http.client
import json
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.fakes.gateways import free_ports
from tests.faults import raw, repository
from tests.faults.lab import Lab
from tests.faults.measure import Holdings

LIMIT_S = 40.0
X = np.arange(4, dtype=np.float32).reshape(1, 4)
Answer = list[Any]  # [HTTP status or gRPC code's name, text or JSON]
DISABLED = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
MORE_PLACES = 8  # regions that a row may have gateways make
SOCKETS = ("broker.sock", "http.sock", "grpc.sock", "zmq.sock")
NO_HEADERS: Mapping[str, str] = {}


class FrontDoors(Lab):
    """A lab whose broker has a gateway. `http_key`, `grpc_key`: the header, if any, that opens what is restricted."""

    def __init__(
        self,
        directory: Path,
        *flags: str,
        http_key: Mapping[str, str] = NO_HEADERS,
        grpc_key: Mapping[str, str] = NO_HEADERS,
        models: Callable[[Path], Path] = repository.write,
    ) -> None:
        self._keys = {"http_key": dict(http_key), "grpc_key": dict(grpc_key)}
        self.http, self.grpc, metrics = free_ports(3)
        ports = (f"--http-port={self.http}", f"--grpc-port={self.grpc}", f"--metrics-port={metrics}")
        super().__init__(directory, "--gateways=1", *ports, *flags, models=models)

    def remember(self) -> None:
        super().remember()
        self._places_before = self._places()

    def gateway_sessions(self) -> set[int]:
        status = self.status()
        pids = {row["pid"] for row in status["gateways"]}
        return {row["id"] for row in status["sessions"] if row["pid"] in pids}

    def _region_rows(self) -> list[tuple[int, str, int]]:
        """Of others than gateways, whose own are the places of plans that they keep."""
        gateways = self.gateway_sessions()
        return [row for row in super()._region_rows() if row[0] not in gateways]

    def _places(self) -> int:
        """Regions of the gateways' own, aliases not counted."""
        sessions = self.gateway_sessions()
        regions = self.status()["regions"]
        return sum(row["session"] in sessions and row["name"].startswith("clientlib.") for row in regions)

    def _kept(self) -> list[str]:
        """A gateway may have made places for new plans: each is a region, of which all processes have a descriptor."""
        more = self._places() - self._places_before
        if not 0 < more <= MORE_PLACES:
            return super()._kept()
        known, self._held = self._held, {name: Holdings(*(n + 2 * more for n in h)) for name, h in self._held.items()}
        try:
            return super()._kept()
        finally:
            self._held = known

    def _warm_up(self) -> None:
        """Also what a gateway makes at its first requests and keeps: channel, memory, threads."""
        self._hand.ask("GetIndex")
        self.offend(walk_through, http=self.http, grpc=self.grpc, **self._keys)
        super()._warm_up()


def ask_http(
    where: int | str | tuple[str, int],
    method: str,
    path: str,
    document: Any = None,
    headers: Mapping[str, str] = NO_HEADERS,
) -> Answer:
    """One request on a connection of its own. `where`: a port of 127.0.0.1, an address, or a Unix socket's path."""
    connection = http.client.HTTPConnection("localhost", timeout=LIMIT_S)
    if isinstance(where, str):
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(where)
    else:
        connection.sock = socket.create_connection(("127.0.0.1", where) if isinstance(where, int) else where, LIMIT_S)
    try:
        body = None if document is None else json.dumps(document)
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in {"Host": "localhost", **headers, "Content-Length": str(len(body or ""))}.items():
            connection.putheader(name, value)
        connection.endheaders(body.encode() if body else None)
        response = connection.getresponse()
        text = response.read().decode()
        return [response.status, json.loads(text)["error"] if response.status != 200 else text]
    finally:
        connection.close()


def infer_document(region: str = "", output: str = "") -> dict[str, Any]:
    """A request for add1; its input in `region`, its output to `output`, "" for in the message."""
    tensor: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [1, 4]}
    if region:
        tensor["parameters"] = {"shared_memory_region": region, "shared_memory_byte_size": 16}
    else:
        tensor["data"] = X.ravel().tolist()
    document: dict[str, Any] = {"inputs": [tensor]}
    if output:
        parameters = {"shared_memory_region": output, "shared_memory_byte_size": 16}
        document["outputs"] = [{"name": "y", "parameters": parameters}]
    return document


def http_verbs(where: int | str | tuple[str, int], key: str, name: str, **headers: str) -> dict[str, Answer]:
    """Every use of shared memory and a plain request; `headers` with _ for -."""
    fields = {header.replace("_", "-"): value for header, value in headers.items()}
    region = f"/v2/systemsharedmemory/region/{name}"
    steps = {
        "register": ("POST", f"{region}/register", {"key": key, "byte_size": 4096}),
        "status": ("GET", "/v2/systemsharedmemory/status", None),
        "one": ("GET", f"{region}/status", None),
        "input": ("POST", "/v2/models/add1/infer", infer_document(name)),
        "output": ("POST", "/v2/models/add1/infer", infer_document("", name)),
        "unregister": ("POST", f"{region}/unregister", None),
        "unregister all": ("POST", "/v2/systemsharedmemory/unregister", None),
        "plain": ("POST", "/v2/models/add1/infer", infer_document()),
    }
    return {verb: ask_http(where, *step, headers=fields) for verb, step in steps.items()}


def infer_message(region: str = "", output: str = "") -> Any:
    """As `infer_document`."""
    request = service_pb2.ModelInferRequest(model_name="add1")
    tensor = request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    if region:
        tensor.parameters["shared_memory_region"].string_param = region
        tensor.parameters["shared_memory_byte_size"].int64_param = 16
    else:
        request.raw_input_contents.append(X.tobytes())
    if output:
        wanted = request.outputs.add(name="y")
        wanted.parameters["shared_memory_region"].string_param = output
        wanted.parameters["shared_memory_byte_size"].int64_param = 16
    return request


def ask_grpc(stub: Any, method: str, request: Any, headers: Mapping[str, str] = NO_HEADERS) -> Answer:
    """One unary call."""
    try:
        response = getattr(stub, method)(request, metadata=tuple(headers.items()), timeout=LIMIT_S)
    except grpc.RpcError as error:
        return [error.code().name, error.details()]
    return ["OK", str(response)]


def grpc_verbs(target: str, key: str, name: str, **headers: str) -> dict[str, Answer]:
    """As `http_verbs`."""
    fields = {header.replace("_", "-"): value for header, value in headers.items()}
    steps = {
        "register": (
            "SystemSharedMemoryRegister",
            service_pb2.SystemSharedMemoryRegisterRequest(name=name, key=key, byte_size=4096),
        ),
        "status": ("SystemSharedMemoryStatus", service_pb2.SystemSharedMemoryStatusRequest()),
        "one": ("SystemSharedMemoryStatus", service_pb2.SystemSharedMemoryStatusRequest(name=name)),
        "input": ("ModelInfer", infer_message(name)),
        "output": ("ModelInfer", infer_message("", name)),
        "unregister": ("SystemSharedMemoryUnregister", service_pb2.SystemSharedMemoryUnregisterRequest(name=name)),
        "unregister all": ("SystemSharedMemoryUnregister", service_pb2.SystemSharedMemoryUnregisterRequest()),
        "plain": ("ModelInfer", infer_message()),
    }
    with grpc.insecure_channel(target) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        return {verb: ask_grpc(stub, *step, headers=fields) for verb, step in steps.items()}


def walk_through(http: int, grpc: int, http_key: dict[str, str], grpc_key: dict[str, str]) -> None:
    """Every use of shared memory, and a plain request."""
    with raw.named_memory(4096) as key:
        verbs = http_verbs(http, key, "walk", **http_key), grpc_verbs(f"127.0.0.1:{grpc}", key, "walk", **grpc_key)
        for found in verbs:
            assert {answer[0] for answer in found.values()} in ({200}, {"OK"}), found


def assert_nothing_but_inline(found: dict[str, Any]) -> None:
    missing = "Unable to find shared memory region: 'victim'"
    http, grpc = found["http"], found["grpc"]
    for verb in ("register", "unregister", "unregister all"):
        assert http[verb] == [501, DISABLED], verb
        assert grpc[verb] == ["UNIMPLEMENTED", DISABLED], verb
    assert http["status"] == [200, "[]"]
    assert grpc["status"] == ["OK", ""]
    assert http["one"] == [404, "Unable to find system shared memory region: 'victim'"]
    assert grpc["one"] == ["NOT_FOUND", "Unable to find system shared memory region: 'victim'"]
    for verb in ("input", "output"):
        assert http[verb][0] == 404, http[verb]
        assert grpc[verb][0] == "NOT_FOUND", grpc[verb]
        assert missing in http[verb][1]
        assert missing in grpc[verb][1]
    assert http["plain"][0] == 200, http["plain"]
    assert grpc["plain"][0] == "OK", grpc["plain"]
