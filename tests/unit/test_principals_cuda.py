"""GPU memory of principals, without a worker: what is noted, what is refused and in which words."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

import pytest

from broker.principals import Principals
from broker.quota import Quota
from broker.records import GATEWAY, Peer, RegionEntry, add_region, record
from broker.registry import Registry
from shm.errors import InferError
from shm.message_values import Principal

UID = os.getuid()
ME, OTHER = Principal(uid=UID, scope="kserve"), Principal(uid=UID, scope="zmq:1")
GATE = Peer(11, 101, UID, GATEWAY)
GPUS = tuple(f"GPU-{number:08x}-0000-0000-0000-000000000000" for number in range(2))
HANDLE, BYTES = bytes(range(64)), 4096
Open = Callable[[RegionEntry], Awaitable[None]]


async def opened(entry: RegionEntry) -> None:
    """A worker that can."""


def made(open_cuda: Open = opened, gpus: tuple[str, ...] = GPUS, limit: int = 4 * BYTES) -> tuple[Registry, Principals]:
    registry = Registry(Quota(1 << 20, cuda_limit=limit))
    registry.cuda_devices = lambda: gpus
    registry.cuda_reason = lambda: "no driver"
    return registry, Principals(registry, open_cuda)


def refusing(registry: list[Registry], error: InferError) -> Open:
    async def refuse(entry: RegionEntry) -> None:
        await registry[0].unregister(entry.session, entry.name)
        raise error

    return refuse


def test_an_ordinal_is_the_brokers_and_a_gateways_alias_is_the_same_memory_of_the_same_owner() -> None:
    async def scenario() -> None:
        registry, principals = made()
        entry = await principals.register_cuda(ME, "r", HANDLE, 1, BYTES)
        assert entry.cuda is not None
        assert (entry.cuda.device, entry.cuda.handle, entry.cuda.byte_size) == (GPUS[1], HANDLE, BYTES)
        assert [(r.name, r.kind, r.key, r.byte_size) for r in await principals.regions(ME)] == [
            ("r", "cuda", "1", BYTES)
        ]
        assert await principals.regions(OTHER) == []
        assert record(entry).offset == 0
        alias = principals.use(GATE, ME, "r")
        assert (alias.cuda, alias.device, alias.inode) == (entry.cuda, entry.device, entry.inode)
        assert alias.session == GATE.session
        assert add_region(alias).owner == add_region(entry).owner == entry.session, "whose memory may be evicted for it"
        await principals.unregister(ME, "r", "system")
        assert len(await principals.regions(ME)) == 1, "of another kind"
        await principals.unregister(ME, "r", "cuda")
        assert (len(principals), list(registry), registry.quota.cuda_used(UID)) == (0, [], 0)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("gpus", "ordinal", "byte_size", "text"),
    [
        (
            GPUS,
            2,
            BYTES,
            "failed to register shared memory region: invalid args: the broker's GPUs are 0 to 1, it is said to be on "
            "2",
        ),
        (GPUS, 0, 0, "failed to register shared memory region 'r': invalid args: a region has at least 1 byte"),
        ((), 0, BYTES, "failed to register CUDA shared memory region: 'r', GPUs not supported: no driver"),
    ],
)
def test_what_no_worker_is_asked_for(gpus: tuple[str, ...], ordinal: int, byte_size: int, text: str) -> None:
    async def unasked(entry: RegionEntry) -> None:
        raise AssertionError(entry)

    registry, principals = made(unasked, gpus)
    with pytest.raises(InferError) as raised:
        asyncio.run(principals.register_cuda(ME, "r", HANDLE, ordinal, byte_size))
    assert (raised.value.code, raised.value.message) == ("INVALID_ARG", text)
    assert (len(principals), list(registry)) == (0, [])


@pytest.mark.parametrize(("gpus", "why"), [(GPUS, ""), ((), ": no driver")])
def test_a_handle_of_another_length(gpus: tuple[str, ...], why: str) -> None:
    async def unasked(entry: RegionEntry) -> None:
        raise AssertionError(entry)

    registry, principals = made(unasked, gpus)
    for handle in (b"", b"h", HANDLE + b"h"):
        with pytest.raises(InferError) as raised:
            asyncio.run(principals.register_cuda(ME, "r", handle, 0, BYTES))
        assert raised.value.message == f"failed to register shared memory region: invalid args{why}"
    assert (len(principals), list(registry)) == (0, [])


@pytest.mark.parametrize(
    ("why", "text"),
    [
        ("the allocation has 64 bytes", "failed to register shared memory region 'r': invalid args"),
        ("CUDA_ERROR_INVALID_VALUE:\nnot it", "failed to register shared memory region: invalid args"),
    ],
)
def test_what_a_worker_refuses_is_refused_in_tritons_words_and_its_own(
    why: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    error = InferError("INVALID_ARG", f"failed to register shared memory region 'r': invalid args: {why}")
    known: list[Registry] = []
    registry, principals = made(refusing(known, error))
    known.append(registry)
    with caplog.at_level("INFO"), pytest.raises(InferError) as raised:
        asyncio.run(principals.register_cuda(ME, "r", HANDLE, 0, BYTES))
    assert (raised.value.code, raised.value.message) == ("INVALID_ARG", f"{text}: {why}")
    assert why in caplog.text, "the reason is the operator's to read, too"
    assert (len(principals), list(registry), registry.quota.cuda_used(UID)) == (0, [], 0)


def test_names_are_of_both_kinds_and_a_repeated_one_opens_nothing() -> None:
    async def scenario() -> None:
        registry, principals = made()
        await principals.register_cuda(ME, "r", HANDLE, 0, BYTES)
        with pytest.raises(InferError, match="shared memory region 'r' already in manager") as raised:
            await principals.register_cuda(ME, "r", bytes(64), 0, BYTES)
        assert raised.value.code == "ALREADY_EXISTS"
        with pytest.raises(InferError, match="already in manager"):
            await principals.register(ME, "r", "/none", BYTES, 0)
        await principals.register_cuda(OTHER, "r", HANDLE, 0, BYTES)
        for principal in (ME, OTHER):
            await principals.unregister(principal, "", "")
        assert list(registry) == []

    asyncio.run(scenario())


def test_a_users_bytes_on_gpus_are_bounded() -> None:
    async def scenario() -> None:
        _, principals = made()
        for number in range(4):
            await principals.register_cuda(ME, f"r{number}", bytes([number]) * 64, 0, BYTES)
        with pytest.raises(InferError, match="--cuda-region-memory") as raised:
            await principals.register_cuda(OTHER, "r", HANDLE, 0, 1)
        assert raised.value.code == "UNAVAILABLE"
        await principals.unregister(ME, "", "cuda")
        await principals.register_cuda(OTHER, "r", HANDLE, 0, 1)

    asyncio.run(scenario())


def test_unregistered_while_it_is_opened() -> None:
    async def scenario() -> None:
        entered, go = asyncio.Event(), asyncio.Event()

        async def slow(entry: RegionEntry) -> None:
            entered.set()
            await go.wait()
            if entry.draining:
                raise InferError("NOT_FOUND", f"Unable to find shared memory region: '{entry.name}'")

        registry, principals = made(slow)
        asked = asyncio.create_task(principals.register_cuda(ME, "r", HANDLE, 0, BYTES))
        await entered.wait()
        await principals.unregister(ME, "", "cuda")
        go.set()
        with pytest.raises(InferError, match="shared memory region 'r' was unregistered meanwhile"):
            await asked
        assert (len(principals), list(registry)) == (0, [])

    asyncio.run(scenario())
