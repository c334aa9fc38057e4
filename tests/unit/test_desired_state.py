"""What a replacement is brought, while it changes."""

from __future__ import annotations

import asyncio
import os

from broker.desired_state import DesiredState, Wanted
from broker.supervision import LoadDeaths
from broker.worker.messages import BindPlan, LinkMessage, Ping


class Process:
    """Acknowledges what it is asked, and remembers it."""

    life = 2

    def __init__(self) -> None:
        self.asked: list[tuple[LinkMessage, tuple[int, ...]]] = []

    async def request(self, message: LinkMessage, descriptors: tuple[int, ...] = ()) -> str:
        self.asked.append((message, tuple(map(os.dup, descriptors))))
        return ""


async def bring() -> list[tuple[LinkMessage, tuple[int, ...]]]:
    state = DesiredState(LoadDeaths(5), lambda message, reason: None, lambda: "")
    process = Process()
    state.process = process  # type: ignore[assignment]
    descriptors = [os.open(os.devnull, os.O_RDONLY) for _ in range(2)]
    for number, descriptor in enumerate(descriptors):
        state.regions[number, 1] = Wanted(Ping(id=number), (descriptor,))
    bringing = asyncio.ensure_future(state.bring_rest())
    # It has begun: the regions were looked at. Now a session ends, as any time.
    asyncio.get_running_loop().call_soon(lambda: (state.abandon(state.regions, (1, 1), None), os.close(descriptors[1])))
    await bringing
    return process.asked


def test_what_is_taken_back_while_it_is_brought_is_not_sent():
    """Its descriptors are closed by then: sending them cost the worker its start, or sent somebody else's."""
    asked = asyncio.run(bring())
    assert [message.id for message, _ in asked] == [0]
    for _, descriptors in asked:
        for descriptor in descriptors:
            os.close(descriptor)


def test_a_plan_is_brought_only_where_its_regions_and_its_events_are():
    """Those of clients that have not let go of them yet: each of their requests would be told that a region is gone."""

    async def brought() -> set[int]:
        state = DesiredState(LoadDeaths(5), lambda message, reason: None, lambda: "")
        process = Process()
        state.process = process  # type: ignore[assignment]
        state.regions[1, 1] = Wanted(Ping())
        for index, events in enumerate([None, (1, 1), (1, 2)]):
            plan = BindPlan(
                session=1, index=index, generation=1, model="m", version=1, inputs=(), outputs=(), input_positions=1,
                output_positions=1, rows=0, events=events,
            )  # fmt: skip
            state.plans[1, index, 1] = Wanted(plan)
        await state.bring_rest()
        return {message.index for message, _ in process.asked if isinstance(message, BindPlan)}

    assert asyncio.run(brought()) == {0, 1}
