"""A worker's table of clients' GPU memory: two real processes on the CUDA driver of --cuda."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from shm.errors import InferError
from tests.fakes.cuda import CudaEnv
from tests.fakes.cuda_children import Child

BLOCK = 4 << 20
INVALID = "failed to register shared memory region 'r1': invalid args"


@pytest.fixture(scope="module")
def pair(cuda_env: CudaEnv) -> Iterator[tuple[Child, Child]]:
    with (
        Child(cuda_env, "tests.fakes.cuda_roles:Application") as application,
        Child(cuda_env, "tests.fakes.cuda_roles:Worker") as worker,
    ):
        yield application, worker


@pytest.fixture
def application(pair: tuple[Child, Child]) -> Iterator[Child]:
    yield pair[0]
    pair[0].call("reset")


@pytest.fixture
def worker(pair: tuple[Child, Child]) -> Iterator[Child]:
    yield pair[1]
    pair[1].call("reset")


def block(application: Child, byte_size: int = BLOCK) -> dict[str, Any]:
    number = application.call("allocate", byte_size)
    return dict(application.call("export", number, 0, byte_size))


def refused(worker: Child, memory: dict[str, Any], number: int = 1, fd: int = -1) -> str:
    with pytest.raises(InferError) as caught:
        worker.call("add", number, 1, memory, fd=fd)
    assert caught.value.code == "INVALID_ARG"
    return caught.value.message


def test_a_window_inside_a_block_is_the_clients_memory(application: Child, worker: Child) -> None:
    number = application.call("allocate", BLOCK)
    application.call("write", number, 4096 + 12, 7.0)
    memory = application.call("export", number, 4096 + 12, 1024)
    assert (memory["offset"], memory["allocation_size"]) == (4108, BLOCK)
    assert worker.call("add", 1, 1, memory) == {"byte_size": 1024, "aligned": False}
    assert worker.call("read", 1) == 7
    worker.call("write", 1, 8.0)
    assert application.call("read", number, 4108) == 8
    assert worker.call("retire", 1)
    assert worker.call("counts") == {"opens": 1, "closes": 1, "evictions": 0, "regions": 0, "open_bytes": 0}


def test_one_allocation_is_opened_once_however_many_regions_are_in_it(application: Child, worker: Child) -> None:
    number = application.call("allocate", BLOCK)
    for region in range(1, 6):
        worker.call("add", region, region % 2, application.call("export", number, region * 256, 256))
    assert worker.call("counts")["opens"] == 1
    for region in range(1, 6):
        assert worker.call("counts")["closes"] == 0
        assert worker.call("counts")["open_bytes"] == BLOCK
        assert worker.call("retire", region)
    assert worker.call("counts")["closes"] == 1
    assert worker.call("retire", 1), "unknown by now"


def test_nothing_is_closed_while_a_request_runs(application: Child, worker: Child) -> None:
    memory = block(application)
    worker.call("add", 1, 1, memory)
    assert worker.call("begin", 1)
    assert not worker.call("retire", 1), "so its owner may not free it yet"
    assert worker.call("close_idle") == []
    assert worker.call("counts")["closes"] == 0
    assert worker.call("finish"), "the last on it"
    assert worker.call("close_idle") == [1]
    assert worker.call("counts")["closes"] == 1
    worker.call("add", 2, 1, memory)
    assert worker.call("counts")["opens"] == 2, "opened anew after it was closed"


def test_steady_requests_call_no_driver_function_of_regions(cuda_sim: CudaEnv) -> None:
    """The figure to hold: no open, no close, no context per request; `begin` and `finish` call nothing at all."""
    with (
        Child(cuda_sim, "tests.fakes.cuda_roles:Application") as application,
        Child(cuda_sim, "tests.fakes.cuda_roles:Worker") as worker,
    ):
        worker.call("add", 1, 1, block(application))
        before = cuda_sim.calls(worker.pid)
        assert before["cuIpcOpenMemHandle"] == before["cuDevicePrimaryCtxRetain"] == 1
        for _ in range(100):
            assert worker.call("begin", 1)
            assert not worker.call("finish")
        assert cuda_sim.calls(worker.pid) == before


def test_vmm_memory_outlives_its_client(cuda_env: CudaEnv, worker: Child) -> None:
    with Child(cuda_env, "tests.fakes.cuda_roles:Application") as application:
        memory = application.call("alloc_cuda", 1000)
        (fd,) = application.fds
        assert (memory["kind"], memory["byte_size"], memory["allocation_size"]) == ("vmm", 1000, 2 << 20)
        assert worker.call("add", 1, 1, memory, fd=fd)["aligned"]
        os.close(fd)
        assert worker.call("read", 1) == 101
        application.call("let_go")
        application.process.send_signal(signal.SIGKILL)
    assert worker.call("read", 1) == 101
    assert worker.call("end_owner", 1)
    counts = worker.call("counts")
    assert (counts["opens"], counts["closes"], counts["open_bytes"]) == (1, 1, 0)


def test_vmm_memory_that_comes_twice_is_opened_once(application: Child, worker: Child) -> None:
    """Where its descriptor tells which allocation it is; a client that says another size gets a mapping of its own."""
    memory = application.call("alloc_cuda", 1000)
    (fd,) = application.fds
    again = os.dup(fd)
    worker.call("add", 1, 1, memory, fd=fd)
    worker.call("add", 2, 2, memory, fd=again)
    assert worker.call("counts")["opens"] == 1
    assert worker.call("pointer", 1) == worker.call("pointer", 2)
    refused(worker, {**memory, "allocation_size": 4 << 20}, 3, fd=again)
    assert worker.call("retire", 1)
    assert worker.call("read", 2) == 101
    assert worker.call("counts")["closes"] == 0
    assert worker.call("retire", 2)
    counts = worker.call("counts")
    assert (counts["opens"], counts["closes"], counts["open_bytes"]) == (1, 1, 0)
    os.close(fd)
    os.close(again)


def test_a_client_that_was_killed_leaves_nothing(cuda_env: CudaEnv, worker: Child) -> None:
    with Child(cuda_env, "tests.fakes.cuda_roles:Application") as application:
        worker.call("add", 1, 1, block(application))
        worker.call("add", 2, 1, block(application))
        other = block(application)
        assert worker.call("begin", 2)
        application.kill()
    assert worker.call("read", 1) == 1, "what is mapped stays readable"
    assert not worker.call("end_owner", 1), "one request still runs"
    assert worker.call("finish")
    assert worker.call("close_idle") == [2]
    assert worker.call("counts") == {"opens": 2, "closes": 2, "evictions": 0, "regions": 0, "open_bytes": 0}
    assert refused(worker, other).startswith(INVALID)


def test_an_address_that_is_used_again_is_other_memory(application: Child, worker: Child) -> None:
    old = block(application)
    worker.call("add", 1, 1, old)
    application.call("free", 0)
    new = block(application)  # at the same address
    assert new["handle"] != old["handle"]
    worker.call("add", 2, 1, new)
    assert worker.call("read", 2) == 2
    assert worker.call("lost", 1)
    assert not worker.call("begin", 1), "its memory is gone"
    assert worker.call("counts")["evictions"] == 1
    assert worker.call("retire", 1)
    assert worker.call("retire", 2)
    assert worker.call("counts")["closes"] == 2


def test_memory_in_use_is_not_evicted(application: Child, worker: Child) -> None:
    worker.call("add", 1, 1, block(application))
    assert worker.call("begin", 1)
    application.call("free", 0)
    new = block(application)
    assert "CUDA_ERROR_ALREADY_MAPPED" in refused(worker, new, 2)
    assert worker.call("read", 1) == 1
    worker.call("finish")
    worker.call("add", 2, 1, new)
    assert worker.call("read", 2) == 2


def test_another_clients_memory_is_never_evicted(cuda_env: CudaEnv, application: Child, worker: Child) -> None:
    with Child(cuda_env, "tests.fakes.cuda_roles:Application") as neighbour:
        worker.call("add", 9, 9, block(neighbour))
        worker.call("add", 1, 1, block(application))
        application.call("free", 0)
        worker.call("add", 2, 1, block(application))
        assert not worker.call("lost", 9)
        assert worker.call("read", 9) == 1


@pytest.mark.parametrize("handle", [b"", b"x", bytes(63), bytes(65)], ids=len)
def test_handles_of_other_lengths_are_refused(application: Child, worker: Child, handle: bytes) -> None:
    assert f"has 64 bytes, {len(handle)} came" in refused(worker, block(application) | {"handle": handle})


@pytest.mark.parametrize("handle", [bytes(64), b"\xff" * 64, bytes(range(64))], ids=["zeros", "ones", "noise"])
def test_handles_of_nothing_are_refused(application: Child, worker: Child, handle: bytes) -> None:
    for _ in range(10):
        assert refused(worker, block(application, 4096) | {"handle": handle}).startswith(INVALID)
    assert worker.call("counts")["open_bytes"] == 0


def test_a_handle_of_freed_memory_is_refused(application: Child, worker: Child) -> None:
    memory = block(application)
    application.call("free", 0)
    assert refused(worker, memory).startswith(INVALID)


@pytest.mark.parametrize(
    "wrong",
    [{"allocation_size": 1 << 40, "byte_size": BLOCK + 1}, {"allocation_size": 1 << 40, "offset": BLOCK}],
    ids=["longer", "behind"],
)
def test_the_driver_says_how_large_an_allocation_is(application: Child, worker: Child, wrong: dict[str, int]) -> None:
    memory = block(application)
    for _ in range(20):
        assert f"the allocation has {BLOCK} bytes" in refused(worker, memory | wrong)
    counts = worker.call("counts")
    assert counts["opens"] == counts["closes"] == 20, "what was opened to look is closed again"
    worker.call("add", 2, 1, memory)
    assert f"the allocation has {BLOCK} bytes" in refused(worker, memory | wrong)


def test_a_descriptor_of_something_else_is_refused(application: Child, worker: Child) -> None:
    memory = application.call("alloc_cuda", 4096)
    (fd,) = application.fds
    with open("/dev/null") as other:
        assert refused(worker, memory, fd=other.fileno()).startswith(INVALID)
    assert refused(worker, memory | {"allocation_size": 8 << 20}, fd=fd).startswith(INVALID)
    worker.call("add", 1, 1, memory, fd=fd)
    os.close(fd)


def test_memory_of_another_gpu_needs_peers(cuda_sim: CudaEnv) -> None:
    two = cuda_sim.with_settings(CUSIM_DEVICES=2)
    apart = two.with_settings(CUSIM_PEER=0)
    with Child(two, "tests.fakes.cuda_roles:Application", "1") as application:
        memory = block(application)
        with Child(two, "tests.fakes.cuda_roles:Worker", "0") as worker:
            text = refused(worker, memory)
            assert f"it is memory of {memory['device']}, this worker runs on" in text
            assert "--cuda-peer-access=true" in text
        for allowed in ([], ["peers"]):
            with Child(apart, "tests.fakes.cuda_roles:Worker", "0", *allowed) as worker:
                text = refused(worker, memory)
                assert text.endswith("which cannot reach that one: use memory of its own GPU, or of the host"), allowed
        with Child(two, "tests.fakes.cuda_roles:Worker", "0", "peers") as worker:
            worker.call("add", 1, 1, memory)
            assert worker.call("read", 1) == 1


def test_numbers_of_devices_do_not_matter(cuda_sim: CudaEnv) -> None:
    """CUDA_VISIBLE_DEVICES turns them round in one of the processes."""
    two = cuda_sim.with_settings(CUSIM_DEVICES=2)
    turned = two.with_settings(CUDA_VISIBLE_DEVICES="1,0")
    with (
        Child(two, "tests.fakes.cuda_roles:Application", "0") as application,
        Child(turned, "tests.fakes.cuda_roles:Worker", "1") as worker,
    ):
        worker.call("add", 1, 1, block(application))
        assert worker.call("read", 1) == 1


def test_a_worker_without_memory_for_a_mapping_refuses_and_goes_on(cuda_sim: CudaEnv) -> None:
    full = cuda_sim.with_settings(CUSIM_FAIL="cuIpcOpenMemHandle:2:1")
    with (
        Child(cuda_sim, "tests.fakes.cuda_roles:Application") as application,
        Child(full, "tests.fakes.cuda_roles:Worker") as worker,
    ):
        worker.call("add", 2, 1, block(application))
        why = refused(worker, block(application))
        assert re.search(r"CUDA_ERROR_OUT_OF_MEMORY \(2\): of GPU-\S+ \d+ of \d+ bytes are free", why)
        assert worker.call("read", 2) == 1
