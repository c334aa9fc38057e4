"""What a replacement is brought, while it changes."""

from __future__ import annotations

import asyncio
import os

import pytest

from broker.desired_state import DesiredState, Wanted
from broker.supervision import LoadDeaths
from broker.worker.messages import AddRegion, AttachChannel, BindPlan, DetachChannel, LinkMessage, Ping, RetireRegion
from shm.errors import InferError


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


REGION = AddRegion(
    region=1, generation=2, name="frames", kind="pool", byte_size=1, offset=0, file_size=1, device=0, inode=0,
    writable=True,
)  # fmt: skip
PLAN = BindPlan(
    session=1, index=1, generation=1, model="m", version=1, inputs=(), outputs=(), input_positions=1,
    output_positions=1, rows=0,
)  # fmt: skip


class Stopped:
    """A process that never answers."""

    life, pid = 1, 4711

    def __init__(self) -> None:
        self.killed = ""

    async def request(self, message: LinkMessage, descriptors: tuple[int, ...] = ()) -> str:
        return await asyncio.get_running_loop().create_future()

    def post(self, message: LinkMessage, descriptors: tuple[int, ...] = ()) -> int:
        return 1

    def kill(self, reason: str, told: str = "") -> None:
        self.killed = reason


@pytest.mark.parametrize(
    ("message", "task", "killed"),
    [
        (REGION, "map shared memory region 'frames'", "did not map memory of a client within 0.01 s"),
        (PLAN, "prepare a plan of model 'm'", "did not prepare a plan of model 'm' within 0.01 s"),
        (
            AttachChannel(channel=1, session=1, slots=1),
            "take requests of a client's thread or event loop",
            "did not take requests of a client's thread or event loop within 0.01 s",
        ),
    ],
)
def test_who_waits_for_a_worker_that_does_not_respond_is_told_what_for(
    message: LinkMessage, task: str, killed: str
) -> None:
    async def told() -> tuple[str, str]:
        state = DesiredState(LoadDeaths(5), lambda message, reason: None, lambda: "worker 'cpu/left'")
        process = Stopped()
        state.process = process  # type: ignore[assignment]
        state.up.set()
        with pytest.raises(InferError) as caught:
            await state.have({}, 1, Wanted(message), None, 0.01)
        return caught.value.message, process.killed

    text, reason = asyncio.run(told())
    assert text == (
        f"the worker process 4711 did not {task} within 0.01 s (worker 'cpu/left'); "
        "it was stopped, or stuck, and has been killed: the worker is being replaced, so try again"
    )
    assert reason == killed


@pytest.mark.parametrize(
    ("message", "undo", "task"),
    [
        (REGION, RetireRegion(region=1, generation=2), "let go of shared memory region 'frames'"),
        (
            AttachChannel(channel=1, session=1, slots=1),
            DetachChannel(channel=1),
            "end with the requests of a client's thread or event loop",
        ),
    ],
)
def test_who_takes_something_back_from_a_worker_that_does_not_respond_is_told_what(
    message: LinkMessage, undo: LinkMessage, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def told() -> str:
        state = DesiredState(LoadDeaths(5), lambda message, reason: None, lambda: "worker 'cpu/left'")
        process = Stopped()
        state.process = process  # type: ignore[assignment]
        wanted = Wanted(message)
        wanted.sent = wanted.done = process.life
        with pytest.raises(InferError) as caught:
            await state.forget({1: wanted}, 1, undo)
        assert not process.killed
        return caught.value.message

    monkeypatch.setattr("broker.desired_state.ANSWER_S", 0.01)
    assert asyncio.run(told()) == (
        f"the worker process 4711 did not {task} within 0.01 s (worker 'cpu/left'); "
        "is it stopped? `kill -CONT 4711` lets it go on, `kill -9 4711` has it replaced at once"
    )


def test_a_worker_that_is_not_up_has_no_process_to_name() -> None:
    async def told() -> str:
        state = DesiredState(LoadDeaths(5), lambda message, reason: None, lambda: "worker 'cpu/left' is backoff")
        with pytest.raises(InferError) as caught:
            await state.have({}, 1, Wanted(PLAN), None, 0.01)
        return caught.value.message

    what = "the worker did not prepare a plan of model 'm' within 0.01 s"
    assert asyncio.run(told()) == f"{what} (worker 'cpu/left' is backoff)"
