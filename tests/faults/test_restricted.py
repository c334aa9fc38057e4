"""Rows H-10, H-09: restricted APIs however they are spelled, and callers that do not come over loopback."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

import clientlib
from tests.fakes.zmq_gateway import HandZmqClient
from tests.faults import front_doors, raw
from tests.faults.front_doors import FrontDoors

CATEGORIES = "health,metadata,inference,shared-memory,model-config,model-repository,statistics,trace,logging"
HTTP_KEY = {"x-key": "s3cret"}
GRPC_KEY = {"triton-grpc-protocol-x-key": "s3cret"}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontDoors]:
    """Everything is restricted, and both ports are open to all addresses."""
    flags = (
        f"--http-restricted-api={CATEGORIES}:X-Key=s3cret",
        f"--grpc-restricted-protocol={CATEGORIES}:x-key=s3cret",
        "--http-address=0.0.0.0",
        "--grpc-address=0.0.0.0",
    )
    with FrontDoors(tmp_path_factory.mktemp("guarded"), *flags, http_key=HTTP_KEY, grpc_key=GRPC_KEY) as lab:
        yield lab


# --- H-10 ----------------------------------------------------------------------------------------------------------

ROUTES = (
    ("GET", "/v2"),
    ("GET", "/v2/health/live"),
    ("GET", "/v2/health/ready"),
    ("GET", "/v2/models/add1"),
    ("GET", "/v2/models/add1/versions/1"),
    ("GET", "/v2/models/add1/ready"),
    ("GET", "/v2/models/add1/versions/1/ready"),
    ("GET", "/v2/models/add1/config"),
    ("GET", "/v2/models/add1/stats"),
    ("GET", "/v2/models/stats"),
    ("POST", "/v2/models/add1/infer"),
    ("POST", "/v2/models/add1/versions/1/infer"),
    ("POST", "/v2/models/add1/generate"),
    ("POST", "/v2/models/add1/generate_stream"),
    ("GET", "/v2/models/add1/trace/setting"),
    ("GET", "/v2/trace/setting"),
    ("POST", "/v2/trace/setting"),
    ("GET", "/v2/logging"),
    ("POST", "/v2/logging"),
    ("POST", "/v2/repository/index"),
    ("POST", "/v2/repository/models/add1/load"),
    ("POST", "/v2/repository/models/add1/unload"),
    ("GET", "/v2/systemsharedmemory/status"),
    ("GET", "/v2/systemsharedmemory/region/r/status"),
    ("POST", "/v2/systemsharedmemory/region/r/register"),
    ("POST", "/v2/systemsharedmemory/region/r/unregister"),
    ("POST", "/v2/systemsharedmemory/unregister"),
    ("GET", "/v2/cudasharedmemory/status"),
    ("POST", "/v2/cudasharedmemory/region/r/register"),
    ("POST", "/v2/cudasharedmemory/region/r/unregister"),
)


def _spellings(path: str) -> list[str]:
    tail = path.removeprefix("/v2")
    return [
        f"{path}/",
        f"/{path}",
        f"{path}?x=/v2/health",
        f"{path}#x",
        f"http://localhost{path}",
        f"/V2{tail}",
        f"/v2/.{tail}",
        f"/x/..{path}",
        f"/%76%32{tail}",
        path.replace("add1", "%61dd1"),
        path.replace("add1", "%2561dd1"),
        path.replace("add1", "add1%2Finfer"),
        path.replace("add1", "..%2f..%2fhealth%2flive"),
        path.replace("add1", "add1%00"),
        path.replace("add1", "%ff%C0%AF"),
        f"/v2{tail.replace('/', '%2f')}",
        f"/v2{tail.replace('/', '//')}",
        f"/v2{tail};x=1",
        f"/v1{tail}",
        f"/api{path}",
        path.upper(),
    ]


def _try_every_spelling(http: int, directory: str) -> dict[str, Any]:
    wrong, opened = [], []
    for where in (http, f"{directory}/http.sock"):
        for method, path in ROUTES:
            for spelling in (path, *_spellings(path)):
                for asked in (method, "PUT"):
                    answer = front_doors.ask_http(where, asked, spelling, headers={"x-key": "wrong"})
                    if answer not in ([403, "This API is restricted, expecting header 'x-key'"], [404, "Not Found"]):
                        wrong.append([asked, spelling, answer])
            first = front_doors.ask_http(where, method, path)
            if first[0] != 403:
                wrong.append([method, path, first])
    for method, path in ROUTES:
        if front_doors.ask_http(http, method, path, headers={"X-KEY": "s3cret"})[0] != 403:
            opened.append(path)
    for path in ("/ping", "/invocations", "/metrics", "/models/add1/invoke", "/v2/sagemaker", "/predict"):
        answer = front_doors.ask_http(http, "GET", path)
        if answer != [404, "Not Found"]:
            wrong.append(["GET", path, answer])
    return {"wrong": wrong, "opened": len(opened)}


def test_h10_http_answers_alike_however_a_path_is_spelled(guarded: FrontDoors) -> None:
    """[H-10] A second spelling is either no path at all or as restricted as the first."""
    found = guarded.offend(_try_every_spelling, http=guarded.http, directory=str(guarded.run_directory), timeout_s=110)
    assert found == {"wrong": [], "opened": len(ROUTES)}
    guarded.settled()


def _try_every_method(grpc: int, directory: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    service = front_doors.service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    for target in (f"127.0.0.1:{grpc}", f"unix:{directory}/grpc.sock"):
        with front_doors.grpc.insecure_channel(target) as channel:
            stub = front_doors.service_pb2_grpc.GRPCInferenceServiceStub(channel)
            for method in service.methods:
                request = getattr(front_doors.service_pb2, method.input_type.name)()
                if method.name == "ModelStreamInfer":
                    responses = stub.ModelStreamInfer(iter([request]), timeout=front_doors.LIMIT_S)
                    with pytest.raises(front_doors.grpc.RpcError) as caught:
                        list(responses)
                    found[f"{target} {method.name}"] = [caught.value.code().name, caught.value.details()]
                else:
                    found[f"{target} {method.name}"] = front_doors.ask_grpc(stub, method.name, request)
            call = channel.unary_unary("/grpc.health.v1.Health/Check")
            with pytest.raises(front_doors.grpc.RpcError) as caught:
                call(b"", timeout=front_doors.LIMIT_S)
            found[f"{target} health"] = [caught.value.code().name, caught.value.details()]
            for path in (
                "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
                "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
                "/inference.GRPCInferenceService/serverlive",
                "/inference.grpcinferenceservice/ServerLive",
                "/GRPCInferenceService/ServerLive",
                "/nvidia.inferenceserver.GRPCInferenceService/ServerLive",
            ):
                with pytest.raises(front_doors.grpc.RpcError) as caught:
                    channel.unary_unary(path)(b"", timeout=front_doors.LIMIT_S)
                assert caught.value.code().name == "UNIMPLEMENTED", path
            live = front_doors.ask_grpc(
                stub, "ServerLive", front_doors.service_pb2.ServerLiveRequest(), headers=GRPC_KEY
            )
            assert live[0] == "OK", live
    return found


def test_h10_grpc_answers_alike_on_every_method(guarded: FrontDoors) -> None:
    """[H-10] No method without the header, no other name for one."""
    found = guarded.offend(_try_every_method, grpc=guarded.grpc, directory=str(guarded.run_directory))
    text = "This protocol is restricted, expecting header 'triton-grpc-protocol-x-key'"
    assert {name: answer for name, answer in found.items() if answer != ["UNAVAILABLE", text]} == {}
    assert len(found) == 2 * 21
    guarded.settled()


def _try_zeromq(directory: str) -> dict[str, Any]:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": front_doors.X.tobytes()}
    asked: dict[str, dict[str, Any]] = {
        "server": {},
        "models": {},
        "metadata": {"model": "add1"},
        "config": {"model": "add1"},
        "statistics": {},
        "register": {"name": "r", "key": "/r", "byte_size": 4096},
        "unregister": {},
        "regions": {},
        "infer": {"model": "add1", "inputs": [tensor]},
        "prepare": {"model": "add1", "inputs": [tensor]},
        "load": {"model": "add1"},
        "unload": {"model": "add1"},
    }
    found = {}
    with HandZmqClient(Path(directory)) as client:
        client.hello()
        for kind, fields in asked.items():
            found[kind] = client.ask(kind, **fields).get("message", "")
    return found


def test_h10_zeromq_is_no_way_around(guarded: FrontDoors) -> None:
    """[H-10] It has no headers to give: what is restricted elsewhere is not to be had here."""
    found = guarded.offend(_try_zeromq, directory=str(guarded.run_directory))
    assert {kind: text for kind, text in found.items() if "This API is restricted" not in text} == {}
    guarded.settled()


def _say_everything(urls: dict[str, str], keys: dict[str, dict[str, str]]) -> dict[str, Any]:
    """With clientlib: what it is told without the header, with a wrong one, and whether all verbs work with it."""
    found: dict[str, Any] = {}
    for wire, url in urls.items():
        told = []
        for headers in (None, dict.fromkeys(keys[wire], "wrong")):
            with pytest.raises(clientlib.InferError) as refused:
                clientlib.connect(url, timeout=front_doors.LIMIT_S, headers=headers)
            told.append([str(refused.value.code), refused.value.message])
        with clientlib.connect(url, headers=keys[wire]) as client:
            assert "add1" in client.models()
            assert client.statistics("add1")
            out = [client.infer("add1", {"x": front_doors.X})["y"]]
            out += [each["y"] for each in client.stream("add1", {"x": front_doors.X})]
            region = client.create_region("x", front_doors.X.nbytes)
            region.array((1, 4), "FP32")[:] = front_doors.X
            with client.prepare("add1", {"x": region.tensor((1, 4), "FP32")}) as plan:
                out.append(plan.submit().result()["y"].copy())
        out.append(asyncio.run(_infer_on_a_loop(url, keys[wire])))
        found[wire] = [*told, [(each == front_doors.X + 1).all().item() for each in out]]
    return found


async def _infer_on_a_loop(url: str, headers: dict[str, str]) -> Any:
    async with await clientlib.connect_async(url, headers=headers) as client:
        return (await client.infer("add1", {"x": front_doors.X}))["y"]


def test_h10_the_client_library_says_what_is_missing_and_sends_it(guarded: FrontDoors) -> None:
    """[H-10] Over each wire; the value that was sent is not repeated."""
    urls = {
        "http": f"http://127.0.0.1:{guarded.http}",
        "grpc": f"grpc://127.0.0.1:{guarded.grpc}",
        "zmq": f"zmq+ipc://{guarded.run_directory}",
    }
    found = guarded.offend(_say_everything, urls=urls, keys={"http": HTTP_KEY, "grpc": GRPC_KEY, "zmq": HTTP_KEY})
    for wire, (without, wrong, right) in found.items():
        kind, (name,) = ("protocol", GRPC_KEY) if wire == "grpc" else ("API", HTTP_KEY)
        text = f"This {kind} is restricted, expecting header '{name}' with its value for 'health': clientlib.connect"
        assert without == wrong == ["UNAVAILABLE", f"{text}(url, headers={{'{name}': value}})"]
        assert right == [True] * 4, wire
    guarded.settled()


# --- H-09 ----------------------------------------------------------------------------------------------------------


def _come_from(http: int, grpc: int, host: str) -> dict[str, Any]:
    with raw.named_memory(4096) as key:
        return {
            "http": front_doors.http_verbs((host, http), key, "victim", **HTTP_KEY),
            "grpc": front_doors.grpc_verbs(f"{host}:{grpc}", key, "victim", **GRPC_KEY),
        }


def test_h09_who_comes_from_another_address_than_loopback_is_remote(guarded: FrontDoors) -> None:
    """[H-09] An address of this host, which is as near as a test without a network can come."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: only picks a source address
        except OSError:
            pytest.skip("no route but loopback")
        host = probe.getsockname()[0]
    if ip_address(host).is_loopback:
        pytest.skip("no address but loopback")
    front_doors.assert_nothing_but_inline(guarded.offend(_come_from, http=guarded.http, grpc=guarded.grpc, host=host))
    guarded.settled()
