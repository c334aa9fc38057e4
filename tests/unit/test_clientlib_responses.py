"""What a client makes of a decoupled model's completions: whole responses in order, and one error for what is none."""

from __future__ import annotations

import contextlib
import math
import struct
from collections import deque
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clientlib import responses
from clientlib.responses import Assembler, Inbox, room
from clientlib.results import InferResult
from shm import datatypes
from shm.errors import Code, InferError
from shm.layout import FINAL, NOTE_BYTES, NOTED

PLACES, ABSENT = 4, 2**64 - 1
Array = npt.NDArray[Any]
Parts = list[tuple[bytes, list[bytes]]]  # the note of each, and what it has of every output


class Output:
    """An output of a plan with two positions, in memory of its own. Bytes before and after are never its."""

    GUARD = 128

    def __init__(self, name: str, datatype: str, byte_size: int) -> None:
        self.name, self.datatype, self.room = name, datatype, byte_size
        self.dtype = np.dtype(np.uint8) if datatype == "BYTES" else datatypes.numpy_dtype(datatype)
        self.memory = np.full(2 * self.GUARD + 2 * PLACES * byte_size, 0xEE, np.uint8)

    def raw(self, position: int) -> Array:
        start = self.GUARD + position * PLACES * self.room
        return self.memory[start : start + PLACES * self.room]


def inbox(outputs: list[Output], position: int = 0, *, raw: bool = False, copied: int = 0) -> Inbox:
    def failure(code: int, note: bytes) -> InferError:
        return InferError(Code(code), note.rstrip(b"\0").decode())

    return Inbox(Assembler(outputs, position, PLACES, raw=raw), failure, copied)  # type: ignore[arg-type]


def status(flags: int = 0, copied: int = 0) -> tuple[int, ...]:
    return (1, 1 << 16, flags, 1, 2, 3, 4, copied)


def note_of(*words: int) -> bytes:
    return struct.pack(f"<{len(words)}Q", *words).ljust(NOTE_BYTES, b"\0")


def encoded(array: Array) -> bytes:
    return datatypes.encode_bytes(array) if array.dtype == object else array.tobytes()


def parts_of(outputs: list[Output], response: dict[str, Array]) -> Parts:
    """A response as the wire has it, from the description and not from the code under test."""
    words: list[int] = []
    data = []
    for output in outputs:
        array = response.get(output.name)
        data.append(b"" if array is None else encoded(array))
        words += [ABSENT] if array is None else [array.ndim, *array.shape, len(data[-1])]
    count = max([1, *(math.ceil(len(each) / output.room) for each, output in zip(data, outputs, strict=True))])
    return [
        (note_of(*words), [each[j * o.room : (j + 1) * o.room] for each, o in zip(data, outputs, strict=True)])
        for j in range(count)
    ]


class Writer:
    """The worker of one request: a part is written when that of PLACES parts before has been read."""

    def __init__(self, outputs: list[Output], position: int, sent: list[dict[str, Array]]) -> None:
        self.outputs, self.position = outputs, position
        self.todo = deque(part for response in sent for part in parts_of(outputs, response))
        self.done = deque[bytes]()
        self.written = 0

    def write(self) -> None:
        note, data = self.todo.popleft()
        for output, each in zip(self.outputs, data, strict=True):
            place = output.raw(self.position).reshape(PLACES, -1)[self.written % PLACES]
            place[:] = 0xDD  # whatever lies there is no part of the next one
            place[: len(each)] = np.frombuffer(each, np.uint8)
        self.written += 1
        self.done.append(note)


def arrays(datatype: str) -> st.SearchStrategy[Array]:
    shapes = st.lists(st.integers(0, 7), min_size=0, max_size=3)

    def filled(shape: list[int]) -> Array:
        count = math.prod(shape)
        if datatype == "BYTES":
            strings = np.empty(count, object)
            strings[:] = [b"\0" + b"x" * (i * 7 % 23) for i in range(count)]
            return strings.reshape(shape)
        return (np.arange(count) % 2).astype(datatypes.numpy_dtype(datatype)).reshape(shape)

    return shapes.map(filled)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[Output], list[list[dict[str, Array]]], list[bool]]:
    kinds = draw(st.lists(st.sampled_from(["INT32", "FP64", "BOOL", "BF16", "BYTES"]), min_size=1, max_size=3))
    outputs = [Output(f"o{i}", kind, draw(st.sampled_from([64, 128, 320]))) for i, kind in enumerate(kinds)]
    response = st.fixed_dictionaries({}, optional={output.name: arrays(output.datatype) for output in outputs})
    sent = [draw(st.lists(response, max_size=6)) for _ in range(2)]
    return outputs, sent, draw(st.lists(st.booleans(), max_size=80))


@settings(max_examples=150, deadline=None)
@given(conversations(), st.booleans())
def test_two_requests_at_once_get_what_was_sent(
    conversation: tuple[list[Output], list[list[dict[str, Array]]], list[bool]], raw: bool
) -> None:
    outputs, sent, turns = conversation
    writers = [Writer(outputs, position, sent[position]) for position in range(2)]
    inboxes = [inbox(outputs, position, raw=raw) for position in range(2)]
    order = deque(turns)
    while any(writer.todo or writer.done for writer in writers):
        which = order.popleft() if order else bool(writers[1].todo or writers[1].done)
        writer, target = writers[which], inboxes[which]
        ahead = order.popleft() if order else True
        if writer.todo and (len(writer.done) < PLACES and (ahead or not writer.done)):
            writer.write()
        elif writer.done:
            target.put(status(NOTED), writer.done.popleft())
    for target in inboxes:
        target.put(status(FINAL), b"")
    for target, expected in zip(inboxes, sent, strict=True):
        for response in expected:
            result = target.take()
            assert result is not None
            check(result, response, raw=raw)
        assert target.over
        assert target.take() is None
    for output in outputs:
        assert (output.memory[: output.GUARD] == 0xEE).all()
        assert (output.memory[-output.GUARD :] == 0xEE).all()


def check(result: InferResult, response: dict[str, Array], *, raw: bool) -> None:
    assert set(result) == set(response)
    for name, array in response.items():
        got = result[name]
        if raw:
            assert got.dtype == np.uint8
            assert got.tobytes() == encoded(array)
            assert result.shapes[name] == array.shape
        else:
            assert got.shape == array.shape
            assert got.dtype == array.dtype
            assert encoded(got) == encoded(array)
            assert got.flags.owndata or got.base is not None
            assert got.flags.writeable
    assert result.copied_here == sum(len(encoded(array)) for array in response.values())


@pytest.fixture
def largest(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of every array that is made: never more than a response may have."""
    made: list[int] = []
    monkeypatch.setattr(responses.np, "empty", counted(made))
    return made


def counted(made: list[int]) -> Callable[..., Array]:
    """`numpy.empty`, which adds the size of each array to `made`."""
    original = np.empty

    def empty(shape: Any, dtype: Any = float) -> Array:
        made.append(math.prod(np.atleast_1d(shape).tolist()) * np.dtype(dtype).itemsize)
        return original(shape, dtype)

    return empty


WORD = st.one_of(st.integers(0, 5), st.integers(0, 2**64 - 1), st.sampled_from([ABSENT, 2**31, 2**48, 2**63, 1 << 30]))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.one_of(st.lists(WORD, max_size=64).map(lambda words: note_of(*words)), st.binary(max_size=512))),
    st.lists(st.sampled_from(["INT32", "BOOL", "BYTES"]), min_size=1, max_size=3),
)
def test_a_note_that_no_worker_writes_ends_the_stream(notes: list[bytes], kinds: list[str]) -> None:
    outputs = [Output(f"o{i}", kind, 64) for i, kind in enumerate(kinds)]
    target = inbox(outputs)
    for note in notes:
        made: list[int] = []
        with mock.patch.object(responses.np, "empty", counted(made)):
            target.put(status(NOTED), note)
        assert sum(made) <= responses.LARGEST
    target.put(status(FINAL), b"")
    taken = 0
    while not target.over:
        with contextlib.suppress(InferError):  # garbage may also be a response whose strings are none
            assert target.take() is not None
        taken += 1
    assert taken <= len(notes) + 1
    assert all((output.memory == 0xEE).all() for output in outputs)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((1, 4, 15), "INT32 [4] has 15 bytes"),
        ((1, 4, 17), "has 17 bytes"),
        ((2, 2**40, 2**40, 0), "more elements than any memory holds"),
        ((1, 2**46, 2**48), "1073741824"),
        ((1, 2**63, 2**64 - 2), "more elements"),
        ((63, *([1] * 63)), "rank 63"),
        ((2**63,), "rank"),
    ],
)
def test_sizes_that_cannot_be(words: tuple[int, ...], text: str, largest: list[int]) -> None:
    target = inbox([Output("y", "INT32", 64)])
    target.put(status(NOTED), note_of(*words))
    assert target.deaf
    with pytest.raises(InferError, match=text.replace("[", r"\[")):
        target.take()
    assert target.over
    assert not largest


@pytest.mark.parametrize("words", [(1, 3, 11), (1, 0, 1), (0, 3), (1, 2**32, 2**30)])
def test_strings_are_at_least_their_lengths(words: tuple[int, ...], largest: list[int]) -> None:
    target = inbox([Output("t", "BYTES", 64)])
    target.put(status(NOTED), note_of(*words))
    with pytest.raises(InferError, match="cannot be"):
        target.take()
    assert not largest


def test_a_response_has_at_most_a_gibibyte(largest: list[int]) -> None:
    half = 1 << 29
    outputs = [Output("a", "UINT8", 64), Output("b", "UINT8", 64)]
    target = inbox(outputs)
    target.put(status(NOTED), note_of(1, half, half, 1, half + 1, half + 1))
    with pytest.raises(InferError, match="may have 1073741824") as caught:
        target.take()
    assert caught.value.code == "UNSUPPORTED"
    assert not largest
    target = inbox(outputs)
    target.put(status(NOTED), note_of(1, half, half, 1, half, half))
    assert not target.deaf
    assert largest == [half, half]


def test_the_parts_of_a_response_agree() -> None:
    output = Output("y", "INT32", 64)
    target = inbox([output])
    target.put(status(NOTED), note_of(1, 32, 128))
    target.put(status(NOTED), note_of(1, 48, 192))
    with pytest.raises(InferError, match="part 2 of 2"):
        target.take()


def test_the_end_comes_after_the_last_part() -> None:
    target = inbox([Output("y", "INT32", 64)])
    target.put(status(NOTED), note_of(1, 32, 128))
    target.put(status(FINAL), b"")
    with pytest.raises(InferError, match="before the last of its parts"):
        target.take()
    assert target.over


def test_the_last_response_may_come_with_the_end() -> None:
    target = inbox([Output("y", "INT32", 64)])
    target.put(status(NOTED | FINAL), note_of(0, 4))
    assert not target.final
    result = target.take()
    assert result is not None
    assert result["y"].shape == ()
    assert target.final
    assert target.over


def test_an_error_in_the_middle_ends_nothing() -> None:
    target = inbox([Output("y", "INT32", 64)])
    target.put(status(NOTED), note_of(1, 32, 128))  # the model failed in the middle of it
    target.put(status(NOTED | Code.INTERNAL), b"no such token")
    target.put(status(NOTED), note_of(1, 1, 4))
    target.put(status(FINAL | NOTED | Code.UNAVAILABLE), b"the worker died")
    with pytest.raises(InferError, match="no such token"):
        target.take()
    result = target.take()
    assert result is not None
    assert result["y"].shape == (1,)
    assert not target.over
    with pytest.raises(InferError, match="the worker died"):
        target.take()
    assert target.over


def test_what_nobody_reads_is_bounded() -> None:
    output = Output("y", "UINT8", 1 << 20)
    target = inbox([output])
    taken = responses.UNREAD // ((1 << 20) + responses.OVERHEAD)
    for _ in range(taken + 5):
        target.put(status(NOTED), note_of(1, 1 << 20, 1 << 20))
    assert target.deaf
    assert target.unread_bytes <= responses.UNREAD
    for _ in range(taken):
        assert target.take() is not None
    with pytest.raises(InferError, match="wait to be read") as caught:
        target.take()
    assert caught.value.code == "UNAVAILABLE"
    assert target.over


def test_one_response_may_be_larger_than_what_is_kept() -> None:
    output = Output("y", "UINT8", 1 << 24)
    target = inbox([output])
    for _ in range(5):
        target.put(status(NOTED), note_of(1, 5 << 24, 5 << 24))
    result = target.take()
    assert result is not None
    assert result["y"].nbytes == 5 << 24 > responses.UNREAD


def test_errors_count_too() -> None:
    target = inbox([Output("y", "INT32", 64)])
    for _ in range(responses.UNREAD // responses.OVERHEAD + 10):
        target.put(status(NOTED | Code.INTERNAL), b"again")
    assert target.deaf


def test_a_closed_inbox_takes_nothing_in() -> None:
    target = inbox([Output("y", "INT32", 64)])
    target.put(status(NOTED), note_of(0, 4))
    target.close()
    target.put(status(NOTED), note_of(0, 4))
    assert target.deaf
    assert target.over
    assert target.take() is None


def test_what_fails_from_outside_comes_after_what_is_here() -> None:
    target = inbox([Output("y", "INT32", 64)])
    target.put(status(NOTED), note_of(0, 4))
    target.fail(InferError(Code.UNAVAILABLE, "late"))
    target.put(status(NOTED), note_of(0, 4))
    assert target.take() is not None
    with pytest.raises(InferError, match="late"):
        target.take()
    target.fail(InferError(Code.UNAVAILABLE, "later"))
    assert target.over


def test_the_copies_are_counted() -> None:
    target = inbox([Output("y", "UINT8", 64)], copied=1000)
    for _ in range(2):
        target.put(status(NOTED, copied=64), note_of(1, 100, 100))
        target.put(status(NOTED, copied=36), note_of(1, 100, 100))
    first, second = target.take(), target.take()
    assert first is not None
    assert second is not None
    assert first.copied_here == 1100
    assert first.copied_bytes == 1200
    assert second.copied_bytes == 200
    assert first.timing == (1, 2, 3, 4)


def test_responses_of_many_parts_ask_for_more_room() -> None:
    target = inbox([Output("small", "INT32", 64), Output("large", "UINT8", 64)])
    target.put(status(NOTED), note_of(0, 4, 1, 512, 512))
    assert target.outgrown is None
    target = inbox([Output("small", "INT32", 64), Output("large", "UINT8", 64)])
    target.put(status(NOTED), note_of(0, 4, 1, 10_000, 10_000))
    assert target.outgrown == ("large", 2500)


def test_rooms() -> None:
    assert room("INT32", (), None) == 64
    assert room("INT32", (0,), None) == 64
    assert room("FP32", (100,), None) == 448
    assert room("FP32", (1000, 1000), None) == responses.LARGEST_ROOM
    assert [responses.places([size]) for size in (64, 4096, 65536, 100_000, 1 << 17)] == [16, 16, 16, 10, 8]
    assert [responses.at_once(size) for size in (64, 1 << 18, 1 << 19, 1 << 24)] == [64, 64, 32, 16]
    assert room("FP32", (-1,), None) == room("BYTES", (1,), None) == responses.FIRST_ROOM
    assert room("FP32", (-1,), 100_000) == 100_032
    assert room("FP32", (-1,), 1 << 30) == responses.LARGEST_ROOM
