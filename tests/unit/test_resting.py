"""Channels that nobody looks at: their clients ring, and a worker at rest hears it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from broker.coroner import leave
from broker.records import ChannelRecord
from broker.resting import Rest
from shm.layout import HEAD, MARK, TAKEN
from tests.fakes.channel import PLAN, Plan, Twin, submit, take


def record_of(twin: Twin, channel: int = 1) -> ChannelRecord:
    return ChannelRecord(channel, 9, twin.slots, twin.memory_fd, twin.ledger_fd, twin.bell_fd, twin.pipe_write)


@pytest.fixture
def twin() -> Iterator[Twin]:
    with Twin() as twin:
        yield twin


def test_a_client_rings_for_what_it_publishes_on_a_channel_that_was_left(twin: Twin) -> None:
    client = twin.client()
    twin.worker({PLAN: Plan()}).disarm()  # as the worker was killed: it was looking
    assert leave(record_of(twin))
    assert not twin.worker_was_rung()
    submit(client)
    assert twin.worker_was_rung()


def test_what_no_client_will_ring_for_is_seen(twin: Twin) -> None:
    worker, client = twin.worker({PLAN: Plan()}), twin.client()
    worker.disarm()
    submit(client)
    assert not twin.worker_was_rung()
    assert not leave(record_of(twin)), "published and not taken"
    (request,) = take(worker)
    assert worker.ledger[MARK + request.slot] & 0xFF == TAKEN
    assert worker.ledger[HEAD] == 1
    assert not leave(record_of(twin)), "taken and not ended"
    worker.complete((request,))
    assert leave(record_of(twin))


def test_a_rest_lasts_until_the_worker_is_wanted_or_rung_for(twin: Twin) -> None:
    async def rests() -> None:
        rest, wanted, client = Rest(60.0), asyncio.Event(), twin.client()
        twin.worker({}).arm()
        _, before = submit(client)  # rung for, and answered, long ago
        worker = twin.worker({})
        for refused, _ in worker.take(4, 1, []):
            worker.complete((refused,))
        client.reap()
        assert before.finals == 1

        resting = asyncio.create_task(rest.last([record_of(twin)], wanted))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not resting.done(), "an old ring is no ring"
        submit(client)
        await asyncio.wait_for(resting, 30)
        assert wanted.is_set()
        await rest.last([record_of(twin)], asyncio.Event())  # what waits there is seen at once

        wanted = asyncio.Event()
        resting = asyncio.create_task(rest.last([], wanted))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not resting.done()
        wanted.set()
        await asyncio.wait_for(resting, 30)

    asyncio.run(rests())


def test_requests_that_come_keep_a_worker_from_rest_whatever_becomes_of_them() -> None:
    rest, minute = Rest(60.0), 61_000_000_000
    for look in range(1, 5):
        assert not rest.is_due(True, look, look * minute)
    assert not rest.is_due(True, 4, 5 * minute), "since this look it is asked nothing"
    assert rest.is_due(True, 4, 6 * minute)


def test_a_channel_that_cannot_be_left_is_for_the_next_process(twin: Twin, caplog: pytest.LogCaptureFixture) -> None:
    wrong = replace(record_of(twin), slots=twin.slots * 1000)

    async def rests() -> None:
        with Twin() as other:
            await asyncio.wait_for(Rest(60.0).last([wrong, record_of(other, 2)], asyncio.Event()), 30)

    asyncio.run(rests())
    assert caplog.messages == ["channel 1 cannot be left"]


def test_who_leaves_a_worker_at_rest_is_not_heard_any_more(twin: Twin) -> None:
    async def rests() -> None:
        with Twin() as other:
            rest, wanted, client = Rest(60.0), asyncio.Event(), other.client()
            left = record_of(other, 2)
            resting = asyncio.create_task(rest.last([record_of(twin), left], wanted))
            await asyncio.sleep(0)
            rest.forget(left)
            submit(client)
            for _ in range(10):
                await asyncio.sleep(0)
            assert not resting.done()
            submit(twin.client())
            await asyncio.wait_for(resting, 30)
            rest.forget(left)

    asyncio.run(rests())
