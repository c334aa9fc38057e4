"""Principals' regions: whose they are, how gateways use them, how they end. Real shared memory, no process."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

import posix_ipc
import pytest

from broker.principals import UNUSED_S, Principals
from broker.quota import Quota
from broker.records import GATEWAY, Peer, RegionEntry
from broker.registry import Registry
from shm.errors import InferError
from shm.message_values import Principal
from tests.fakes.processes import descriptors, until

UID = os.getuid()
ME = Principal(uid=UID, scope="kserve")
OTHER = Principal(uid=UID, scope="zmq:1")
ONE, TWO = Peer(11, 101, UID, GATEWAY), Peer(12, 102, UID, GATEWAY)
PAGE = 4096


class Shm:
    """POSIX objects of one test."""

    def __init__(self) -> None:
        self.keys: set[str] = set()

    def make(self, key: str = "", byte_size: int = PAGE) -> str:
        key = key or f"/tb-{secrets.token_hex(8)}"
        os.close(posix_ipc.SharedMemory(key, posix_ipc.O_CREX, size=byte_size).fd)
        self.keys.add(key)
        return key

    def unlink(self, key: str) -> None:
        posix_ipc.unlink_shared_memory(key)
        self.keys.discard(key)


class Worker:
    """A worker whose requests run until the test says otherwise."""

    key = "cpu/default"

    def __init__(self) -> None:
        self.running: dict[tuple[int, int], asyncio.Future[None]] = {}
        self.used: set[tuple[int, int]] = set()
        self.asked = 0

    def run(self, entry: RegionEntry) -> None:
        self.running[entry.identity] = asyncio.get_running_loop().create_future()

    async def add_region(self, entry: RegionEntry) -> None:
        pass

    async def retire_region(self, region: int, generation: int) -> asyncio.Future[None] | None:
        return self.running.get((region, generation))

    async def region_used(self, region: int, generation: int) -> bool:
        self.asked += 1
        found = (region, generation) in self.used
        self.used.discard((region, generation))
        return found


@pytest.fixture
def shm() -> Iterator[Shm]:
    objects = Shm()
    yield objects
    for key in list(objects.keys):
        objects.unlink(key)


Scenario = Callable[[Registry, Principals, Shm], Coroutine[Any, Any, None]]


async def no_gpu(entry: RegionEntry) -> None:
    raise AssertionError("no GPU memory here")


def scenario(body: Scenario) -> Callable[[Shm], None]:
    """Run `body` on a loop; afterwards nothing may be left."""

    def test(shm: Shm) -> None:
        async def main() -> None:
            registry = Registry(Quota(1 << 20))
            principals = Principals(registry, no_gpu)
            try:
                await body(registry, principals, shm)
                for principal in (ME, OTHER):
                    await principals.unregister(principal, "", "")
                await registry.unregister(ONE.session)
                assert (len(principals), list(registry), registry.quota.total) == (0, [], 0)
            finally:
                registry.close()

        before = descriptors()
        asyncio.run(main())
        assert descriptors() <= before

    test.__name__ = body.__name__
    return test


async def refused(awaitable: Awaitable[Any]) -> tuple[str, str]:
    with pytest.raises(InferError) as refusal:
        await awaitable
    return refusal.value.code, refusal.value.message


def not_found(principals: Principals, principal: Principal, name: str) -> str:
    with pytest.raises(InferError) as refusal:
        principals.use(ONE, principal, name)
    assert refusal.value.code == "NOT_FOUND"
    return refusal.value.message


async def names(principals: Principals, principal: Principal = ME) -> list[str]:
    return [region.name for region in await principals.regions(principal)]


# --- whose they are -----------------------------------------------------------------------------------------------


@scenario
async def test_names_are_a_principals_own(registry: Registry, principals: Principals, shm: Shm) -> None:
    mine, theirs = shm.make(), shm.make()
    await principals.register(ME, "input0", mine, PAGE, 0)
    await principals.register(OTHER, "input0", theirs, PAGE, 0)
    assert [row.key for row in await principals.regions(ME)] == [mine]
    assert [row.key for row in await principals.regions(OTHER)] == [theirs]
    await principals.unregister(ME, "", "")
    assert await names(principals) == []
    assert await names(principals, OTHER) == ["input0"]
    assert not_found(principals, ME, "input0") == "Unable to find shared memory region: 'input0'"
    assert len(principals) == 1


@scenario
async def test_unregister_takes_a_name_a_kind_or_all(registry: Registry, principals: Principals, shm: Shm) -> None:
    key = shm.make()
    for name in ("b", "a", "c"):
        await principals.register(ME, name, key, PAGE, 0)
    await principals.unregister(ME, "never heard of", "")
    await principals.unregister(ME, "a", "cuda")
    await principals.unregister(ME, "", "cuda")
    assert await names(principals) == ["a", "b", "c"]
    await principals.unregister(ME, "b", "system")
    assert await names(principals) == ["a", "c"]
    await principals.unregister(ME, "", "system")
    await principals.unregister(OTHER, "", "system")
    assert await names(principals) == []


@scenario
async def test_refusals_have_tritons_codes_and_texts(registry: Registry, principals: Principals, shm: Shm) -> None:
    key = shm.make()
    await principals.register(ME, "taken", key, PAGE, 0)
    reserved = "triton_python_backend_shm_region_0"
    for name, asked, byte_size, offset, code, text in (
        ("taken", key, 1, 0, "ALREADY_EXISTS", "shared memory region 'taken' already in manager"),
        ("taken", "/no-such-key", 1, 0, "ALREADY_EXISTS", "shared memory region 'taken' already in manager"),
        ("n", "/no-such-key", 1, 0, "INTERNAL", "Unable to open shared memory region: '/no-such-key'"),
        ("n", "", 1, 0, "INVALID_ARG", "cannot register shared memory region 'n' - invalid shm key ''"),
        ("n", "///", 1, 0, "INVALID_ARG", "cannot register shared memory region 'n' - invalid shm key '///'"),
        ("n", "a/../b", 1, 0, "INVALID_ARG", "cannot register shared memory region 'n' - invalid shm key 'a/../b'"),
        (
            "n",
            f"//{reserved}",
            1,
            0,
            "INVALID_ARG",
            f"cannot register shared memory region 'n' with key '//{reserved}' as the key contains the reserved prefix "
            "'triton_python_backend_shm_region_'",
        ),
        ("n", key, 0, 0, "INVALID_ARG", "failed to register shared memory region 'n': invalid args"),
        ("n", key, PAGE + 1, 0, "INVALID_ARG", "failed to register shared memory region 'n': invalid args"),
        ("n", key, 1, PAGE, "INVALID_ARG", "failed to register shared memory region 'n': invalid args"),
        ("n", key, 1 << 40, 0, "INVALID_ARG", "failed to register shared memory region 'n': invalid args"),
        ("n", key, 2**63 - 1, 2**63 - 1, "INVALID_ARG", "failed to register shared memory region 'n': invalid args"),
    ):
        got = await refused(principals.register(ME, name, asked, byte_size, offset))
        assert got[0] == code, got
        assert got[1].startswith(text), got
    await principals.register(ME, "unaligned", key, PAGE - 101, 101)
    assert await names(principals) == ["taken", "unaligned"]


@scenario
async def test_memory_of_another_uid_is_refused(registry: Registry, principals: Principals, shm: Shm) -> None:
    stranger = Principal(uid=UID + 1, scope="kserve")
    code, text = await refused(principals.register(stranger, "n", shm.make(), PAGE, 0))
    assert code == "INTERNAL"
    assert text.startswith("Unable to open shared memory region: '/tb-")
    assert len(principals) == 0


@scenario
async def test_the_quota_is_the_uids(registry: Registry, principals: Principals, shm: Shm) -> None:
    key = shm.make(byte_size=1 << 20)
    await principals.register(ME, "all there is", key, 1 << 20, 0)
    code, text = await refused(principals.register(OTHER, "more", shm.make(), PAGE, 0))
    assert code == "UNAVAILABLE"
    assert text.startswith("no memory quota for shared memory region 'more'")
    assert len(principals) == 1


@scenario
async def test_one_name_registered_twice_at_once(registry: Registry, principals: Principals, shm: Shm) -> None:
    key = shm.make()
    both = await asyncio.gather(
        principals.register(ME, "n", key, PAGE, 0), principals.register(ME, "n", key, PAGE, 0), return_exceptions=True
    )
    assert sorted(type(result).__name__ for result in both) == ["InferError", "RegionEntry"]
    assert registry.quota.total == PAGE


# --- how gateways use them ----------------------------------------------------------------------------------------


@scenario
async def test_what_is_unregistered_while_it_registers_goes(
    registry: Registry, principals: Principals, shm: Shm
) -> None:
    """A client that registers and ends at once: its end is told while the pages are still being allocated."""
    for name, kind in (("a", "system"), ("", "system"), ("", "")):
        registering = asyncio.create_task(principals.register(ME, "a", shm.make(), PAGE, 0))
        await asyncio.sleep(0)
        await principals.unregister(ME, "b", "")
        await principals.unregister(ME, "a", "cuda")
        assert not registering.done()
        await principals.unregister(ME, name, kind)
        assert (await refused(registering))[0] == "CANCELLED"
        assert len(principals) == 0
    await principals.register(ME, "a", shm.make(), PAGE, 0)


@scenario
async def test_a_gateway_has_one_alias_of_a_region(registry: Registry, principals: Principals, shm: Shm) -> None:
    entry = await principals.register(ME, "r", shm.make(), PAGE - 8, 8)
    alias = principals.use(ONE, ME, "r")
    assert principals.use(ONE, ME, "r") is alias
    assert principals.use(TWO, ME, "r") is not alias
    assert registry.find(ONE.session, alias.name) is alias
    assert (alias.byte_size, alias.offset, alias.inode) == (PAGE - 8, 8, entry.inode)
    assert alias.name not in ("r", principals.use(TWO, ME, "r").name)
    assert registry.quota.total == PAGE - 8
    await principals.unregister(ME, "r", "")
    for gateway, opened in ((ONE, alias), (TWO, alias)):
        with pytest.raises(InferError):
            registry.find(gateway.session, opened.name)
    assert list(registry) == []


@scenario
async def test_regions_outlive_gateways(registry: Registry, principals: Principals, shm: Shm) -> None:
    await principals.register(ME, "r", shm.make(), PAGE, 0)
    alias = principals.use(ONE, ME, "r")
    await registry.unregister(ONE.session)
    assert alias.fd == -1
    assert await names(principals) == ["r"]
    assert principals.use(TWO, ME, "r").inode == alias.inode
    await registry.unregister(TWO.session)
    await principals.unregister(ME, "", "")
    assert len(principals) == 0


@scenario
async def test_a_truncated_region_goes_altogether(registry: Registry, principals: Principals, shm: Shm) -> None:
    await principals.register(ME, "r", shm.make(), PAGE, 0)
    alias = principals.use(ONE, ME, "r")
    expelled = registry.expel(alias.generation)
    assert expelled is not None
    assert expelled.name == "r"
    while list(registry):  # noqa: ASYNC110  what is waited for is the loop's own work
        await asyncio.sleep(0)
    not_found(principals, ME, "r")


# --- how they end -------------------------------------------------------------------------------------------------


@scenario
async def test_a_region_in_use_is_listed_until_its_last_request(
    registry: Registry, principals: Principals, shm: Shm
) -> None:
    worker = Worker()
    await principals.register(ME, "r", shm.make(), PAGE, 0)
    await principals.register(ME, "idle", shm.make(), PAGE, 0)
    alias = principals.use(ONE, ME, "r")
    await registry.map_at(worker, [alias, principals.use(ONE, ME, "idle")])
    worker.run(alias)
    await principals.unregister(ME, "", "system")
    assert [(row.name, row.state) for row in await principals.regions(ME)] == [("r", "draining")]
    assert worker.asked == 1
    not_found(principals, ME, "r")
    assert registry.quota.total == PAGE
    await registry.unregister(ONE.session)  # the gateway ends: the request goes on
    assert await names(principals) == ["r"]
    worker.running[alias.identity].set_result(None)
    await asyncio.sleep(0)
    assert await names(principals) == []
    assert list(registry) == []
    assert alias.fd == -1


@scenario
async def test_a_name_is_free_while_the_old_region_drains(registry: Registry, principals: Principals, shm: Shm) -> None:
    worker, key = Worker(), shm.make()
    await principals.register(ME, "r", key, PAGE, 0)
    alias = principals.use(ONE, ME, "r")
    await registry.map_at(worker, [alias])
    worker.run(alias)
    await principals.unregister(ME, "r", "")
    await principals.register(ME, "r", key, 100, 0)
    assert [(row.byte_size, row.state) for row in await principals.regions(ME)] == [(100, "active")]
    await principals.unregister(ME, "r", "")  # which the alias that still drains must survive
    assert [(row.byte_size, row.state) for row in await principals.regions(ME)] == [(PAGE, "draining")]
    worker.running[alias.identity].set_result(None)
    await asyncio.sleep(0)


@scenario
async def test_a_dead_registration_makes_room_for_its_successor(
    registry: Registry, principals: Principals, shm: Shm
) -> None:
    key = shm.make()
    old = await principals.register(ME, "r", key, PAGE, 0)
    alias = principals.use(ONE, ME, "r")
    assert (await refused(principals.register(ME, "r", key, PAGE, 0)))[0] == "ALREADY_EXISTS"
    shm.unlink(key)
    assert (await refused(principals.register(ME, "r", key, PAGE, 0)))[0] == "ALREADY_EXISTS"
    shm.make(key)
    new = await principals.register(ME, "r", key, PAGE, 0)
    assert new.inode != old.inode
    assert (old.fd, alias.fd) == (-1, -1)
    assert principals.use(ONE, ME, "r").inode == new.inode
    shm.unlink(key)
    shm.make(key)
    assert (await refused(principals.register(ME, "r", shm.make(), PAGE, 0)))[0] == "ALREADY_EXISTS"
    assert await names(principals) == ["r"]


@scenario
async def test_what_has_no_name_and_no_use_is_reaped(registry: Registry, principals: Principals, shm: Shm) -> None:
    key, kept, worker = shm.make(), shm.make(), Worker()
    await principals.register(ME, "dead", key, PAGE, 0)
    await principals.register(ME, "named", kept, PAGE, 0)
    alias = principals.use(ONE, ME, "dead")
    await registry.map_at(worker, [alias])
    await principals.reap(0.0)
    await principals.reap(2 * UNUSED_S)
    assert await names(principals) == ["dead", "named"]
    shm.unlink(key)
    await principals.reap(1000.0)
    worker.used.add(alias.identity)  # a request ran on it
    await principals.reap(1000.0 + UNUSED_S)
    assert "dead" in await names(principals)
    principals.use(TWO, ME, "dead")  # a gateway asked for it
    await principals.reap(1000.0 + 2 * UNUSED_S)
    await principals.reap(1000.0 + 3 * UNUSED_S - 1)
    assert "dead" in await names(principals)
    await principals.reap(1000.0 + 3 * UNUSED_S)
    assert await names(principals) == ["named"]
    assert alias.fd == -1
    shm.unlink(kept)
    await principals.reap(2000.0)
    await principals.reap(2000.0 + UNUSED_S)
    assert len(principals) == 0


@scenario
async def test_the_reaper_goes_on_whatever_happens(registry: Registry, principals: Principals, shm: Shm) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("broker.principals.LOOK_EVERY_S", 0.0)
        patch.setattr("broker.principals.UNUSED_S", 0.0)
        key, worker = shm.make(), Worker()
        await principals.register(ME, "dead", key, PAGE, 0)
        alias = principals.use(ONE, ME, "dead")
        await registry.map_at(worker, [alias])
        shm.unlink(key)
        answers = iter([InferError("UNAVAILABLE", "no answer"), OSError(24, "too many"), False])

        async def region_used(region: int, generation: int) -> bool:
            answer = next(answers)
            if isinstance(answer, Exception):
                raise answer
            return answer

        patch.setattr(worker, "region_used", region_used)
        reaper = asyncio.create_task(principals.keep_reaping())
        await until(lambda: len(principals) == 0)
        reaper.cancel()
        await asyncio.wait([reaper])
