from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from broker.worker.control import Control
from broker.worker.messages import AddRegion
from broker.worker.regions import Region, RegionTable
from shm.cuda.driver import CudaError
from shm.errors import InferError
from shm.regions import create_pool
from shm.statistics import GPU_USED
from tests.fakes.processes import descriptors

SIZE = 1 << 16


@pytest.fixture
def pool() -> Iterator[int]:
    fd = create_pool(SIZE)
    yield fd
    os.close(fd)


def info(fd: int, region: int = 1, generation: int = 1, offset: int = 0, byte_size: int = 0, **fields) -> AddRegion:
    status = os.fstat(fd)
    known = {"name": "r", "kind": "pool", "writable": True, "file_size": status.st_size}
    return AddRegion(
        region=region,
        generation=generation,
        offset=offset,
        byte_size=byte_size or status.st_size - offset,
        device=status.st_dev,
        inode=status.st_ino,
        **{**known, **fields},
    )


def mappings(fd: int) -> int:
    """How often this process maps the file."""
    inode = str(os.fstat(fd).st_ino)
    return sum(line.split()[4] == inode for line in Path("/proc/self/maps").read_text().splitlines())


def test_a_region_is_its_window_of_the_file(pool):
    table = RegionTable()
    table.add(info(pool), pool)
    table.add(info(pool, region=2, offset=100, byte_size=50), pool)
    whole, window = table.get(1, 1), table.get(2, 1)
    whole.bytes[100:150] = 7
    assert window.bytes.tolist() == [7] * 50
    window.bytes[0] = 9
    assert whole.bytes[100] == 9
    assert whole.identity == window.identity


def test_a_generation_is_a_region_of_its_own(pool):
    table = RegionTable()
    table.add(info(pool), pool)
    assert table.get(1, 2) is None
    table.add(info(pool, generation=2), pool)
    table.retire(1, 1)
    assert table.get(1, 1) is None
    assert table.get(1, 2) is not None
    assert len(table) == 1


def test_adding_again_changes_nothing(pool):
    table = RegionTable()
    table.add(info(pool), pool)
    first = table.get(1, 1)
    table.add(info(pool), pool)
    assert table.get(1, 1) is first
    assert mappings(pool) == 1


def test_a_retired_region_is_unmapped_with_its_last_user(pool):
    table = RegionTable()
    table.add(info(pool), pool)
    region = table.get(1, 1)
    view = region.bytes[10:20]
    table.retire(1, 1)
    assert region.retired
    del region
    gc.collect()
    assert mappings(pool) == 1
    view[:] = 5
    del view
    assert mappings(pool) == 0
    table.retire(1, 1)


def test_a_read_only_region_cannot_be_written(pool):
    table = RegionTable()
    table.add(info(pool, writable=False), pool)
    data = table.get(1, 1).bytes
    assert not data.flags.writeable
    os.pwrite(pool, b"\5", 3)
    assert data[3] == 5


def test_the_descriptor_stays_the_callers(pool):
    before = descriptors()
    table = RegionTable()
    table.add(info(pool), pool)
    os.fstat(pool)
    table.retire(1, 1)
    assert descriptors() <= before


def test_a_pool_cannot_change_its_size_and_a_system_region_can():
    fd = os.memfd_create("test-system", os.MFD_CLOEXEC)
    os.ftruncate(fd, SIZE)
    before = descriptors()
    region = Region(info(fd, kind="system"), fd)
    assert not region.changed_size()
    os.ftruncate(fd, SIZE * 2)
    assert not region.changed_size(), "growing takes nothing away"
    os.ftruncate(fd, SIZE - 1)
    assert region.changed_size()
    del region
    assert descriptors() <= before, "the descriptor it watched goes with it"
    os.close(fd)


def test_a_file_that_is_too_short_is_refused(pool):
    table = RegionTable()
    with pytest.raises(InferError, match=f"{SIZE + 1} bytes were registered, {SIZE} are left"):
        table.add(info(pool, byte_size=SIZE + 1), pool)
    assert table.get(1, 1) is None
    with pytest.raises(InferError):
        table.add(info(pool, kind="system", offset=1, byte_size=SIZE), pool)


def test_a_ping_is_answered_whatever_the_driver_says_of_the_gpus_memory(monkeypatch):
    words = memoryview(bytearray(1024)).cast("Q")
    table = RegionTable("GPU-1", words)
    models = SimpleNamespace(is_loading=False)
    control: Any = SimpleNamespace(_models=models, _regions=table)
    answers = iter((5, CudaError("cuMemGetInfo", "CUDA_ERROR_UNKNOWN", 999), 7, 8))

    def used_memory(device):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("broker.worker.cuda.windows.used_memory", used_memory)
    for loading, known in ((False, 5), (False, 5), (True, 5), (False, 7), (True, 7)):
        models.is_loading = loading
        assert Control._on_Ping(control, None, [])
        assert words[GPU_USED] == known
