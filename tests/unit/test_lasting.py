"""Places for requests of decoupled models: shared out so that nobody can take them all."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from broker.gateway.lasting import Holder, Lasting
from shm.errors import InferError
from tests.fakes.processes import in_loop


class Asked:
    """A request of `holder`. `task`: ends when it has entered."""

    unread_bytes = 0

    def __init__(self, lasting: Lasting, connection: object, owner: object = "me") -> None:
        self.holder = Holder(connection, owner)
        self.task = asyncio.create_task(lasting.enter(self))

    def cut(self, error: InferError) -> None:
        raise error

    @property
    def inside(self) -> bool:
        return self.task.done() and not self.task.cancelled()


async def settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


@in_loop
async def test_one_connection_gets_a_quarter_and_holds_up_nobody() -> None:
    lasting = Lasting(16)
    greedy = [Asked(lasting, "a") for _ in range(40)]
    await settle()
    assert sum(each.inside for each in greedy) == 4
    polite = [Asked(lasting, name) for name in "bcd"]
    await settle()
    assert all(each.inside for each in polite)
    lasting.leave(greedy[0])
    await settle()
    assert [each.inside for each in greedy[:7]] == [True] * 5 + [False] * 2
    for each in greedy:
        each.task.cancel()


@in_loop
async def test_one_owner_gets_three_quarters() -> None:
    lasting = Lasting(16)
    greedy = [Asked(lasting, number // 4) for number in range(40)]
    await settle()
    assert sum(each.inside for each in greedy) == 12
    others = [Asked(lasting, ("far", number), "another") for number in range(5)]
    await settle()
    assert [each.inside for each in others] == [True] * 4 + [False]
    lasting.leave(greedy[0])
    await settle()
    assert not others[4].inside, "those who came before have turns first"
    lasting.leave(others[0])
    await settle()
    assert others[4].inside, "the owner of the others has all that it may have"
    for each in (*greedy, *others):
        each.task.cancel()


@in_loop
async def test_who_waits_takes_turns_by_connection() -> None:
    lasting = Lasting(8)
    inside = [Asked(lasting, "a"), Asked(lasting, "a"), Asked(lasting, "b"), Asked(lasting, "b")]
    inside += [Asked(lasting, "c"), Asked(lasting, "d")]
    await settle()
    waiting = [Asked(lasting, "a"), Asked(lasting, "a"), Asked(lasting, "e")]
    await settle()
    lasting.leave(inside[0])
    await settle()
    assert [each.inside for each in waiting] == [True, False, False]
    lasting.leave(inside[1])
    await settle()
    assert [each.inside for each in waiting] == [True, False, True]
    for each in waiting:
        each.task.cancel()


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_coming_going_and_giving_up(seed: int) -> None:
    @in_loop
    async def run() -> None:
        random_ = random.Random(seed)
        lasting, alive = Lasting(12), list[Asked]()
        for _ in range(800):
            if random_.random() < 0.55:
                owner = random_.choice("xyz")
                alive.append(Asked(lasting, owner + random_.choice("1234"), owner))
            elif alive:
                one = alive.pop(random_.randrange(len(alive)))
                if random_.random() < 0.5:
                    await settle()
                one.task.cancel()
                if random_.random() < 0.5:
                    await asyncio.gather(one.task, return_exceptions=True)
                if not one.task.done():
                    await asyncio.gather(one.task, return_exceptions=True)
                if one.inside:
                    lasting.leave(one)
            await settle()
            inside = [each for each in alive if each.inside]
            connections = Counter(each.holder.connection for each in inside)
            owners = Counter(each.holder.owner for each in inside)
            assert max(connections.values(), default=0) <= 3
            assert max(owners.values(), default=0) <= 9
            assert len(inside) <= 12
            if len(inside) < 12:  # nobody waits who could have a place
                for each in alive:
                    full = connections[each.holder.connection] == 3 or owners[each.holder.owner] == 9
                    assert each.inside or full
        for each in alive:
            each.task.cancel()
            await asyncio.gather(each.task, return_exceptions=True)
            if each.inside:
                lasting.leave(each)
        assert (lasting._free, lasting._waiting, lasting._connections, lasting._owners) == (12, {}, {}, {})

    run()
