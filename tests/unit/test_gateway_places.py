"""Places of a gateway's plan: parties take turns, and one has never all of them."""

from __future__ import annotations

import asyncio
import functools
import random
import time
from collections.abc import Callable, Coroutine

import pytest

from broker.gateway.places import Places
from shm.errors import InferError


def on_a_loop(test: Callable[[], Coroutine[None, None, None]]) -> Callable[[], None]:
    """Run a test on an event loop of its own."""

    @functools.wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


class Asker:
    """A request: `inside` once it has its place."""

    def __init__(self, places: Places, count: int, party: int, deadline_ns: int = 0) -> None:
        self.party = party
        self.task = asyncio.ensure_future(places.enter(count, party, deadline_ns))

    @property
    def inside(self) -> bool:
        return self.task.done() and not self.task.cancelled() and self.task.exception() is None


@on_a_loop
async def test_one_that_asks_for_all_leaves_some_to_others() -> None:
    places = Places()
    greedy = [Asker(places, 64, 1) for _ in range(100)]
    await settle()
    assert [each.inside for each in greedy] == [True] * 56 + [False] * 44
    polite = Asker(places, 64, 2)
    await settle()
    assert polite.inside
    places.leave(2)
    await settle()
    assert not greedy[56].inside
    places.leave(1)
    await settle()
    assert greedy[56].inside
    assert not greedy[57].inside


@on_a_loop
async def test_with_few_places_none_is_kept() -> None:
    places = Places()
    greedy = [Asker(places, 2, 1) for _ in range(9)]
    polite = Asker(places, 2, 2)
    await settle()
    assert sum(each.inside for each in greedy) == 2
    places.leave(1)
    await settle()
    assert polite.inside, "it had its turn before those who came earlier"
    assert sum(each.inside for each in greedy) == 2


@on_a_loop
async def test_who_goes_away_while_waiting_costs_no_place() -> None:
    places = Places()
    first = Asker(places, 1, 1)
    await settle()
    second, third = Asker(places, 1, 1), Asker(places, 1, 2)
    await settle()
    places.leave(1)  # it is the turn of one of them, which is cancelled in the same moment
    second.task.cancel()
    third.task.cancel()
    await settle()
    assert first.inside
    last = Asker(places, 1, 3)
    await settle()
    assert last.inside


@on_a_loop
async def test_a_deadline_ends_the_wait() -> None:
    places = Places()
    Asker(places, 1, 1)
    await settle()
    with pytest.raises(InferError, match="Request timeout expired"):
        await places.enter(1, 2, time.monotonic_ns())
    places.leave(1)
    await places.enter(1, 2, 0)


@on_a_loop
async def test_whatever_comes_every_place_is_used_and_given_back() -> None:
    rng = random.Random(4)
    places, count = Places(), 8
    inside: list[Asker] = []
    waiting: list[Asker] = []
    for _ in range(3000):
        what = rng.random()
        if what < 0.5:
            waiting.append(Asker(places, count, rng.choice((1, 1, 1, 2, 3))))
        elif what < 0.9 and inside:
            places.leave(inside.pop(rng.randrange(len(inside))).party)
        elif waiting:
            waiting.pop(rng.randrange(len(waiting))).task.cancel()
        await settle()
        inside += [each for each in waiting if each.inside]
        waiting = [each for each in waiting if not each.inside]
        assert len(inside) <= count
        if waiting:
            most = max(sum(each.party == party for each in inside) for party in (1, 2, 3))
            assert len(inside) == count or most == count - 1
    for each in waiting:
        each.task.cancel()
    for each in inside:
        places.leave(each.party)
    everybody = [Asker(places, count, party) for party in range(1, count + 1)]
    await settle()
    assert all(each.inside for each in everybody)


@on_a_loop
async def test_steps_of_sequences_go_on_in_their_order_whatever_happens_in_one_turn_of_the_loop() -> None:
    rng = random.Random(7)
    places, gone_on, tasks = Places(), list[int](), list[asyncio.Task[None]]()

    async def step(number: int) -> None:
        await places.enter(5, 0, 0)
        gone_on.append(number)

    inside = 0
    for number in range(2000):
        tasks.append(asyncio.ensure_future(step(number)))
        if rng.random() < 0.1:
            tasks[rng.randrange(len(tasks))].cancel()
        for _ in range(min(rng.randrange(3), len(gone_on) - inside)):
            places.leave(0)
            inside += 1
        if rng.random() < 0.5:
            await asyncio.sleep(0)
    await settle()
    assert gone_on == sorted(gone_on)
    assert len(gone_on) - inside == 5, "all places are used: none is kept for others"


@on_a_loop
async def test_who_is_let_in_and_leaves_in_the_same_moment_holds_nobody_up() -> None:
    places = Places()
    first, second = Asker(places, 1, 1), Asker(places, 1, 1)
    await settle()
    places.leave(1)
    third = Asker(places, 1, 2)
    second.task.cancel()
    await settle()
    assert first.inside
    assert second.task.cancelled()
    assert third.inside
