"""Memory of `tritonclient.utils.cuda_shared_memory`, unmodified, opened by a worker through its 64-byte handle."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shm.errors import InferError
from tests.fakes.cuda import CudaEnv
from tests.fakes.cuda_children import Child


@pytest.fixture(scope="module")
def user(cuda_env: CudaEnv) -> Iterator[Child]:
    with Child(cuda_env, "tests.fakes.cuda_triton:TritonUser", "simulated" if cuda_env.simulated else "real") as child:
        yield child


@pytest.fixture(scope="module")
def worker(cuda_env: CudaEnv) -> Iterator[Child]:
    with Child(cuda_env, "tests.fakes.cuda_roles:Worker") as child:
        yield child


def test_a_worker_reads_and_writes_what_the_client_made(cuda_env: CudaEnv, user: Child, worker: Child) -> None:
    handle = user.call("create", "in", 64, 0)
    assert len(handle) == 64
    user.call("set", "in", [1.0, 2.0, 3.0])
    # All that such a registration says: a handle, a size and the client's number of the device.
    memory = {"kind": "legacy", "device": cuda_env.devices()[0], "allocation_size": 64, "offset": 0, "byte_size": 64}
    worker.call("add", 1, 1, memory | {"handle": handle})
    assert worker.call("read", 1) == 1
    worker.call("write", 1, 5.0)
    assert user.call("get", "in", 3) == [5.0, 2.0, 3.0]
    larger = {"allocation_size": 1 << 30, "byte_size": 1 << 30, "handle": handle}
    with pytest.raises(InferError, match="invalid args: the allocation has"):
        worker.call("add", 2, 1, memory | larger)
    assert worker.call("retire", 1)
    assert user.call("destroy", "in") == 0
    with pytest.raises(InferError, match="failed to register shared memory region 'r3': invalid args"):
        worker.call("add", 3, 1, memory | {"handle": handle})
    counts = worker.call("counts")
    assert counts["opens"] == counts["closes"]
