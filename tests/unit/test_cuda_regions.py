"""The broker and GPU memory: who may register it, what is charged, who gets it, when its owner may free it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from broker.control import register_cuda
from broker.cuda_regions import nearest
from broker.quota import Quota
from broker.records import Peer, add_region, record, region_info
from broker.registry import Registry
from shm import messages
from shm.cuda.descriptor import CudaEvents, CudaMemory, allocation_of
from shm.descriptor_kinds import _says_dma_buf
from shm.errors import InferError
from shm.sockets import close_all

UID = os.getuid()
ALICE, BOB = Peer(session=1, pid=101, uid=UID), Peer(session=2, pid=102, uid=UID + 1)
GPU, OTHER = "GPU-43555349-4d00-0000-0000-000000000000", "GPU-43555349-4d00-0000-0000-000000000001"
SIZE = 1 << 20


class CudaWorker:
    """A worker of a GPU. `last`: what ends when no request uses a retired region any more."""

    def __init__(self, key: str = f"{GPU}/default") -> None:
        self.key = key
        self.device = key.partition("/")[0].removeprefix("cpu")
        self.added: list[Any] = []
        self.retired: list[tuple[int, int]] = []
        self.last: asyncio.Future[None] | None = None

    async def add_region(self, entry: Any) -> None:
        self.added.append(add_region(entry))

    async def retire_region(self, region: int, generation: int) -> asyncio.Future[None] | None:
        self.retired.append((region, generation))
        return self.last

    async def region_used(self, region: int, generation: int) -> bool:
        return False


@pytest.fixture
def registry() -> Iterator[Registry]:
    registry = Registry(Quota(1 << 20, max_regions=8, cuda_limit=4 * SIZE, max_events=4))
    registry.cuda_devices = lambda: (GPU,)
    yield registry
    registry.close()


def legacy(number: int = 1, **changes: Any) -> CudaMemory:
    made = CudaMemory(
        kind="legacy", device=GPU, allocation_size=2 * SIZE, offset=256, byte_size=SIZE, handle=bytes([number]) * 64
    )
    return msgspec.structs.replace(made, **changes)


def vmm(**changes: Any) -> CudaMemory:
    return legacy(kind="vmm", handle=b"", **changes)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_region_of_a_gpu_is_a_region(registry: Registry) -> None:
    entry = registry.register_cuda(ALICE, "in", legacy(), False)
    assert registry.find(ALICE.session, "in") is entry
    info = region_info(entry)
    assert (info.kind, info.byte_size, info.offset, info.writable) == ("cuda", SIZE, 256, False)
    assert record(entry).kind == "cuda"
    assert add_region(entry).cuda == legacy()
    assert entry.descriptors == ()
    with pytest.raises(InferError, match="shared memory region 'in' already in manager"):
        registry.register_cuda(ALICE, "in", legacy(2), True)


def test_the_same_allocation_is_the_same_memory_for_everybody(registry: Registry) -> None:
    """So that two sessions' outputs cannot overlap unseen."""
    mine = registry.register_cuda(ALICE, "a", legacy(1, offset=0), True)
    theirs = registry.register_cuda(BOB, "b", legacy(1, offset=SIZE), True)
    other = registry.register_cuda(ALICE, "c", legacy(2), True)
    assert (mine.device, mine.inode) == (theirs.device, theirs.inode)
    assert mine.inode != other.inode
    assert mine.device == -1, "no file's"


def test_equal_files_behind_descriptors_are_one_allocation(registry: Registry) -> None:
    """A device node, which NVIDIA's drivers may export, says nothing: it is the same for every allocation."""
    memory, other = (os.memfd_create("vmm") for _ in range(2))
    nodes = [os.open("/dev/null", os.O_RDWR) for _ in range(2)]
    entries = [
        registry.register_cuda(ALICE, f"r{at}", vmm(byte_size=1), True, fd)
        for at, fd in enumerate((memory, os.dup(memory), other, *nodes, os.eventfd(0)))
    ]
    one, again, another, *unknown = ((entry.device, entry.inode) for entry in entries)
    assert one == again
    assert len({one, another, *unknown}) == 5
    assert {device for device, _ in unknown} == {-1}, "no file's"


def test_nobody_asks_a_clients_file_system_about_a_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a FUSE mount would answer when the client likes."""
    asked: list[int] = []
    fstat = os.fstat
    monkeypatch.setattr(os, "fstat", lambda fd: (asked.append(fd), fstat(fd))[1])
    for fd in (os.open("/proc/self/status", os.O_RDONLY), os.open("/dev/null", os.O_RDWR), -1):
        assert allocation_of(fd) is None
        close_all((fd,))
    assert not asked
    fd = os.memfd_create("vmm")
    assert allocation_of(fd) == (fstat(fd).st_dev, fstat(fd).st_ino)
    assert asked == [fd]
    os.close(fd)


def test_dma_bufs_are_known_by_what_the_kernel_says_of_them() -> None:
    common = b"pos:\t0\nflags:\t02000002\nmnt_id:\t15\nino:\t1061\n"
    assert _says_dma_buf(common + b"size:\t4096\ncount:\t2\nexp_name:\tnvidia\nname:\t\xff\n")
    assert not _says_dma_buf(common)


def test_without_a_worker_there_triton_says_so(registry: Registry) -> None:
    registry.cuda_devices = tuple
    with pytest.raises(InferError) as caught:
        registry.register_cuda(ALICE, "in", legacy(), True)
    assert caught.value.code == "UNSUPPORTED"
    assert caught.value.message.startswith(
        "failed to register CUDA shared memory region: 'in', GPUs not supported: this broker has no worker on "
        f"{GPU}; its workers run on the CPU only"
    )
    registry.cuda_devices = lambda: (OTHER,)
    with pytest.raises(InferError, match=f"workers run on {OTHER}"):
        registry.register_cuda(ALICE, "in", legacy(), True)
    assert registry.quota.cuda_used(UID) == len(registry) == 0


def test_a_user_has_so_many_events_at_once(registry: Registry) -> None:
    """Workers open each of them."""

    def ring(count: int) -> CudaEvents:
        return CudaEvents(device=GPU, handles=bytes(64 * count))

    registry.register_cuda(ALICE, "e", ring(3), False)
    wanted = r"\[UNAVAILABLE\] too many events for shared memory region 'more': asked 2, those of uid \d+: 3, limit 4"
    with pytest.raises(InferError, match=wanted):
        registry.register_cuda(ALICE, "more", ring(2), False)
    registry.register_cuda(ALICE, "one", ring(1), False)
    registry.register_cuda(BOB, "more", ring(4), False)
    asyncio.run(registry.unregister(ALICE.session, "e"))
    registry.register_cuda(ALICE, "more", ring(3), False)
    assert registry.quota.total == 0, "the host holds handles only"


def test_gpu_memory_has_a_budget_of_its_own(registry: Registry) -> None:
    for number in range(4):
        registry.register_cuda(ALICE, f"r{number}", legacy(number), True)
    assert registry.quota.total == 0, "the host holds none of it"
    with pytest.raises(InferError, match="no GPU memory quota for shared memory region 'r4'") as caught:
        registry.register_cuda(ALICE, "r4", legacy(4), True)
    assert caught.value.code == "UNAVAILABLE"
    with pytest.raises(InferError) as caught:
        registry.register_cuda(ALICE, "r4", legacy(4, allocation_size=1 << 40, byte_size=8 * SIZE), True)
    assert caught.value.code == "INVALID_ARG", "it can never fit"
    registry.register_cuda(BOB, "r", legacy(5), True)
    asyncio.run(registry.unregister(ALICE.session, "r0"))
    registry.register_cuda(ALICE, "r4", legacy(4), True)
    asyncio.run(registry.unregister(ALICE.session))
    asyncio.run(registry.unregister(BOB.session))
    assert registry.quota.cuda_used(UID) == registry.quota.cuda_used(UID + 1) == 0


def test_refusals_leave_neither_descriptors_nor_quota(registry: Registry) -> None:
    registry.register_cuda(ALICE, "taken", legacy(), True)
    before = descriptors()
    for memory, name in (
        (vmm(), "taken"),
        (vmm(device=OTHER), "a"),
        (vmm(byte_size=0), "b"),
        (vmm(offset=SIZE + 1), "c"),
    ):
        with pytest.raises(InferError):
            registry.register_cuda(ALICE, name, memory, True, os.open("/dev/null", os.O_RDONLY))
    assert descriptors() <= before
    assert registry.quota.cuda_used(UID) == SIZE


class Parts:
    """Of `Control`, what `register_cuda` uses."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry


@pytest.mark.parametrize(("memory", "came"), [(legacy(), 1), (vmm(), 0), (vmm(), 2)])
def test_vmm_memory_comes_with_its_descriptor_and_no_other_does(
    registry: Registry, memory: CudaMemory, came: int
) -> None:
    before = descriptors()
    fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(came)]
    asked = messages.RegisterCuda(name="r", memory=memory)
    with pytest.raises(InferError, match=f"{came} came with region 'r'"):
        register_cuda(Parts(registry), ALICE, asked, fds)  # type: ignore[arg-type]
    assert descriptors() <= before


def test_workers_that_plans_go_to_get_it(registry: Registry) -> None:
    fd = os.open("/dev/null", os.O_RDONLY)
    by_handle = registry.register_cuda(ALICE, "h", legacy(), True)
    by_descriptor = registry.register_cuda(ALICE, "d", vmm(), True, fd)
    assert by_descriptor.descriptors == (fd,)
    here, elsewhere, host = CudaWorker(), CudaWorker(f"{OTHER}/default"), CudaWorker("cpu/default")
    regions = [by_handle, by_descriptor]
    assert nearest([host, elsewhere, here], regions) == [here], "in place"
    assert nearest([elsewhere, host], regions) == [host], "copies"
    assert nearest([elsewhere], regions) == [elsewhere], "which says itself whether it reaches it"
    assert nearest([host, elsewhere, here], []) == [host, elsewhere, here]
    asyncio.run(registry.map_at(here, regions))
    assert [message.cuda for message in here.added] == [legacy(), vmm()]
    asyncio.run(registry.unregister(ALICE.session))
    assert here.retired == [by_handle.identity, by_descriptor.identity], "and only there"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_unregister_is_answered_when_the_memory_may_be_freed(registry: Registry) -> None:
    """Not while a request uses it, as for memory of the host: the mapping of that keeps it, that of CUDA does not."""

    async def scenario() -> None:
        entry = registry.register_cuda(ALICE, "r", legacy(), True)
        worker = CudaWorker()
        worker.last = asyncio.get_running_loop().create_future()
        await registry.map_at(worker, [entry])
        asked = asyncio.create_task(registry.unregister(ALICE.session, "r"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert worker.retired
        assert not asked.done()
        assert [one.name for one in registry.of(ALICE.session)] == ["r"]
        registry.register_cuda(ALICE, "r", legacy(2), True)  # the name is free at once
        worker.last.set_result(None)
        await asked
        assert entry.generation not in [one.generation for one in registry]

    asyncio.run(scenario())


def test_it_cannot_be_shared_by_a_token(registry: Registry) -> None:
    registry.register_cuda(ALICE, "r", legacy(), True)
    with pytest.raises(InferError, match="only the session that registered it can use it"):
        registry.share(ALICE.session, "r")


def test_a_gateway_opens_a_principals_gpu_memory(registry: Registry) -> None:
    principal, gateway = Peer(-1, 0, UID, "principal"), Peer(5, 100, UID, "gateway")
    owner = registry.register_cuda(principal, "r", legacy(), True)
    alias = registry.alias(gateway, owner)
    assert alias.cuda == owner.cuda
    assert (alias.device, alias.inode) == (owner.device, owner.inode)
    asyncio.run(registry.unregister(principal.session, "r"))
    assert len(registry) == 0


def test_the_message_says_everything(registry: Registry) -> None:
    asked = messages.RegisterCuda(id=7, name="r", memory=legacy(), writable=False)
    assert messages.decode_request(messages.encode(asked)) == asked
