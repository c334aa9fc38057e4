"""Rows H-01, H-02, H-05, H-09, H-12: whose memory a caller may use, on every front end, and what listens."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.zmq_gateway import HandZmqClient
from tests.faults import child, front_doors, raw
from tests.faults.front_doors import FrontDoors

STRANGER = 4321
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another uid")


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontDoors]:
    with FrontDoors(tmp_path_factory.mktemp("doors")) as lab:
        yield lab


# --- H-01: sockets in the run directory ----------------------------------------------------------------------------


def _knock(directory: str) -> dict[str, str]:
    found = {}
    for name in front_doors.SOCKETS:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET if name == "broker.sock" else socket.SOCK_STREAM) as s:
            found[name] = errno.errorcode[s.connect_ex(f"{directory}/{name}")]
    return found


@needs_root
def test_h01_another_uid_at_our_unix_sockets(doors: FrontDoors) -> None:
    """[H-01] The directory keeps them out, and where somebody opens it the sockets themselves do."""
    directory = str(doors.run_directory)
    refused = dict.fromkeys(front_doors.SOCKETS, "EACCES")
    assert doors.offend(_knock, uid=STRANGER, valid=False, directory=directory) == refused
    closed = {path: path.stat().st_mode for path in (doors.run_directory, *doors.run_directory.parents[:-2])}
    try:
        for path in closed:
            path.chmod(0o755)
        assert doors.offend(_knock, uid=STRANGER, valid=False, directory=directory) == refused
    finally:
        for path, mode in closed.items():
            path.chmod(stat.S_IMODE(mode))
    doors.settled()


# --- H-02, H-05: another uid over TCP ------------------------------------------------------------------------------


def _register_mine(http: int, key: str) -> None:
    request = {"key": key, "byte_size": 4096}
    answer = front_doors.ask_http(http, "POST", "/v2/systemsharedmemory/region/victim/register", request)
    assert answer == [200, ""], answer


def _use_mine(http: int, grpc: int) -> dict[str, Any]:
    """By the owner: it is still there, over HTTP and gRPC alike; then it goes."""
    document = front_doors.infer_document("victim")
    with front_doors.grpc.insecure_channel(f"127.0.0.1:{grpc}") as channel:
        stub = front_doors.service_pb2_grpc.GRPCInferenceServiceStub(channel)
        found = {
            "http": front_doors.ask_http(http, "POST", "/v2/models/add1/infer", document)[0],
            "grpc": front_doors.ask_grpc(stub, "ModelInfer", front_doors.infer_message("victim"))[0],
        }
    front_doors.ask_http(http, "POST", "/v2/systemsharedmemory/region/victim/unregister")
    return found


def _take(http: int, grpc: int, key: str) -> dict[str, Any]:
    return {
        "http": front_doors.http_verbs(http, key, "victim"),
        "grpc": front_doors.grpc_verbs(f"127.0.0.1:{grpc}", key, "victim"),
    }


@needs_root
def test_h02_h05_another_uid_on_loopback_sends_tensors_inline_and_reaches_no_region(doors: FrontDoors) -> None:
    """[H-02] [H-05] It registers nothing, and neither sees, reads, writes nor unregisters what others did."""
    with raw.named_memory(4096) as key:
        ports = {"http": doors.http, "grpc": doors.grpc}
        owner = doors.start(_own_for_a_while, valid=False, **ports)
        owner.heard()
        front_doors.assert_nothing_but_inline(doors.offend(_take, uid=STRANGER, valid=False, key=key, **ports))
        owner.tell("use")
        assert owner.result() == {"http": 200, "grpc": "OK"}
    doors.settled()


def _own_for_a_while(http: int, grpc: int) -> dict[str, Any]:
    with raw.named_memory(4096) as mine:
        _register_mine(http, mine)
        child.say("registered")
        child.hear()
        return _use_mine(http, grpc)


def _reach_across(http: int, directory: str) -> dict[str, Any]:
    """The same uid: what one scope registered is not another's."""
    with raw.named_memory(4096) as key:
        _register_mine(http, key)
        found: dict[str, Any] = {}
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "region": "victim", "byte_size": 16}
        with HandZmqClient(Path(directory)) as one, HandZmqClient(Path(directory)) as two:
            one.hello()
            two.hello()
            found["zmq sees kserve"] = one.ask("infer", model="add1", inputs=[tensor])["message"]
            assert one.ask("register", name="victim", key=key, byte_size=4096)["type"] == "done"
            found["zmq sees zmq"] = two.ask("infer", model="add1", inputs=[tensor])["message"]
            two.ask("unregister", name="")
            found["own"] = one.ask("infer", model="add1", inputs=[tensor])["type"]
        native = raw.session()
        plan = {"inputs": [tensor], "outputs": [{**tensor, "name": "y", "offset": 64}]}
        found["native sees kserve"] = raw.outcome(native.ask("Prepare", model="add1", **plan))
        native.ask("Unregister", name="")
        document = front_doors.infer_document("victim")
        found["kserve's own"] = front_doors.ask_http(http, "POST", "/v2/models/add1/infer", document)[0]
        front_doors.ask_http(http, "POST", "/v2/systemsharedmemory/unregister")
    return found


def test_h05_scopes_of_one_uid_do_not_see_each_others_names(doors: FrontDoors) -> None:
    """[H-05] HTTP and gRPC share one namespace; every ZeroMQ client and every session has its own."""
    found = doors.offend(_reach_across, http=doors.http, directory=str(doors.run_directory))
    missing = "Unable to find shared memory region: 'victim'"
    assert missing in found["zmq sees kserve"]
    assert missing in found["zmq sees zmq"]
    assert found["own"] == "result"
    assert found["native sees kserve"] == ["NOT_FOUND", missing]
    assert found["kserve's own"] == 200
    doors.settled()


# --- H-09: remote, or forwarded ------------------------------------------------------------------------------------


def _be_forwarded(http: int, grpc: int, directory: str) -> dict[str, Any]:
    found = {}
    with raw.named_memory(4096) as key:
        for header in ("X_Forwarded_For", "Forwarded", "Via", "X_Real_IP"):
            found[header] = {
                "http": front_doors.http_verbs(http, key, "victim", **{header: "for=10.0.0.9"}),
                "grpc": front_doors.grpc_verbs(f"127.0.0.1:{grpc}", key, "victim", **{header.lower(): "10.0.0.9"}),
            }
        found["unix"] = {
            "http": front_doors.http_verbs(f"{directory}/http.sock", key, "victim", X_Forwarded_For="10.0.0.9"),
            "grpc": front_doors.grpc_verbs(f"unix:{directory}/grpc.sock", key, "victim", x_forwarded_for="10.0.0.9"),
        }
    return found


def test_h09_what_a_proxy_forwards_is_remote(doors: FrontDoors) -> None:
    """[H-09] Whatever the proxy's own uid and address."""
    arguments = {"http": doors.http, "grpc": doors.grpc, "directory": str(doors.run_directory)}
    for found in doors.offend(_be_forwarded, **arguments).values():
        front_doors.assert_nothing_but_inline(found)
    doors.settled()


# --- H-12: what listens by default ---------------------------------------------------------------------------------


def _inodes(pids: list[int]) -> set[str]:
    found = set()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError):  # a process that has ended since
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(FileNotFoundError):
                    target = os.readlink(f"/proc/{pid}/fd/{fd}")
                    found.add(target.removeprefix("socket:[").removesuffix("]"))
    return found


def _listening(inodes: set[str]) -> tuple[list[str], list[str]]:
    """Addresses (as the kernel writes them in hexadecimal) and Unix sockets' names."""
    tcp = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and rest[5] in inodes:
                tcp.append(local.partition(":")[0])
    unix = []
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[3], 16) & 0x10000 and fields[6] in inodes:  # __SO_ACCEPTCON
            unix.append(fields[7] if len(fields) > 7 else "")
    return tcp, unix


@needs_root
def test_h12_what_a_broker_listens_on_unless_told_otherwise(doors: FrontDoors) -> None:
    """[H-12] Loopback, and sockets in its directory that are its uid's alone; models cannot be managed."""
    pids = [doors.broker.pid, *doors.broker.descendants()]
    tcp, unix = _listening(_inodes(pids))
    assert len(tcp) == 3, "HTTP, gRPC, metrics"
    assert {address.removeprefix("0000000000000000FFFF0000") for address in tcp} == {"0100007F"}  # 127.0.0.1
    assert sorted(Path(name).name for name in unix) == sorted(front_doors.SOCKETS), unix
    for name in front_doors.SOCKETS:
        path = doors.run_directory / name
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, name
    assert stat.S_IMODE(doors.run_directory.stat().st_mode) == 0o700
    found = doors.offend(_manage, http=doors.http, grpc=doors.grpc)
    assert found["http"][0] == 503
    assert found["grpc"][0] == "UNAVAILABLE"
    for answer in found.values():
        assert "explicit model load / unload is not allowed" in answer[1]
    doors.settled()


def _manage(http: int, grpc: int) -> dict[str, Any]:
    with front_doors.grpc.insecure_channel(f"127.0.0.1:{grpc}") as channel:
        stub = front_doors.service_pb2_grpc.GRPCInferenceServiceStub(channel)
        request = front_doors.service_pb2.RepositoryModelUnloadRequest(model_name="add1")
        return {
            "http": front_doors.ask_http(http, "POST", "/v2/repository/models/add1/unload"),
            "grpc": front_doors.ask_grpc(stub, "RepositoryModelUnload", request),
        }
