"""The broker as a client and an operator meet it: real processes, messages packed by hand."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import pickle
import resource
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgpack
import numpy as np
import posix_ipc
import pytest

from shm.client_channel import ClientChannel
from tests.fakes import models
from tests.fakes.broker import LIMIT_S, Broker, HandClient, alive, command, descriptor, eventually, pool, tensor
from tests.fakes.processes import children, name_of

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    return models.write_repository(
        tmp_path_factory.mktemp("repository"), {"add1": models.add1(), "two_input": models.two_input()}
    )


@pytest.fixture(scope="module")
def broker(repository, tmp_path_factory):
    """One broker for all tests that leave it as they found it."""
    with Broker(repository, tmp_path_factory.mktemp("run")) as broker:
        yield broker.ready()


@pytest.fixture(autouse=True)
def nothing_stays(request):
    """After each test of the shared broker: the same process, no session, no region, its descriptors as before."""
    if "broker" not in request.fixturenames:
        yield
        return
    broker = request.getfixturevalue("broker")
    pid, before = broker.pid, broker.descriptors()
    yield
    for client in broker._clients:
        client.close()
    eventually(lambda: broker.descriptors() <= before, "descriptors are back")
    status = broker.status()
    assert status["broker"]["pid"] == pid
    assert [session for session in status["sessions"] if session["library"] != "tensorbroker status"] == []
    assert status["regions"] == []
    assert status["quotas"]["memory_used"] == 0


class Ending:
    """What a submission leaves in the channel."""

    def __init__(self):
        self.entry = None
        self.note = b""

    def settle(self, entry, note):
        self.entry, self.note = entry, note


def prepare_add1(client, region="r", rows=2, **fields):
    inputs = [tensor("x", region, (rows, 4))]
    outputs = [tensor("y", region, (rows, 4), offset=64)]
    return client.ask("Prepare", model="add1", inputs=inputs, outputs=outputs, **fields)


# --- the ordinary way ---------------------------------------------------------------------------------------------


def test_register_prepare_open_and_infer_sent_back_to_back(broker):
    client = broker.connect()
    fd = pool(4096)
    with descriptor(fd), mmap.mmap(fd, 4096) as memory:
        client.send("Hello", protocol=1)
        client.send("RegisterPool", [fd], name="r", byte_size=4096)
        client.send(
            "Prepare",
            model="add1",
            inputs=[tensor("x", "r", (2, 4))],
            outputs=[tensor("y", "r", (2, 4), offset=64)],
        )
        client.send("OpenChannel", worker="cpu/default", slots=3)
        assert client.receive()["type"] == "Welcome"
        assert client.receive()["type"] == "RegionInfo"
        prepared = client.receive()
        assert (prepared["worker"], prepared["model_version"], prepared["rows"]) == ("cpu/default", "1", 2)
        channel = client.receive()
        assert channel["slots"] == 4
        memory_fd, bell, pipe = client.fds
        client.fds = []
        memory[:32] = np.arange(8, dtype=np.float32).tobytes()
        link = ClientChannel(memory_fd, bell, pipe, channel["slots"], 0.0)
        ending = Ending()
        assert link.submit(ending, prepared["index"] | prepared["generation"] << 32, 0, 0, 0, 0)
        deadline = time.monotonic() + LIMIT_S
        while ending.entry is None and time.monotonic() < deadline:
            link.wait(1.0)
            link.reap()
        assert ending.entry is not None
        assert ending.note == b""
        np.testing.assert_array_equal(np.frombuffer(memory[64:96], np.float32), np.arange(1, 9))
        link.close()
        (model,) = client.ask("GetStatistics", model="add1")["model_stats"]
        assert model["inference_stats"]["success"]["count"] == 1


def test_models_are_described(broker):
    client = broker.client()
    described = client.ask("GetModels")["models"]
    assert [(model["name"], model["state"]) for model in described] == [("add1", "READY"), ("two_input", "READY")]
    (add1,) = client.ask("GetModel", model="add1", version="1")["models"]
    assert add1["inputs"][0]["shape"] == [-1, -1]
    assert add1["workers"] == ["cpu/default"]
    for fields, code, text in (
        ({"model": "nope"}, "INVALID_ARG", "Request for unknown model: 'nope' is not found"),
        ({"model": "add1", "version": "9"}, "NOT_FOUND", "Request for unknown model: 'add1' version 9 is not found"),
        ({"model": "add1", "version": "x"}, "INVALID_ARG", "failed to get model version from specified version"),
        ({"model": "../add1"}, "INVALID_ARG", "is not found"),
        ({"model": "a\r\nE1129 forged\x1b[31m"}, "INVALID_ARG", "is not found"),
    ):
        failure = client.ask("GetModel", **fields)
        assert failure["code"] == code
        assert text in failure["message"]
    failure = client.ask("LoadModel", model="add1")
    assert (failure["code"], failure["message"]) == (
        "UNAVAILABLE",
        "explicit model load / unload is not allowed if polling is enabled",
    )


def test_shared_region_is_the_same_memory_until_its_owner_ends(broker):
    owner, reader = broker.client(), broker.client()
    fd = owner.register("frames")
    token = owner.ask("ShareRegion", name="frames")["token"]
    opened = reader.ask("OpenRegion", name="cam", token=token)
    assert (opened["byte_size"], opened["writable"]) == (4096, True)
    with descriptor(fd):
        os.pwrite(fd, b"hello", 0)
        assert os.pread(reader.fds[0], 5, 0) == b"hello"
    assert prepare_add1(reader, "cam")["type"] == "Prepared"
    owner.close()
    eventually(lambda: prepare_add1(reader, "cam")["type"] == "Failure", "the owner's end retires it")
    failure = prepare_add1(reader, "cam")
    assert (failure["code"], failure["message"]) == ("NOT_FOUND", "Unable to find shared memory region: 'cam'")
    assert reader.ask("OpenRegion", name="cam", token=token)["code"] == "NOT_FOUND"


def test_a_system_region_comes_with_the_open_file(broker):
    key = f"/tb-{secrets.token_hex(8)}"
    memory = posix_ipc.SharedMemory(key, posix_ipc.O_CREX, size=8192)
    try:
        client = broker.client()
        info = client.ask("RegisterSystem", name="in", key=key, byte_size=4096, offset=100)
        assert (info["kind"], info["offset"], info["file_size"]) == ("system", 100, 8192)
        assert os.fstat(client.fds[0]).st_ino == os.fstat(memory.fd).st_ino
        (region,) = client.ask("ListRegions")["regions"]
        assert (region["key"], region["owner_pid"]) == (key, os.getpid())
        assert key.strip("/") not in json.dumps(broker.status())
        assert client.ask("Unregister", name="in")["type"] == "Done"
    finally:
        os.close(memory.fd)
        posix_ipc.unlink_shared_memory(key)


def test_unregister_affects_nobody_else_and_the_name_is_free(broker):
    mine, theirs = broker.client(), broker.client()
    for client in (mine, theirs):
        os.close(client.register("same name"))
    assert theirs.ask("Unregister", name="never heard of")["type"] == "Done"
    assert theirs.ask("Unregister")["type"] == "Done"
    assert [region["name"] for region in mine.ask("ListRegions")["regions"]] == ["same name"]
    failure = prepare_add1(theirs, "same name")
    assert failure["code"] == "NOT_FOUND"
    assert prepare_add1(mine, "same name")["type"] == "Prepared"
    fd = pool(4096)
    with descriptor(fd):
        failure = mine.ask("RegisterPool", [fd], name="same name", byte_size=4096)
        assert (failure["code"], failure["message"]) == (
            "ALREADY_EXISTS",
            "shared memory region 'same name' already in manager",
        )
    mine.ask("Unregister", name="same name")
    os.close(mine.register("same name"))


def test_released_plans_and_closed_channels_are_gone(broker):
    client = broker.client()
    os.close(client.register("r"))
    plan = prepare_add1(client)
    assert client.ask("Release", index=plan["index"], generation=plan["generation"])["type"] == "Done"
    assert client.ask("Release", index=plan["index"], generation=plan["generation"])["code"] == "NOT_FOUND"
    channel = client.ask("OpenChannel", worker="cpu/default", slots=64)
    pipe = os.dup(client.fds[2])
    with descriptor(pipe):
        assert client.ask("CloseChannel", channel=channel["channel"])["type"] == "Done"
        assert client.ask("CloseChannel", channel=channel["channel"])["code"] == "NOT_FOUND"
        os.set_blocking(pipe, True)
        while os.read(pipe, 4096):  # rings of its life, then its end: no write end is left anywhere
            pass
    assert client.ask("OpenChannel", worker="gpu7/default", slots=64)["code"] == "NOT_FOUND"


# --- hostile and broken clients -----------------------------------------------------------------------------------


class Bomb:
    """Unpickling it leaves a mark."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (Path(self.path),))


def test_malformed_messages_are_refused_and_the_next_valid_request_succeeds(broker, tmp_path):
    client = broker.client()
    os.close(client.register("r"))
    valid = msgpack.packb(
        {
            "type": "Prepare",
            "id": 77,
            "model": "add1",
            "inputs": [tensor("x", "r", (2, 4))],
            "outputs": [tensor("y", "r", (2, 4), offset=64)],
        }
    )
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    bad = [valid[:cut] for cut in range(1, len(valid), 2)] + [os.urandom(4096) for _ in range(20)]
    bad += [bomb, b"\x91" * 65536, b"\xff" + b"\x00" * 8 + b"\x01\x7f", valid + b"\x00"]
    for field, values in {
        "model": (None, 1, "x" * 5000, b"\xff\xfe"),
        "inputs": (None, {}, [[]], [{}], [tensor("x", "r", (2, 4))] * 4097, [tensor("x", "r", (-2,))]),
        "input_positions": (0, 65535, 65536, -1, 1.5, True, "1", 2**64 - 1),
        "id": (-1, 2**63, 1.0, "1", None),
    }.items():
        bad += [msgpack.packb({**msgpack.unpackb(valid), field: value}) for value in values]
    for place in ({"offset": -1}, {"offset": 2**63}, {"offset": 1e999}, {"stride": "64"}, {"byte_size": True}):
        message = msgpack.unpackb(valid)
        message["inputs"][0].update(place)
        bad.append(msgpack.packb(message))
    for data in bad:
        if len(data) > 65536:
            continue
        client.send_raw(data)
        reply = client.receive()
        assert reply["type"] == "Failure", data
        assert reply["code"] == "INVALID_ARG"
        assert "Traceback" not in reply["message"]
        client.send_raw(valid)
        assert client.receive()["type"] == "Prepared"
    assert not (tmp_path / "exploded").exists()
    assert broker.status()["counters"]["protocol_errors"] >= len(bad) - 1


@pytest.mark.parametrize(
    "first",
    [b"\xc1", b"GET /v2 HTTP/1.1\r\n\r\n", pickle.dumps(print), b"\xff" * 64],
    ids=["not msgpack", "http", "pickle", "zmtp"],
)
def test_a_stranger_is_hung_up(broker, first):
    client = broker.connect()
    client.send_raw(first)
    assert client.receive()["type"] == "Failure"
    assert client.receive()["type"] == "Goodbye"
    assert client.receive() is None


def test_wrong_version_is_named(broker):
    client = broker.connect()
    failure = client.ask("Hello", protocol=2)
    assert failure["code"] == "UNSUPPORTED"
    assert "protocol 1" in failure["message"]
    assert "protocol 2" in failure["message"]


def test_descriptors_where_none_or_too_many_belong(broker):
    client = broker.client()
    read, write = os.pipe()
    with descriptor(read):
        with descriptor(write):
            assert client.ask("ListRegions", [write] * 16)["type"] == "Regions"
            failure = client.ask("RegisterPool", name="r", byte_size=1)
            assert "exactly one descriptor" in failure["message"]
            failure = client.ask("RegisterPool", [write, write], name="r", byte_size=1)
            assert "exactly one descriptor" in failure["message"]
            with pytest.raises(OSError, match="Invalid argument"):
                client.send("ListRegions", [write] * 254)
            client.send("ListRegions", [write] * 253)
            assert client.receive()["type"] == "Failure"
            assert client.receive()["type"] == "Goodbye"
        assert os.read(read, 1) == b""


def test_huge_and_empty_datagrams(broker):
    client = broker.client()
    with pytest.raises(OSError, match="Message too long"):
        client.send_raw(b"x" * (2 << 20))
    assert client.ask("ListRegions")["type"] == "Regions"
    client.send_raw(b"x" * 100_000)
    assert client.receive()["type"] == "Failure"
    assert client.receive()["type"] == "Goodbye"
    client = broker.client()
    client.send_raw(b"")
    assert client.receive() is None


def test_ten_thousand_refused_registrations_leave_no_descriptor(broker):
    client = broker.client()
    good, plain, null = pool(4096), os.memfd_create("plain"), os.open("/dev/null", os.O_RDWR)
    read, write = os.pipe()
    before = broker.descriptors()
    cases = [
        (good, "too long", 8192),
        (good, "beyond every quota", 64 << 40),
        (good, "zero", 0),
        (plain, "not sealed", 4096),
        (null, "a device", 4096),
        (read, "a pipe", 4096),
    ]
    for turn in range(10_000 // len(cases)):
        for fd, name, byte_size in cases:
            client.send("RegisterPool", [fd], name=name, byte_size=byte_size)
        client.send("RegisterSystem", name="s", key=f"/nothing-{turn}", byte_size=1)
        for _ in range(len(cases) + 1):
            assert client.receive()["type"] == "Failure"
    assert broker.descriptors() <= before
    for fd in (good, plain, null, read, write):
        os.close(fd)


def test_quota_is_refused_with_numbers(repository, tmp_path):
    with Broker(repository, tmp_path / "run", "--region-memory", "64K") as broker:
        client = broker.ready().client()
        os.close(client.register("a", 40960))
        fd = pool(40960)
        with descriptor(fd):
            failure = client.ask("RegisterPool", [fd], name="b", byte_size=40960)
            assert failure["code"] == "UNAVAILABLE"
            for number in ("asked 40960", "used 40960", "limit 65536"):
                assert number in failure["message"]
            client.ask("Unregister", name="a")
            assert client.ask("RegisterPool", [fd], name="b", byte_size=40960)["type"] == "RegionInfo"


def test_a_client_that_never_reads_is_hung_up_and_others_are_served(broker):
    deaf, other = broker.client(), broker.client()
    with contextlib.suppress(OSError):
        for _ in range(200_000):
            deaf.send("GetStatus")
    assert other.ask("ListRegions")["type"] == "Regions"
    replies = 0
    while (reply := deaf.receive()) is not None and reply["type"] != "Goodbye":
        replies += 1
    assert replies < 200_000


def test_idle_connections_up_to_the_limit_and_beyond(repository, tmp_path):
    def few_descriptors():
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

    with Broker(repository, tmp_path / "run", before=few_descriptors) as broker:
        first = broker.ready().client()
        refused = 0
        crowd = [broker.connect() for _ in range(100)]
        for client in crowd:
            client.socket.settimeout(0.2)
            with contextlib.suppress(TimeoutError):
                reply = client.receive()
                refused += reply is not None and "too many sessions" in reply.get("reason", "")
        assert refused > 50
        assert first.ask("ListRegions")["type"] == "Regions"
        for client in crowd:
            client.close()
        eventually(lambda: _welcome(broker), "it recovers")
        assert broker.log().count("a connection was refused") < 30


def _welcome(broker):
    client = HandClient(broker.path)
    try:
        reply = client.ask("Hello", protocol=1) if client else None
    except (AssertionError, OSError):
        return False
    finally:
        client.close()
    return reply["type"] == "Welcome"


# --- ends of clients ----------------------------------------------------------------------------------------------

HOLDER = """
import os, socket, sys, time
sys.path.insert(0, {root!r})
from tests.fakes.broker import HandClient
client = HandClient({path!r})
client.ask("Hello", protocol=1)
for number in range(20):
    client.register(f"r{{number}}")
client.ask("OpenChannel", worker="cpu/default", slots=64)
if {fork}:
    if os.fork():
        print("holding", flush=True)
        time.sleep(60)
    time.sleep(60)
print("holding", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("fork", [False, True])
def test_a_killed_client_leaves_nothing_even_when_a_child_holds_its_socket(broker, fork):
    root = str(Path(__file__).parent.parent.parent)
    script = HOLDER.format(root=root, path=broker.path, fork=fork)
    before = broker.descriptors()
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"holding\n"
        forked = children(holder.pid)
        assert len(forked) == fork
        assert broker.descriptors() >= before + 20 + 4
        holder.kill()
        holder.wait()
        eventually(lambda: broker.descriptors() <= before, "the session's descriptors are closed")
        assert all(alive(pid) for pid in forked)
        for pid in forked:
            os.kill(pid, signal.SIGKILL)


def test_clients_that_come_and_go_leave_nothing(broker):
    before = broker.descriptors()
    for turn in range(100):
        client = broker.connect()
        client.send("Hello", protocol=1)
        fd = pool(4096)
        client.send("RegisterPool", [fd], name="r", byte_size=4096)
        os.close(fd)
        inputs, outputs = [tensor("x", "r", (1, 4))], [tensor("y", "r", (1, 4), offset=64)]
        client.send("Prepare", model="add1", inputs=inputs, outputs=outputs)
        client.send("OpenChannel", worker="cpu/default", slots=4)
        for _ in range(turn % 5):
            client.receive()
        client.close()
    eventually(lambda: broker.descriptors() <= before)


def test_a_worker_killed_between_register_and_prepare_is_not_noticed(broker):
    client = broker.client()
    os.close(client.register("r"))
    plan = prepare_add1(client)
    (worker,) = broker.status()["workers"]
    os.kill(worker["pid"], signal.SIGKILL)
    assert prepare_add1(client)["generation"] == plan["generation"]
    assert client.ask("OpenChannel", worker="cpu/default", slots=64)["type"] == "ChannelInfo"
    assert client.ask("Unregister")["type"] == "Done"
    (replaced,) = broker.status()["workers"]
    assert replaced["pid"] != worker["pid"]
    assert replaced["restarts"] == 1


# --- the broker's own start and end -------------------------------------------------------------------------------


def test_a_second_broker_is_refused_and_the_first_serves_on(broker, repository):
    second = command("serve", "--model-repository", str(repository), "--directory", str(broker.directory))
    assert second.returncode == 1
    assert f"already running (pid {broker.pid})" in second.stderr
    assert broker.client().ask("ListRegions")["type"] == "Regions"


def test_sigterm_ends_it_with_status_0_and_says_goodbye(repository, tmp_path):
    with Broker(repository, tmp_path / "run") as broker:
        client = broker.ready().client()
        os.close(client.register("r"))
        family = broker.descendants()
        assert {"tb-worker", "tb-zygote"} <= {name_of(pid) for pid in family}
        broker.process.send_signal(signal.SIGTERM)
        goodbye = client.receive()
        assert (goodbye["type"], goodbye["reason"]) == ("Goodbye", "the broker is shutting down")
        assert client.receive() is None
        assert broker.process.wait(LIMIT_S) == 0
        assert os.listdir(broker.directory) == []
        assert not any(alive(pid) for pid in family)
        assert "Signal (15) received." in broker.log()


def test_after_sigkill_the_next_one_takes_over(repository, tmp_path):
    with Broker(repository, tmp_path / "run") as broker:
        client = broker.ready().client()
        epoch = broker.status()["broker"]["epoch"]
        family = broker.descendants()
        broker.process.kill()
        assert client.receive() is None
        broker.process.wait()
        assert sorted(os.listdir(broker.directory)) == ["broker.lock", "broker.sock"]
        eventually(lambda: not any(alive(pid) for pid in family), "workers end with their broker")
        answer = command("status", "--directory", str(broker.directory))
        assert (answer.returncode, "no broker is running in" in answer.stderr) == (1, True)
    with Broker(repository, tmp_path / "run") as broker:
        assert broker.ready().status()["broker"]["epoch"] != epoch


def test_sigterm_while_it_loads(repository, tmp_path):
    with Broker(repository, tmp_path / "run") as broker:
        eventually(lambda: os.path.exists(broker.path))
        broker.process.send_signal(signal.SIGTERM)
        assert broker.process.wait(LIMIT_S) == 0
        assert os.listdir(broker.directory) == []


def test_sessions_wait_for_the_start_up_load_and_are_told(repository, tmp_path):
    with Broker(repository, tmp_path / "run") as broker:
        eventually(lambda: os.path.exists(broker.path))
        client = HandClient(broker.path)
        client.send_raw(msgpack.packb({"type": "Hello", "id": 5, "protocol": 1}))
        kinds = []
        while True:
            message = msgpack.unpackb(client.socket.recv(65536))
            kinds.append(message["type"])
            if message["type"] != "Starting":
                break
        client.close()
        assert message["type"] == "Welcome"
        assert message["id"] == 5
        assert kinds[0] == "Starting"
        broker.ready()


def test_a_broken_model_ends_it_or_is_shown(tmp_path):
    repository = models.write_repository(tmp_path / "repository", {"add1": models.add1()})
    broken = repository / "broken" / "1"
    broken.mkdir(parents=True)
    (broken / "model.onnx").write_bytes(b"not a model")
    checked = command("check", str(repository))
    assert checked.returncode == 1
    assert "UNAVAILABLE" in checked.stdout
    with Broker(repository, tmp_path / "run") as broker:
        assert broker.process.wait(LIMIT_S) == 1
        assert "error: creating server: Internal - failed to load all models" in broker.log()
    with Broker(repository, tmp_path / "run", "--exit-on-error=false") as broker:
        described = {model["name"]: model for model in broker.ready().status()["models"]}
        assert described["add1"]["state"] == "READY"
        assert described["broken"]["state"] == "UNAVAILABLE"
        assert described["broken"]["reason"]
        assert "| broken | -       | UNAVAILABLE" in broker.log()


def test_explicit_control_loads_and_unloads(repository, tmp_path):
    flags = ("--model-control-mode=explicit", "--load-model=add1")
    with Broker(repository, tmp_path / "run", *flags) as broker:
        client = broker.ready().client()
        assert [model["name"] for model in client.ask("GetModels")["models"]] == ["add1"]
        assert client.ask("LoadModel", model="two_input")["type"] == "Done"
        assert client.ask("GetModel", model="two_input")["models"][0]["state"] == "READY"
        assert client.ask("UnloadModel", model="two_input")["type"] == "Done"
        assert client.ask("GetModel", model="two_input")["code"] == "NOT_FOUND"
        assert "path traversal" in client.ask("LoadModel", model="../x")["message"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("serve",), "--model-repository must be specified"),
        (("serve", "--model-repository=/x", "--no-such-flag"), "Unexpected argument: --no-such-flag"),
        (("serve", "--model-repository=/x", "positional"), "Unexpected argument: positional"),
        (("serve", "--model-repository=/x", "--allow-http=maybe"), "invalid value for bool option: maybe"),
        (("fly",), "Unexpected argument: fly"),
        (("explain", "m"), "--model-repository must be specified"),
        (("status", "--directory", "/nonexistent/run"), "no broker is running in /nonexistent/run"),
    ],
)
def test_refused_command_lines(arguments, text):
    answer = command(*arguments)
    assert answer.returncode == 1
    assert text in answer.stderr
    assert "Traceback" not in answer.stderr


def test_explain_shows_the_final_configuration(repository):
    answer = command("explain", "add1", "--model-repository", str(repository))
    document = json.loads(answer.stdout)
    assert document["config"]["name"] == "add1"
    assert document["inputs"]["x"]["zero_copy"] is True
    assert command("explain", "nope", "--model-repository", str(repository)).returncode == 1
