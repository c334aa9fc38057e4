"""The channel's layout against numbers worked out by hand: peers of different versions must agree on them."""

from __future__ import annotations

import itertools

import pytest

from shm import layout
from shm.layout import COMPLETION, MAX_SLOTS, NOTE_BYTES, SUBMISSION, Geometry

WORD = 8


def test_words_that_do_not_depend_on_the_geometry():
    assert (layout.TAIL, layout.CONSUMED, layout.WAITING) == (8, 9, 10)
    assert (layout.CTAIL, layout.ARMED, layout.RING) == (16, 24, 64)
    assert (layout.HEAD, layout.LEDGER_CTAIL, layout.MARK) == (0, 1, 8)
    assert (layout.TAKEN, layout.STARTED, layout.RESPONDED, layout.DONE) == (1, 2, 3, 4)
    assert (layout.FINAL, layout.NOTED, layout.CANCEL) == (0x1_0000_0000, 0x2_0000_0000, 0x1_0000_0000)
    assert layout.CODE_MASK == 0xFFFF_FFFF


def test_client_and_worker_words_share_no_cache_line():
    client = {word * WORD // 64 for word in (layout.TAIL, layout.CONSUMED, layout.WAITING, layout.SENT, layout.ASKS)}
    worker = {word * WORD // 64 for word in (layout.CTAIL, layout.ARMED, layout.AWAY, layout.AHEAD)}
    assert client.isdisjoint(worker | {layout.RING * WORD // 64})
    assert layout.CTAIL * WORD // 64 != layout.ARMED * WORD // 64


# slots: first word of submissions, completions, notes; bytes of channel and ledger
DOCUMENTED = {
    1: (68, 76, 92, 4096, 4096),
    4: (80, 112, 176, 8192, 4096),
    64: (320, 832, 1856, 81920, 4096),
    512: (2112, 6208, 14400, 643072, 8192),
    1024: (4160, 12352, 28736, 1282048, 12288),
}


@pytest.mark.parametrize("slots", DOCUMENTED)
def test_geometry(slots):
    geometry = Geometry(slots)
    assert (
        geometry.submissions,
        geometry.completions,
        geometry.notes,
        geometry.channel_bytes,
        geometry.ledger_bytes,
    ) == DOCUMENTED[slots]
    assert (geometry.slots, geometry.ring_mask, geometry.completion_mask) == (slots, 4 * slots - 1, 2 * slots - 1)


@pytest.mark.parametrize("slots", [1 << power for power in range(11)])
def test_areas_follow_each_other_without_overlap_inside_the_memory(slots):
    geometry = Geometry(slots)
    areas = [
        (layout.RING, 4 * slots),
        (geometry.submissions, slots * SUBMISSION.size // WORD),
        (geometry.completions, 2 * slots * COMPLETION.size // WORD),
        (geometry.notes, 2 * slots * NOTE_BYTES // WORD),
    ]
    for (start, length), (following, _) in itertools.pairwise(areas):
        assert start + length == following
    end = areas[-1][0] + areas[-1][1]
    assert 0 <= geometry.channel_bytes - end * WORD < 4096
    assert 0 <= geometry.ledger_bytes - (layout.MARK + slots) * WORD < 4096


@pytest.mark.parametrize("slots", [0, -1, 3, 63, 1000, MAX_SLOTS * 2])
def test_other_numbers_of_slots_are_refused(slots):
    with pytest.raises(ValueError, match=f"power of two up to 1024, got {slots}"):
        Geometry(slots)


def test_submission_is_eight_words_and_its_cancel_word_is_the_last():
    assert SUBMISSION.size == 64
    packed = SUBMISSION.pack(1, 2 << 32 | 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14)
    words = memoryview(packed).cast("Q")
    assert list(words[:4]) == [1, 2 << 32 | 3, 4, 5]
    assert words[4] == 6 | 7 << 16 | 8 << 32
    assert words[5] == 9
    assert words[6] == 10 | 11 << 16 | 12 << 32 | 13 << 48
    assert words[7] == 14


def test_completion_is_eight_words():
    assert COMPLETION.size == 64
    assert list(memoryview(COMPLETION.pack(*range(1, 9))).cast("Q")) == list(range(1, 9))
