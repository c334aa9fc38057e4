"""`plan.after(stream)`: the verbs of a plan on GPU memory, for requests that come after what a stream has to do.

Made by `Plan.after` and `AsyncPlan.after`; what the order means is `clientlib.cuda_order`'s. `in_order` is what both
kinds of plan do before each request on GPU memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypedDict, Unpack, final

from clientlib.arguments import shown
from clientlib.cuda_order import After, Order, Wait, record, ring_for, said_of, stream_address, waits_for
from clientlib.process import StaysHere
from clientlib.results import InferResult
from shm.errors import Code, InferError

if TYPE_CHECKING:
    from clientlib.async_client import AsyncClient
    from clientlib.async_lane import AsyncLane
    from clientlib.async_pending import AsyncPending
    from clientlib.async_plans import AsyncPlan
    from clientlib.channels import Lane
    from clientlib.client import Client
    from clientlib.link import Bound
    from clientlib.pending import Pending
    from clientlib.plans import Plan


class Arguments(TypedDict, total=False):
    """Of `Plan.infer` and `Plan.submit`."""

    timeout: float | None
    input_slot: int
    output_slot: int | None
    rows: int
    priority: int
    sequence_id: int
    sequence_start: bool
    sequence_end: bool


@final
class OrderedPlan(StaysHere):
    """A plan, after a stream. For one call or many: each comes after what the stream has when it is made."""

    __slots__ = ("_order", "_plan", "_stream")
    elsewhere = "use the plan of that process"

    def __init__(self, plan: Plan, stream: object, order: str) -> None:
        self._plan = plan
        self._stream, self._order = _checked(plan.gpus, stream, order)

    def infer(self, **arguments: Unpack[Arguments]) -> InferResult:
        """As `Plan.infer`."""
        with After(self._plan, self._stream, self._order):
            return self._plan.infer(**arguments)

    def submit(self, **arguments: Unpack[Arguments]) -> Pending:
        """As `Plan.submit`."""
        with After(self._plan, self._stream, self._order):
            return self._plan.submit(**arguments)


@final
class AsyncOrderedPlan(StaysHere):
    """The same on an event loop."""

    __slots__ = ("_order", "_plan", "_stream")
    elsewhere = OrderedPlan.elsewhere

    def __init__(self, plan: AsyncPlan, stream: object, order: str) -> None:
        self._plan = plan
        self._stream, self._order = _checked(plan.gpus, stream, order)

    async def infer(self, **arguments: Unpack[Arguments]) -> InferResult:
        """As `AsyncPlan.infer`."""
        with After(self._plan, self._stream, self._order):
            return await self._plan.infer(**arguments)

    async def submit(self, **arguments: Unpack[Arguments]) -> AsyncPending:
        """As `AsyncPlan.submit`."""
        with After(self._plan, self._stream, self._order):
            return await self._plan.submit(**arguments)


def _checked(gpus: tuple[str, ...], stream: object, order: str) -> tuple[int | None, Order]:
    if order not in ("event", "synchronize"):
        raise InferError(Code.INVALID_ARG, f"order must be 'event' or 'synchronize', got {shown(order)}")
    if not gpus:
        raise InferError(
            Code.INVALID_ARG,
            "after() is for plans on GPU memory; what writes the host's has to be done before a request is sent",
        )
    return None if stream is None else stream_address(stream), order  # type: ignore[return-value]


# --- before a request -------------------------------------------------------------------------------------------------


def in_order(
    plan: Plan, client: Client, bound: Bound[Lane], deadline_ns: int, bind: Callable[[], Bound[Lane]]
) -> tuple[Bound[Lane], int]:
    """Wait for what the application has enqueued, or have the worker do it: by the event, from 1; 0: none.

    `bind`: gives what the plan is bound by once it has a ring of events. Raises InferError UNAVAILABLE at the deadline
    (CLOCK_MONOTONIC, 0: none).
    """
    said = said_of(plan)
    ring = ring_for(said, plan.gpus, client.native.orders)
    if ring is not None and not bound.events:
        client.give_events(plan, ring, deadline_ns)
        bound = bind()
    event = record(said, ring) if bound.events else 0
    if not event and (wait := waits_for(said, plan.gpus)) is not None:
        wait.now(deadline_ns)
    return bound, event


async def in_order_async(
    plan: AsyncPlan,
    client: AsyncClient,
    bound: Bound[AsyncLane],
    deadline_ns: int,
    bind: Callable[[], Awaitable[Bound[AsyncLane]]],
) -> tuple[Bound[AsyncLane], int]:
    """The same. The loop goes on meanwhile."""
    said = said_of(plan)
    ring = ring_for(said, plan.gpus, client.native.orders)
    if ring is not None and not bound.events:
        await client.give_events(plan, ring, deadline_ns)
        bound = await bind()
    event = record(said, ring) if bound.events else 0
    if not event and (wait := waits_for(said, plan.gpus)) is not None:
        await over(wait, deadline_ns)
    return bound, event


async def over(wait: Wait, deadline_ns: int) -> None:
    """As `Wait.now`, without holding up the event loop.

    The loop looks again and again: on other threads, of which there are few, such a wait would stand in line behind
    those of others and of the application, deaf to its deadline and to being cancelled.
    """
    if (moment := wait.begin()) is None:
        return
    try:
        while pause_s := moment.pause_s(deadline_ns):  # noqa: ASYNC110 (no call of the driver wakes a loop)
            await asyncio.sleep(pause_s)
    finally:
        moment.drop()
