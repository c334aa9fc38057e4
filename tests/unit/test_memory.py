"""Sealed memory, its word view, the fence's platform rule and the statistics page."""

from __future__ import annotations

import errno
import mmap
import os

import pytest

from shm import statistics
from shm.fence import Fence
from shm.memory import map_words, pages, sealed_memfd
from shm.statistics import BLOCK, BLOCKS, MAX_BATCH, StatisticsPage


@pytest.fixture
def fd():
    fd = sealed_memfd("test", 8192)
    yield fd
    os.close(fd)


def test_sealed_memory_is_zeroed_allocated_and_not_inherited(fd):
    assert os.fstat(fd).st_size == 8192
    assert os.fstat(fd).st_blocks * 512 >= 8192
    assert os.pread(fd, 8192, 0) == bytes(8192)
    assert not os.get_inheritable(fd)


@pytest.mark.parametrize("byte_size", [0, 4096, 8191, 8193, 1 << 20])
def test_nobody_can_change_its_size(fd, byte_size):
    with pytest.raises(PermissionError):
        os.ftruncate(fd, byte_size)
    assert os.fstat(fd).st_size == 8192


@pytest.mark.parametrize("byte_size", [0, -1])
def test_a_size_that_cannot_be_had_leaves_no_descriptor(byte_size):
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError) as caught:  # noqa: PT011 the code is checked
        sealed_memfd("test", byte_size)
    assert caught.value.errno == errno.EINVAL
    assert set(os.listdir("/proc/self/fd")) <= before


def test_two_mappings_see_the_same_words(fd):
    memory, words = map_words(fd, 8192)
    _, others = map_words(fd, 8192)
    words[1023] = 2**64 - 1
    others[0] = 0x0102030405060708
    assert others[1023] == 2**64 - 1
    assert memory[:8] == bytes([8, 7, 6, 5, 4, 3, 2, 1])
    assert len(words) == 1024


def test_a_mapping_outlives_its_descriptor():
    fd = sealed_memfd("test", 4096)
    _, words = map_words(fd, 4096)
    os.close(fd)
    words[0] = 1
    assert words[0] == 1


@pytest.mark.parametrize(("byte_size", "rounded"), [(0, 0), (1, 4096), (4096, 4096), (4097, 8192)])
def test_pages(byte_size, rounded):
    assert pages(byte_size) == rounded
    assert rounded % mmap.PAGESIZE == 0


def test_a_fence_can_be_called_again_and_again():
    fence = Fence()
    fence()
    fence()


def test_statistics_blocks_do_not_overlap_and_outlive_who_wrote_them():
    page = StatisticsPage.create()
    try:
        for index in range(BLOCKS):
            block = page.block(index)
            assert len(block) == BLOCK
            block[0] = block[BLOCK - 1] = index + 1
        again = StatisticsPage(page.fd)
        for index in range(BLOCKS):
            assert (again.block(index)[0], again.block(index)[BLOCK - 1]) == (index + 1, index + 1)
        assert sum(again.words) == 2 * sum(range(1, BLOCKS + 1))
    finally:
        os.close(page.fd)


def test_the_words_of_an_instances_block_do_not_overlap():
    single = [
        value
        for name, value in vars(statistics).items()
        if name.isupper()
        and isinstance(value, int)
        and value < statistics.LATENCY
        # a worker's own block has a meaning of its own for these
        and name not in ("LOST_WAKEUPS", "TAKEN", "IN_FLIGHT", "REFUSED", "RECOVERED", "COPIED", "LATENCIES")
        and name not in ("CACHE_SIZE", "CACHE_USED", "CACHE_ENTRIES", "CACHE_EVICTIONS", "CACHE_ALL_HITS")
        and name not in ("CACHE_ALL_MISSES", "CACHE_LOOKUP_NS", "CACHE_INSERTION_NS")
        and name not in ("GPU_OPENS", "GPU_CLOSES", "GPU_EVICTIONS", "GPU_OPEN_BYTES", "PINNED_BYTES")
        and name not in ("GPU_WAITS", "GPU_WAIT_NS", "GPU_USED", "GPU_PEER_BYTES")
        and name not in ("OWN_BUCKETS", "OWN_WORDS", "NO_BOUND")
        and name not in ("RESPONSE_WORDS", "RESPONSE_INDICES", "FULL", "PREFERRED", "DELAY", "IDLE")  # no places
    ]
    copied = range(statistics.COPIED, statistics.COPIED + len(statistics.REASONS))
    assert len({*single, *copied}) == len(single) + len(copied)
    assert statistics.LATENCY + statistics.LATENCIES <= statistics.BATCHES
    assert statistics.BATCHES + 4 * MAX_BATCH <= statistics.RESPONSES < BLOCK


def test_a_duration_is_counted_below_the_first_bound_that_it_does_not_exceed():
    bounds = statistics.BOUNDS_NS
    assert (bounds[0], bounds[-1], list(bounds)) == (10_000, 10_000_000_000, sorted(bounds))
    assert [statistics.bucket(ns) for ns in (0, 9_999, 10_000, 10_001, 20_000)] == [0, 0, 0, 1, 1]
    assert statistics.bucket(bounds[-1]) == statistics.LATENCIES - 2
    assert statistics.bucket(bounds[-1] + 1) == statistics.LATENCIES - 1
