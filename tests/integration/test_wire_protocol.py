"""docs/wire-protocol.md against a real broker, with pyzmq and msgpack alone; and the C client."""

from __future__ import annotations

import ctypes.util
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgpack
import numpy as np
import posix_ipc
import pytest
import zmq

from tests.fakes import models
from tests.fakes.broker import eventually
from tests.fakes.gateways import Gateway
from tests.fakes.zmq_gateway import HandZmqClient

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "wire-protocol.md").read_text()
C_CLIENT = ROOT / "examples" / "c_client"
# A block of hexadecimal digits; in each line they end where two spaces and a comment begin.
EXAMPLES = [
    bytes.fromhex("".join(re.sub(r'\s{2,}("|map|array).*', "", line) for line in block.splitlines()))
    for block in re.findall(r"```\n(8[0-9a-f] [^`]*)```", DOCUMENT)
]
HELLO, INFER, RESULT, RUN = EXAMPLES


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    repository = models.write_repository(tmp_path_factory.mktemp("repository"), {"add1": models.add1()})
    with Gateway(repository, tmp_path_factory.mktemp("run")) as broker:
        yield broker.ready()


@pytest.fixture
def client(broker: Gateway) -> Iterator[HandZmqClient]:
    with HandZmqClient(broker.directory) as client:
        yield client
        client.ask("goodbye")
    eventually(lambda: not system_regions(broker), "no region is left")


@pytest.fixture
def memory() -> Iterator[tuple[str, np.ndarray]]:
    """A POSIX object of 4096 bytes: its key, and the bytes."""
    key = f"/wire.{os.getpid()}"
    shared = posix_ipc.SharedMemory(key, posix_ipc.O_CREX, mode=0o600, size=4096)
    yield key, np.memmap(f"/proc/self/fd/{shared.fd}", np.uint8, "r+")
    shared.close_fd()
    posix_ipc.unlink_shared_memory(key)


def system_regions(broker: Gateway) -> list[dict[str, object]]:
    """Those that clients registered; the gateway has memory of its own."""
    return [region for region in broker.status()["regions"] if region["kind"] == "system"]


def exchange(client: HandZmqClient, frame: bytes) -> bytes:
    client.socket.send(frame)
    assert client.socket.poll(20_000)
    return client.socket.recv()


def test_the_sizes_that_the_document_names() -> None:
    named = [int(size) for size in re.findall(r"\((\d+) bytes\)", DOCUMENT)]
    assert named == [len(example) for example in EXAMPLES]


def test_the_documents_bytes_work_as_they_are(client: HandZmqClient, memory: tuple[str, np.ndarray]) -> None:
    key, contents = memory
    contents[:16] = np.arange(4, dtype=np.float32).view(np.uint8)
    welcome = msgpack.unpackb(exchange(client, HELLO))
    assert (welcome["type"], welcome["protocol"], welcome["resumed"]) == ("welcome", 1, False)
    assert re.fullmatch("[0-9a-f]{32}", welcome["token"])
    assert welcome["limits"] == {
        "message_bytes": 1 << 20,
        "requests": 1024,
        "request_bytes": 64 << 20,
        "prepared": 1024,
    }
    assert client.ask("register", id=2, name="in", key=key, byte_size=4096)["type"] == "done"
    assert exchange(client, INFER) == RESULT
    np.testing.assert_array_equal(contents[64:80].view(np.float32), [1, 2, 3, 4])
    assert client.ask("regions", id=5)["regions"] == [
        {"name": "in", "kind": "system", "key": key, "offset": 0, "byte_size": 4096}
    ]
    assert client.ask("unregister", id=6, name="in")["type"] == "done"
    assert msgpack.unpackb(exchange(client, INFER))["code"] == "NOT_FOUND"


def test_prepared_requests(client: HandZmqClient, memory: tuple[str, np.ndarray]) -> None:
    key, contents = memory
    client.hello()
    client.ask("register", name="in", key=key, byte_size=2048, offset=1024)  # offsets count from there
    contents[1024 + 7 * 16 : 1024 + 8 * 16] = np.full(4, 7, np.float32).view(np.uint8)
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "region": "in", "byte_size": 16, "stride": 16}
    output = {"name": "y", "region": "in", "offset": 1024, "byte_size": 16, "stride": 16}
    prepared = client.ask("prepare", model="add1", inputs=[tensor], outputs=[output], input_slots=20, output_slots=2)
    assert (prepared["type"], prepared["number"]) == ("prepared", 1)
    reply = msgpack.unpackb(exchange(client, RUN))
    assert (reply["type"], reply["id"]) == ("result", 9)
    np.testing.assert_array_equal(contents[2048:2064].view(np.float32), [8] * 4)
    assert client.ask("release", number=1)["type"] == "done"


def test_inline_and_what_there_is(client: HandZmqClient) -> None:
    client.hello()
    x = np.arange(4, dtype=np.float32)
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": x.tobytes()}
    reply = client.ask("infer", model="add1", inputs=[tensor], timeout_us=10_000_000, parameters={"mine": 1})
    np.testing.assert_array_equal(np.frombuffer(reply["outputs"][0]["data"], np.float32), x + 1)
    state = client.ask("server")
    assert (state["type"], state["live"], state["ready"]) == ("server_state", True, True)
    assert client.ask("models")["models"][0]["state"] == "READY"
    metadata = client.ask("metadata", model="add1")["metadata"]
    assert metadata["inputs"][0]["datatype"] == "FP32"
    assert client.ask("config", model="add1")["config"]["name"] == "add1"
    assert client.ask("statistics", model="add1")["model_stats"][0]["inference_count"] >= 1
    wrong = client.ask("infer", model="add1", inputs=[{**tensor, "datatype": "INT32"}])
    assert (wrong["type"], wrong["code"]) == ("error", "INVALID_ARG")
    assert client.ask("infer", model="nix", inputs=[tensor])["type"] == "error"


def test_a_session_outlives_the_gateway_and_not_its_client(broker: Gateway, memory: tuple[str, np.ndarray]) -> None:
    key, _ = memory
    with HandZmqClient(broker.directory, IMMEDIATE=1) as client:
        token = client.hello()["token"]
        client.ask("register", name="in", key=key, byte_size=4096)
        pid = broker.gateways()[0]["pid"]
        assert isinstance(pid, int)
        lost = client.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)  # which it is until the next gateway listens
        os.kill(pid, signal.SIGKILL)
        assert lost.poll(20_000), "the connection is gone"
        client.socket.disable_monitor()
        lost.close()
        assert client.socket.poll(30_000, zmq.POLLOUT), "the new gateway listens"
        client.told_to_say_hello()
        assert client.hello(token=token)["resumed"] is True
        assert [region["name"] for region in client.ask("regions")["regions"]] == ["in"]
        assert client.ask("goodbye")["type"] == "done"
    eventually(lambda: not system_regions(broker), "no region is left")


def libzmq() -> list[str]:
    """How to link the C client: Debian's libzmq with its headers, else the library inside pyzmq's wheel."""
    if Path("/usr/include/zmq.h").exists() and ctypes.util.find_library("zmq"):
        return ["-lzmq"]
    found = sorted((Path(zmq.__file__).parents[1] / "pyzmq.libs").glob("libzmq*.so*"))
    if not found:
        pytest.skip("no libzmq to link with: neither libzmq3-dev nor pyzmq's own is here")
    return [str(found[0]), f"-Wl,-rpath,{found[0].parent}"]


@pytest.fixture(scope="module")
def add1(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc to compile the C client with")
    program = str(tmp_path_factory.mktemp("c") / "add1")
    flags = ["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-fsanitize=undefined", "-fno-sanitize-recover"]
    command = [compiler, *flags, "-o", program, str(C_CLIENT / "add1.c"), *libzmq(), "-lrt"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return program


def test_the_c_client(add1: str, broker: Gateway) -> None:
    before = set(os.listdir("/dev/shm"))
    done = subprocess.run([add1, str(broker.directory)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 2 3 4\n", "")
    assert not {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("add1.")}
    eventually(lambda: not system_regions(broker), "no region is left")


def test_the_c_client_says_what_the_gateway_says(add1: str, tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(f"ipc://{tmp_path}/zmq.sock")
        with subprocess.Popen([add1, str(tmp_path)], stderr=subprocess.PIPE, text=True) as process:
            routing, hello = router.recv_multipart()
            assert msgpack.unpackb(hello) == {"type": "hello", "id": 1, "protocol": 1, "heartbeat_ms": 10000}
            more = {"unknown": [None, True, -1, 2**63, 0.5, {"a": b"x" * 300}, ["y" * 40] * 20], "code": "UNAVAILABLE"}
            error = {**more, "type": "error", "id": 1, "message": "not now"}
            router.send_multipart([routing, msgpack.packb(error)])
            _, stderr = process.communicate(timeout=30)
        assert (process.returncode, stderr) == (1, "hello: not now\n")


@pytest.mark.parametrize(
    "reply", [b"", b"\xc1", b"\xdf\xff\xff\xff\xff", b"\x82\xa2id\x01\xa4type\xdb\xff\xff\xff\xff"]
)
def test_the_c_client_survives_nonsense(add1: str, tmp_path: Path, reply: bytes) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(f"ipc://{tmp_path}/zmq.sock")
        with subprocess.Popen([add1, str(tmp_path)], stderr=subprocess.PIPE, text=True) as process:
            routing, _ = router.recv_multipart()
            router.send_multipart([routing, reply])
            _, stderr = process.communicate(timeout=30)
        assert process.returncode == 1
        assert stderr.startswith("hello: ")
