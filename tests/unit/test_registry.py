"""Regions: admitted, refused without leaving a descriptor, shared, retired."""

import asyncio
import os
import secrets
import threading

import posix_ipc
import pytest

from broker.quota import Quota
from broker.records import Peer, record
from broker.registry import Registry
from shm import regions
from shm.errors import InferError
from shm.regions import create_pool

UID = os.getuid()
ALICE, BOB = Peer(session=1, pid=101, uid=UID), Peer(session=2, pid=102, uid=UID)
PAGE = 4096


class SlowWorker:
    """A worker whose acknowledgements come when the test says so."""

    def __init__(self, key="cpu/default"):
        self.key = key
        self.log = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def add_region(self, entry):
        self.log.append(("add", entry.region, entry.generation))
        await self.may_answer.wait()

    async def retire_region(self, region, generation):
        self.log.append(("retire", region, generation))
        await self.may_answer.wait()


class DeadWorker(SlowWorker):
    async def retire_region(self, region, generation):
        raise InferError("UNAVAILABLE", "no answer for 30 s")


@pytest.fixture
def registry():
    registry = Registry(Quota(1 << 20))
    yield registry
    registry.close()


@pytest.fixture
def system_key():
    """A POSIX shared memory object of one page, gone after the test."""
    key = f"/tb-{secrets.token_hex(8)}"
    memory = posix_ipc.SharedMemory(key, posix_ipc.O_CREX, size=PAGE)
    os.close(memory.fd)
    yield key
    posix_ipc.unlink_shared_memory(key)


def open_fds():
    return len(os.listdir("/proc/self/fd"))


def pool(registry, peer, name, byte_size=PAGE):
    return registry.register_pool(peer, name, byte_size, create_pool(byte_size))


def test_names_are_unique_per_session_and_private_to_it(registry):
    entry = pool(registry, ALICE, "frames")
    assert registry.find(ALICE.session, "frames") is entry
    with pytest.raises(InferError, match="shared memory region 'frames' already in manager") as refusal:
        pool(registry, ALICE, "frames")
    assert refusal.value.code == "ALREADY_EXISTS"
    with pytest.raises(InferError, match="Unable to find shared memory region: 'frames'") as refusal:
        registry.find(BOB.session, "frames")
    assert refusal.value.code == "NOT_FOUND"
    assert pool(registry, BOB, "frames").identity != entry.identity


def test_refusals_leave_neither_descriptors_nor_quota(registry):
    pool(registry, ALICE, "taken")
    used, before = registry.quota.total, open_fds()
    for _ in range(200):
        for fd, name, byte_size in (
            (create_pool(PAGE), "taken", PAGE),
            (create_pool(PAGE), "empty", 0),
            (create_pool(PAGE), "larger than it is", 2 * PAGE),
            (create_pool(PAGE), "larger than the quota", 2 << 20),
            (os.memfd_create("unsealed", os.MFD_CLOEXEC), "unsealed", PAGE),
            (os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC), "device", PAGE),
        ):
            with pytest.raises(InferError):
                registry.register_pool(ALICE, name, byte_size, fd)
    assert open_fds() <= before
    assert registry.quota.total == used
    assert [entry.name for entry in registry.of(ALICE.session)] == ["taken"]


def test_system_region_is_opened_and_its_pages_are_reserved(registry, system_key):
    async def scenario():
        entry = await registry.register_system(ALICE, "in", system_key, PAGE, 0)
        assert os.fstat(entry.fd).st_blocks * 512 >= PAGE
        assert entry.kind == "system"
        assert record(entry).key == system_key
        assert record(entry, show_key=False).key == ""

    asyncio.run(scenario())


def test_refused_system_regions_leave_no_descriptor(registry, system_key):
    async def scenario():
        await registry.register_system(ALICE, "warm-up: the loop's and the threads' own descriptors", system_key, 1, 0)
        before = open_fds()
        for key, byte_size, offset in (
            ("/does-not-exist", PAGE, 0),
            (system_key, PAGE + 1, 0),
            (system_key, PAGE, 1),
            (system_key, 64 << 40, 0),
            (system_key, 1, 2**63 - 1),
            ("../etc/passwd", PAGE, 0),
        ):
            with pytest.raises(InferError):
                await registry.register_system(ALICE, "x", key, byte_size, offset)
        assert open_fds() <= before
        assert len(registry.of(ALICE.session)) == 1

    asyncio.run(scenario())


def test_unregister_frees_the_name_at_once_and_answers_after_the_workers(registry):
    async def scenario():
        worker = SlowWorker()
        first = pool(registry, ALICE, "ring")
        await registry.map_at(worker, [first])
        worker.may_answer.clear()
        leaving = asyncio.create_task(registry.unregister(ALICE.session, "ring"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(InferError):
            registry.find(ALICE.session, "ring")
        second = pool(registry, ALICE, "ring")
        assert second.generation != first.generation
        assert sorted(record(entry).state for entry in registry.of(ALICE.session)) == ["active", "draining"]
        assert not leaving.done()
        used = registry.quota.total
        worker.may_answer.set()
        await leaving
        assert registry.quota.total == used - PAGE
        assert [entry.generation for entry in registry.of(ALICE.session)] == [second.generation]
        assert worker.log == [("add", *first.identity), ("retire", *first.identity)]

    asyncio.run(scenario())


def test_unregister_of_unknown_names_succeeds_and_all_means_mine(registry):
    async def scenario():
        pool(registry, ALICE, "a")
        pool(registry, ALICE, "b")
        pool(registry, BOB, "a")
        await registry.unregister(ALICE.session, "never heard of")
        await registry.unregister(ALICE.session)
        assert registry.of(ALICE.session) == []
        assert [entry.name for entry in registry.of(BOB.session)] == ["a"]
        await registry.unregister(3)

    asyncio.run(scenario())


def test_a_region_retired_while_a_worker_maps_it_is_not_found(registry):
    async def scenario():
        worker = SlowWorker()
        worker.may_answer.clear()
        entry = pool(registry, ALICE, "ring")
        mapping = asyncio.create_task(registry.map_at(worker, [entry]))
        await asyncio.sleep(0)
        leaving = asyncio.create_task(registry.unregister(ALICE.session, "ring"))
        await asyncio.sleep(0)
        worker.may_answer.set()
        with pytest.raises(InferError, match="Unable to find shared memory region: 'ring'"):
            await mapping
        await leaving
        assert worker.log[-1] == ("retire", *entry.identity)

    asyncio.run(scenario())


def test_a_worker_that_never_answers_is_reported_but_the_region_is_gone(registry):
    async def scenario():
        entry = pool(registry, ALICE, "ring")
        await registry.map_at(DeadWorker(), [entry])
        with pytest.raises(InferError, match="no answer"):
            await registry.unregister(ALICE.session, "ring")
        assert registry.of(ALICE.session) == []
        assert registry.quota.total == 0
        assert entry.fd == -1

    asyncio.run(scenario())


def test_shared_region_is_the_same_memory_and_ends_with_its_owner(registry):
    async def scenario():
        worker = SlowWorker()
        entry = pool(registry, ALICE, "frames")
        token = registry.share(ALICE.session, "frames")
        assert registry.share(ALICE.session, "frames") == token
        assert len(token) == 32
        opened = registry.open(BOB, "cam", token)
        assert (opened.device, opened.inode) == (entry.device, entry.inode)
        assert os.fstat(opened.fd).st_ino == entry.inode
        assert registry.quota.total == PAGE  # counted once: it is the same memory
        await registry.map_at(worker, [opened])
        await registry.unregister(ALICE.session)
        with pytest.raises(InferError, match="Unable to find shared memory region: 'cam'"):
            registry.find(BOB.session, "cam")
        assert ("retire", *opened.identity) in worker.log
        assert opened.fd == -1
        with pytest.raises(InferError, match="no region is shared under this token"):
            registry.open(BOB, "cam", token)

    asyncio.run(scenario())


def test_the_openers_end_leaves_the_owners_region_alone(registry):
    async def scenario():
        pool(registry, ALICE, "frames")
        token = registry.share(ALICE.session, "frames")
        registry.open(BOB, "cam", token)
        await registry.unregister(BOB.session)
        assert registry.find(ALICE.session, "frames").fd >= 0
        registry.open(BOB, "cam", token)

    asyncio.run(scenario())


def test_a_session_can_open_its_own_token_and_leave(registry):
    async def scenario():
        pool(registry, ALICE, "frames")
        registry.open(ALICE, "again", registry.share(ALICE.session, "frames"))
        with pytest.raises(InferError, match="ask its owner"):
            registry.share(ALICE.session, "again")
        await registry.unregister(ALICE.session)
        assert list(registry) == []
        assert registry.quota.total == 0

    asyncio.run(scenario())


def test_tokens_of_other_uids_open_nothing(registry):
    pool(registry, ALICE, "frames")
    token = registry.share(ALICE.session, "frames")
    for peer, attempt in ((Peer(3, 103, UID + 1), token), (BOB, "0" * 32)):
        with pytest.raises(InferError) as refusal:
            registry.open(peer, "cam", attempt)
        assert refusal.value.code == "NOT_FOUND"


def test_identities_are_never_used_twice(registry):
    async def scenario():
        seen = set()
        for _ in range(50):
            seen.add(pool(registry, ALICE, "a").identity)
            await registry.unregister(ALICE.session)
        assert len(seen) == 50
        assert len({region for region, _ in seen}) == 1  # but indexes are, so tables stay small

    asyncio.run(scenario())


def test_a_session_that_ends_while_pages_are_reserved_gives_all_back(registry, system_key, monkeypatch):
    """The thread goes on with a descriptor of its own: numbers that are used again must not be touched by it."""
    running, may_go_on, reserved = threading.Event(), threading.Event(), []

    def slow_reserve(fd, offset, byte_size):
        running.set()
        may_go_on.wait(60)
        reserved.append(os.fstat(fd).st_ino)

    monkeypatch.setattr(regions, "reserve", slow_reserve)

    async def scenario():
        await asyncio.to_thread(lambda: None)
        before = open_fds()
        first = asyncio.create_task(registry.register_system(ALICE, "a", system_key, PAGE, 0))
        await asyncio.to_thread(running.wait, 60)
        inode = os.stat(f"/dev/shm{system_key}").st_ino
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert registry.quota.total == 0
        others = [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]
        may_go_on.set()
        await asyncio.to_thread(lambda: registry._reservations.close(wait=True))
        assert reserved == [inode]
        for fd in others:
            os.close(fd)
        assert open_fds() <= before

    asyncio.run(scenario())


def test_a_truncated_region_is_expelled(registry):
    async def scenario():
        worker = SlowWorker()
        entry = pool(registry, ALICE, "a")
        await registry.map_at(worker, [entry])
        registry.expel(entry.generation)
        registry.expel(12345)
        while list(registry):  # noqa: ASYNC110  what is waited for is the loop's own work
            await asyncio.sleep(0)
        with pytest.raises(InferError):
            registry.find(ALICE.session, "a")
        assert worker.log[-1] == ("retire", *entry.identity)

    asyncio.run(scenario())
