"""A session as a client meets it: a real broker, messages packed by hand, well-formed and not."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import pickle
import secrets
from pathlib import Path

import msgpack
import numpy as np
import posix_ipc
import pytest

from broker.status import ROWS
from shm.errors import Code
from shm.layout import TAIL
from tests.fakes.broker import (
    Ending,
    descriptor,
    eventually,
    open_channel,
    pool,
    prepare_add1,
    reap,
    steady,
    tensor,
)

pytestmark = pytest.mark.timeout(180)


# --- the ordinary way ---------------------------------------------------------------------------------------------


def test_register_and_prepare_sent_back_to_back_then_infer(broker):
    def answered() -> int:
        (model,) = broker.client().ask("GetStatistics", model="add1")["model_stats"]
        return int(model["inference_stats"]["success"]["count"])

    before = steady(answered)
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
        assert client.receive()["type"] == "Welcome"
        assert client.receive()["type"] == "RegionInfo"
        prepared = client.receive()
        assert (prepared["worker"], prepared["model_version"], prepared["rows"]) == ("cpu/default", "1", 2)
        channel = open_channel(client, slots=3)
        assert channel.slots == 4
        memory[:32] = np.arange(8, dtype=np.float32).tobytes()
        ending = Ending()
        assert channel.submit(ending, prepared["index"] | prepared["generation"] << 32, 0, 0, 0, 0)
        reap(channel, [ending])
        assert ending.note == b""
        np.testing.assert_array_equal(np.frombuffer(memory[64:96], np.float32), np.arange(1, 9))
        channel.close()
        eventually(lambda: answered() == before + 1, "it is counted")


def test_models_are_described(broker):
    client = broker.client()
    described = client.ask("GetModels")["models"]
    assert [(model["name"], model["state"]) for model in described] == [("add1", "READY"), ("two_input", "READY")]
    (add1,) = client.ask("GetModel", model="add1", version="1")["models"]
    assert add1["inputs"][0]["shape"] == [-1, -1]
    assert add1["workers"] == ["cpu/default"]
    for fields, code, text in (
        ({"model": "nope"}, "INVALID_ARG", "Request for unknown model: 'nope' is not found; models: "),
        ({"model": "add1", "version": "9"}, "NOT_FOUND", "'add1' version 9 is not found; its versions: 1"),
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
        "explicit model load / unload is not allowed if polling is enabled: start the broker with "
        "--model-control-mode=explicit",
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


def test_the_status_document_has_a_size(broker):
    client = broker.client()
    fd = pool(4096)
    with descriptor(fd):
        for number in range(ROWS + 5):
            assert client.ask("RegisterPool", [fd], name=f"r{number}", byte_size=4096)["type"] == "RegionInfo"
        status = broker.status()
        assert [row["name"] for row in status["regions"]] == [f"r{number}" for number in range(ROWS)]
        assert status["quotas"]["regions"] == ROWS + 5
        (row,) = (row for row in status["sessions"] if row["regions"])
        assert (row["regions"], row["region_bytes"]) == (ROWS + 5, 4096 * (ROWS + 5))


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
    before = steady(broker.descriptors)
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
    eventually(lambda: broker.descriptors() <= before, "those of the last ones are closed, too")
    for fd in (good, plain, null, read, write):
        os.close(fd)


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


def test_a_client_that_breaks_its_channel_is_told_and_hung_up(broker):
    client, other = broker.client(), broker.client()
    client.ask("OpenChannel", worker="cpu/default", slots=64)
    memory, bell, _ = client.fds
    with mmap.mmap(memory, os.fstat(memory).st_size) as channel:
        channel[TAIL * 8 : TAIL * 8 + 8] = b"\xff" * 8
        os.eventfd_write(bell, 1)
        goodbye = client.receive()
    assert goodbye["type"] == "Goodbye"
    assert goodbye["reason"].startswith("channel ")
    assert client.receive() is None
    assert other.ask("ListRegions")["type"] == "Regions"


def test_a_region_truncated_under_a_worker_is_an_error_of_its_requests(broker):
    key = f"/tb-{secrets.token_hex(8)}"
    memory = posix_ipc.SharedMemory(key, posix_ipc.O_CREX, size=4096)
    try:
        client = broker.client()
        client.ask("RegisterSystem", name="r", key=key, byte_size=4096)
        plan = prepare_add1(client)
        channel = open_channel(client)
        os.ftruncate(memory.fd, 0)
        ending = Ending()
        assert channel.submit(ending, plan["index"] | plan["generation"] << 32, 0, 0, 0, 0)
        reap(channel, [ending])
        assert ending.entry[2] & 0xFFFFFFFF == Code.INTERNAL
        assert b"changed size" in ending.note
        channel.close()
        assert client.ask("Unregister", name="r")["type"] == "Done"
    finally:
        os.close(memory.fd)
        posix_ipc.unlink_shared_memory(key)
