"""Memory of `tritonclient.utils.cuda_shared_memory`, unmodified: opened by a worker through its 64-byte handle, and
served by a broker. Also with --cuda=real.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shm.errors import InferError
from tests.fakes import models
from tests.fakes.cuda import ROOT, CudaEnv
from tests.fakes.cuda_children import Child
from tests.fakes.gateways import Gateway
from tests.integration.test_cuda_served import IDENTITY


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


def test_a_broker_serves_it_over_http_and_grpc(cuda_env: CudaEnv, tmp_path: Path) -> None:
    models.write_model(tmp_path / "repository", "on_cpu", config=IDENTITY % "KIND_CPU")
    runtime, before = "simulated" if cuda_env.simulated else "real", cuda_env.environ | {"PYTHONPATH": str(ROOT)}
    with Gateway(
        tmp_path / "repository", tmp_path / "run", "--allow-client-shm=true", before=lambda: os.environ.update(before)
    ) as broker:
        broker.ready()
        for transport in ("http", "grpc"):
            address = f"127.0.0.1:{broker.ports[transport]}"
            with Child(cuda_env, "tests.fakes.cuda_triton:TritonCaller", runtime, transport, address) as user:
                for name in ("in", "out"):
                    user.call("create", name, 64, 0)
                    assert user.call("register", name, name, 0, 64) == ""
                user.call("set", "in", [1.0, 2.0, 3.0, 4.0])
                assert user.call("infer", "on_cpu", {"INPUT0": ("in", 0)}, {"OUTPUT0": ("out", 16)}, [1, 4]) == {}
                assert user.call("get", "out", 8)[4:] == [1.0, 2.0, 3.0, 4.0]
                user.call("unregister", "")
                assert user.call("destroy", "in") + user.call("destroy", "out") == 1
