"""Rows S-01 … S-07: string tensors whose lengths lie."""

from __future__ import annotations

import os
import struct
from typing import Any

from shm.datatypes import MAX_STRING_ELEMENTS
from shm.errors import Code
from tests.fakes.broker import tensor
from tests.faults import raw
from tests.faults.lab import Lab, scaled

OUTPUT = 1 << 15
IA, OK = str(int(Code.INVALID_ARG)), "0"


def strings(*elements: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


class Echo:
    """The identity of string tensors: bytes in at 0, bytes out at OUTPUT of one region."""

    def __init__(self) -> None:
        self.client = raw.session()
        self.memory = raw.Region(self.client, byte_size=1 << 16).memory
        self.channel = raw.Channel(self.client)

    def prepare(self, count: int, byte_size: int, room: int = 1 << 14) -> dict[str, Any]:
        inputs = [tensor("x", "r", (1, count), "BYTES", byte_size=byte_size)]
        outputs = [tensor("y", "r", (1, -1), "BYTES", offset=OUTPUT, byte_size=room)]
        return self.client.ask("Prepare", model="identity_string", inputs=inputs, outputs=outputs)

    def ask(self, data: bytes, count: int, room: int = 1 << 14) -> list[str]:
        """[code, text] of `data` as `count` strings; the text is what came back, as hex, when it went well."""
        plan = self.prepare(count, len(data), room)
        if plan["type"] != "Prepared":
            return raw.outcome(plan)
        self.memory[: len(data)] = data
        self.memory[OUTPUT:] = b"\xee" * OUTPUT
        ending = self.channel.wait(self.channel.submit(plan["index"], plan["generation"]))
        self.client.ask("Release", index=plan["index"], generation=plan["generation"])
        if ending[0] == OK:
            return [OK, self.memory[OUTPUT : OUTPUT + len(data)].hex()]
        return ending

    def untouched(self) -> bool:
        return self.memory[OUTPUT:] == b"\xee" * OUTPUT


def _ask(cases: list[list[Any]]) -> list[list[str]]:
    echo = Echo()
    found = [echo.ask(bytes.fromhex(data), count) for data, count in cases]
    good = strings(b"still", b"here")
    assert echo.ask(good, 2) == [OK, good.hex()]
    return found


def test_s00_strings_that_are_right(lab: Lab) -> None:
    """Empty, long, many."""
    cases = [strings(b"a"), strings(b"", b""), strings(b"x" * 8000), strings(*(str(i).encode() for i in range(500)))]
    counts = [1, 2, 1, 500]
    found = lab.offend(_ask, cases=[[data.hex(), count] for data, count in zip(cases, counts, strict=True)])
    assert found == [[OK, data.hex()] for data in cases]
    lab.settled()


TEXT = strings(b"one", b"two")
LIES: list[tuple[str, bytes, int, str]] = [
    *[(f"S-01 {n}", TEXT + bytes(n), 2, "incomplete string length indicator|unexpected number") for n in (1, 2, 3)],
    *[(f"S-01 cut {n}", TEXT[:-n], 2, "incomplete string data") for n in (1, 2, 3)],
    *[(f"S-01 cut {n}", TEXT[:-n], 2, "incomplete string length indicator") for n in (4, 5, 6)],
    ("S-02 by 1", strings(b"one") + struct.pack("<I", 4) + b"two", 2, "incomplete string data"),
    ("S-02 largest", strings(b"one") + struct.pack("<I", 0xFFFF_FFFF) + b"two", 2, "incomplete string data"),
    ("S-02 sign", strings(b"one") + struct.pack("<I", 1 << 31) + b"two", 2, "incomplete string data"),
    ("S-02 first", struct.pack("<I", 0xFFFF_FFFF) + b"one", 1, "incomplete string data"),
    ("S-02 wraps", struct.pack("<I", 0xFFFF_FFFC) + b"one" * 3, 1, "incomplete string data"),
    ("S-03 too many", strings(b"1", b"2", b"3"), 2, "unexpected number of string elements 3"),
    ("S-03 too few", strings(b"1"), 2, "expected 2 string elements"),
    ("S-03 none", strings(b""), 2, "expected 2 string elements"),
]


def test_s01_s02_s03_lengths_that_lie(lab: Lab) -> None:
    """[S-01] [S-02] [S-03] Triton's texts, and the last length is looked at as well."""
    found = lab.offend(_ask, cases=[[data.hex(), count] for _, data, count, _ in LIES])
    for (case, _, _, texts), (code, got) in zip(LIES, found, strict=True):
        assert code == IA, (case, got)
        assert any(text in got for text in texts.split("|")), (case, got)
    lab.settled()


# --- S-04: very many -----------------------------------------------------------------------------------------------


def _ask_for_many(counts: list[int]) -> list[list[str]]:
    echo = Echo()
    return [echo.ask(bytes(4096), count) for count in counts]


def test_s04_very_many_strings(lab: Lab) -> None:
    """[S-04] the number of elements has a limit, and a few bytes do not hold many."""
    counts = [100_000_000, MAX_STRING_ELEMENTS + 1, 2**40, 2**62, 2**63 - 1]
    for count, (code, text) in zip(counts, lab.offend(_ask_for_many, counts=counts), strict=True):
        assert code in ("INVALID_ARG", IA), (count, text)
    lab.settled()


def _send_zero_length(count: int) -> list[str]:
    """As many empty strings as are said to be there."""
    client = raw.session()
    region = raw.Region(client, byte_size=4 * count + 4096)
    inputs = [tensor("x", "r", (1, count), "BYTES", byte_size=4 * count)]
    outputs = [tensor("y", "r", (1, -1), "BYTES", offset=4 * count, byte_size=4096)]
    plan = client.ask("Prepare", model="identity_string", inputs=inputs, outputs=outputs)
    if plan["type"] != "Prepared":
        return raw.outcome(plan)
    channel = raw.Channel(client)
    ending = channel.wait(channel.submit(plan["index"], plan["generation"]))
    assert region.name == "r"
    return ending


def test_s04_million_empty_strings(lab: Lab) -> None:
    """[S-04] a walk of bounded length; the result does not fit, which names the bytes it takes."""
    count = scaled(200_000, MAX_STRING_ELEMENTS)
    code, text = lab.offend(_send_zero_length, count=count, timeout_s=120)
    assert code == IA
    assert f"should be at least {4 * count} bytes to hold the results" in text
    lab.settled()


# --- S-05: any bytes -----------------------------------------------------------------------------------------------

TEXTS = [b"\x00", b"a\x00b", b"\x00\x00", b"\xf0\x9f\x98\x80", "\ufeff\u202e".encode(), bytes(range(128))]
NO_TEXTS = [b"\xff\xfe", b"\xc3\x28", b"\xed\xa0\x80", b"\xc0\x80", b"\xf0\x9f\x98", bytes(range(256))]


def test_s05_any_text_comes_back(lab: Lab) -> None:
    """[S-05] NULs, marks, everything that is UTF-8: the same bytes."""
    cases = [strings(text, b"and", text) for text in TEXTS]
    found = lab.offend(_ask, cases=[[data.hex(), 3] for data in cases])
    assert found == [[OK, data.hex()] for data in cases]
    lab.settled()


def test_s05_what_is_no_text_is_refused(lab: Lab) -> None:
    """[S-05] the runtime takes UTF-8 only: an error that names the element, never other bytes."""
    found = lab.offend(_ask, cases=[[strings(b"and", text).hex(), 2] for text in NO_TEXTS])
    for code, text in found:
        assert code == IA
        assert text.startswith("element 1 of inference input 'x' is not UTF-8")
    lab.settled()


# --- S-06: lengths that change -------------------------------------------------------------------------------------


def _flip_lengths(requests: int) -> dict[str, Any]:
    """Another process rewrites the tensor between two contents that are right, byte by byte, while it is read."""
    echo = Echo()
    first, second = strings(b"a" * 60, b"b" * 60), strings(b"c" * 20, b"d" * 100)
    assert len(first) == len(second)
    memory = echo.memory
    memory[: len(first)] = first
    flipper = os.fork()
    if not flipper:
        while True:
            for content in (first, second):
                for start in range(0, len(content), 8):
                    memory[start : start + 8] = content[start : start + 8]
    try:
        plan = echo.prepare(2, len(first))
        counts: dict[str, int] = {}
        strange = []
        for _ in range(requests):
            code, text = echo.channel.wait(echo.channel.submit(plan["index"], plan["generation"]))
            counts[code] = counts.get(code, 0) + 1
            if code == OK:
                got = bytes(memory[OUTPUT : OUTPUT + len(first)])
                lengths = struct.unpack_from("<I", got)[0], 0
                ok = set(got) <= set(first) | set(second) and lengths[0] in (60, 20)
                strange += [] if ok else [got.hex()]
            elif code != IA or "string" not in text:
                strange.append(text)
        return {"counts": counts, "strange": strange[:3]}
    finally:
        os.kill(flipper, 9)
        os.waitpid(flipper, 0)


def test_s06_lengths_rewritten_while_they_are_read(lab: Lab) -> None:
    """[S-06] checked and used are the same private copy: an answer of bytes that were there, or a clean refusal."""
    found = lab.offend(_flip_lengths, requests=scaled(1500, 200_000), timeout_s=600)
    assert found["strange"] == []
    assert set(found["counts"]) <= {OK, IA}
    assert found["counts"].get(OK, 0) > 0
    lab.settled()


# --- S-07: outputs that are too large ------------------------------------------------------------------------------


def _give_little_room(rooms: list[int], data: str) -> list[Any]:
    echo = Echo()
    return [[*echo.ask(bytes.fromhex(data), 2, room), echo.untouched()] for room in rooms]


def test_s07_strings_larger_than_their_room(lab: Lab) -> None:
    """[S-07] the error names the bytes needed; nothing is written."""
    data = strings(b"x" * 30, b"y" * 30)
    *little, enough = lab.offend(_give_little_room, rooms=[1, 4, 34, len(data) - 1, len(data)], data=data.hex())
    for code, text, untouched in little:
        assert code == IA
        assert f"should be at least {len(data)} bytes to hold the results" in text
        assert untouched
    assert enough[:2] == [OK, data.hex()]
    lab.settled()
