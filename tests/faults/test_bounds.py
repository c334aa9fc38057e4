"""Rows B-01 … B-10: the ranges of a prepared request, said by hand: the client library would refuse most of them."""

from __future__ import annotations

import fcntl
import os
from typing import Any

import numpy as np
import pytest

from shm.errors import Code
from tests.fakes.broker import HandClient, tensor
from tests.faults import raw
from tests.faults.lab import Lab

SIZE = 4096
X_BYTES = 64  # FP32 [2,8]


def _prepared(
    client: HandClient, x: dict[str, Any] | None = None, y: dict[str, Any] | None = None, **more: Any
) -> list[str]:
    reply = raw.plan(client, "add1", x, y, **more)
    if reply["type"] == "Prepared":
        client.ask("Release", index=reply["index"], generation=reply["generation"])
    return raw.outcome(reply)


# --- B-01 … B-06: places -------------------------------------------------------------------------------------------

GOOD = [
    ({}, {}),
    ({"byte_size": X_BYTES}, {"byte_size": X_BYTES}),
    ({"offset": SIZE - X_BYTES}, {}),
    ({}, {"offset": SIZE - X_BYTES}),
    ({"stride": 0}, {"stride": X_BYTES}),
    ({"stride": 2**63 - 1}, {}),  # of one position it is never used
]
BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("B-01", {"region": "nosuch"}, "NOT_FOUND", "Unable to find shared memory region: 'nosuch'"),
    ("B-02", {"offset": SIZE}, "INVALID_ARG", "Invalid offset for shared memory region: 'r'"),
    ("B-02", {"offset": SIZE + 1}, "INVALID_ARG", "Invalid offset for shared memory region: 'r'"),
    ("B-02", {"offset": 2**63 - 1}, "INVALID_ARG", "Invalid offset for shared memory region: 'r'"),
    ("B-03", {"offset": SIZE - X_BYTES + 1}, "INVALID_ARG", "Invalid offset + byte size for shared memory region: 'r'"),
    ("B-03", {"byte_size": SIZE + 1}, "INVALID_ARG", "Invalid offset + byte size for shared memory region: 'r'"),
    ("B-04", {"byte_size": 2**63 - 1}, "INVALID_ARG", "Invalid offset + byte size for shared memory region: 'r'"),
    ("B-04", {"byte_size": 2**63 - 1, "offset": 4095}, "INVALID_ARG", "Invalid offset + byte size"),
    ("B-04", {"byte_size": 2**63}, "INVALID_ARG", "byte_size"),
    ("B-04", {"byte_size": 2**64 - 1}, "INVALID_ARG", "byte_size"),
    ("B-05", {"offset": -1}, "INVALID_ARG", "offset"),
    ("B-05", {"offset": -(2**63)}, "INVALID_ARG", "offset"),
    ("B-05", {"stride": -64}, "INVALID_ARG", "stride"),
]
WRONG_SIZES = [(X_BYTES + 1), (X_BYTES - 1), (2 * X_BYTES), 1]


def _place(kind: str, cases: list[dict[str, Any]]) -> list[list[str]]:
    client = raw.session()
    raw.Region(client)
    return [_prepared(client, **{kind: case}) for case in cases]


def _place_well(cases: list[list[dict[str, Any]]]) -> list[list[str]]:
    client = raw.session()
    raw.Region(client)
    return [_prepared(client, x, {"offset": 1024, **y}) for x, y in cases]


def test_b00_places_that_are_right(lab: Lab) -> None:
    """The last byte of a region may be used, and sizes may be said."""
    assert {code for code, _ in lab.offend(_place_well, cases=GOOD)} == {"Prepared"}
    lab.settled()


@pytest.mark.parametrize("kind", ["x", "y"])
def test_b01_to_b05_places_outside_the_region(lab: Lab, kind: str) -> None:
    """[B-01] [B-02] [B-03] [B-04] [B-05] inputs and outputs alike, in Triton's words."""
    found = lab.offend(_place, kind=kind, cases=[case for _, case, _, _ in BAD])
    for (row, case, code, text), got in zip(BAD, found, strict=True):
        assert got[0] == code, (row, case, got)
        assert text in got[1], (row, case, got)
    lab.settled()


def test_b04_sums_do_not_wrap_over_positions(lab: Lab) -> None:
    """[B-04] (positions - 1) * stride + size, with every factor at its largest."""
    found = lab.offend(_overflow)
    for case, (code, text) in found.items():
        assert code == "INVALID_ARG", case
        assert text.startswith(("Integer overflow detected: byte_size (", "Invalid offset + byte size")), (case, text)
    assert found["largest"][1].startswith("Integer overflow detected")
    lab.settled()


def _overflow() -> dict[str, list[str]]:
    client = raw.session()
    raw.Region(client)
    many = {"input_positions": 65534, "output_positions": 65534}
    return {
        "largest": _prepared(client, {"stride": 2**63 - 1}, **many),
        "wraps to 0": _prepared(client, {"stride": 2**62}, input_positions=5),
        "wraps to 64": _prepared(client, {"stride": 2**63 - 1, "offset": 2}, input_positions=3),
        "output": _prepared(client, {}, {"stride": 2**63 - 1}, **many),
        "by one": _prepared(client, {"stride": X_BYTES}, input_positions=SIZE // X_BYTES + 1),
    }


def test_b06_byte_size_that_is_not_the_shape_s(lab: Lab) -> None:
    """[B-06] ±1, twice, 1: the shape says 64 bytes."""
    found = lab.offend(_place, kind="x", cases=[{"byte_size": size} for size in WRONG_SIZES])
    for size, (code, text) in zip(WRONG_SIZES, found, strict=True):
        assert code == "INVALID_ARG"
        assert text == f"input byte size mismatch for input 'x' for model 'add1'. Expected 64, got {size}"
    lab.settled()


# --- B-07: outputs that are too small ------------------------------------------------------------------------------


def _give_little_room() -> dict[str, Any]:
    client = raw.session()
    region = raw.Region(client)
    found: dict[str, Any] = {size: _prepared(client, {}, {"byte_size": size}) for size in (1, 63)}
    region.floats(0, 8)[:] = 1
    region.memory[1024:2048] = b"\xee" * 1024
    # Eight non-zero elements of one dimension: 64 bytes of INT64, of which the plan has room for `room`.
    channel = raw.Channel(client)
    for room in (8, 63, 64):
        plan = client.ask(
            "Prepare",
            model="nonzero",
            inputs=[tensor("x", "r", (8,))],
            outputs=[tensor("y", "r", (1, -1), "INT64", offset=1024, byte_size=room)],
        )
        ending = channel.wait(channel.submit(plan["index"], plan["generation"]))
        found[f"room {room}"] = [ending[0], ending[1] if ending[0] != "0" else ""]
        found[f"written {room}"] = sum(byte != 0xEE for byte in region.memory[1024:2048])
        client.ask("Release", index=plan["index"], generation=plan["generation"])
    channel.close()
    return found


def test_b07_outputs_larger_than_their_room(lab: Lab) -> None:
    """[B-07] the error names the bytes needed, and nothing is written, not even what would fit."""
    found = lab.offend(_give_little_room)
    for size in ("1", "63"):
        assert found[size] == [
            "INVALID_ARG",
            f"shared memory size specified with the request for output 'y' for model 'add1' ({size} bytes) should be "
            "at least 64 bytes to hold the results",
        ]
    for room in (8, 63):
        code, text = found[f"room {room}"]
        assert code == str(int(Code.INVALID_ARG))
        assert f"output 'y' ({room} bytes) should be at least 64 bytes to hold the results" in text
        assert found[f"written {room}"] == 0
    assert found["room 64"] == ["0", ""]
    assert found["written 64"] == 64
    lab.settled()


# --- B-08, B-09: overlap -------------------------------------------------------------------------------------------


def _overlap() -> dict[str, Any]:
    client = raw.session()
    raw.Region(client)
    twice = [tensor("a", "r", (2, 8)), tensor("b", "r", (2, 8), offset=64)]

    def two(total: int, difference: int) -> list[str]:
        outputs = [tensor("total", "r", (2, 8), offset=total), tensor("difference", "r", (2, 8), offset=difference)]
        return raw.outcome(client.ask("Prepare", model="two_input", inputs=twice, outputs=outputs))

    found: dict[str, Any] = {f"by {offset}": _prepared(client, {}, {"offset": offset}) for offset in (0, 1, 32, 63)}
    found["before by 1"] = _prepared(client, {"offset": 63}, {"offset": 0})
    found["beside"] = _prepared(client, {}, {"offset": 64})
    positions = {"input_positions": 4, "output_positions": 4}
    found["another position"] = _prepared(client, {"stride": 64}, {"offset": 192}, **positions)
    found["between positions"] = _prepared(client, {"stride": 128}, {"offset": 64, "stride": 128}, **positions)
    found["own positions"] = _prepared(client, {}, {"stride": 63}, output_positions=2)
    with raw.named_memory(8192) as key:
        for name, offset in (("low", 0), ("high", 32)):
            client.ask("RegisterSystem", name=name, key=key, byte_size=4096, offset=offset)
        found["two windows"] = _prepared(client, {"region": "low"}, {"region": "high", "offset": 0})
        found["apart in them"] = _prepared(client, {"region": "low"}, {"region": "high", "offset": 32})
    found["outputs equal"] = two(1024, 1024)
    found["outputs by 1"] = two(1024, 1087)
    found["outputs beside"] = two(1024, 1088)
    return found


def test_b08_b09_overlap_within_a_plan(lab: Lab) -> None:
    """[B-08] [B-09] an output over an input, over another output, over its next position, through two windows."""
    found = lab.offend(_overlap)
    for case in ("beside", "between positions", "apart in them", "outputs beside"):
        assert found.pop(case) == ["Prepared", ""], case
    for case, (code, text) in found.items():
        assert code == "INVALID_ARG", case
        assert "overlap" in text, (case, text)
    lab.settled()


def _write_twice_at_once(count: int) -> dict[str, Any]:
    """Slow requests whose ranges meet those of others, from one session and from two that share memory."""
    client, other = raw.session(), raw.session()
    region = raw.Region(client)
    token = client.ask("ShareRegion", name="r")["token"]
    assert other.ask("OpenRegion", name="r", token=token)["type"] == "RegionInfo"
    np.frombuffer(region.memory, np.int64, 1)[:] = count

    def slow(who: HandClient, output: int, x: int = 64) -> tuple[int, int]:
        inputs = [tensor("count", "r", (1,), "INT64"), tensor("x", "r", (4,), offset=x)]
        reply = who.ask("Prepare", model="slow", inputs=inputs, outputs=[tensor("y", "r", (4,), offset=output)])
        assert reply["type"] == "Prepared", reply
        return reply["index"], reply["generation"]

    mine, theirs = raw.Channel(client), raw.Channel(other)
    first = slow(client, 1024)
    running = mine.submit(*first)
    found: dict[str, Any] = {
        "same plan": mine.wait(mine.submit(*first)),
        "same range": mine.wait(mine.submit(*slow(client, 1024))),
        "half": mine.wait(mine.submit(*slow(client, 1032))),
        "over its input": mine.wait(mine.submit(*slow(client, 64, x=256))),
        "reads its output": mine.wait(mine.submit(*slow(client, 2048, x=1024))),
        "other session": theirs.wait(theirs.submit(*slow(other, 1024))),
        "running still": running.entry is None,
    }
    found["first"] = mine.wait(running)
    found["right"] = bool((region.floats(1024, 4) == count).all())
    found["afterwards"] = theirs.wait(theirs.submit(*slow(other, 1024)))
    mine.close()
    theirs.close()
    return found


def test_b09_same_range_in_two_requests_at_once(lab: Lab) -> None:
    """[B-09] a range that a request in flight reads or writes is nobody else's to write, whoever asks."""
    for count in (500_000, 2_000_000, 8_000_000):  # a busy machine may be slow to ask for the others
        found = lab.offend(_write_twice_at_once, count=count, timeout_s=60)
        if found["running still"]:
            break
    assert found.pop("running still"), "the slow request was over before the others were answered"
    assert found.pop("right")
    assert found.pop("first") == found.pop("afterwards") == ["0", ""]
    for case, (code, text) in found.items():
        assert code in (str(int(Code.UNAVAILABLE)), str(int(Code.INVALID_ARG))), (case, text)
        assert "overlap" in text or "in flight" in text, (case, text)
    lab.settled()


# --- B-10: memory that cannot be written ---------------------------------------------------------------------------


def _use_read_only() -> dict[str, Any]:
    client = raw.session()
    raw.Region(client)
    fd = os.memfd_create("read-only", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.posix_fallocate(fd, 0, 4096)
    os.pwrite(fd, np.arange(16, dtype=np.float32).tobytes(), 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
    info = client.ask("RegisterPool", [fd], name="sealed", byte_size=4096)
    os.close(fd)
    found: dict[str, Any] = {"writable": info["writable"]}
    found["output"] = _prepared(client, {}, {"region": "sealed"})
    found["input"] = _prepared(client, {"region": "sealed"})
    with raw.named_memory(4096) as key:
        os.chmod(f"/dev/shm{key}", 0o400)
        client.ask("RegisterSystem", name="readable", key=key, byte_size=4096)
        found["system output"] = _prepared(client, {}, {"region": "readable"})
        found["system input"] = _prepared(client, {"region": "readable"})
    return found


def test_b10_read_only_memory_is_no_place_for_outputs(lab: Lab) -> None:
    """[B-10] write-sealed memfds and objects that their owner may only read."""
    found = lab.offend(_use_read_only)
    assert found["writable"] is False
    for case in ("output", "system output"):
        assert found[case][0] == "INVALID_ARG"
        assert found[case][1].endswith("which is read-only")
    for case in ("input", "system input"):
        assert found[case] == ["Prepared", ""]
    lab.settled()
