"""Rows M: malformed and hostile control messages on the session socket."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from tests.fakes.broker import tensor
from tests.faults import raw
from tests.faults.lab import Lab, scaled

PREPARE = {
    "type": "Prepare",
    "id": 7,
    "model": "add1",
    "inputs": [tensor("x", "r", (2, 4))],
    "outputs": [tensor("y", "r", (2, 4), offset=1024)],
}


class Bomb:
    """Unpickling it leaves a mark."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path(self.path),))


# --- M-09: garbage -------------------------------------------------------------------------------------------------


def _garbage(seed: int, bomb: str) -> Iterator[bytes]:
    chance = random.Random(seed)
    yield pickle.dumps(Bomb(bomb))
    yield b"\xff" + struct.pack(">Q", 1) + b"\x7f"  # a ZMTP greeting
    yield b"\x01\xff" + struct.pack(">Q", 8 << 30)  # a ZMTP frame that claims 8 GiB
    yield b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n"
    yield b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    yield b"\x91" * 60_000  # arrays in arrays
    yield b"\x81\xa1a" * 20_000
    yield b"\xdd\xff\xff\xff\xff"  # an array of 2^32 - 1
    yield b"\xdb\xff\xff\xff\xff" + b"x" * 100
    yield b"\xc7\x04\x05\x00\x00\x00\x00"  # an extension type
    yield msgpack.packb({**PREPARE, "extra": 1})
    yield msgpack.packb([PREPARE])
    yield msgpack.packb({**PREPARE, "type": "Nope"})
    yield msgpack.packb({**PREPARE, "type": "Welcome"})
    yield msgpack.packb({**PREPARE, "type": 3})
    yield msgpack.packb({"id": 1})
    whole = msgpack.packb(PREPARE)
    yield from (whole[:cut] for cut in range(1, len(whole)))
    yield whole + b"\x00"
    for _ in range(50):
        yield chance.randbytes(4096)
    for _ in range(200):
        broken = bytearray(whole)
        broken[chance.randrange(len(broken))] ^= 1 << chance.randrange(8)
        yield bytes(broken)


def _send_garbage(bomb: str) -> dict[str, Any]:
    client = raw.session()
    region = raw.Region(client)
    kinds: dict[str, int] = {}
    texts = set()
    for data in _garbage(1, bomb):
        client.send_raw(data)
        reply = client.receive()
        code, text = raw.outcome(reply)
        kinds[code] = kinds.get(code, 0) + 1
        if code in ("INVALID_ARG", "NOT_FOUND", "UNSUPPORTED"):
            texts.add(text)
        assert client.ask("ListRegions")["regions"][0]["name"] == region.name
    return {"kinds": kinds, "texts": sorted(texts)}


def _be_a_stranger(bomb: str) -> list[list[str]]:
    ends = []
    for data in _garbage(2, bomb):
        client = raw.stranger()
        client.send_raw(data)
        last = None
        while (reply := client.receive()) is not None:
            last = raw.outcome(reply)
        ends.append(last or ["hung up", ""])
        client.close()
    return ends


def test_m09_garbage_in_a_session_is_refused_message_by_message(lab: Lab, tmp_path: Path) -> None:
    """[M-09] pickle bombs, other protocols, truncations and flipped bits: an answer each, the session lives on."""
    bomb = tmp_path / "exploded"
    before = lab.status()["counters"]["protocol_errors"]
    result = lab.offend(_send_garbage, bomb=str(bomb))
    assert set(result["kinds"]) <= {"INVALID_ARG", "NOT_FOUND", "UNSUPPORTED", "Prepared"}, result["kinds"]
    assert result["kinds"]["INVALID_ARG"] > 150
    assert all(text for text in result["texts"])
    assert not bomb.exists()
    assert lab.status()["counters"]["protocol_errors"] >= before + 150
    lab.settled()


def test_m09_a_stranger_that_sends_garbage_is_hung_up(lab: Lab, tmp_path: Path) -> None:
    """[M-09] the same as the first message: a failure, then the end."""
    bomb = tmp_path / "exploded"
    assert {code for code, _ in lab.offend(_be_a_stranger, bomb=str(bomb))} == {"hung up"}
    assert not bomb.exists()
    lab.settled()


# --- M-16: datagrams and descriptors -------------------------------------------------------------------------------


def _break_datagrams() -> dict[str, Any]:
    found: dict[str, Any] = {}
    client = raw.stranger()
    found["version + 1"] = raw.outcome(client.ask("Hello", protocol=2))
    found["version + 1, then"] = raw.outcome(client.receive())
    client = raw.stranger()
    found["no Hello"] = raw.outcome(client.ask("ListRegions"))
    client = raw.session()
    found["second Hello"] = raw.outcome(client.ask("Hello", protocol=1))
    client.send_raw(b"")
    found["length 0"] = raw.outcome(client.receive())
    client = raw.session()
    client.send_raw(b"x" * 65_537)
    found["65537 bytes"] = raw.outcome(client.receive())
    found["65537 bytes, then"] = raw.outcome(client.receive())
    client = raw.session()
    try:
        client.send_raw(b"x" * (4 << 20))
    except OSError as error:
        found["4 MiB"] = error.strerror
    found["4 MiB, then"] = raw.outcome(client.ask("ListRegions"))
    return found


def _attach_descriptors() -> dict[str, Any]:
    read, write = os.pipe()
    found: dict[str, Any] = {}
    client = raw.session()
    for count in (1, 2, 16):
        found[f"{count} where none belongs"] = raw.outcome(client.ask("ListRegions", [write] * count))
    found["none where one belongs"] = raw.outcome(client.ask("RegisterPool", name="p", byte_size=4096))
    found["two where one belongs"] = raw.outcome(client.ask("RegisterPool", [write] * 2, name="p", byte_size=4096))
    with contextlib.suppress(OSError):
        client.ask("ListRegions", [write] * 254)
        found["254"] = "was sent"
    for count in (17, 100, 253):
        client = raw.session()
        client.send("ListRegions", [write] * count)
        found[str(count)] = raw.outcome(client.receive())
        found[f"{count}, then"] = raw.outcome(client.receive())
    client = raw.session()
    client.send_raw(b"\xc1", [write] * 16)
    found["with garbage"] = raw.outcome(client.receive())
    os.close(write)
    found["all closed"] = os.read(read, 1) == b""
    return found


def test_m16_datagrams_that_no_client_sends(lab: Lab) -> None:
    """[M-16] wrong version, no Hello, empty, too long: an error or the end, never silence."""
    found = lab.offend(_break_datagrams)
    assert found["version + 1"][0] == "UNSUPPORTED"
    assert "protocol 1" in found["version + 1"][1]
    assert "protocol 2" in found["version + 1"][1]
    assert found["version + 1, then"][0] == "hung up"
    assert found["no Hello"] == ["INVALID_ARG", "the first message must be Hello"]
    assert found["second Hello"][0] == "INVALID_ARG"
    assert found["length 0"][0] == "hung up"
    assert found["65537 bytes"] == ["INVALID_ARG", "a datagram is longer than 65536 bytes"]
    assert found["65537 bytes, then"][0] == "hung up"
    assert found["4 MiB"] == "Message too long"
    assert found["4 MiB, then"] == ["Regions", ""]
    lab.settled()


def test_m16_descriptors_where_none_or_too_many_belong(lab: Lab) -> None:
    """[M-16] every received descriptor is closed, whatever becomes of its message."""
    found = lab.offend(_attach_descriptors)
    for count in (1, 2, 16):
        assert found[f"{count} where none belongs"] == ["Regions", ""]
    for case in ("none where one belongs", "two where one belongs"):
        assert found[case][0] == "INVALID_ARG"
        assert "exactly one descriptor" in found[case][1]
    for count in (17, 100, 253):
        assert found[str(count)][0] == "INVALID_ARG"
        assert "at most 16 travel with one" in found[str(count)][1]
        assert found[f"{count}, then"][0] == "hung up"
    assert "254" not in found
    assert found["with garbage"][0] == "INVALID_ARG"
    assert found["all closed"]
    lab.settled()


# --- M-10, M-11, M-13: names ---------------------------------------------------------------------------------------


def _say_names() -> list[Any]:
    client = raw.session()
    region = raw.Region(client)
    found = []
    for name in (
        "",
        ".",
        "..",
        "../add1",
        "/etc/passwd",
        "add1/1",
        "add1\x00",
        "äöü",
        "add1\r\nE1129 forged",
        "\x1b[31m",
    ):
        for kind in ("GetModel", "GetStatistics", "LoadModel", "UnloadModel"):
            found.append([kind, name, *raw.outcome(client.ask(kind, model=name))])
        found.append(["Prepare", name, *raw.outcome(raw.plan(client, name))])
    for version in ("..", "1/../1", "-1", "0", "2", "1.0", "\uff11", " 1", "1\n", "9" * 300, "0x1", "True"):
        found.append(["version", version, *raw.outcome(raw.plan(client, version=version))])
    assert raw.outcome(raw.plan(client)) == ["Prepared", ""]
    assert region.name == "r"
    return found


def test_m11_names_that_no_model_has(lab: Lab) -> None:
    """[M-11, M-13] paths, NUL, line ends, colours: refused, and the log has no line that a client wrote."""
    for kind, name, code, text in lab.offend(_say_names):
        if kind == "GetStatistics" and not name:
            assert code == "Statistics"
        elif kind in ("LoadModel", "UnloadModel"):
            assert code == "UNAVAILABLE"
        else:
            assert code in ("INVALID_ARG", "NOT_FOUND"), (kind, name, code, text)
    log = lab.broker.log()
    assert "\x1b" not in log
    assert "\nE1129 forged" not in log
    lab.settled()


def _say_many() -> dict[str, Any]:
    client = raw.session()
    region = raw.Region(client)
    one = tensor("x", "r", (2, 8))
    out = tensor("y", "r", (2, 8), offset=1024)
    small = {"name": "x", "region": "r", "datatype": "FP32", "shape": []}
    cases = {
        "x twice": ([one, one], [out]),
        "y twice": ([one], [out, out]),
        "4097 inputs": ([small] * 1200, [out]),
        "many names": ([{**small, "name": f"x{i}"} for i in range(1000)], [out]),
        "many outputs": ([one], [{**small, "name": f"y{i}"} for i in range(1000)]),
        "no inputs": ([], [out]),
        "no outputs": ([one], []),
        "long name": ([{**one, "name": "x" * 257}], [out]),
        "longer name": ([{**one, "name": "x" * 60_000}], [out]),
    }
    found = {
        name: raw.outcome(client.ask("Prepare", model="add1", inputs=i, outputs=o)) for name, (i, o) in cases.items()
    }
    assert raw.outcome(raw.plan(client)) == ["Prepared", ""]
    assert region.name == "r"
    return found


def test_m10_many_tensors_and_duplicates(lab: Lab) -> None:
    """[M-10] thousands of tensors, doubles, long names: refused in a text of bounded length."""
    found = lab.offend(_say_many)
    for case, (code, text) in found.items():
        assert code == "INVALID_ARG", case
        assert len(text) < 2000, case
    assert "already exists in request" in found["x twice"][1]
    assert "already exists in request" in found["y twice"][1]
    lab.settled()


# --- too much ------------------------------------------------------------------------------------------------------


def _ask_and_never_read(requests: int) -> str:
    client = raw.session()
    with contextlib.suppress(OSError):
        for _ in range(requests):
            client.send("GetStatus")
    last = "nothing"
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while (reply := client.receive()) is not None:
            last = raw.outcome(reply)[0]
    return last


def test_client_that_asks_and_never_reads_is_hung_up(lab: Lab) -> None:
    """[L-05, native] replies are queued up to a bound, then the session ends; nobody else waits."""
    assert lab.offend(_ask_and_never_read, requests=scaled(20_000, 200_000)) in ("hung up", "Status")
    lab.settled()


def _fail_a_hundred_times() -> list[str]:
    client = raw.session()
    codes = []
    for _ in range(150):
        with contextlib.suppress(OSError):
            client.send_raw(b"\xc1")
        if (reply := client.receive()) is None:
            break
        codes.append(raw.outcome(reply)[0])
    return codes


def test_nothing_but_garbage_ends_the_session(lab: Lab) -> None:
    """[M-09] somebody who never says anything right is hung up after a hundred tries, not served for ever."""
    codes = lab.offend(_fail_a_hundred_times)
    assert codes[:-1] == ["INVALID_ARG"] * (len(codes) - 1)
    assert codes[-1] == "hung up"
    assert len(codes) <= 102
    lab.settled()


@pytest.mark.parametrize("count", [300])
def test_m16_many_datagrams_full_of_descriptors(lab: Lab, count: int) -> None:
    """[M-16] 253 descriptors at a time, again and again: none stays."""
    assert lab.offend(_flood_with_descriptors, count=count) == count
    lab.settled()


def _flood_with_descriptors(count: int) -> int:
    read, write = os.pipe()
    for _ in range(count):
        client = raw.session()
        with contextlib.suppress(OSError):
            client.send_raw(b"\x80", [write] * 253)
            client.send_raw(b"\x80", [write] * 253)
        client.close()
    os.close(write)
    assert os.read(read, 1) == b""
    return count
