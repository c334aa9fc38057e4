"""Applications and their GPU memory: found, exported, registered, refused with a remedy, held and let go."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shm.errors import InferError
from tests.fakes import models
from tests.fakes.broker import Broker
from tests.fakes.cuda import CudaEnv
from tests.fakes.cuda_broker import CudaBroker
from tests.fakes.cuda_children import Child

APPLICATION = "tests.fakes.cuda_application:Application"


@pytest.fixture(scope="module")
def devices(cuda_env: CudaEnv) -> tuple[str, ...]:
    return cuda_env.devices()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory, devices: tuple[str, ...]) -> Iterator[CudaBroker]:
    made = CudaBroker(tmp_path_factory.mktemp("run"), devices)
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared_application(cuda_env: CudaEnv, broker: CudaBroker) -> Iterator[Child]:
    with Child(cuda_env, APPLICATION, str(broker.directory)) as child:
        yield child


@pytest.fixture
def application(shared_application: Child, broker: CudaBroker) -> Iterator[Child]:
    yield shared_application
    shared_application.call("reset")
    broker.entries.clear()
    broker.unregistered.clear()


def refusal(child: Child, method: str, *arguments: Any) -> str:
    with pytest.raises(InferError) as caught:
        child.call(method, *arguments)
    return f"{caught.value.code}: {caught.value.message}"


def test_an_array_inside_a_block_is_registered_where_it_lies(
    cuda_env: CudaEnv, broker: CudaBroker, application: Child
) -> None:
    region = application.call("register_interface", "in", 512, [4, 8])
    assert region == {"kind": "cuda", "byte_size": 128, "offset": 512, "device": broker.registry.cuda_devices()[0]}
    memory = broker.entries["in"].cuda
    assert memory is not None
    assert (memory.kind, memory.offset, memory.byte_size, memory.allocation_size) == ("legacy", 512, 128, 4 << 20)
    with Child(cuda_env, "tests.fakes.cuda_roles:Worker") as worker:
        broker.give(worker, 1, "in")
        assert worker.call("read", 1) == 512, "what the application wrote at this offset"
    assert application.call("register_dlpack", "also", 1024, [16])["offset"] == 1024
    assert application.call("register_pointer", "too", 2048, 100)["byte_size"] == 100


def test_allocated_memory_is_shared_by_its_descriptor(
    cuda_env: CudaEnv, broker: CudaBroker, application: Child
) -> None:
    region = application.call("alloc_cuda", "r", 1000)
    assert (region["byte_size"], region["offset"]) == (1000, 0)
    entry = broker.entries["r"]
    assert entry.cuda is not None
    assert (entry.cuda.kind, entry.cuda.handle, entry.cuda.allocation_size) == ("vmm", b"", 2 << 20)
    assert application.call("write_array", "r", 5.0) == {"shape": [250], "typestr": "<f4", "version": 3}
    with Child(cuda_env, "tests.fakes.cuda_roles:Worker") as worker:
        broker.give(worker, 1, "r")
        assert worker.call("read", 1) == 5
        worker.call("write", 1, 6.0)
    assert application.call("read_array", "r") == 6


def test_without_vmm_it_is_an_allocation_of_its_own(cuda_sim: CudaEnv, broker: CudaBroker) -> None:
    """Of whole steps of 2 MiB: a handle opens the neighbours in smaller ones too."""
    with Child(cuda_sim.with_settings(CUSIM_FAIL="cuMemCreate:801"), APPLICATION, str(broker.directory)) as application:
        application.call("alloc_cuda", "r", 1000)
        memory = broker.entries["r"].cuda
        assert memory is not None
        assert (memory.kind, memory.allocation_size) == ("legacy", 2 << 20)


def test_a_device_may_be_named_as_an_instance_of_a_partitioned_one(
    devices: tuple[str, ...], application: Child
) -> None:
    """The driver gives such an instance's UUID without that word."""
    assert application.call("alloc_on", "r", devices[0].replace("GPU-", "MIG-"))["device"] == devices[0]
    assert "there is no GPU" in refusal(application, "alloc_on", "s", f"MIG-{devices[0][4:-1]}f")


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({"CUSIM_MEM_MB": 64}, "62914560 of 67108864 bytes are free"),  # the application has 4 MiB
        ({"CUSIM_MEM_MB": 64, "CUSIM_FAIL": "cuMemCreate:801"}, "62914560 of 67108864 bytes are free"),
        ({"CUSIM_FAIL": "cuDevicePrimaryCtxRetain:2"}, "not even a context of this process fits"),
    ],
)
def test_a_full_gpu_is_told_with_its_figures(
    cuda_sim: CudaEnv, broker: CudaBroker, settings: dict[str, object], left: str
) -> None:
    has_none = ["no"] if "context" in left else []
    with Child(cuda_sim.with_settings(**settings), APPLICATION, str(broker.directory), *has_none) as application:
        assert refusal(application, "alloc_cuda", "big", 1 << 30) == (
            f"UNAVAILABLE: cannot allocate 'big': SIMULATED GPU 0 (cusim), {cuda_sim.devices()[0]}, has no 1073741824 "
            f"bytes left: {left}. Unregister regions that are not used any more, see by `nvidia-smi` who has the rest, "
            "ask for less, or name another GPU (device=)"
        )
        if not has_none:
            application.call("alloc_cuda", "small", 4096)


def test_memory_is_held_until_unregister_has_returned(broker: CudaBroker, application: Child) -> None:
    before = application.call("free_bytes")
    application.call("alloc_cuda", "r", 3 << 20)
    application.call("register_held", "t")
    assert application.call("held"), "by the region alone"
    assert before - application.call("free_bytes") >= 4 << 20
    application.call("unregister", "t")
    assert not application.call("held")
    application.call("unregister", "r")
    assert broker.unregistered == ["t", "r"]
    assert application.call("free_bytes") == before
    assert application.call("descriptors_leaked") == 0


def test_closing_lets_everything_go(cuda_env: CudaEnv, broker: CudaBroker) -> None:
    with Child(cuda_env, APPLICATION, str(broker.directory)) as application:
        before = application.call("free_bytes")
        application.call("alloc_cuda", "r", 1)
        application.call("close")
        assert application.call("free_bytes") == before


def test_arrays_outlive_their_region(application: Child) -> None:
    application.call("alloc_cuda", "r", 1000)
    application.call("write_array", "r", 7.0)
    application.call("keep_array", "r")
    application.call("unregister", "r")
    assert application.call("read_kept") == 7


def test_it_is_registered_again_with_another_broker(broker: CudaBroker, application: Child) -> None:
    application.call("alloc_cuda", "a", 1000)
    application.call("register_interface", "b", 256, [8])
    broker.stop()
    broker.entries.clear()
    broker.start()
    application.call("models")
    assert sorted(broker.entries) == ["a", "b"]


def test_the_host_cannot_read_it(application: Child) -> None:
    application.call("alloc_cuda", "r", 1000)
    assert "is memory of a GPU, which numpy cannot read" in refusal(application, "host_array", "r")
    assert "needs 2000 bytes, region 'r' has 1000" in refusal(application, "large_array", "r")


@pytest.mark.parametrize(
    ("method", "text"),
    [
        ("register_pool_memory", "UNSUPPORTED: cannot register 'r': memory of a stream-ordered pool (cudaMallocAsync"),
        ("register_host_memory", "INVALID_ARG: cannot register 'r': its address is no memory of a GPU"),
        ("register_too_much", "lie in the allocation"),
        ("register_wrong_device", "not of GPU-00000000-0000-0000-0000-000000000000 as given"),
        ("register_a_number_as_device", "a device is named by its UUID"),
        ("register_gaps", "is not C-contiguous"),
        ("register_freed", "its address is no memory of a GPU"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_the_reason(application: Child, method: str, text: str) -> None:
    assert text in refusal(application, method)
    assert application.call("descriptors_leaked") == 0


def test_mapped_memory_is_shared_by_its_descriptor_and_not_by_a_handle(broker: CudaBroker, application: Child) -> None:
    """As torch's expandable segments are."""
    application.call("register_mapped", "r")
    memory = broker.entries["r"].cuda
    assert memory is not None
    assert (memory.kind, memory.offset) == ("vmm", 4096)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"CUSIM_INTEGRATED": 1}, "UNSUPPORTED: cannot register 'r': this GPU shares the host's memory (Jetson)"),
        ({"CUSIM_FAIL": "cuIpcGetMemHandle:801"}, "the driver does not export it: cuIpcGetMemHandle failed with"),
    ],
)
def test_platforms_without_ipc_say_so(
    cuda_sim: CudaEnv, broker: CudaBroker, settings: dict[str, object], text: str
) -> None:
    with Child(cuda_sim.with_settings(**settings), APPLICATION, str(broker.directory)) as application:
        assert text in refusal(application, "register_interface", "r", 0, [8])


def test_a_client_of_host_memory_alone_has_no_context(cuda_sim: CudaEnv, broker: CudaBroker) -> None:
    with Child(cuda_sim, APPLICATION, str(broker.directory), "without CUDA") as application:
        application.call("infer_on_host")
        assert cuda_sim.calls(application.pid) == {}
        assert application.call("cuda_is_imported") is False


def test_without_cuda_the_reason_is_said(cuda_sim: CudaEnv, broker: CudaBroker) -> None:
    none = cuda_sim.with_settings(CUSIM_DEVICES=0)
    with Child(none, APPLICATION, str(broker.directory), "without CUDA") as application:
        expected = "UNSUPPORTED: cannot allocate 'r': CUDA is not available: the driver sees no GPU"
        assert refusal(application, "alloc_cuda", "r", 64) == expected


def test_a_real_broker_without_gpu_workers_refuses(cuda_env: CudaEnv, tmp_path: Path) -> None:
    repository = models.write_repository(tmp_path / "models", {"add1": models.add1()})
    with Broker(repository, tmp_path / "run", before=lambda: os.environ.update(CUDA_VISIBLE_DEVICES="")) as broker:
        broker.ready()
        with Child(cuda_env, APPLICATION, str(broker.directory)) as application:
            before = application.call("free_bytes")
            expected = "UNSUPPORTED: failed to register CUDA shared memory region: 'r', GPUs not supported"
            for method in ("alloc_cuda", "alloc_cuda_async"):
                assert refusal(application, method, "r", 64).startswith(expected)
                assert application.call("free_bytes") == before
                assert application.call("descriptors_leaked") == 0
