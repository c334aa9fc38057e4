"""One writer at a time, first come, first served, whoever leaves early."""

from __future__ import annotations

import asyncio

import pytest

from broker.gateway import turns as module
from broker.gateway.turns import Queues, Turn, give_back_all, in_turn, take_all
from clientlib.failures import RangeInUse
from clientlib.submission import deadline_ns_of
from shm.errors import Code, InferError


def test_first_come_first_served():
    async def test():
        turn, order = Turn(), []

        async def one(number):
            await turn.take()
            order.append(number)
            await asyncio.sleep(0)
            turn.give_back()

        assert turn.free
        await turn.take()
        tasks = [asyncio.create_task(one(number)) for number in range(5)]
        await asyncio.sleep(0)
        turn.give_back()
        assert not turn.free, "it is the next one's already"
        await asyncio.gather(*tasks)
        assert (order, turn.free) == ([0, 1, 2, 3, 4], True)

    asyncio.run(test())


@pytest.mark.parametrize("handed", [False, True])
def test_who_leaves_does_not_keep_it(handed):
    async def test():
        turn = Turn()
        await turn.take()
        leaving, staying = (asyncio.create_task(turn.take()) for _ in range(2))
        await asyncio.sleep(0)
        if handed:
            turn.give_back()  # to the one who is just leaving
        leaving.cancel()
        await asyncio.wait([leaving])
        assert leaving.cancelled()
        if not handed:
            assert not staying.done()
            turn.give_back()
        await staying
        turn.give_back()
        assert turn.free

    asyncio.run(test())


def test_all_or_none():
    async def test():
        turns = [Turn(), Turn(), Turn()]
        await turns[2].take()
        task = asyncio.create_task(take_all(turns))
        await asyncio.sleep(0)
        assert [turn.free for turn in turns] == [False, False, False]
        task.cancel()
        await asyncio.wait([task])
        assert [turn.free for turn in turns] == [True, True, False]
        turns[2].give_back()
        await take_all(turns)
        give_back_all(turns)
        assert all(turn.free for turn in turns)

    asyncio.run(test())


def test_a_queue_for_each_key():
    async def test():
        queues, order = Queues(), []

        async def one(key, number):
            async with queues.turn(key):
                order.append((key, number))
                await asyncio.sleep(0)

        async with queues.turn("a"):
            tasks = [asyncio.create_task(one("a", number)) for number in range(3)]
            await one("b", 0)
            assert (order, len(queues)) == ([("b", 0)], 1)
            tasks[1].cancel()
            await asyncio.sleep(0)
        tasks[0].cancel()  # it is its turn in this moment
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (order, len(queues)) == ([("b", 0), ("a", 2)], 0)

    asyncio.run(test())


def busy_for(times, log):
    """Something to run that others' requests keep from its range so many times."""

    async def run():
        log.append("run")
        if len(log) <= times:
            raise RangeInUse(Code.INVALID_ARG, "in use")
        return "done"

    return run


def test_what_others_write_is_waited_for():
    async def test():
        turns, log = (Turn(), Turn()), []
        await turns[1].take()
        task = asyncio.create_task(in_turn(turns, busy_for(3, log), 0))
        await asyncio.sleep(0)
        assert (log, turns[0].free) == ([], False)
        turns[1].give_back()
        assert await task == "done"
        assert (len(log), [turn.free for turn in turns]) == (4, [True, True])

    asyncio.run(test())


def test_not_beyond_the_deadline_nor_for_ever(monkeypatch):
    async def test():
        turn = Turn()
        await turn.take()
        with pytest.raises(InferError, match="Request timeout expired"):
            await in_turn((turn,), busy_for(0, []), deadline_ns_of(0.001))
        turn.give_back()
        with pytest.raises(InferError, match="Request timeout expired"):
            await in_turn((turn,), busy_for(1 << 30, []), deadline_ns_of(0.005))
        monkeypatch.setattr(module, "IN_USE_S", 0.002)
        with pytest.raises(RangeInUse):
            await in_turn((turn,), busy_for(1 << 30, []), 0)
        assert turn.free

    asyncio.run(test())
