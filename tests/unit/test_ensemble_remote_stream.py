"""Responses of a decoupled member elsewhere: parts, credit, who waits for whom, and notes that no worker writes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broker.worker.ensembles.memory import Value, as_array
from broker.worker.ensembles.remote.memory import SharedMemory
from broker.worker.ensembles.remote.places import LARGEST_ROOM, Places, room_of
from broker.worker.ensembles.remote.stream import LARGEST, RemoteStream
from shm import datatypes, responses
from shm.admission import Request
from shm.errors import Code
from shm.layout import FINAL, NOTE_BYTES, NOTED
from shm.responses import Extent
from tests.fakes.elsewhere import SpreadBench

ROOM = 64


class Branch:
    """As much of a `SpreadBranch` as a stream calls."""

    def __init__(self) -> None:
        self.room = True
        self.tokens = 0
        self.ahead = 0
        self.blamed = 0
        self.ended: list[Request] = []

    def has_room(self) -> bool:
        return self.room

    def came(self, stream: RemoteStream) -> None:
        self.tokens += 1

    def waits(self, byte_size: int) -> None:
        self.ahead += byte_size

    def learn(self, written: dict[str, Value]) -> None: ...

    def blame(self) -> None:
        self.blamed += 1

    def complete(self, requests: Any) -> None:
        self.ended.extend(requests)


class Lab:
    """A stream, and the other worker's end of it: `send` and `end`."""

    def __init__(self) -> None:
        self.bench = SpreadBench()
        self.memory = SharedMemory(self.bench.session)  # type: ignore[arg-type]
        outputs: list[Any] = [SimpleNamespace(name=name, datatype=datatype) for name, datatype in KINDS.items()]
        self.places = Places(self.memory, outputs, {name: f"t{name}" for name in KINDS}, [ROOM] * len(KINDS))
        self.branch = Branch()
        self.cancelled = 0
        lane: Any = SimpleNamespace(worker="cpu/other", ended=lambda sends: None, cancel=self._cancel)
        bound: Any = SimpleNamespace(places=self.places, word=lambda worker: 1)
        self.step = Request(self.branch, 0, (1,) + (0,) * 12, None, 1)  # type: ignore[arg-type]
        self.stream = RemoteStream(self.branch, self.step, lane, bound)  # type: ignore[arg-type]
        self.parts = 0
        self.pending: list[tuple[bytes, list[bytes | None]]] = []  # parts that have no place yet

    def _cancel(self, step: Request) -> None:
        self.cancelled += 1

    def credit(self) -> int:
        spec = self.places.credit()
        (block,) = [self.places._credit]
        return int(block.region.bytes[spec.offset : spec.offset + 8].view(np.uint64)[0])

    def send(self, arrays: dict[str, np.ndarray]) -> None:
        """As `broker.worker.answers`: parts wait until they have a place."""
        data: list[bytes | None] = []
        extents: list[Extent | None] = []
        for name, datatype in KINDS.items():
            array = arrays.get(name)
            raw = None if array is None else array.tobytes()
            if array is not None and datatype == "BYTES":
                raw = datatypes.encode_bytes(array) if array.size else b""
            data.append(raw)
            extents.append(None if array is None or raw is None else Extent(array.shape, len(raw)))
        note = responses.pack(extents).ljust(NOTE_BYTES, b"\0")
        for part in range(responses.part_count(extents, [ROOM] * len(KINDS))):
            self.pending.append((note, [None if raw is None else raw[part * ROOM : (part + 1) * ROOM] for raw in data]))
        self.push()

    def push(self) -> None:
        while self.pending and self.parts - self.credit() < self.places.responses:
            note, pieces = self.pending.pop(0)
            for output, piece in zip(self.places.outputs, pieces, strict=True):
                if piece:
                    output.at(self.parts % self.places.responses)[: len(piece)] = np.frombuffer(piece, np.uint8)
            self.parts += 1
            self.stream.settle((0, 0, NOTED, 1, 1, 1, 1, 0), note)

    def end(self, code: Code = Code.OK, text: str = "") -> None:
        self.stream.settle((0, 0, code | FINAL, 1, 1, 1, 1, 0), text.encode().ljust(NOTE_BYTES, b"\0"))

    def take(self) -> dict[str, Value] | None:
        assert self.branch.tokens > 0
        self.branch.tokens -= 1
        return self.stream.take()

    def close(self) -> None:
        self.places.free()
        self.bench.close()


KINDS = {"a": "INT32", "b": "BYTES"}


@pytest.fixture
def lab() -> Iterator[Lab]:
    lab = Lab()
    yield lab
    lab.close()


def numbers(count: int, first: int = 0) -> dict[str, np.ndarray]:
    return {"a": np.arange(first, first + count, dtype=np.int32)}


def test_what_comes_is_copied_at_once_while_there_is_room(lab):
    for number in range(100):
        lab.send(numbers(3, number))
    assert lab.credit() == lab.parts == 100
    for number in range(100):
        written = lab.take()
        assert written is not None
        assert as_array(written["ta"], (3,)).tolist() == [number, number + 1, number + 2]
        assert "tb" not in written


def test_without_room_as_many_wait_as_there_are_places(lab):
    lab.branch.room = False
    for number in range(100):
        lab.send(numbers(3, number))
    assert (lab.parts, lab.credit()) == (lab.places.responses, 0)
    assert lab.branch.ahead == 0
    assert lab.take() is not None
    assert lab.credit() == 1
    lab.push()
    assert lab.parts == lab.places.responses + 1


def test_the_end_comes_once_and_after_what_waits(lab):
    lab.branch.room = False
    lab.send(numbers(2))
    lab.end()
    assert lab.branch.ended == [lab.step]
    assert lab.take() is not None
    assert lab.step.code == Code.OK


def test_an_error_that_is_not_final_is_the_end_all_the_same(lab):
    lab.stream.settle((0, 0, Code.INVALID_ARG, 1, 1, 1, 1, 0), b"this one".ljust(NOTE_BYTES, b"\0"))
    assert (lab.cancelled, lab.branch.ended) == (1, [])
    lab.end(Code.CANCELLED, "the request was cancelled")
    assert lab.branch.ended == [lab.step]
    assert (lab.step.code, lab.step.note) == (Code.INVALID_ARG, b"this one")


@pytest.mark.parametrize(
    ("extents", "text"),
    [
        ([Extent((3,), 11), None], "output 'a' of shape [3] has 11 bytes"),
        ([None, Extent((3,), 2)], "output 'b' of shape [3] has 2 bytes"),
        ([Extent((LARGEST // 4 + 1,), LARGEST + 4), None], "one may have"),
    ],
)
def test_what_no_worker_writes_ends_it(lab, extents, text):
    lab.stream.settle((0, 0, NOTED, 1, 1, 1, 1, 0), responses.pack(extents).ljust(NOTE_BYTES, b"\0"))
    assert lab.cancelled == 1
    assert lab.take() is None
    lab.end()
    assert text.encode() in lab.step.note


def test_parts_that_do_not_belong_together_end_it(lab):
    lab.stream.settle((0, 0, NOTED, 1, 1, 1, 1, 0), responses.pack([Extent((64,), 256), None]))
    lab.stream.settle((0, 0, NOTED, 1, 1, 1, 1, 0), responses.pack([Extent((65,), 260), None]))
    lab.end()
    assert b"do not belong together" in lab.step.note


def test_rooms_follow_from_shapes_and_from_what_came():
    assert room_of("FP32", (3,), 0) == 64
    assert room_of("FP32", (-1,), 0) == 4096
    assert room_of("BYTES", (2,), 9000) == 9024
    assert room_of("FP32", (-1,), 1 << 30) == LARGEST_ROOM


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_whatever_comes_and_whenever_it_is_taken_nothing_is_lost_or_mixed(data):
    lab = Lab()
    try:
        sent: list[dict[str, np.ndarray]] = []
        found: list[dict[str, Value]] = []
        for _ in range(data.draw(st.integers(1, 40))):
            match data.draw(st.sampled_from(["send", "send", "take", "room", "push"])):
                case "send":
                    arrays: dict[str, np.ndarray] = {}
                    if (size := data.draw(st.sampled_from([-1, 0, 1, 16, 17, 100]))) >= 0:
                        arrays["a"] = np.arange(size, dtype=np.int32) + 1000 * len(sent)
                    if (size := data.draw(st.sampled_from([-1, 0, 1, 70]))) >= 0 or not arrays:
                        arrays["b"] = np.array([b"x" * max(size, 0)] * data.draw(st.integers(0, 3)), object)
                    sent.append(arrays)
                    lab.send(arrays)
                case "take" if lab.branch.tokens:
                    if (written := lab.take()) is not None:
                        found.append(written)
                case "room":
                    lab.branch.room = not lab.branch.room
                case _:
                    lab.push()
            assert 0 <= lab.parts - lab.credit() <= lab.places.responses
        while lab.branch.tokens or lab.pending:
            if lab.branch.tokens and (written := lab.take()) is not None:
                found.append(written)
            lab.push()
        assert lab.step.code == Code.OK
        assert [{name[1:]: as_array(v, v.shape).tolist() for name, v in each.items()} for each in found] == [
            {name: array.tolist() for name, array in each.items()} for each in sent
        ]
        assert lab.branch.ahead == sum(v.byte_size for each in found for v in each.values())
    finally:
        lab.close()
