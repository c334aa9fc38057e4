"""The arena against a model that knows every live range."""

import random
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import shm.arena
from shm.arena import ALIGNMENT, Arena


def rounded(byte_size):
    return max(1, -(-byte_size // ALIGNMENT)) * ALIGNMENT


class ArenaMachine(RuleBasedStateMachine):
    """Any sequence of allocations and frees, checked after each step."""

    @initialize(byte_size=st.integers(0, 4096))
    def make(self, byte_size):
        self.arena = Arena(byte_size)
        self.live = {}

    @rule(byte_size=st.integers(0, 1024))
    def allocate(self, byte_size):
        offset = self.arena.allocate(byte_size)
        if offset is None:
            assert self.largest_gap() < rounded(byte_size)
            return
        assert offset % ALIGNMENT == 0
        assert 0 <= offset <= self.arena.byte_size - rounded(byte_size)
        for start, size in self.live.items():
            assert offset + rounded(byte_size) <= start or start + size <= offset
        self.live[offset] = rounded(byte_size)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data):
        offset = data.draw(st.sampled_from(sorted(self.live)))
        del self.live[offset]
        self.arena.free(offset)

    @rule(offset=st.integers(-64, 4096))
    def free_what_is_not_allocated(self, offset):
        if offset not in self.live:
            with pytest.raises(ValueError, match=f"offset {offset}"):
                self.arena.free(offset)

    @invariant()
    def counts_its_bytes(self):
        assert self.arena.free_bytes == self.arena.byte_size - sum(self.live.values())

    def largest_gap(self):
        edges = [0, *(edge for offset in sorted(self.live) for edge in (offset, offset + self.live[offset]))]
        edges.append(self.arena.byte_size)
        return max(end - start for start, end in zip(edges[::2], edges[1::2], strict=True))


TestAgainstModel = ArenaMachine.TestCase


def test_equal_sizes_are_reused_at_once():
    arena = Arena(10 * 64)
    first = arena.allocate(100)
    arena.free(first)
    assert [arena.allocate(100), arena.allocate(128)] == [first, first + 128]


def test_neighbours_are_merged_when_nothing_else_fits():
    arena = Arena(16 * 64)
    offsets = [arena.allocate(64) for _ in range(16)]
    assert arena.allocate(1) is None
    for offset in offsets[2:6]:
        arena.free(offset)
    assert arena.allocate(5 * 64) is None
    assert arena.allocate(4 * 64) == offsets[2]


def test_smallest_gap_is_cut():
    arena = Arena(12 * 64)
    large, wall, small, _ = (arena.allocate(size * 64) for size in (6, 1, 3, 2))
    arena.free(large)
    arena.free(small)
    assert arena.allocate(2 * 64) == small
    assert arena.allocate(6 * 64) == large
    assert wall == 6 * 64


def test_size_is_rounded_to_whole_blocks():
    assert Arena(127).byte_size == 64
    assert Arena(63).allocate(0) is None
    arena = Arena(128)
    assert (arena.allocate(0), arena.allocate(1), arena.allocate(0)) == (0, 64, None)


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=50), st.randoms(use_true_random=False))
def test_is_whole_again_when_all_is_freed(sizes, order):
    arena = Arena(64 * 1024)
    offsets = [offset for size in sizes if (offset := arena.allocate(size)) is not None]
    order.shuffle(offsets)
    for offset in offsets:
        arena.free(offset)
    assert arena.free_bytes == arena.byte_size
    assert arena.allocate(arena.byte_size) == 0


def test_closes_only_while_unused():
    arena = Arena(4 * ALIGNMENT)
    offset = arena.allocate(ALIGNMENT)
    assert not arena.close_if_unused()
    arena.free(offset)
    assert arena.close_if_unused()
    assert arena.close_if_unused()
    assert arena.allocate(ALIGNMENT) is None


def test_free_at_any_point_inside_allocate():
    """The collector may run the finalizer of an array, and so `free`, between any two steps of `allocate`."""
    arena = Arena(64 * 256)
    live = {}
    leaving = []
    freed = 0

    def free_at_some_lines(frame, event, argument):
        if frame.f_code.co_filename != shm.arena.__file__ or frame.f_code.co_name == "free":
            return None
        if event == "line" and leaving and chance.random() < 0.2:
            arena.free(leaving.pop())
        return free_at_some_lines

    chance = random.Random(1)
    before = sys.gettrace()
    for _ in range(500):
        leaving = chance.sample(sorted(live), min(len(live), 5))
        leaves = set(leaving)
        size = 64 * chance.randrange(1, 16)
        sys.settrace(free_at_some_lines)
        offset = arena.allocate(size)
        sys.settrace(before)
        for gone in leaves - set(leaving):
            del live[gone]
            freed += 1
        if offset is not None:
            assert all(offset + size <= start or start + live[start] <= offset for start in live)
            live[offset] = size
    assert freed > 100
    assert arena.free_bytes == arena.byte_size - sum(live.values())
    for offset in live:
        arena.free(offset)
    assert arena.allocate(arena.byte_size) == 0


def test_threads_never_share_a_block():
    arena = Arena(64 * 64)
    owners = [None] * 64
    mistakes = []

    def work(me):
        chance = random.Random(me)
        held = []
        for _ in range(3000):
            if held and chance.random() < 0.5:
                offset, blocks = held.pop(chance.randrange(len(held)))
                for block in blocks:
                    if owners[block] != me:
                        mistakes.append(block)
                    owners[block] = None
                arena.free(offset)
            else:
                size = chance.randrange(1, 6)
                offset = arena.allocate(64 * size)
                if offset is not None:
                    blocks = range(offset // 64, offset // 64 + size)
                    for block in blocks:
                        if owners[block] is not None:
                            mistakes.append(block)
                        owners[block] = me
                    held.append((offset, blocks))
        for offset, blocks in held:
            for block in blocks:
                owners[block] = None
            arena.free(offset)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert mistakes == []
    assert arena.free_bytes == arena.byte_size
