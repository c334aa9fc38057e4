"""GPU memory of unmodified HTTP, gRPC and ZeroMQ clients, served by a real broker: simulated; not run on hardware.

The clients are processes of their own, as CUDA wants it. TensorRT is a double (tests/doubles/tensorrt.py).
"""

from __future__ import annotations

import base64
import os
import signal
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.doubles import tensorrt as double
from tests.fakes import models, streaming_backend
from tests.fakes.broker import eventually, steady
from tests.fakes.cuda import ROOT, CudaEnv
from tests.fakes.cuda_children import Child
from tests.fakes.cuda_worker import BACKEND
from tests.fakes.gateways import Gateway
from tests.fakes.lone_worker import WAIT, Gate
from tests.fakes.zmq_gateway import HandZmqClient
from tests.integration.test_cuda_served import ADDER, DONE, DOUBLES, IDENTITY, PIPE, PLAN, per_request
from tests.integration.test_principals import CONFIG as GATED

pytestmark = pytest.mark.timeout(120)
SIZE, APART = 4096, 1024
SHAPE = [1, 4]
over_http = pytest.mark.parametrize("process", ["http"], indirect=True)  # what is the same over gRPC
INVALID = "failed to register shared memory region: invalid args"


@pytest.fixture(scope="module")
def env(cuda_sim: CudaEnv) -> CudaEnv:
    return cuda_sim.with_settings(CUSIM_DEVICES=2, CUSIM_PEER=0)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("front-ends") / "repository"
    models.write_model(repository, "on_cpu", config=IDENTITY % "KIND_CPU")
    models.write_model(repository, "add", config=ADDER)
    (repository / "add" / "backend.py").write_text(BACKEND)
    (repository / "add" / "1" / "model.plan").write_bytes(double.plan("add", *PLAN))
    models.write_model(repository, "pipe", config=PIPE)
    models.write_model(repository, "many", config=streaming_backend.CONFIG)
    (repository / "many" / "backend.py").write_bytes(Path(streaming_backend.__file__).read_bytes())
    return repository


@pytest.fixture(scope="module")
def gate(repository: Path) -> Iterator[Gate]:
    gate = Gate(repository / "gate")
    config = GATED.format(repository / "gate") + "instance_group [ { kind: KIND_CPU } ]"
    (repository / "gate" / "config.pbtxt").write_text(config)
    yield gate
    gate.close()


@pytest.fixture(scope="module")
def broker(env: CudaEnv, repository: Path, gate: Gate) -> Iterator[Gateway]:
    directory = repository.parent / "run"
    directory.mkdir()
    with Gateway(
        repository,
        directory,
        "--allow-client-shm=true",
        "--cuda-region-memory=1048576",
        before=lambda: os.environ.update(env.environ, PYTHONPATH=str(ROOT)),
        gateways=2,
    ) as running:
        yield running.ready()


def caller(broker: Gateway, env: CudaEnv, transport: str) -> Child:
    address = f"127.0.0.1:{broker.ports[transport]}"
    return Child(env, "tests.fakes.cuda_triton:TritonCaller", "simulated", transport, address)


@pytest.fixture(scope="module", params=["http", "grpc"])
def process(request: pytest.FixtureRequest, broker: Gateway, env: CudaEnv) -> Iterator[Child]:
    with caller(broker, env, request.param) as child:
        yield child


@pytest.fixture
def user(process: Child) -> Iterator[Child]:
    yield process
    process.call("unregister_all")
    process.call("destroy_all")


@pytest.fixture
def zmq(broker: Gateway) -> Iterator[HandZmqClient]:
    with HandZmqClient(broker.directory) as client:
        client.hello()
        yield client
        client.ask("goodbye")


@pytest.fixture
def application(env: CudaEnv) -> Iterator[Child]:
    with Child(env, "tests.fakes.cuda_triton:TritonUser", "simulated") as child:
        yield child


def worker(broker: Gateway) -> int:
    """The process id of the GPU's."""
    pid: int = next(row["pid"] for row in broker.status()["workers"] if row["key"] == "gpu0/tensorrt")
    return pid


def opens(broker: Gateway, env: CudaEnv) -> tuple[int, int]:
    """Handles that the GPU's worker has opened, and closed."""
    calls = env.calls(worker(broker))
    return calls.get("cuIpcOpenMemHandle", 0), calls.get("cuIpcCloseMemHandle", 0)


def steady_opens(broker: Gateway, env: CudaEnv) -> tuple[int, int]:
    """The same once what an earlier client had is closed: nobody waits for that when it is gone."""
    return steady(lambda: opens(broker, env))


def test_tritons_flow(broker: Gateway, env: CudaEnv, user: Child) -> None:
    """As simple_{http,grpc}_cudashm_client do it."""
    first = steady_opens(broker, env)
    for name in ("in", "out"):
        user.call("create", name, SIZE, 0)
        assert user.call("register", name, name, 0, SIZE) == ""
    assert user.call("status") == [["in", 0, SIZE], ["out", 0, SIZE]]
    assert user.call("status", "in") == [["in", 0, SIZE]]
    user.call("set", "in", [1, 2, 3, 4, 10, 20, 30, 40])
    before = opens(broker, env)
    for model, inputs, expected in (
        ("add", {"INPUT0": ("in", 0), "INPUT1": ("in", 16)}, [11, 22, 33, 44]),
        ("on_cpu", {"INPUT0": ("in", 16)}, [10, 20, 30, 40]),
    ):
        for _ in range(3):
            user.call("set", "out", [0, 0, 0, 0])
            assert user.call("infer", model, inputs, {"OUTPUT0": ("out", 0)}, SHAPE) == {}
            assert user.call("get", "out", 4) == expected
    assert opens(broker, env) == before, "a request opens nothing"
    assert user.call("unregister", "in") == user.call("unregister", "nix") == ""
    assert "Unable to find cuda shared memory region: 'in'" in user.call("status", "in")
    said = user.call("infer", "on_cpu", {"INPUT0": ("in", 0)}, {"OUTPUT0": ("out", 0)}, SHAPE)
    assert "Unable to find shared memory region: 'in'" in said
    assert user.call("unregister", "") == ""
    assert user.call("status") == []
    assert [now - then for then, now in zip(first, opens(broker, env), strict=True)] == [2, 2]
    assert user.call("destroy", "in") + user.call("destroy", "out") == 1


def test_the_driver_is_called_as_for_a_native_request(broker: Gateway, env: CudaEnv, user: Child) -> None:
    user.call("create", "g", SIZE, 0)
    assert user.call("register", "g", "g", 0, SIZE) == ""
    asked = "add", {"INPUT0": ("g", 0), "INPUT1": ("g", 0)}, {"OUTPUT0": ("g", APART)}, SHAPE
    assert per_request(env, worker(broker), lambda: user.call("infer", *asked)) == DOUBLES | DONE


def test_memory_of_all_kinds_in_one_request(user: Child) -> None:
    user.call("create", "g", SIZE, 0)
    assert user.call("register", "g", "g", 0, SIZE) == user.call("register_system", "s", SIZE) == ""
    try:
        user.call("set", "g", [1, 2, 3, 4])
        user.call("set_system", "s", [5, 5, 5, 5])
        both = {"INPUT0": ("g", 0), "INPUT1": ("s", 0)}
        assert user.call("infer", "add", both, {"OUTPUT0": None}, SHAPE) == {"OUTPUT0": [6, 7, 8, 9]}
        assert user.call("infer", "add", both, {"OUTPUT0": 2}, SHAPE) == {"OUTPUT0": ["9.000000:3", "8.000000:2"]}
        assert user.call("infer", "add", both, {"OUTPUT0": ("s", APART)}, SHAPE) == {}
        assert user.call("get_system", "s", 260)[256:] == [6, 7, 8, 9]
        inline = {"INPUT0": [1, 1, 1, 1], "INPUT1": ("g", 0)}
        assert user.call("infer", "add", inline, {"OUTPUT0": ("g", APART)}, SHAPE) == {}
        assert user.call("get", "g", 260)[256:] == [2, 3, 4, 5]
        assert user.call("infer", "on_cpu", {"INPUT0": ("g", 0)}, {"OUTPUT0": 1}, SHAPE) == {"OUTPUT0": ["4.000000:3"]}
    finally:
        user.call("destroy_system", "s")


@over_http
def test_a_gpu_without_a_worker(broker: Gateway, env: CudaEnv, user: Child) -> None:
    """Its memory is opened, and copied, by workers on the CPU. Ordinals are the broker's, whatever the client sees."""
    user.call("create", "second", SIZE, 1)
    user.call("create", "first", SIZE, 0)
    before = steady_opens(broker, env)
    assert user.call("register", "g", "second", 0, SIZE).endswith(INVALID), "it is on the other one"
    assert user.call("register", "g", "second", 1, 1 << 19).endswith("region 'g': invalid args"), "it is smaller"
    assert user.call("register", "g", "second", 1, SIZE) == ""
    assert user.call("status") == [["g", 1, SIZE]]
    assert user.call("register", "first", "first", 0, SIZE) == ""
    user.call("set", "second", [1, 2, 3, 4])
    assert user.call("infer", "on_cpu", {"INPUT0": ("g", 0)}, {"OUTPUT0": ("first", 0)}, SHAPE) == {}
    assert user.call("get", "first", 4) == [1, 2, 3, 4]
    both = {"INPUT0": ("g", 0), "INPUT1": ("first", 0)}
    said = user.call("infer", "add", both, {"OUTPUT0": None}, SHAPE)
    assert isinstance(said, str), said
    assert "this worker runs on" in said
    user.call("unregister", "")
    opened, closed = (after - earlier for after, earlier in zip(opens(broker, env), before, strict=True))
    assert (opened, closed) == (2, 1), "calls, one of which failed"


def test_what_lies_outside_or_over_something(user: Child) -> None:
    user.call("create", "g", SIZE, 0)
    assert user.call("register", "g", "g", 0, SIZE // 2) == "", "the first half of the allocation"
    assert user.call("register", "other", "g", 0, SIZE) == "", "the same memory by another name"
    for inputs, output, expected in (
        (("g", SIZE // 2), ("g", 0), "Invalid offset for shared memory region: 'g'"),
        (("g", SIZE // 2 - 8), ("g", 0), "Invalid offset + byte size for shared memory region: 'g'"),
        (("g", 0), ("g", 8), "output 'OUTPUT0' overlaps input 'INPUT0'"),
        (("g", 0), ("other", 8), "output 'OUTPUT0' overlaps input 'INPUT0'"),
        (("g", 0), ("g", 64, 0), "shared memory size specified with the request for output 'OUTPUT0' (0 bytes)"),
        (("g", 0), ("g", 64, 8), "shared memory size specified with the request for output 'OUTPUT0' (8 bytes)"),
    ):
        assert expected in user.call("infer", "on_cpu", {"INPUT0": inputs}, {"OUTPUT0": output}, SHAPE)


def test_handles_that_open_nothing(broker: Gateway, env: CudaEnv, user: Child) -> None:
    handle: bytes = user.call("create", "g", SIZE, 0)
    before = steady_opens(broker, env)
    said = user.call("register", "g", "g", 0, 1 << 19)
    assert said.endswith("failed to register shared memory region 'g': invalid args")
    for device in (1, 99):
        assert user.call("register", "g", "g", device, SIZE).endswith(INVALID)
    own = handle[:4] + struct.pack("<i", worker(broker)) + handle[8:]  # as if that worker had exported it
    for bad in (bytes(64), bytes(range(64)), own):
        assert user.call("register_handle", "g", base64.b64encode(bad), 0, SIZE).endswith(INVALID)
    for length in (1, 63, 65):
        said = user.call("register_handle", "g", base64.b64encode(bytes(length)), 0, SIZE)
        assert said.endswith((INVALID, "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t"))
    user.call("create", "freed", SIZE, 0)
    stale = user.call("handle", "freed")
    user.call("destroy", "freed")
    assert user.call("register_handle", "g", stale, 0, SIZE).endswith(INVALID)
    opened, closed = (after - earlier for after, earlier in zip(opens(broker, env), before, strict=True))
    assert user.call("status") == []
    assert user.call("register", "g", "g", 0, SIZE) == ""
    assert user.call("register", "g", "g", 0, SIZE).endswith("shared memory region 'g' already in manager")
    assert (opens(broker, env)[1], closed) == (before[1] + closed, 1), "the one that was too large was closed"
    assert opened >= closed


def test_one_output_region_for_all_requests(user: Child) -> None:
    """As load generators have it; two gateways do not know of each other's requests."""
    user.call("create", "g", SIZE, 0)
    assert user.call("register", "g", "g", 0, SIZE) == ""
    user.call("set", "g", [1, 2, 3, 4])
    for model, inputs in (("on_cpu", {"INPUT0": ("g", 0)}), ("add", {"INPUT0": ("g", 0), "INPUT1": ("g", 0)})):
        assert user.call("infer_at_once", model, inputs, {"OUTPUT0": ("g", APART)}, SHAPE, 16) == []
    assert user.call("get", "g", 260)[256:] == [2, 4, 6, 8]


def test_a_stream_of_grpc(broker: Gateway, env: CudaEnv) -> None:
    with caller(broker, env, "grpc") as user:
        user.call("create", "g", SIZE, 0)
        assert user.call("register", "g", "g", 0, SIZE) == ""
        user.call("set", "g", [1, 2, 3, 4])
        inputs = {"INPUT0": ("g", 0), "INPUT1": ("g", 0)}
        assert user.call("stream", "add", inputs, {"OUTPUT0": ("g", APART)}, SHAPE, 5) == {}
        assert user.call("get", "g", 260)[256:] == [2, 4, 6, 8]
        user.call("unregister_all")


@over_http
def test_a_user_has_so_many_bytes(user: Child) -> None:
    user.call("create", "g", 1 << 20, 0)
    assert user.call("register", "a", "g", 0, 1 << 20) == ""
    assert "--cuda-region-memory" in user.call("register", "b", "g", 0, 16)
    user.call("unregister", "a")
    assert user.call("register", "b", "g", 0, 16) == ""


def test_an_exporter_that_is_killed(broker: Gateway, env: CudaEnv) -> None:
    """Its regions stay until they are unregistered: a handle does not say whose it is. Others are served meanwhile."""
    before = steady_opens(broker, env)
    with caller(broker, env, "http") as user:
        user.call("create", "g", SIZE, 0)
        assert user.call("register", "g", "g", 0, SIZE) == ""
        user.kill()
    with caller(broker, env, "grpc") as other:
        said = other.call("infer", "on_cpu", {"INPUT0": ("g", 0)}, {"OUTPUT0": None}, SHAPE)
        assert isinstance(said, str) or len(said["OUTPUT0"]) == 4, "an error or an answer"
        assert other.call("infer", "on_cpu", {"INPUT0": [1, 2, 3, 4]}, {"OUTPUT0": None}, SHAPE) == {
            "OUTPUT0": [1, 2, 3, 4]
        }
        assert other.call("status") == [["g", 0, SIZE]]
        other.call("unregister_all")
        assert other.call("status") == []
    opened, closed = (after - earlier for after, earlier in zip(opens(broker, env), before, strict=True))
    assert opened == closed == 1


def test_zeromq_by_hand(broker: Gateway, env: CudaEnv, application: Child, zmq: HandZmqClient) -> None:
    before = steady_opens(broker, env)
    handle = application.call("create", "g", SIZE, 0)
    bad = zmq.ask("register_cuda", name="g", handle=handle[:63], device=0, byte_size=SIZE)
    assert (bad["code"], bad["message"]) == (
        "INVALID_ARG",
        f"{INVALID} (region 'g': a handle has 64 bytes, 63 came)",
    )
    assert zmq.ask("register_cuda", name="g", handle=handle, device=0, byte_size=SIZE)["type"] == "done"
    row = {"name": "g", "kind": "cuda", "key": "0", "offset": 0, "byte_size": SIZE}
    assert zmq.ask("regions")["regions"] == [row]
    application.call("set", "g", [1, 2, 3, 4, 5, 6, 7, 8])
    inputs = [tensor(f"INPUT{at}") for at in range(2)]
    reply = zmq.ask("infer", model="add", inputs=inputs, outputs=[tensor("OUTPUT0", APART)])
    assert reply["outputs"] == [{"name": "OUTPUT0", "datatype": "FP32", "shape": SHAPE}]
    assert application.call("get", "g", 260)[256:] == [2, 4, 6, 8]
    prepared = zmq.ask(
        "prepare",
        model="add",
        inputs=[{**each, "stride": 16} for each in inputs],
        outputs=[{**tensor("OUTPUT0", APART), "stride": 16}],
        input_slots=2,
        output_slots=2,
    )
    assert zmq.ask("run", number=prepared["number"], input_slot=1, output_slot=1)["type"] == "result"
    assert application.call("get", "g", 264)[256:] == [2, 4, 6, 8, 10, 12, 14, 16]
    assert zmq.ask("goodbye")["type"] == "done"
    eventually(lambda: [b - a for a, b in zip(before, opens(broker, env), strict=True)] == [1, 1], "it is closed")


def tensor(name: str, offset: int = 0) -> dict[str, Any]:
    """Of the ZeroMQ protocol, as an input or an output in region "g"."""
    where = {"name": name, "region": "g", "offset": offset, "byte_size": 16}
    return where | ({"datatype": "FP32", "shape": SHAPE} if name.startswith(("INPUT", "x")) else {})


def test_unregister_is_answered_when_no_request_uses_the_memory(
    application: Child, zmq: HandZmqClient, gate: Gate
) -> None:
    handle = application.call("create", "g", SIZE, 0)
    zmq.ask("register_cuda", name="g", handle=handle, device=0, byte_size=SIZE)
    application.call("set", "g", [WAIT, 2, 3, 4])
    infer = zmq.send("infer", model="gate", inputs=[tensor("x")], outputs=[tensor("y", APART)])
    gate.entered()
    unregister = zmq.send("unregister", name="g")
    assert zmq.silent()
    gate.let()
    replies = [zmq.receive(), zmq.receive()]  # the worker lets memory go just before it tells the end of a request
    assert {reply["id"]: reply["type"] for reply in replies} == {infer: "result", unregister: "done"}
    assert application.call("get", "g", 260)[256:] == [WAIT + 1, 3, 4, 5], "written before the memory was let go"


def test_what_gpu_memory_cannot_be_used_for(broker: Gateway, application: Child) -> None:
    region = {"name": "g", "raw_handle": application.call("create", "g", SIZE, 0), "device_id": 0, "byte_size": SIZE}
    request = service_pb2.ModelInferRequest(model_name="many", raw_input_contents=[struct.pack("<5i", 1, 4, 0, -1, -1)])
    request.inputs.add(name="ACT", datatype="INT32", shape=[5])
    request.outputs.add(name="Y").parameters["shared_memory_region"].string_param = "g"
    request.outputs[0].parameters["shared_memory_byte_size"].int64_param = 16
    with grpc.insecure_channel(f"127.0.0.1:{broker.ports['grpc']}") as wire:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(wire)
        stub.CudaSharedMemoryRegister(service_pb2.CudaSharedMemoryRegisterRequest(**region))
        (reply,) = stub.ModelStreamInfer(iter([request]))
        stub.CudaSharedMemoryUnregister(service_pb2.CudaSharedMemoryUnregisterRequest(name="g"))
    assert "output 'Y' of decoupled model 'many' cannot be written to CUDA shared memory region" in reply.error_message
    assert reply.error_message.endswith("use system shared memory, or none, and copy each response to the GPU")


def test_ensembles_over_workers_use_gpu_memory(application: Child, zmq: HandZmqClient) -> None:
    handle = application.call("create", "g", SIZE, 0)
    zmq.ask("register_cuda", name="g", handle=handle, device=0, byte_size=SIZE)
    application.call("set", "g", [1, 2, 3, 4])
    reply = zmq.ask("infer", model="pipe", inputs=[{**tensor("x"), "name": "IN"}], outputs=[tensor("OUT", APART)])
    assert reply["type"] == "result", reply
    assert application.call("get", "g", 260)[256:] == [2, 4, 6, 8]


def test_a_worker_that_is_killed_comes_back_to_the_same_memory(
    broker: Gateway, application: Child, zmq: HandZmqClient
) -> None:
    handle = application.call("create", "g", SIZE, 0)
    zmq.ask("register_cuda", name="g", handle=handle, device=0, byte_size=SIZE)
    application.call("set", "g", [1, 2, 3, 4])
    asked = {"inputs": [tensor("INPUT0"), tensor("INPUT1")], "outputs": [tensor("OUTPUT0", APART)]}
    assert zmq.ask("infer", model="add", **asked)["type"] == "result"
    os.kill(worker(broker), signal.SIGKILL)
    application.call("set", "g", [2, 2, 2, 2])
    assert zmq.ask("infer", model="add", **asked)["type"] == "result"
    assert application.call("get", "g", 260)[256:] == [4, 4, 4, 4]


def test_memory_that_was_freed_and_made_again(application: Child, zmq: HandZmqClient) -> None:
    """The driver does not open what lies where something else is open: what that client has freed is closed first."""
    asked = {"inputs": [tensor("INPUT0"), tensor("INPUT1")], "outputs": [tensor("OUTPUT0", APART)]}
    zmq.ask("register_cuda", name="g", handle=application.call("create", "g", SIZE, 0), device=0, byte_size=SIZE)
    assert zmq.ask("infer", model="add", **asked)["type"] == "result"
    application.call("destroy", "g")
    handle = application.call("create", "again", SIZE, 0)
    assert zmq.ask("register_cuda", name="again", handle=handle, device=0, byte_size=SIZE)["type"] == "done"
    reply = zmq.ask("infer", model="add", **asked)
    assert (reply["type"], reply["code"]) == ("error", "NOT_FOUND"), reply
    zmq.ask("unregister", name="g")
    assert zmq.ask("register_cuda", name="g", handle=handle, device=0, byte_size=SIZE)["type"] == "done"
    assert zmq.ask("infer", model="add", **asked)["type"] == "result"
