"""When a retired region is in use, and until when."""

from __future__ import annotations

import asyncio

import pytest

from broker.region_uses import RegionUses
from broker.worker.messages import IN_USE
from shm.errors import Code, InferError
from tests.fakes.processes import in_loop

REGION, OTHER = (1, 2), (3, 4)


async def says(detail: str) -> str:
    await asyncio.sleep(0)
    return detail


@in_loop
async def test_an_idle_region_has_no_last_use() -> None:
    assert await RegionUses().retire(REGION, says("")) is None


@in_loop
async def test_a_region_in_use_has_one_that_ends_once() -> None:
    uses = RegionUses()
    last, other = await uses.retire(REGION, says(IN_USE)), await uses.retire(OTHER, says(IN_USE))
    assert last is not None
    assert other is not None
    uses.idle(REGION)
    assert (last.done(), other.done()) == (True, False)
    uses.idle(REGION)
    uses.died()
    assert other.done()


@in_loop
async def test_what_is_said_right_behind_the_acknowledgement_is_not_lost() -> None:
    uses = RegionUses()

    async def both() -> str:
        uses.idle(REGION)
        return IN_USE

    last = await uses.retire(REGION, both())
    assert last is not None
    assert last.done()


@in_loop
async def test_an_acknowledgement_that_does_not_come_leaves_nothing() -> None:
    uses = RegionUses()

    async def late() -> str:
        raise InferError(Code.UNAVAILABLE, "no answer")

    with pytest.raises(InferError):
        await uses.retire(REGION, late())
    assert await uses.retire(REGION, says("")) is None
