"""Rows M-13, H-03, H-04: what errors say to callers and to the log, over HTTP, gRPC and ZeroMQ."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.fakes.zmq_gateway import HandZmqClient
from tests.faults import front_doors, raw
from tests.faults.visited import VisitedLab
from tests.faults.visitor import Door, outcome

# What answers hold besides: statuses, and sizes that were asked for or are a model's.
OTHER_NUMBERS = [*range(400, 512), 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 2**40, 2**62, 2**63]
LINE = re.compile(r"[IWE]\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ \w+\.py:\d+\] (\".*\"|)$")
EVIL = 'x\r\nE0101 00:00:00.000000 1 forged:1] "forged"\x1b[31m\x00é' + "A" * 5000


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VisitedLab]:
    with VisitedLab(tmp_path_factory.mktemp("told"), "--log-verbose=1") as lab:
        yield lab


def _has_number(text: str, number: int) -> bool:
    return re.search(rf"(?<![\d.]){number}(?![\d.])", text) is not None


def _documents() -> list[Any]:
    good = front_doors.infer_document()
    tensor = good["inputs"][0]
    changed = [
        {"datatype": "FP64"},
        {"datatype": EVIL},
        {"shape": [1, 5]},
        {"shape": [-1, 2**62]},
        {"name": "no such"},
        {"name": EVIL},
        {"data": ["text"]},
        {"parameters": {"shared_memory_region": "none", "shared_memory_byte_size": 16}},
        {"parameters": {"shared_memory_region": EVIL, "shared_memory_byte_size": 16}},
        {"parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 2**63}},
        {"parameters": {"binary_data_size": 10}},
    ]
    documents: list[Any] = [{**good, "inputs": [{**tensor, **each}]} for each in changed]
    documents += [{**good, "outputs": [{"name": EVIL}]}, {**good, "id": EVIL, "inputs": []}, {}, [], None, "text"]
    return documents


def _over_http(http: int, key: str) -> list[Any]:
    region = "/v2/systemsharedmemory/region"
    told = [front_doors.ask_http(http, "POST", "/v2/models/add1/infer", each) for each in _documents()]
    for name in ("none", "..", "%2e%2e", "a%0d%0ab", "A" * 3000):
        told += [front_doors.ask_http(http, "POST", f"/v2/models/{name}/infer", _documents()[0])]
        told += [front_doors.ask_http(http, "GET", f"/v2/models/{name}{what}") for what in ("", "/config", "/stats")]
        told.append(front_doors.ask_http(http, "POST", f"/v2/repository/models/{name}/load", {}))
        told.append(front_doors.ask_http(http, "GET", f"{region}/{name}/status"))
    for bad in ("/none", "/../etc/passwd", "/dev/null", EVIL, key * 100):
        told.append(front_doors.ask_http(http, "POST", f"{region}/r/register", {"key": bad, "byte_size": 16}))
    told.append(front_doors.ask_http(http, "POST", f"{region}/r/register", {"key": key, "byte_size": 2**40}))
    told.append(front_doors.ask_http(http, "POST", "/v2/logging", {"log_file": "/etc/passwd"}))
    told.append(front_doors.ask_http(http, "POST", "/v2/trace/setting", {"trace_file": "/etc/passwd"}))
    told.append(front_doors.ask_http(http, "POST", "/v2/repository/index", {"ready": EVIL}))
    return [each for each in told if each[0] != 200]


def _over_grpc(grpc: int, key: str) -> list[Any]:
    told = []
    with front_doors.grpc.insecure_channel(f"127.0.0.1:{grpc}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        def ask(method: str, request: Any) -> None:
            told.append(front_doors.ask_grpc(stub, method, request))

        for field in ("model_name", "model_version", "id"):
            message = front_doors.infer_message("none")
            setattr(message, field, EVIL)
            ask("ModelInfer", message)
        for region in ("none", EVIL):
            ask("ModelInfer", front_doors.infer_message(region))
            ask("ModelInfer", front_doors.infer_message("", region))
            ask("SystemSharedMemoryStatus", service_pb2.SystemSharedMemoryStatusRequest(name=region))
            ask("ModelConfig", service_pb2.ModelConfigRequest(name=region))
            ask("RepositoryModelLoad", service_pb2.RepositoryModelLoadRequest(model_name=region))
        for bad in ("/none", "/../etc/passwd", EVIL, key * 100):
            register = service_pb2.SystemSharedMemoryRegisterRequest(name="r", key=bad, byte_size=16)
            ask("SystemSharedMemoryRegister", register)
        cuda = service_pb2.CudaSharedMemoryRegisterRequest(name="c", raw_handle=b"\0" * 64, byte_size=64)
        ask("CudaSharedMemoryRegister", cuda)
    return [each for each in told if each[0] != "OK"]


def _over_zmq(directory: str, key: str) -> list[Any]:
    told = []
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "region": "none", "byte_size": 16}
    with HandZmqClient(Path(directory)) as client:
        client.hello()
        for kind, fields in (
            ("infer", {"model": "none", "inputs": [tensor]}),
            ("infer", {"model": "add1", "inputs": [tensor]}),
            ("infer", {"model": EVIL, "inputs": [{**tensor, "region": EVIL}]}),
            ("register", {"name": "r", "key": "/../etc/passwd", "byte_size": 16}),
            ("register", {"name": EVIL, "key": EVIL, "byte_size": 16}),
            ("register", {"name": "r", "key": key, "byte_size": 2**40}),
            ("metadata", {"model": EVIL}),
            ("no such verb", {}),
        ):
            told.append([client.ask(kind, **fields).get("message", "")])
    return told


def _provoke(http: int, grpc: int, directory: str) -> dict[str, Any]:
    with raw.named_memory(4096) as key:
        found = {"http": _over_http(http, key), "grpc": _over_grpc(grpc, key), "zmq": _over_zmq(directory, key)}
        for name in ("http", "grpc"):
            door = Door(name, http, grpc)
            found[f"{name} client"] = [outcome(door.client.infer, EVIL, [triton_grpc.InferInput("x", [1], "FP32")])]
    return found


def test_h03_m13_errors_give_nothing_away(doors: VisitedLab) -> None:
    """[H-03] [M-13] no name, path, pid or address of ours in any error; a line of the log stays a line."""
    told = doors.offend(_provoke, http=doors.http, grpc=doors.grpc, directory=str(doors.run_directory), timeout_s=60)
    assert len(told["http"]) > 40, told["http"]
    assert len(told["grpc"]) > 14, told["grpc"]
    text = json.dumps(told)
    internal = ["clientlib.", "memfd", "/proc/", "tb-gateway", "root:", "session "]
    internal += [str(doors.run_directory), str(doors.directory)]
    internal += [row["name"] for row in doors.status()["regions"] if row["session"] in doors.gateway_sessions()]
    asked = json.dumps([_documents(), OTHER_NUMBERS])
    pids = [doors.broker.pid, *doors.broker.descendants()]
    pids = [pid for pid in pids if not _has_number(asked, pid)]  # what callers said themselves gives nothing away
    found = [each for each in internal if each in text]
    found += [str(pid) for pid in pids if _has_number(text, pid)]
    assert not found, f"{found}: {text[:3000]}"
    lines = [line for line in doors.broker.log().splitlines() if not line.startswith(("+", "|")) and line]
    assert not [line for line in lines if not LINE.match(line)], lines
    assert max(map(len, lines)) < 10_000
    doors.settled()


def _register_what_was_seen(http: int, grpc: int, names: list[str]) -> list[Any]:
    return [
        [kind, number, outcome(Door(kind, http, grpc).client.register_system_shared_memory, "seen", name, 16)[0]]
        for kind in ("http", "grpc")
        for number, name in enumerate(names)
    ]


def test_h04_nothing_that_can_be_seen_can_be_registered(doors: VisitedLab) -> None:
    """[H-04] Names of regions, aliases, memfds, descriptors and sockets are no keys."""
    names = {row["name"] for row in doors.status()["regions"]} - {"visitors-own"}
    for pid in (doors.broker.pid, *doors.gateway_pids()):
        names |= {f"/proc/{pid}/fd/{fd}" for fd in range(0, 40, 3)}
    names |= {f"{doors.run_directory}/{name}" for name in front_doors.SOCKETS}
    names |= {"tensorbroker-options", "memfd:tensorbroker", "/memfd:clientlib", "zmq.sock"}
    found = doors.offend(_register_what_was_seen, http=doors.http, grpc=doors.grpc, names=sorted(names))
    assert not [each for each in found if each[2] in ("OK", "LOST")], (found, sorted(names))
    doors.settled()
