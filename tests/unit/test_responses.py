"""Notes of responses, and how responses are cut into parts."""

from __future__ import annotations

import random
import struct

import pytest

from shm.errors import InferError
from shm.layout import NOTE_BYTES
from shm.responses import ABSENT, WORDS, Extent, pack, part_count, unpack


@pytest.mark.parametrize("seed", range(50))
def test_what_is_packed_is_unpacked(seed):
    random_ = random.Random(seed)
    extents: list[Extent | None] = []
    words = 0
    while words < WORDS - 6 and len(extents) < random_.randint(1, 12):
        rank = random_.randint(0, 4)
        absent = random_.random() < 0.2
        extents.append(None if absent else Extent(tuple(random_.randrange(2**40) for _ in range(rank)), rank))
        words += 1 if absent else rank + 2
    assert unpack(pack(extents).ljust(NOTE_BYTES, b"\0"), len(extents)) == extents


def test_more_than_a_note_holds_is_refused():
    with pytest.raises(InferError, match="have 66 ranks, dimensions and sizes together, a response can report 64"):
        pack([Extent((1,) * 20, 4)] * 3)


@pytest.mark.parametrize(
    "words", [(), (1,), (1, 5), (2**64 - 2, 1, 1), (63, *range(62)), (0,), (ABSENT, 3, 1, 1)], ids=repr
)
def test_notes_that_no_worker_makes_are_refused(words):
    with pytest.raises(ValueError, match="the note of a response"):
        unpack(struct.pack(f"<{len(words)}Q", *words), 2)


@pytest.mark.parametrize(
    ("extents", "count"),
    [
        ([None], 1),
        ([Extent((0,), 0)], 1),
        ([Extent((64,), 64), None], 1),
        ([Extent((65,), 65), Extent((1,), 1)], 2),
        ([Extent((1,), 1), Extent((1281,), 1281)], 11),
    ],
)
def test_the_largest_output_says_how_many_parts_there_are(extents, count):
    assert part_count(extents, [64, 128]) == count if len(extents) == 2 else part_count(extents, [64]) == count
