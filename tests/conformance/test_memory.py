"""What every kind of region memory does alike."""

import gc
import os
import threading
import uuid

import numpy as np
import pytest

from shm.errors import InferError
from shm.regions import LocalMemory, MappedMemory, create_pool, open_system, reserve
from shm.views import array

BYTE_SIZE = 10_000


def make_pool():
    return MappedMemory(create_pool(BYTE_SIZE), 0, BYTE_SIZE, True, keep_fd=True)


def make_system(offset=0):
    key = f"tensorbroker-test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    path = f"/dev/shm/{key}"
    os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))
    try:
        os.truncate(path, offset + BYTE_SIZE)
        fd, identity = open_system("region", key, BYTE_SIZE, offset, os.getuid())
        reserve(fd, offset, BYTE_SIZE)
    finally:
        os.unlink(path)
    return MappedMemory(fd, offset, BYTE_SIZE, identity.writable, kind="system", keep_fd=True)


MAKERS = {
    "pool": make_pool,
    "system": make_system,
    "system at an odd offset": lambda: make_system(offset=4099),
    "local": lambda: LocalMemory(BYTE_SIZE),
}


@pytest.fixture(params=MAKERS.values(), ids=MAKERS)
def memory(request):
    memory = request.param()
    yield memory
    memory.close()


def test_describes_itself(memory, request):
    assert memory.kind == request.node.callspec.id.split()[0]
    assert memory.byte_size == BYTE_SIZE
    assert memory.writable
    assert (memory.fd is None) == (memory.kind == "local")


def test_is_zeroed_bytes(memory):
    assert memory.bytes.shape == (BYTE_SIZE,)
    assert memory.bytes.dtype == np.uint8
    assert not memory.bytes.any()


def test_views_share_it(memory):
    view = array(memory.bytes, 4096, (10, 10), np.dtype(np.float32))
    view[:] = np.arange(100).reshape(10, 10)
    assert array(memory.bytes, 4096 + 4 * 99, (1,), np.dtype(np.float32))[0] == 99
    assert not memory.bytes[:4096].any()
    assert not memory.bytes[4096 + 400 :].any()


def test_ends_at_its_size(memory):
    assert array(memory.bytes, BYTE_SIZE - 4, (1,), np.dtype(np.float32)).shape == (1,)
    with pytest.raises(InferError):
        array(memory.bytes, BYTE_SIZE - 3, (1,), np.dtype(np.float32))


def test_views_outlive_it(memory):
    view = array(memory.bytes, 1, (1000,), np.dtype(np.int32))
    view[:] = 7
    memory.close()
    del memory
    gc.collect()
    view += 1
    assert view.sum() == 8000


def test_views_outlive_it_in_another_thread(memory):
    view = array(memory.bytes, 0, (BYTE_SIZE,), np.dtype(np.uint8))
    closed = threading.Event()
    sums = []

    def read():
        closed.wait(60)
        view[:] = 1
        sums.append(int(view.sum()))

    reader = threading.Thread(target=read)
    reader.start()
    memory.close()
    gc.collect()
    closed.set()
    reader.join(60)
    assert sums == [BYTE_SIZE]


def test_is_gone_for_its_owner_after_close(memory):
    memory.close()
    with pytest.raises(InferError, match="closed"):
        _ = memory.bytes
    assert memory.fd is None
    memory.close()


def test_close_returns_its_descriptors(memory):
    if memory.fd is None:
        pytest.skip("local memory is plain memory of this process: it has no descriptor to return")
    gc.collect()  # what other tests left would be closed below, too
    before = len(os.listdir("/proc/self/fd"))
    memory.close()
    gc.collect()
    # The kept one and the mapping's own.
    assert len(os.listdir("/proc/self/fd")) == before - 2
