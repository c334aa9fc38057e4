"""Aliases of principals' regions and the verbs of the shared memory extension, on a broker of a dict."""

from __future__ import annotations

import asyncio
import os

import pytest
from msgspec.structs import replace

from broker.gateway import regions
from broker.gateway.kserve import Caller
from broker.gateway.regions import DISABLED, MAX_RETIRING, RegionCache, check_range
from clientlib.region import NamedRegion
from shm.errors import Code, InferError
from shm.gateway_messages import ListFor, RegisterCudaFor, RegisterFor, UnregisterFor, UseRegion
from shm.message_values import Principal, RegionRecord
from shm.messages import Done, RegionInfo, Regions, Unregister

MINE, YOURS = Principal(uid=1000, scope="kserve"), Principal(uid=1000, scope="zmq:1")
LOCAL, REMOTE = Caller("http", MINE), Caller("grpc", None, "from afar")
SIZE = 256


class FakeClient:
    """Answers as the broker does; every region is a memfd of `SIZE` bytes, its alias is "a<generation>"."""

    def __init__(self):
        self.asked = []
        self.held: dict[tuple[Principal, str], tuple[RegionRecord, int]] = {}
        self.named: list[NamedRegion] = []
        self.forgotten: list[NamedRegion] = []
        self.generation = 0

    def hold(self, principal, name, kind="system", offset=0):
        fd = os.memfd_create("region", os.MFD_CLOEXEC)
        os.truncate(fd, SIZE)
        self.generation += 1
        record = RegionRecord(name=name, kind=kind, byte_size=SIZE, offset=offset, generation=self.generation)
        self.held[principal, name] = record, fd

    async def call(self, message, expects=0):
        self.asked.append(message)
        await asyncio.sleep(0)
        match message:
            case RegisterFor(principal=principal, name=name):
                self.hold(principal, name)
            case UnregisterFor(principal=principal, name=name):
                for key in [key for key in self.held if key[0] == principal and name in ("", key[1])]:
                    os.close(self.held.pop(key)[1])
            case ListFor(principal=principal):
                rows = [record for (owner, _), (record, _) in self.held.items() if owner == principal]
                return Regions(regions=tuple(rows)), []
            case UseRegion(principal=principal, name=name, descriptor=descriptor):
                if (principal, name) not in self.held:
                    raise InferError(Code.NOT_FOUND, f"Unable to find shared memory region: '{name}': internals")
                record, fd = self.held[principal, name]
                info = RegionInfo(
                    name=f"a{record.generation}",
                    kind=record.kind,
                    region=1,
                    generation=record.generation,
                    byte_size=SIZE - record.offset,
                    offset=record.offset,
                    file_size=SIZE,
                    device=os.fstat(fd).st_dev,
                    inode=os.fstat(fd).st_ino,
                )
                assert expects == int(descriptor)
                return info, [os.dup(fd)] if descriptor else []
        return Done(), []

    def name_region(self, info, identity):
        self.named.append(NamedRegion(info.name, info.byte_size, info.offset, identity, kind=info.kind))
        return self.named[-1]

    def forget_region(self, region):
        self.forgotten.append(region)

    def close(self):
        for _, fd in self.held.values():
            os.close(fd)


@pytest.fixture
def client():
    before = len(os.listdir("/proc/self/fd"))
    client = FakeClient()
    yield client
    client.close()
    assert len(os.listdir("/proc/self/fd")) <= before, "a descriptor was left open"


def refused(code, message):
    return pytest.raises(InferError, match=f"^\\[{code.name}\\] {message}$")


# --- who may --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("caller", "allowed"), [(REMOTE, True), (LOCAL, False)])
def test_those_who_may_not_are_told_so_and_see_nothing(client, caller, allowed):
    async def test():
        client.hold(MINE, "r")
        cache = RegionCache(client, allowed=allowed)
        for verb in (
            cache.register_system(caller, "r", "/k", 1, 0),
            cache.register_cuda(caller, "r", b"", 0, 1),
            cache.unregister(caller, "system", ""),
        ):
            with refused(Code.UNSUPPORTED, DISABLED):
                await verb
        assert await cache.records(caller, "system", "") == []
        with refused(Code.NOT_FOUND, "Unable to find cuda shared memory region: 'r'"):
            await cache.records(caller, "cuda", "r")
        with refused(Code.NOT_FOUND, "Unable to find shared memory region: 'r'"):
            await cache.open(caller, "r")
        assert client.asked == [], "the broker is not asked"

    asyncio.run(test())


# --- verbs ----------------------------------------------------------------------------------------------------------


def test_register_speaks_for_the_principal(client):
    async def test():
        await RegionCache(client).register_system(LOCAL, "r", "/k", 64, 8)

    asyncio.run(test())
    assert client.asked == [RegisterFor(principal=MINE, name="r", key="/k", byte_size=64, offset=8)]


@pytest.mark.parametrize(("byte_size", "offset"), [(2**63, 0), (1, 2**64 - 32), (-1, 0), (1, -1)])
def test_sizes_that_no_message_carries_are_invalid_args(client, byte_size, offset):
    async def test():
        with refused(Code.INVALID_ARG, "failed to register shared memory region 'r': invalid args"):
            await RegionCache(client).register_system(LOCAL, "r", "/k", byte_size, offset)

    asyncio.run(test())


@pytest.mark.parametrize("name", ["", "n" * 257])
def test_names_have_bounds(client, name):
    async def test():
        with pytest.raises(InferError, match="1 to 256 characters"):
            await RegionCache(client).register_system(LOCAL, name, "/k", 1, 0)

    asyncio.run(test())


def test_cuda_memory_is_registered_for_the_principal(client):
    asyncio.run(RegionCache(client).register_cuda(LOCAL, "r", b"h" * 64, 1, 64))
    assert client.asked == [RegisterCudaFor(principal=MINE, name="r", handle=b"h" * 64, ordinal=1, byte_size=64)]


def test_a_handle_of_another_length_is_the_brokers_to_refuse(client):
    for length in (0, 63, 65, 10_000):
        asyncio.run(RegionCache(client).register_cuda(LOCAL, "r", bytes(length), 0, 64))
    assert [len(asked.handle) for asked in client.asked] == [0, 63, 65, 65]


@pytest.mark.parametrize(
    ("name", "length", "device", "byte_size", "text"),
    [
        *(("", length, 0, 0, "region: invalid args") for length in (0, 1, 63, 65, 10_000)),
        ("r", 64, -1, 64, "region: invalid args"),
        ("r", 64, 2**31, 64, "region: invalid args"),
        ("r", 64, 0, -1, "region 'r': invalid args"),
        ("r", 64, 0, 2**63, "region 'r': invalid args"),
    ],
)
def test_what_cannot_be_cuda_memory_is_not_asked_for(client, name, length, device, byte_size, text):
    async def test():
        with refused(Code.INVALID_ARG, f"failed to register shared memory {text}"):
            await RegionCache(client).register_cuda(LOCAL, name, bytes(length), device, byte_size)

    asyncio.run(test())
    assert client.asked == []


def test_those_who_wait_for_requests_leave_the_session_to_others(client, monkeypatch):
    async def test():
        cache, held, waiting = RegionCache(client), asyncio.Event(), []
        answered = client.call

        async def call(message, expects=0):
            if isinstance(message, UnregisterFor) and message.kind == "cuda":
                waiting.append(message)
                await held.wait()
            return await answered(message, expects)

        monkeypatch.setattr(client, "call", call)
        tasks = [asyncio.create_task(cache.unregister(LOCAL, "cuda", f"r{n}")) for n in range(3 * MAX_RETIRING)]
        await asyncio.sleep(0)
        await cache.unregister(LOCAL, "system", "r")
        assert len(waiting) == MAX_RETIRING
        held.set()
        await asyncio.gather(*tasks)
        assert len(waiting) == len(tasks)

    asyncio.run(test())


def test_status(client):
    async def test():
        for name, kind in (("b", "system"), ("a", "system"), ("g", "cuda")):
            client.hold(MINE, name, kind)
        client.hold(YOURS, "c")
        cache = RegionCache(client)
        assert [record.name for record in await cache.records(LOCAL, "system", "")] == ["a", "b"]
        assert [record.name for record in await cache.records(LOCAL, "cuda", "")] == ["g"]
        assert [record.name for record in await cache.records(LOCAL, "system", "b")] == ["b"]
        with refused(Code.NOT_FOUND, "Unable to find system shared memory region: 'c'"):
            await cache.records(LOCAL, "system", "c")
        with refused(
            Code.NOT_FOUND, "The region named 'g' is registered as CUDA shared memory, not system shared memory"
        ):
            await cache.records(LOCAL, "system", "g")
        with refused(
            Code.NOT_FOUND, "The region named 'a' is registered as system shared memory, not CUDA shared memory"
        ):
            await cache.records(LOCAL, "cuda", "a")

    asyncio.run(test())


# --- aliases --------------------------------------------------------------------------------------------------------


def test_an_alias_is_asked_for_once(client):
    async def test():
        client.hold(MINE, "r", offset=16)
        cache = RegionCache(client)
        assert cache.find(MINE, "r") is None
        first, second = await asyncio.gather(cache.open(LOCAL, "r"), cache.open(LOCAL, "r"))
        assert first is second is cache.find(MINE, "r")
        assert (first.name, first.region.name, first.region.byte_size, first.region.offset) == ("r", "a1", 240, 16)
        assert len(client.named) == 1
        assert cache.find(YOURS, "r") is None, "another principal's names are other names"

    asyncio.run(test())


def test_unknown_regions_are_refused_without_internals(client):
    async def test():
        with refused(Code.NOT_FOUND, "Unable to find shared memory region: 'r'"):
            await RegionCache(client).open(LOCAL, "r")
        with refused(Code.NOT_FOUND, f"Unable to find shared memory region: '{'n' * 257}'"):
            await RegionCache(client).open(LOCAL, "n" * 257)

    asyncio.run(test())


def test_what_was_unregistered_here_is_asked_for_again(client):
    async def test():
        cache = RegionCache(client)
        for name in ("r", "s"):
            await cache.register_system(LOCAL, name, "/k", SIZE, 0)
            await cache.open(LOCAL, name)
        before = cache.find(MINE, "r")
        await cache.unregister(LOCAL, "system", "r")
        assert cache.find(MINE, "r") is None
        assert cache.find(MINE, "s") is not None
        assert client.forgotten == [before.region]
        await cache.register_system(LOCAL, "r", "/k", SIZE, 0)
        assert (await cache.open(LOCAL, "r")).number != before.number
        await cache.unregister(LOCAL, "system", "")
        assert cache.find(MINE, "r") is cache.find(MINE, "s") is None

    asyncio.run(test())


def test_what_was_replaced_elsewhere_gets_another_number(client):
    async def test():
        cache = RegionCache(client)
        client.hold(MINE, "r")
        old = await cache.open(LOCAL, "r")
        os.close(client.held.pop((MINE, "r"))[1])
        client.hold(MINE, "r")
        cache.forget(old)
        new = await cache.open(LOCAL, "r")
        assert new.number != old.number
        cache.forget(old)
        assert cache.find(MINE, "r") is new, "a late word of the old one does not concern the new"

    asyncio.run(test())


def test_aliases_are_bounded_and_the_broker_is_told(client):
    async def test():
        cache = RegionCache(client, limit=4)
        for number in range(10):
            client.hold(MINE, f"r{number}")
            await cache.open(LOCAL, f"r{number}")
            cache.find(MINE, "r0")
        assert [n for n in range(10) if cache.find(MINE, f"r{n}") is not None] == [0, 7, 8, 9]
        gone = [message.name for message in client.asked if isinstance(message, Unregister)]
        assert gone == ["a2", "a3", "a4", "a5", "a6", "a7"]

    asyncio.run(test())


# --- writing --------------------------------------------------------------------------------------------------------


def test_writing_goes_through_the_descriptor(client):
    async def test():
        cache = RegionCache(client)
        client.hold(MINE, "r", offset=16)
        alias = await cache.open(LOCAL, "r")
        writer = await cache.writer(alias)
        writer.write(alias, 4, b"abc")
        assert os.pread(client.held[MINE, "r"][1], 6, 19) == b"\0abc\0\0"
        assert await cache.writer(alias) is writer, "kept for a while"
        alias.writer = None

    asyncio.run(test())


def test_a_file_that_became_shorter_is_not_made_longer(client):
    async def test():
        cache = RegionCache(client)
        client.hold(MINE, "r")
        alias = await cache.open(LOCAL, "r")
        writer = await cache.writer(alias)
        fd = client.held[MINE, "r"][1]
        os.truncate(fd, 100)
        with pytest.raises(InferError, match="region 'r' changed size"):
            writer.write(alias, 98, b"abc")
        assert os.fstat(fd).st_size == 100
        writer.write(alias, 97, b"abc")
        alias.writer = None

    asyncio.run(test())


def test_the_descriptor_is_let_go_when_it_is_not_needed_any_more(client, monkeypatch):
    monkeypatch.setattr(regions, "KEEP_S", 0.0)

    async def test():
        cache = RegionCache(client)
        client.hold(MINE, "r")
        alias = await cache.open(LOCAL, "r")
        await cache.writer(alias)
        while alias.writer is not None:  # noqa: ASYNC110 (a timer of the loop)
            await asyncio.sleep(0)

    asyncio.run(test())


def test_a_retired_region_is_not_written_under_its_successors_name(client):
    async def test():
        cache = RegionCache(client)
        client.hold(MINE, "r")
        alias = await cache.open(LOCAL, "r")
        record, fd = client.held[MINE, "r"]
        client.held[MINE, "r"] = replace(record, generation=99), fd
        with refused(Code.NOT_FOUND, "Unable to find shared memory region: 'r'"):
            await cache.writer(alias)

    asyncio.run(test())


# --- ranges ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "byte_size", "message"),
    [
        (64, 0, "Invalid offset for shared memory region: 'r'"),
        (2**64 - 32, 32, "Invalid offset for shared memory region: 'r'"),
        (-32, 32, "Invalid offset for shared memory region: 'r'"),
        (1, 64, "Invalid offset \\+ byte size for shared memory region: 'r'"),
        (0, 65, "Invalid offset \\+ byte size for shared memory region: 'r'"),
        (0, 2**64 - 1, "Invalid offset \\+ byte size for shared memory region: 'r'"),
        (
            32,
            2**64 - 1,
            f"Integer overflow detected: byte_size \\({2**64 - 1}\\) \\+ offset \\(32\\) exceeds maximum value "
            f"\\({2**64 - 1}\\) for region 'r'",
        ),
        (
            1,
            -1,
            f"Integer overflow detected: byte_size \\({2**64 - 1}\\) \\+ offset \\(1\\) exceeds maximum value "
            f"\\({2**64 - 1}\\) for region 'r'",
        ),
    ],
)
def test_ranges_outside_the_window(offset, byte_size, message):
    with refused(Code.INVALID_ARG, message):
        check_range("r", 64, offset, byte_size)


@pytest.mark.parametrize(("offset", "byte_size"), [(0, 64), (63, 1), (0, 0), (63, 0)])
def test_ranges_inside_the_window(offset, byte_size):
    check_range("r", 64, offset, byte_size)
