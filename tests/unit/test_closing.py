"""Regions whose last close frees much memory: closed by a thread, and counted until that is done."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from functools import partial

import pytest

from broker import closing
from broker.closing import Closer
from broker.quota import Quota
from broker.records import Peer, RegionEntry
from broker.registry import Registry
from shm.errors import InferError
from shm.regions import create_pool

PAGE = 4096
LIMIT_S = 60.0
ALICE, BOB = Peer(session=1, pid=101, uid=os.getuid()), Peer(session=2, pid=102, uid=os.getuid())


def pool(registry: Registry, name: str, byte_size: int = PAGE) -> RegionEntry:
    return registry.register_pool(ALICE, name, byte_size, create_pool(byte_size))


def is_open(fd: int, inode: int) -> bool:
    try:
        return os.fstat(fd).st_ino == inode
    except OSError:
        return False


class Slow:
    """Descriptors are closed when the test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[RegionEntry, asyncio.Future[None]]] = []

    def __call__(self, entry: RegionEntry) -> asyncio.Future[None] | None:
        if entry.source is not None:
            entry.close()
            return None
        self.asked.append((entry, asyncio.get_running_loop().create_future()))
        return self.asked[-1][1]

    def finish(self) -> None:
        entry, done = self.asked.pop(0)
        entry.close()
        done.set_result(None)


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_region_is_counted_until_it_is_closed_and_its_owner_is_told_then() -> None:
    async def scenario() -> None:
        slow = Slow()
        registry = Registry(Quota(2 * PAGE), slow)
        large = pool(registry, "large", 2 * PAGE)
        leaving = asyncio.create_task(registry.unregister(ALICE.session, "large"))
        await turns()
        assert not leaving.done()
        assert (list(registry), large.draining, registry.usage(ALICE.session)) == ([large], True, (1, 2 * PAGE))
        with pytest.raises(InferError, match="quota"):
            pool(registry, "large")
        await registry.unregister(ALICE.session)
        slow.finish()
        await leaving
        assert (list(registry), registry.usage(ALICE.session), registry.quota.total) == ([], (0, 0), 0)
        assert pool(registry, "large", 2 * PAGE).region == large.region, "its index is free, too"
        registry.close()

    asyncio.run(scenario())


def test_what_was_opened_from_it_goes_first_and_it_is_closed_once() -> None:
    async def scenario() -> None:
        slow = Slow()
        registry = Registry(Quota(1 << 20), slow)
        pool(registry, "large")
        opened = registry.open(BOB, "mine", registry.share(ALICE.session, "large"))
        leaving = asyncio.create_task(registry.unregister(ALICE.session))
        await turns()
        assert (opened.fd, len(slow.asked), leaving.done()) == (-1, 1, False)
        assert [entry.name for entry in registry] == ["large"]
        slow.finish()
        await leaving
        assert (len(registry), slow.asked) == (0, [])

    asyncio.run(scenario())


def test_an_owner_that_leaves_meanwhile_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        slow = Slow()
        registry = Registry(Quota(1 << 20), slow)
        pool(registry, "large")
        leaving = asyncio.create_task(registry.unregister(ALICE.session))
        await turns()
        leaving.cancel()
        await turns()
        assert len(registry) == 1
        slow.finish()
        await turns()
        assert (len(registry), registry.quota.total) == (0, 0)

    asyncio.run(scenario())


class Held:
    """What a closer's thread does with a descriptor: it waits until the test lets it."""

    def __init__(self) -> None:
        self.begun, self.may_go = threading.Event(), threading.Event()
        self.threads: list[str] = []

    def __call__(self, fd: int) -> None:
        self.threads.append(threading.current_thread().name)
        self.begun.set()
        self.may_go.wait(LIMIT_S)
        os.close(fd)


def entries(registry: Registry, count: int) -> list[tuple[RegionEntry, Callable[[], bool]]]:
    """Each with what tells whether its descriptor is open."""
    pools = [pool(registry, f"pool {number}") for number in range(count)]
    return [(entry, partial(is_open, entry.fd, entry.inode)) for entry in pools]


def test_the_event_loop_goes_on_while_a_thread_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closing, "LARGE", PAGE)
    monkeypatch.setattr(closing, "MAX_WAITING", 2)

    async def scenario() -> None:
        registry, held = Registry(Quota(1 << 20)), Held()
        closer = Closer(held)
        (first, first_open), *rest = entries(registry, 5)
        ended = [closer(first)]
        assert held.begun.wait(LIMIT_S)
        ended += [closer(entry) for entry, _ in rest]
        assert [each is None for each in ended] == [False, False, False, True, True], "those for whom there was no room"
        assert [still() for _, still in rest] == [True, True, False, False]
        assert first_open()
        held.may_go.set()
        await asyncio.wait_for(asyncio.gather(*(each for each in ended if each is not None)), LIMIT_S)
        assert not any(still() for still in (first_open, *(still for _, still in rest)))
        assert held.threads == ["close"] * 3
        done = closer(pool(registry, "later"))
        assert done is not None, "whether the thread is still there or not"
        await asyncio.wait_for(done, LIMIT_S)
        registry.close()

    asyncio.run(scenario())


def test_what_is_small_or_has_no_descriptor_is_closed_at_once() -> None:
    registry, held = Registry(Quota(1 << 20)), Held()
    closer = Closer(held)
    entry = pool(registry, "small")
    assert closer(entry) is None, "without an event loop"
    assert (entry.fd, closer(entry), held.threads) == (-1, None, [])


def test_without_a_thread_it_is_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closing, "LARGE", PAGE)

    def refuse(*args: object, **options: object) -> None:
        raise RuntimeError("can't start new thread")

    async def scenario() -> None:
        registry = Registry(Quota(1 << 20))
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            ((entry, still),) = entries(registry, 1)
            await registry.unregister(ALICE.session)
            assert (entry.fd, still(), len(registry)) == (-1, False, 0)

    asyncio.run(scenario())
