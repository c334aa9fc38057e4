"""Parameters of responses in the note of a completion: what comes out is what went in, or a clear error."""

from __future__ import annotations

import contextlib
import random

import pytest

from shm.errors import InferError
from shm.layout import NOTE_BYTES
from shm.parameters import MAX_GIVEN_BYTES, MAX_GIVEN_COUNT, Parameter, beside, end_of, fits_beside, pack, unpack
from shm.responses import Extent
from shm.responses import pack as note_of


def anything(chance: random.Random) -> Parameter:
    text = "".join(chance.choice("aä€😀\0") for _ in range(chance.randrange(12)))
    whole = chance.choice((0, -1, 2**63 - 1, -(2**63), chance.randrange(-(2**40), 2**40)))
    return chance.choice((text, whole, chance.random(), float("inf"), -0.0, True, False))


def test_what_goes_in_comes_out():
    chance = random.Random(7)
    for _ in range(2000):
        given = {f"p{n}": anything(chance) for n in range(1 + chance.randrange(MAX_GIVEN_COUNT))}
        note = chance.randbytes(8 * chance.randrange(6))
        if sum(len(text.encode()) if isinstance(text, str) else 8 for text in (*given, *given.values())) > 384:
            with pytest.raises(InferError, match="the parameters of a response have "):
                pack(given)
            continue
        packed = pack(given)
        whole = beside(note, packed)
        assert len(whole) == NOTE_BYTES
        assert whole[: len(note)] == note
        found = unpack(end_of(whole))
        assert [(k, type(v), v) for k, v in found.items()] == [(k, type(v), v) for k, v in given.items()]


def test_the_largest_lie_beside_one_output_of_three_dimensions():
    names = [f"{n:x}" for n in range(MAX_GIVEN_COUNT)]
    size = MAX_GIVEN_BYTES // MAX_GIVEN_COUNT - 1
    packed = pack({name: "x" * size for name in names})
    assert fits_beside(note_of([Extent((1, 2, 3), 24)]), packed)
    with pytest.raises(InferError, match=f"have {MAX_GIVEN_BYTES + 1} bytes, at most {MAX_GIVEN_BYTES} are possible"):
        pack({"a": "x" * MAX_GIVEN_BYTES})


def test_no_room_beside_many_shapes():
    packed = pack({"a": "x" * 100})
    note = note_of([Extent((1,) * 58, 4)])
    with pytest.raises(InferError) as caught:
        beside(note, packed)
    assert caught.value.message == (
        f"the parameters of a response take {len(packed)} bytes, beside the shapes of its outputs there is room for 30"
        ": give fewer of them, or ask for fewer outputs whose shape only the run tells"
    )


def test_no_note_brings_a_client_to_anything_but_an_error():
    chance = random.Random(11)
    for _ in range(2000):
        note = bytearray(chance.randbytes(NOTE_BYTES))
        note[-2:] = chance.randrange(2**16 if chance.random() < 0.3 else 40).to_bytes(2, "little")
        with contextlib.suppress(InferError):
            found = unpack(end_of(bytes(note)))
            assert all(isinstance(value, bool | int | float | str) for value in found.values())
    with pytest.raises(InferError, match="the worker reported parameters that cannot be: "):
        unpack(end_of(bytes(NOTE_BYTES)))


def test_text_that_is_none():
    with pytest.raises(InferError, match="is no valid text"):
        pack({"a": "\ud800"})
